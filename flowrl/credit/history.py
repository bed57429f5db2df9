"""What the rules `batch` and `smooth` know of a prompt's earlier iterations, and credit against it.

Source: arXiv 2305.13301; kvablack/ddpo-pytorch:ddpo_pytorch/stat_tracking.py, scripts/train.py. `expected`: arXiv
2509.13232; verl-project/verl-recipe:spo. `moments`: arXiv 2509.02333; lime-RL/DCPO.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import OptionError
from flowrl.core.tensors import floats
from flowrl.core.types import Identity


@dataclass(frozen=True, kw_only=True)
class HistoryConfig:
    buffer_size: int = 16
    """Newest rewards of a prompt that are kept."""
    min_count: int = 16
    """Least number of them; with fewer a prompt is compared with the batch."""
    decay: float | None = None
    """SPO, in place of the newest rewards: a sample is compared with the mean of the prompt's earlier rewards, which
    count by this factor less each time that it is drawn, and with `std` the result with the batch; 1 forgets nothing,
    published .875 to .96; null: the newest rewards."""

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay <= 1:
            raise ValueError(
                f"decay={self.decay} must be in (0, 1]: the share that is left of what earlier rewards count"
            )
        if self.min_count < 2:
            raise ValueError(f"min_count={self.min_count} must be at least 2: one reward has no spread")
        if self.min_count > self.buffer_size:
            raise OptionError(
                f"min_count={self.min_count} is more than buffer_size={self.buffer_size} holds: every prompt would "
                "always be compared with the batch",
                [{"min_count": self.buffer_size}, {"algorithm.advantages.history": None}],
            )


class RewardHistory:
    """Numbers of every prompt that was drawn, keyed by its whole text and its images.

    The official code's key is the text's first 77 tokens, where longer prompts may collide.
    """

    def __init__(self, update: Callable[[list[float], Tensor], list[float]], least: int) -> None:
        """`update` makes what is known of what was and the rewards [n]; fewer than `least` numbers are nothing."""
        self.update, self.least = update, least
        self.known: dict[Identity, list[float]] = {}

    def add(self, prompts: Sequence[Identity], total: Tensor) -> list[Tensor | None]:
        """Take the rewards [P, G] of an iteration, NaN left out; then what is known of each prompt, [n] float64.

        Slots of one prompt share it. Raises ValueError: there is not one prompt for each row.
        """
        if len(prompts) != len(total):
            raise ValueError(f"advantages must know the prompts of {len(total)} groups, and got {len(prompts)}")
        for prompt in dict.fromkeys(prompts):
            own = total[[slot for slot, other in enumerate(prompts) if other == prompt]].double()
            self.known[prompt] = self.update(self.known.get(prompt, []), own[own.isfinite()])
        known = [self.known[prompt] for prompt in prompts]
        return [torch.tensor(x, dtype=torch.float64) if len(x) >= self.least else None for x in known]

    def state(self) -> list[list[Any]]:
        """Plain data; numbers come back from JSON to the last bit."""
        return [[text, list(images), own] for (text, images), own in self.known.items()]

    def load_state(self, state: list[list[Any]]) -> None:
        """Inverse of `state`."""
        self.known = {(text, tuple(images)): list(own) for text, images, own in state}


def newest(known: list[float], own: Tensor, size: int) -> list[float]:
    """The newest rewards of a prompt."""
    return [*known, *floats(own)][-size:]


def expected(known: list[float], own: Tensor, decay: float) -> list[float]:
    """Number and mean of a prompt's rewards, the earlier ones counting by `decay` less; and the mean before."""
    if not len(own):
        return known
    # By differences, so that equal rewards have exactly their own value as mean.
    count, mean = known[:2] or (0.0, float(own[0]))
    count = decay * count + len(own)
    return [count, mean + float((own - mean).sum()) / count, *([mean] if known else [])]


def moments(known: list[float], own: Tensor, ddof: int) -> list[float]:
    """Number of a prompt's groups, cumulative mean and variance of their rewards."""
    visits, mean, variance = known or [0.0, 0.0, 0.0]
    if not len(own):
        return [visits, mean, variance]
    apart = own - own[0]  # equal rewards have exactly their own value as mean, and the variance 0
    step, spread = float(own[0] + apart.mean()) - mean, (apart - apart.mean()).square().sum()
    old = visits / (visits + 1)
    variance = old * variance + (float(spread) / max(len(own) - ddof, 1) + old * step**2) / (visits + 1)
    return [visits + 1, mean + step / (visits + 1), variance]


def normalise_against(
    total: Tensor, past: Sequence[Tensor | None] | None, *, eps: float, ddof: int = 0, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """(reward - mean) / (std + eps) of rewards [P, G], NaN masked. `past`: for each prompt the rewards [n] whose mean
    and std are taken; None: those of the whole iteration. A `ddof` of 0 divides by n; `scaled` False divides by
    nothing.

    Returns:
        [P, G] float64, 0 where masked, and [P] bool: prompts that are compared with equal rewards only, exactly 0.

    >>> normalise_against(torch.tensor([[0.0], [2.0]]), [None, torch.tensor([1.0, 3.0])], eps=0.0)[0].flatten().tolist()
    [-1.0, 0.0]
    """
    total = total.double()
    valid, values = total.isfinite(), torch.zeros_like(total)
    dead = torch.ones(len(total), dtype=torch.bool)
    for slot, own in enumerate([None] * len(total) if past is None else past):
        known = total[valid] if own is None else own.double()
        if len(known) and bool(known.max() > known.min()):
            scale = known.std(correction=ddof) + eps if scaled else 1.0
            values[slot], dead[slot] = (total[slot] - known.mean()) / scale, False
    return torch.where(valid, values, 0.0), dead


def unexpected(total: Tensor, past: Sequence[Tensor | None]) -> Tensor:
    """Rewards [P, G] less what was `expected` of their prompt; where nothing was, less the mean of the iteration."""
    scored = total[total.isfinite()]
    least = scored.min() if len(scored) else torch.zeros((), dtype=torch.float64)
    mean = least + (scored - least).sum() / max(len(scored), 1)  # of equal rewards exactly their value
    return total - torch.stack([mean if own is None else own[2] for own in past])[:, None]
