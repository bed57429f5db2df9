"""The wing: what reads the results of a run, or calls one. Nothing in the trunk imports it."""
