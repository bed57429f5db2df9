"""Drawing preference pairs from a model and its rewards."""
