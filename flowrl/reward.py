"""Rewards: the contract of one, and the scorer that runs several.

A reward is `score(images, prompts, metadata)`: images float [B, 3, H, W], or videos [B, F, 3, H, W], in
[0, 1] (a list where sizes differ); it returns [B], or {output name: [B]}, on the reward's published scale.
A sample that could not be scored is NaN, never 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from flowrl.core.errors import RewardError as RewardError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flowrl.core.types import Condition

# Words, so that a card is read without torch.
Images: TypeAlias = "Tensor | Sequence[Tensor]"
"""Images [B, 3, H, W] or videos [B, F, 3, H, W] in [0, 1]; where sizes differ a sequence, [3, H, W] or [F, 3, H, W]."""
ScoreFunction: TypeAlias = "Callable[[Images, Sequence[str], Sequence[dict]], Tensor | Mapping[str, Tensor]]"
AnswerFunction: TypeAlias = "Callable[[Images, Sequence[str], Sequence[dict]], list[list[float]]]"
"""Answers to the questions of each sample, in their order; NaN: the question failed."""

CompareFunction: TypeAlias = "Callable[[Images, Images, Sequence[str], Sequence[dict]], Tensor]"
"""P(the first image is preferred to the second), [B], shown in this order; NaN: the question failed."""

ValueFunction: TypeAlias = "Callable[[Tensor, Tensor, Condition], Tensor]"
"""Logits [B] of latents x [B, ...] at noise levels sigma [B], under the conditions of their prompts (B rows)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The declaration of a reward: outputs, range, needs, origin."""

    outputs: tuple[str, ...]
    """Names of its values; the first one is trained on unless the configuration says otherwise."""
    low: float = -math.inf
    high: float = math.inf
    """Range of the raw values; a finite value outside it stops the run."""
    higher_is_better: bool = True
    less_is_better: tuple[str, ...] = ()
    """Outputs of which less is better where `higher_is_better` says more of the others."""
    transform: tuple[float, float] = (1.0, 0.0)
    """(scale, offset) of the training value where the entry of the configuration sets none; scale above 0."""
    modality: str = "image"
    """"image", "video" (videos only), "any" (images, and videos by their frames), "edit" (source and result), or
    "latents" (`LatentReward`)."""
    resolution: str = "any"
    """Part and size of an image that it sees, in words: "224 x 224, the centre square"."""
    requires: tuple[str, ...] = ()
    """Keys that every sample's metadata must have."""
    memory_gib: float = 0.0
    """Memory of its weights in GiB, about; 0: none."""
    image_network: str = ""
    """open_clip's name of the network through which gradients reach the images, by which `flowrl plan` counts what
    they hold; empty: not known."""
    version: str = "1"
    """Version of its formula, changed whenever a score changes; a cache keeps versions apart."""
    differentiable: bool = False
    """True where gradients reach the images: no inference mode, cache, PIL or network on the way."""
    needs_groups: bool = False
    """True where a score depends on the other samples of the prompt."""
    repeatable: bool = True
    """False where the same call gives other scores the next time, as a judge on a server does. What is True is tried
    before training."""
    half_precision: bool = False
    """True where a network in half precision scores, whose rounding follows the size of the batch: a sample's score
    alone and in a batch may then differ by 5e-2 in place of 1e-4."""
    by_people: bool = False
    """True where people judge (`core.polls.OCCASION`): asked by the rollouts of training, and by nothing else."""
    overlap: bool = False
    """True where scoring leaves the sampling device alone (a server, a reader on the CPU): finished batches are then
    scored in a thread while the next ones are sampled, or read from files."""
    overlap_on_gpu: bool = False
    """True where the same holds next to a GPU that samples, also for scoring on that GPU: a call changes no setting of
    the process and draws no random number. It then has a CUDA stream of its own."""
    level: str = "experimental"
    """"tested" (a CPU test scores with it), "verified" (real weights, with numbers), "experimental"."""
    licence: str = "unknown"
    source: str = ""

    def __post_init__(self) -> None:
        if not self.transform[0] > 0:
            raise ValueError(
                f"transform={self.transform}: its scale must be above 0; where less is better, say so by less_is_better"
            )
        unknown = sorted(set(self.less_is_better) - set(self.outputs))
        if unknown:
            raise ValueError(
                f"less_is_better names {unknown[0]!r}, which is not among the outputs {list(self.outputs)}"
            )

    def prefers_more(self, output: str) -> bool:
        """Whether more of an output is better."""
        return self.higher_is_better and output not in self.less_is_better

    @property
    def lower(self) -> tuple[str, ...]:
        """Outputs of which less is better."""
        return tuple(name for name in self.outputs if not self.prefers_more(name))


@dataclass(frozen=True, slots=True)
class Reward:
    """A named scorer with its card; what `build(config)` of a file in `rewards/` returns."""

    score: ScoreFunction
    card: Card
    answers: AnswerFunction | None = None
    """For a reward that asks a list of questions: their answers, of which `score` is a function; a benchmark keeps
    them one by one. None: the score is all there is."""
    compare: CompareFunction | None = None
    """For a judge that sees two images at once. None: it judges one at a time."""
    on_latents: LatentReward | None = None
    """The judge of latents whose `value` stands as `score`, and is given (x, sigma, cond). None: it judges images."""

    def prefixed(self, prefix: str) -> Reward:
        """The same reward with "<prefix>_" before the name of every output."""

        def renamed(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor | Mapping[str, Tensor]:
            result = self.score(images, prompts, metadata)
            return {f"{prefix}_{k}": v for k, v in result.items()} if isinstance(result, Mapping) else result

        outputs, lower = (
            tuple(f"{prefix}_{name}" for name in names) for names in (self.card.outputs, self.card.less_is_better)
        )
        card = replace(self.card, outputs=outputs, less_is_better=lower)
        return replace(self, score=renamed, card=card)


class Trainer(Protocol):
    """Trains a judge of latents further, in place; it keeps its optimizer, and draws from a generator of its own."""

    def renew(self, x0: Tensor, cond: Condition, labels: Tensor) -> Mapping[str, float]:
        """Optimizer steps on clean latents x0 [N, ...] under N conditions with labels [N], 0 or 1; its metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps need, the judge's weights among it: tensors and plain data."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True)
class LatentReward:
    """A judge of a model's latents, clean or noisy; `build(config)` may return one in place of a `Reward`.

    Its one output is the logit of clean latents (sigma 0). A row never depends on the other rows. The file's CARD says
    modality "latents" and differentiable.
    """

    value: ValueFunction
    card: Card
    shape: tuple[int, ...]
    """Shape of one sample's latents, as the model's `latent_shape` says it."""
    network: nn.Module | None = None
    """Its weights, in eval mode and without gradient, moved to the device of the latents; None: there are none."""
    trainer: Trainer | None = None
    """Renews it on a run's own samples (`renew`); None: nothing does."""

    def as_reward(self) -> Reward:
        """The reward as a run scores with it."""
        score: Any = self.value  # given what it takes, since `on_latents` is set
        return Reward(score, self.card, on_latents=self)


REASONS: ContextVar[list[str] | None] = ContextVar("flowrl_unscored", default=None)


def unscored(text: str) -> None:
    """Report why samples are NaN, from inside a reward's score function; the message that ends a run shows it."""
    reasons = REASONS.get()
    if reasons is None:  # outside a call by flowrl
        logging.getLogger("flowrl").warning("%s", text)
    else:
        reasons.append(text)
