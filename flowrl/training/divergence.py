"""A model that makes numbers which are not finite: seen before any reward is asked, and never blamed on one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.core.errors import Diverged
from flowrl.training.optim import OptimConfig

TOO_MANY = 0.5
"""Above this share of samples the model has diverged; below it they are masked, as those that no reward can score."""


@dataclass(slots=True)
class Health:
    """Which of the samples of a rollout or an evaluation are finite, on this process."""

    count: int = 0
    spoiled: int = 0
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    """("latents" or "pictures", "NaN" or "inf") -> samples."""

    def seen(self, latents: Tensor, images: Tensor) -> Tensor:
        """The pictures of latents [b, ...], with NaN for those whose latents are not finite; all of them counted."""
        bad, torn = _odd(latents), _odd(images)
        either = bad | torn.to(bad.device)
        self.count += len(images)
        self.spoiled += int(either.sum())
        if not either.any():
            return images
        for row in either.nonzero().flatten().tolist():
            what, values = ("latents", latents[row]) if bad[row] else ("pictures", images[row])
            self.kinds[what, "NaN" if values.isnan().any() else "inf"] += 1
        # A decoder may make a white picture of infinite latents.
        return torch.where(bad.to(images.device).reshape(-1, *[1] * (images.ndim - 1)), torch.nan, images)

    @property
    def diverged(self) -> bool:
        return self.spoiled > TOO_MANY * self.count

    def message(self, when: str) -> str:
        """What is not finite, in a sentence without its end."""
        words = [word for word in ("NaN", "inf") if any(kind == word for _, kind in self.kinds)]
        what = "latents, and so its pictures," if any(kind == "latents" for kind, _ in self.kinds) else "pictures"
        return f"the model's {what} are {' and '.join(words)} {when} ({self.spoiled} of {self.count} samples)"

    def error(self, when: str, remedy: str) -> Diverged:
        return Diverged(f"{self.message(when)}: {remedy}")

    @property
    def in_decoder(self) -> bool:
        """Every latent is finite."""
        return bool(self.kinds) and all(what == "pictures" for what, _ in self.kinds)


def _odd(values: Tensor) -> Tensor:
    """[b] bool: whether a row holds NaN or inf; one pass, no copy of the size of the values."""
    return ~values.detach().sum(dim=tuple(range(1, values.ndim)), dtype=torch.float32).isfinite()


def remedy(dtype: str, optim: OptimConfig, grad_norm: float | None, *, trained: bool, in_decoder: bool) -> str:
    """What is known of the training, and what to change.

    Args:
        dtype: `model.dtype` of the run.
        optim: options of the run.
        grad_norm: of the last update, where this process has seen one.
        trained: whether the weights have moved.
        in_decoder: the latents are finite.
    """
    if in_decoder and not trained:
        return f"the latents are finite, so the decoder overflows: model.dtype is {dtype}, set bfloat16 or float32"
    if not trained:
        return (
            f"nothing was trained yet, so the model itself makes them: model.dtype is {dtype}, set bfloat16 or "
            "float32, or lower rollout.guidance_scale"
        )
    rate, limit = optim.learning_rate, optim.max_grad_norm
    norm = "" if grad_norm is None else f"the gradient norm was {grad_norm:.3g} in the last update, "
    return (
        f"{norm}optim.learning_rate is {rate:g}, optim.max_grad_norm {'null' if limit is None else f'{limit:g}'}; "
        "lower one of them and start anew, under another name"
    )
