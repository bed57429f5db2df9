"""A judge of latents: the blocks of an SD3 transformer, a small head, and its training."""
