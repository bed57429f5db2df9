"""Microbatches, learner, optimizer, processes and sharding."""
