"""Judges: vision-language models here or behind a chat API, and what they are asked."""
