"""What belongs to an evaluation by its tag (base, iteration-N, tuned), and the order in which a page shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np


@dataclass(frozen=True, slots=True)
class Tagged:
    """Something of the evaluation with this tag."""

    tag: str
    iteration: int

    @property
    def in_training(self) -> bool:
        return self.tag.startswith("iteration-")

    @property
    def label(self) -> str:
        """Name in a sentence."""
        return f"iteration {self.iteration}" if self.in_training else self.tag

    @property
    def column(self) -> str:
        """Head of its column in a filmstrip."""
        if self.in_training:
            return str(self.iteration)
        return f"{self.tag} ({self.iteration})" if self.iteration else self.tag


T = TypeVar("T")
Entry = TypeVar("Entry", bound=Tagged)


def during(entries: Mapping[str, Entry]) -> list[Entry]:
    """Those of evaluations during training, ascending."""
    return sorted((entry for entry in entries.values() if entry.in_training), key=lambda entry: entry.iteration)


def in_order(entries: Mapping[str, Entry], *, finished: bool, latest: int | None = None) -> list[Entry]:
    """Base, those during training, tuned. `finished`: whether the run is; else it may go on after a first end, whose
    evaluation is older than others then. `latest`: the most during training; None: all but one that has the weights of
    the tuned model.
    """
    tuned, between = entries.get("tuned"), during(entries)
    if latest is None:
        between = [entry for entry in between if tuned is None or entry.iteration != tuned.iteration]
    later = [entry for entry in (*between[-(latest or len(between)) :], tuned) if entry is not None]
    if not finished:
        later.sort(key=lambda entry: entry.iteration)
    return [*([entries["base"]] if "base" in entries else []), *later]


def spread(entries: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly spaced, with both ends."""
    return [entries[i] for i in np.linspace(0, len(entries) - 1, min(most, len(entries))).round().astype(int)]
