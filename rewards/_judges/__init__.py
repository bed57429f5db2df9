"""Judges: vision-language models here or on a server with a chat API, and what they are asked."""
