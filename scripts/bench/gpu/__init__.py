"""Measurements on a GPU, which run on the CPU too: ceilings, attention, the phases of a run, a profile.

clock      marks in time: CUDA events, on the CPU the wall clock
records    results as JSON lines and as a table
ceilings   matrix products and copies
attention  backends of scaled_dot_product_attention
session    a session on random weights or on the recipe's own, with random rewards
phases     rollout, update, decode, memory, noise, checkpoint
gate       what a replay changes
profile    the largest costs of a step and of an update
"""
