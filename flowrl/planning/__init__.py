"""Memory, cost and parity before anything is downloaded."""
