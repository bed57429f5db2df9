"""Tiny random pipelines of the very classes, one entry of a table each, made in memory in a fraction of a second.

Denoisers and VAEs are diffusers' own at toy sizes; stubs.py has the stand-ins for large text encoders.
"""

from tests.tiny_pipelines.cases import CASES, IMAGED, PROMPTS, SOUNDING, Case, make, stepped
from tests.tiny_pipelines.stubs import TOKENS

__all__ = ["CASES", "IMAGED", "PROMPTS", "SOUNDING", "TOKENS", "Case", "make", "stepped"]
