"""Pure losses on predictions and log-probs, and the batches that they take."""
