"""Latents and images that are not finite: counted before any reward sees them, so that no reward is blamed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.core.errors import DecoderOverflow, Diverged, Overshot
from flowrl.display.console import log
from flowrl.models.base import ModelConfig
from flowrl.training.options import OptimConfig

TOO_MANY = 0.5
"""Share of samples above which the model has diverged; below it they are masked, like those without a score."""


@dataclass(slots=True)
class Health:
    """Counts of the samples of a rollout or an evaluation that are not finite, on this process."""

    count: int = 0
    spoiled: int = 0
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    """("latents" or "images", "NaN" or "inf") -> samples."""

    def check(self, latents: Tensor, images: Tensor) -> Tensor:
        """Count samples [b, ...]; whether each is finite, in latents and image, [b] bool on the CPU."""
        # Both: a decoder may make a white image of infinite latents.
        bad, torn = _odd(latents).cpu(), _odd(images).cpu()
        either = bad | torn
        self.count += len(images)
        self.spoiled += int(either.sum())
        for row in either.nonzero().flatten().tolist():
            what, values = ("latents", latents[row]) if bad[row] else ("images", images[row])
            self.kinds[what, "NaN" if values.isnan().any() else "inf"] += 1
        return ~either

    @property
    def diverged(self) -> bool:
        return self.spoiled > TOO_MANY * self.count

    def require_finite(self, when: str, remedy: Callable[..., tuple[type[Diverged], str]], *, trained: bool) -> None:
        """Warn of a few samples that are not finite, which have no score. Raises Diverged: most of them are not."""
        if self.diverged:
            kind, advice = remedy(trained=trained, in_decoder=self.in_decoder)
            raise kind(f"{self.message(when)}: {advice}")
        if self.spoiled:
            log.warning("%s; they have no score", self.message(when))

    def message(self, when: str) -> str:
        """Latents or images that are not finite, as the first part of a sentence."""
        words = [word for word in ("NaN", "inf") if any(kind == word for _, kind in self.kinds)]
        what = "latents, and so its images," if any(kind == "latents" for kind, _ in self.kinds) else "images"
        return f"the model's {what} are {' and '.join(words)} {when} ({self.spoiled} of {self.count} samples)"

    @property
    def in_decoder(self) -> bool:
        """Every latent is finite."""
        return bool(self.kinds) and all(what == "images" for what, _ in self.kinds)


def _odd(values: Tensor) -> Tensor:
    """Rows that hold NaN or inf, [b] bool; one pass, no copy of the size of the values."""
    return ~values.detach().sum(dim=tuple(range(1, values.ndim)), dtype=torch.float32).isfinite()


def remedy(
    model: ModelConfig, optim: OptimConfig, grad_norm: float | None, *, trained: bool, in_decoder: bool
) -> tuple[type[Diverged], str]:
    """The failure that it is, and the state of the training with what to change. `grad_norm`: of the last update; None:
    there was none. `trained`: the weights have moved. `in_decoder`: the latents are finite, the images are not.
    """
    if in_decoder and (model.vae_precision == "float16" or not trained):
        return DecoderOverflow if trained else Diverged, (
            f"the latents are finite, so the decoder overflows: model.vae_precision is {model.vae_precision}; set "
            "tf32, float32 or bfloat16" + ("" if trained else ", or another model.vae")
        )
    if not trained:
        return Diverged, (
            f"nothing was trained yet, so the model itself makes them: model.dtype is {model.dtype}, set bfloat16 or "
            "float32, or lower rollout.guidance_scale"
        )
    rate, limit = optim.learning_rate, optim.max_grad_norm
    norm = "" if grad_norm is None else f"the gradient norm was {grad_norm:.3g} in the last update, "
    return Overshot, (
        f"{norm}optim.learning_rate is {rate:g}, optim.max_grad_norm {'null' if limit is None else f'{limit:g}'}; "
        "lower the rate, from a state before that"
    )
