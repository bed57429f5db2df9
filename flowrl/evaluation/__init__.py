"""Evaluation with fixed seeds, statistics, evaluation trees, held-out prompts."""
