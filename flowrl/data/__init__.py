"""Prompts, images, edits and preference records."""
