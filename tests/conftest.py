"""Garbage collection without the libraries: their half a million objects cost each `gc.collect` of a run 0.3 s.

And for each test a cache of its own, so that none is answered from what another one measured, and messages that pytest
sees, whatever run was set up before.
"""

import gc
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

_NUMBERS = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def _imported_stays() -> None:
    """What is alive before a module's tests is not looked through again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Plans are kept, and read, in a folder of the test alone; it is made when something is written."""
    place = tmp_path_factory.getbasetemp() / f"flowrl-cache-{next(_NUMBERS)}"
    monkeypatch.setenv("FLOWRL_CACHE", str(place))


@pytest.fixture(autouse=True)
def _seen_messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run keeps its messages from the root logger, which `caplog` listens to; no test silences those that follow."""
    monkeypatch.setattr(logging.getLogger("flowrl"), "propagate", True)
    yield
    assert logging.root.manager.disable == logging.NOTSET


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random SD3 pipeline."""
    from tests import tiny_sd3

    return tiny_sd3.save(tmp_path_factory.mktemp("tiny"))
