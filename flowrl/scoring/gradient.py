"""The gradient of the trained rewards at clean latents: decoded, scored and differentiated a few images at a time.

Rewards on latents are differentiated as they are; where there is no other, nothing is decoded.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, Remedy, RewardFailure
from flowrl.core.rng import normal, stream
from flowrl.core.types import Condition
from flowrl.data.prompts import Prompt
from flowrl.display.console import log
from flowrl.models.base import ModelAdapter, decoded
from flowrl.reward import Card, RewardError
from flowrl.scoring.entries import RewardPlan
from flowrl.scoring.one_call import score_once
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Batch, Conduct, Latents
from flowrl.scoring.weighted import WeightedReward

Keys = Sequence[tuple[int, int, int, int]]
"""(seed, iteration, slot, sample) of each latent, by which frames are drawn."""
_FREE = 32
"""Iterations without an effect of the hinge after which that is said."""


class Slope(NamedTuple):
    """What the rewards say of M clean latents."""

    value: Tensor
    """Weighted sum of the training values, [M] float32; NaN where a reward failed."""
    gradient: Tensor
    """Its gradient at the latents, [M, ...] float32: 0 where it is NaN, or not below the hinge."""
    saturated: Tensor
    """Share of an image's values at 0 or 1, which pass no gradient, [M] float32; 0 where nothing is decoded."""


Reading = tuple[float, Sequence[Prompt], Condition, Tensor]
"""A factor on what rewards say when they read these prompts, M, and their rows in these conditions, [M] int64."""


class RewardGradient:
    """The trained rewards of a run through the model's decoder.

    Rewards of weight 0 take no part; one that only opens a gate is scored without a gradient. `at_once`: images whose
    graph is kept at a time. `hinge`: above this sum a sample has no gradient; None: there is no bound. `frames`: of a
    video, drawn for each sample, whose mean score as images it is; None: whole videos are scored.
    """

    def __init__(
        self, scorer: Scorer, adapter: ModelAdapter, at_once: int, hinge: float | None = None, frames: int | None = None
    ) -> None:
        self.adapter, self.at_once, self.hinge, self.frames = adapter, at_once, hinge, frames
        self.counted = [entry for entry in scorer.entries if entry.weight != 0]
        gates = {entry.gate.output for entry in self.counted if entry.gate is not None}
        climbed = {id(entry.reward): entry for entry in self.counted}
        self.climbed = list(climbed.values())
        self.gates = [e for e in scorer.distinct if id(e.reward) not in climbed and gates & {*e.reward.card.outputs}]
        self.flat_in_a_row = self.free_in_a_row = 0
        """Iterations in a row in which no sample had a gradient; in which all had one."""

    def __call__(self, latents: Latents, readings: Sequence[Reading], keys: Keys = ()) -> Slope:
        """Value and gradient at M latents of the sum over readings.

        Raises RewardFailure: a reward breaks its contract.
        """
        parts = []
        for start in range(0, len(latents.x0), self.at_once):
            part = slice(start, start + self.at_once)
            few = dataclasses.replace(latents[part], x0=latents.x0[part].detach().float().requires_grad_())
            with torch.enable_grad():
                images, total = self._images(few, keys[part]), few.x0.new_zeros(len(few.x0))
                for factor, read, cond, rows in readings:
                    place = dataclasses.replace(few, cond=cond, rows=rows[part])
                    total = total + factor * self._total(images, read[part], place)
                parts.append(self._slope(few.x0, images, total))
        return Slope(*map(torch.cat, zip(*parts, strict=True)))

    def _slope(self, x: Tensor, images: Tensor, total: Tensor) -> Slope:
        """Value and gradient at latents x of the sum `total`, which came from them."""
        climbs = total.isfinite() if self.hinge is None else total < self.hinge
        (gradient,) = torch.autograd.grad(total[climbs].sum(), x)
        lost = ~(gradient.flatten(1).isfinite().all(dim=1) & total.isfinite())
        gradient = torch.where((climbs & ~lost).reshape(-1, *[1] * (x.ndim - 1)), gradient, 0.0)
        cut = ((images <= 0) | (images >= 1)).unflatten(0, (len(x), -1)).flatten(1)
        saturated = cut.float().mean(dim=1).nan_to_num()
        return Slope(torch.where(lost, torch.nan, total.detach()), gradient, saturated)

    def _total(self, images: Tensor, prompts: Sequence[Prompt], latents: Latents) -> Tensor:
        """Weighted sum of the training values, [M], with its graph. Raises as of a call."""
        raw, batch = dict[str, Tensor](), _batch(images, prompts, latents)
        try:
            for entry in self.climbed:
                raw |= score_once(entry, batch, graph=True)
            for entry in self.gates:
                raw |= score_once(entry, dataclasses.replace(batch, images=images.detach()))
        except RewardError as error:
            raise RewardFailure(str(error)) from error
        raw = {name: value.to(images.device) for name, value in raw.items()}
        total = torch.stack([entry.weight * entry.training_value(raw) for entry in self.counted]).sum(dim=0)
        return total.unflatten(0, (len(prompts), -1)).mean(dim=1)

    def _images(self, latents: Latents, keys: Keys) -> Tensor:
        """Their images, with their graph; of videos the drawn frames, each a row; no value where no reward sees any."""
        x, frame = latents.x0, None
        if all(entry.reward.on_latents is not None for entry in (*self.climbed, *self.gates)):
            return x.new_zeros(len(x), 0)
        if self.frames is not None:
            draws = [stream(seed, "gradient_frames", *key) for seed, *key in keys]
            there, n = self.adapter.num_frames, self.frames
            frame = torch.as_tensor(np.stack([each.choice(there, n, replace=False) for each in draws]))
            x = self.adapter.leading(x, int(frame.max()))
        images = decoded(self.adapter, x, latents.cond, latents.rows, graph=True)
        assert isinstance(images, Tensor)
        return images if frame is None else images[torch.arange(len(x))[:, None], frame].flatten(0, 1)

    def warning(self, row: Mapping[str, float]) -> str | None:
        """A warning of a row of metrics: nothing is climbed, at the first, second, fourth, eighth ... iteration in a
        row; or the hinge has ended nothing, at the 32nd."""
        flat, hinge = row.get("reward_gradient/flat_share"), self.hinge
        self.flat_in_a_row = (self.flat_in_a_row + 1) * (flat == 1)
        self.free_in_a_row = (self.free_in_a_row + 1) * (flat == 0)
        count, value = self.flat_in_a_row, row.get("reward_gradient/value", 0.0)
        if hinge is not None and self.free_in_a_row == _FREE:
            return (
                f"algorithm.hinge={hinge:g} has ended no gradient in {_FREE} iterations: the reward is {value:.3g} now"
            )
        if not count or count & (count - 1):
            return None
        why = "the rewards' clip, saturated pixels or failures end it"
        if hinge is not None and value >= hinge:
            why = f"the reward, {value:.3g} on average, is above algorithm.hinge={hinge:g}; raise that, or end the run"
        times = "this iteration" if count == 1 else f"{count} iterations in a row"
        return f"no sample had a gradient in {times}, so that nothing is learned: {why}"

    def probe(self, cond: Condition, prompt: Prompt, device: torch.device) -> None:
        """Show on one sample of noise that each reward's gradient reaches the latents; `cond` has one row.

        Raises ModelError: the adapter gives no gradient; RewardError: the gradient of a reward is lost, 0 or not
        finite.
        """
        x = normal(self.adapter.latent_shape(), 0, "gradient_probe", [()]).to(device).requires_grad_()
        with torch.enable_grad():
            latents = Latents(x, cond, torch.zeros(1, dtype=torch.int64))
            batch = _batch(self._images(latents, [(0, 0, 0, 0)]), [prompt], latents)
            for entry in self.climbed:
                self._probe(entry, score_once(entry, batch, Conduct(), graph=True), x)

    def _probe(self, entry: WeightedReward, raw: dict[str, Tensor], x: Tensor) -> None:
        total = torch.stack([raw[output].sum() for output in entry.shares()]).sum()
        if total.isnan():
            log.warning("reward %r has no score for noise, so that its gradient was not tried", entry.name)
            return
        found = torch.autograd.grad(total, x, retain_graph=True, allow_unused=True)[0] if total.requires_grad else None
        wrong = "does not arrive" if found is None or not found.any() else "is not finite"
        if found is None or not found.any() or not found.isfinite().all():
            raise RewardError(
                f"reward {entry.name!r}: its gradient {wrong} at the latents; keep the way from pixels to score in "
                "torch, in float, and without no_grad, or train on it by a method that takes scores alone, such as "
                "flow_grpo; nothing was trained"
            )


