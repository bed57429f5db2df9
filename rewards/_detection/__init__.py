"""Detectors of objects and of words."""
