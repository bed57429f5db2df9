"""The client of reward servers."""
