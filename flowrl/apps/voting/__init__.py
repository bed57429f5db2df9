"""Votes of people on a run's base and tuned images: `flowrl vote`."""
