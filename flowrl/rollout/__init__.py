"""The only denoising loop, its policy, noise and records."""
