"""Options of every entry of `rewards`."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from flowrl.core.paths import CACHE, PATH
from flowrl.core.subprocesses import require_patience

_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """An entry's training value counts only where an output, of whatever entry, is good enough.

    Source: arXiv 2601.05242, conditioned rewards.
    """

    output: str
    """Its raw value opens the gate. NaN there is NaN here: nobody knows whether the gate is open."""
    at_least: float | None = None
    at_most: float | None = None
    """For an output of which less is better; give one of the two."""
    floor: float = 0.0
    """The training value (before the weight) where the gate is shut."""

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give either at_least or at_most")


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """A judge of latents is trained further on the run's own samples, as another reward labels them."""

    every: int
    """Iterations; the samples of every such one are gone over once, after its updates."""
    by: str
    """Output of another entry of `rewards`, such as one of weight 0."""
    at_least: float = 0.5
    """Its raw value from which on a sample counts as good."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class RewardEntry:
    """Options every reward entry has; the others are the reward's own."""

    name: str | None = None
    """A built-in reward, one that an installed package brings, or a dotted module path."""
    path: Annotated[str | None, PATH] = None
    """Your own file with `score(images, prompts, metadata)`."""
    prefix: str | None = None
    """Before the name of every output, as in h14_clip_cos; so the same reward may stand there with other options."""
    weight: float = 1.0
    """Share in the training value, never below 0; 0 only looks at it."""
    outputs: dict[str, float] = field(default_factory=dict)
    """Share of each output in the training value, by name, never below 0: an output of which less is better counts
    negated. Empty: the first output alone."""
    scale: float | None = None
    """The training value is clip(scale * raw + offset); raw is what is logged. Above 0: an output of which less is
    better is negated already. Both null: the transform of the card."""
    offset: float | None = None
    clip: list[float] | None = None
    gate: Gate | None = None
    """Count the training value only where an output is good enough: {output, at_least or at_most, floor}."""
    renew: Renewal | None = None
    """Train a judge of latents further on the run's own samples: {every, by, at_least}."""
    cache: Annotated[str | None, CACHE] = None
    """Keep scores by image, prompt and version: `memory`, or a folder that runs and processes may share."""
    retries: int | None = None
    """Further tries after an exception; null: 2."""
    isolate: bool = True
    """Search a batch that fails to the last for the samples that make it fail; false masks the whole of it."""
    max_failed_share: float | None = None
    """Above this share of samples without a value of this entry the run stops; null: half, all rewards together."""
    timeout: float | None = None
    """Seconds after which a call of a reward in this process has failed, though it goes on; null: none."""
    overlap: bool = True
    """Score finished images while the next are sampled, where the reward can; false scores at the end, which takes less
    memory on a GPU."""

    def __post_init__(self) -> None:
        if (self.name is None) == (self.path is None):
            raise ValueError("give either name or path")
        for output, share in self.outputs.items():
            if not share >= 0:
                raise ValueError(
                    f"outputs.{output}={share:g} must not be below 0, which would train towards what is worse: an "
                    "output of which less is better is negated already (its card's less_is_better)"
                )
        if self.outputs and not any(self.outputs.values()):
            raise ValueError(
                f"outputs={self.outputs}: every share is 0, so nothing of it is trained on; give one a share, or give "
                "weight: 0 to look at the reward alone"
            )
        if self.scale == 0:
            raise ValueError("scale=0 makes all training values equal; give weight: 0 to look at the reward alone")
        numbers = {"weight": self.weight, "scale": self.scale, "offset": self.offset}
        for option, value in numbers.items():
            if abs(value or 0.0) > _LARGEST:
                raise ValueError(f"{option}={value:g} is beyond float32, which ends at {_LARGEST:.3g}")
        if self.clip is not None and (len(self.clip) != 2 or self.clip[0] >= self.clip[1]):
            raise ValueError(f"clip={self.clip} must be [low, high]")
        if self.retries is not None and self.retries < 0:
            raise ValueError(f"retries={self.retries} must not be negative")
        if self.max_failed_share is not None and not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share={self.max_failed_share} must be in [0, 1]")
        if self.cache == "":
            raise ValueError("cache='' is no folder; give a path, or memory")
        if self.prefix is not None and not re.fullmatch("[A-Za-z0-9_]+", self.prefix):
            raise ValueError(f"prefix={self.prefix!r} must be letters, digits and _")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be above 0; null sets none")
        require_patience("timeout", self.timeout or 0.0)
