"""Frozen vision networks for rewards, and images as they want them."""
