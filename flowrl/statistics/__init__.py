"""Intervals, paired comparisons, tests and corrections for scores by prompt and seed; arrays alone."""
