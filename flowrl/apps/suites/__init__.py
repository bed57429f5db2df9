"""Benchmark suites: prompts, judges and the official aggregation, one file each."""
