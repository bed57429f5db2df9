"""Every remedy that a message gives works when it is followed to the letter.

The modules here provoke each fault that carries a `Remedy`, and then do what it says; `test_listing.py` lists the
places that make one and fails for a place without such a run.
"""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound=Callable[..., None])

FOLLOWED: dict[str, str] = {}
"""Place of a remedy -> name of the test that follows it."""


def follows(*places: str) -> Callable[[T], T]:
    """Mark a test as the run that follows the remedies of places, `flowrl/models/sd3.py:function` or `:Class.method`.

    Where one function makes several remedies, `#2`, `#3` after its name are the second and third in the order of the
    source.
    """

    def marked(test: T) -> T:
        for place in places:
            assert place not in FOLLOWED, place
            FOLLOWED[place] = test.__name__
        return test

    return marked
