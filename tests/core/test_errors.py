"""What a message says of an exception of somebody's code."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.core import registry
from flowrl.core.errors import described


def raised(work) -> BaseException:
    try:
        work()
    except BaseException as error:  # whatever it is
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def work():\n    raise ValueError('no')\n", "ValueError: no (mine.py:2)"),
        ("import json\n\ndef work():\n    json.loads('{')\n", "(mine.py:4)"),
        ("import sys\ndef work():\n    sys.exit()\n", "SystemExit (mine.py:3)"),
    ],
)
def test_the_users_own_line_is_named_however_deep_the_library_that_raised(tmp_path: Path, text: str, expected: str):
    (tmp_path / "mine.py").write_text(text)
    found = described(raised(registry.load("rewards", str(tmp_path / "mine.py")).work))
    assert found.endswith(expected)


def test_of_a_component_of_ours_its_line_is_named():
    module = registry.load("rewards", "jpeg")
    error = raised(lambda: module.build(module.Config()).score([torch.zeros(1)], [""], [{}]))
    assert "(test_errors.py:" in described(error), "a test is a user's file"
    trace: Any = error.__traceback__
    error.__traceback__ = trace.tb_next.tb_next  # without the test's own frames
    assert "(jpeg.py:" in described(error) or "(arrays.py:" in described(error)


def test_a_syntax_error_and_an_exception_that_was_never_raised_have_what_they_say():
    assert described(KeyError("a")) == "KeyError: 'a'"
    assert described(raised(lambda: compile("a b", "mine.py", "exec"))).endswith("(mine.py, line 1)")
    assert described(raised(lambda: json.loads("{"))).startswith("JSONDecodeError: ")
