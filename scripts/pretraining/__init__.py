"""The tiny models and the prompt lists of assets/, from a seed; README.md has the commands."""
