"""Rewards at work: batches, attempts, cache, overlap, limits."""
