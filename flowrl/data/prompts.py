"""Prompts with their images and metadata, and the order of a run; flowrl/data/prompt_sources.py reads them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.rng import permutation
from flowrl.models.base import ModelAdapter


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt with whatever else its record holds (handed to the rewards as metadata)."""

    text: str
    metadata: dict = field(default_factory=dict)
    images: tuple[str, ...] = ()
    """Absolute paths of its reference pictures or first frame; the rewards find them as metadata["images"]."""


def require_images(prompts: Sequence[Prompt], adapter: ModelAdapter, key: str, first: Prompt) -> None:
    """Raise ConfigError unless every prompt has as many pictures as the model wants; as `first`, all or none have some.

    Their embeddings lie in one table, so they must be made alike.
    """
    (least, most), kind = adapter.image_limits, adapter.kind
    for number, prompt in enumerate(prompts, 1):
        count, where = len(prompt.images), f"{key}: prompt {number}, {prompt.text[:60]!r},"
        if count > most:
            remedy = f"leave out {count - most}" if most else "use a model that edits or animates pictures"
            raise ConfigError(f"{where} has {count} picture(s), but {kind} takes {most or 'none'}; {remedy}")
        if count < least:
            raise ConfigError(
                f"{where} has {count} picture(s), but {kind} needs {least}; give the paths under 'image' or 'images' "
                "in a .jsonl, or data.image_column of a data set"
            )
        if bool(count) != bool(first.images):
            raise ConfigError(
                f"{where} has {'a' if count else 'no'} picture, unlike the first prompt; give one to all or to none"
            )


class PromptSource:
    """An endless, seeded order over prompts: epoch after epoch, each a fresh permutation.

    The draw of an iteration depends on (seed, iteration) and on the prompts that were retired before it, nothing else.
    """

    def __init__(self, prompts: Sequence[Prompt], per_iteration: int, seed: int) -> None:
        self.prompts, self.per_iteration, self.seed = list(prompts), per_iteration, seed
        self.retired: set[int] = set()
        self.since = (0, 0)
        """Iteration of the last retirement, and the place in the order behind it."""

    @property
    def exhausted(self) -> bool:
        """Every prompt is retired."""
        return len(self.retired) == len(self.prompts)

    def draw(self, iteration: int) -> list[int]:
        """Indices of the prompts of an iteration, counted from 1, one per slot."""
        return [number for _, number in self._walk(iteration)][-self.per_iteration :]

    def retire(self, iteration: int, numbers: Sequence[int]) -> None:
        """Draw these prompts no more, after this iteration."""
        if numbers:
            behind = self._walk(iteration)[-1][0] + 1
            self.since, self.retired = (iteration, behind), self.retired | set(numbers)

    def _walk(self, iteration: int) -> list[tuple[int, int]]:
        """(place in the order, prompt) of the draws since the last retirement, at least this iteration's."""
        last, place = self.since
        count, orders = len(self.prompts), dict[int, Tensor]()
        if not self.retired:  # no need to walk: nothing is passed over
            last, place = iteration - 1, (iteration - 1) * self.per_iteration
        drawn: list[tuple[int, int]] = []
        while len(drawn) < (iteration - last) * self.per_iteration:
            epoch = place // count
            if epoch not in orders:
                orders[epoch] = permutation(count, self.seed, "prompts", epoch)
            number = int(orders[epoch][place % count])
            if number not in self.retired:
                drawn.append((place, number))
            place += 1
        return drawn

    def state_dict(self) -> dict:
        return {"retired": sorted(self.retired), "since": list(self.since)}

    def load_state_dict(self, state: dict) -> None:
        iteration, place = state["since"]
        self.retired, self.since = set(state["retired"]), (iteration, place)


def identity(prompt: str | Prompt) -> tuple[str, tuple[str, ...]]:
    """What an embedding, and a learned law, depends on: text and pictures. Prompts that share it are one prompt."""
    return (prompt, ()) if isinstance(prompt, str) else (prompt.text, prompt.images)


def distinct_numbers(keys: Sequence[Hashable]) -> list[int]:
    """Number of each key among the distinct ones, from 0 in order of appearance.

    >>> distinct_numbers(["a cat", "a dog", "a cat"])
    [0, 1, 0]
    """
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]
