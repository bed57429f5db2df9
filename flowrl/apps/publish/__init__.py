"""A trained model for others: its model card, and its way to a hub."""
