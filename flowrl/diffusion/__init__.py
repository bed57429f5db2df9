"""Paths x = alpha x0 + sigma eps, grids, step plans, windows, tree shapes and deterministic solvers; no model."""
