"""One browser for the tests of a module."""

from collections.abc import Generator
from typing import Any

import pytest

from tests.apps.gallery.browser import launched


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with launched() as found:
        yield found
