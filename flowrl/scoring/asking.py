"""What surrounds the scoring of an iteration's samples: people may be asked there, and a run may wait for them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from flowrl.core.types import SampleId


class Asking(AbstractContextManager[Any], Protocol):
    """The part of an iteration in which people may be asked, as a context of the whole of it on each process.

    Raises (at its end):
        Abandoned: another process has left, or the run is to stop.
    """

    def begin(self, ids: Sequence[SampleId], fps: float) -> None:
        """From now on rewards may ask about these samples, those of this process that are finite, in the order in which
        rewards are given them; videos are shown at `fps` frames a second.
        """
        ...


class Nobody(nullcontext[None]):
    """Nobody is asked."""

    def begin(self, ids: Sequence[SampleId], fps: float) -> None:
        pass


NOBODY = Nobody()