def slope_of(scorer: Scorer, output: str) -> Callable[[Tensor, Tensor, Condition], Tensor]:
    """The gradient of a judge of latents, [N, ...], at latents [N, ...], noise levels [N] and conditions of N rows."""
    entry = next(e for e in scorer.distinct if output in e.reward.card.outputs)

    def slope(x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
        x, none = x.detach().float().requires_grad_(), [""] * len(x)
        with torch.enable_grad():
            batch = Batch(x, none, [{} for _ in none], Latents(x, cond, torch.arange(len(x)), sigma))
            return torch.autograd.grad(score_once(entry, batch, graph=True)[output].nansum(), x)[0]

    return slope


def _batch(images: Tensor, prompts: Sequence[Prompt], latents: Latents) -> Batch:
    """Samples with as many images each, in their order."""
    if len(images) > len(prompts):
        each = [row for row in range(len(prompts)) for _ in range(len(images) // len(prompts))]
        prompts, latents = [prompts[row] for row in each], latents[each]
    return Batch(images, [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts], latents)


def require_paths(method: str, plans: Sequence[RewardPlan], cards: Sequence[Card | None]) -> None:
    """Refuse trained rewards through which `method` has no gradient, by their cards; None: it is not known yet.

    Raises ConfigError: naming the entry, and the option that gives a path.
    """
    for place, (plan, card) in enumerate(zip(plans, cards, strict=True)):
        key, entry = f"rewards.{place}", plan.entry
        if entry.weight == 0 or card is None:
            continue
        if not card.differentiable:
            options = {} if plan.config is None else dataclasses.asdict(plan.config)
            fast = options.get("preprocess") == "exact"
            why = "preprocess=exact goes through 8 bits" if fast else "its card does not declare one (differentiable)"
            raise ConfigError(
                f"{key}: {method} climbs the gradient of its rewards, and {plan.name!r} has none: {why}; weight 0 only "
                "looks at it, and methods on scores, such as flow_grpo, train on it",
                remedies=[Remedy({f"{key}.preprocess": "fast"})] if fast else [],
            )
        if entry.cache is not None:
            raise ConfigError(
                f"{key}.cache={entry.cache!r}: kept scores have no gradient, which {method} climbs",
                {f"{key}.cache": None},
            )
