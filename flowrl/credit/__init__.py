"""Rewards to advantages: rules, history, selection, trees, saliency, critic."""
