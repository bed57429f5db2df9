"""Garbage collection without the libraries: their half a million objects cost each `gc.collect` of a run 0.3 s."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _imported_stays() -> None:
    """What is alive before a module's tests is not looked through again."""
    gc.collect()
    gc.freeze()
