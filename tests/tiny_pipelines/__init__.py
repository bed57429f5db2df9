"""Tiny random pipelines of the very classes, made in memory in a fraction of a second.

recipes.yaml has the sizes of each one and cases.yaml how it is called. Denoisers and VAEs are diffusers' own;
stubs.py has the stand-ins for large text encoders.
"""

from tests.tiny_pipelines.cases import CASES, IMAGED, PROMPTS, SOUNDING, Case, make, stepped
from tests.tiny_pipelines.stubs import TOKENS

__all__ = ["CASES", "IMAGED", "PROMPTS", "SOUNDING", "TOKENS", "Case", "make", "stepped"]
