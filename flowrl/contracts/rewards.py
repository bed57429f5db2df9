"""The contract of a reward, tried on it: what `flowrl score --check` prints.

Each trial says what it saw and, where the contract is broken, what to mend. An exception that is no RewardError is
allowed for a NaN image (the scorer then finds and masks that sample) and nowhere else.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.contracts.laws import Finding
from flowrl.core.errors import described
from flowrl.reward import Card, Reward, RewardError
from flowrl.scoring.one_call import called, score_once
from flowrl.scoring.surroundings import MEND, Conduct
from flowrl.scoring.weighted import WeightedReward

log = logging.getLogger("flowrl")
COUNT, SIDE, FRAMES = 6, 64, 4
PROMPTS = ("a red circle", "a blue square", "two green triangles")
ODD = (
    "",
    " ",
    "\u732b\u306e\u7d75 \U0001f408 caf\u00e9 \u0645\u0631\u062d\u0628\u0627",
    '{a} %s \\ "quoted" <b>',
    "word " * 600,
)
_TOLERANCE = 1e-4
"""Largest difference between scores of a sample in two batches, relative to the larger of 1 and the score's size."""
_ALONE = "score each sample by itself: no mean, maximum or padding over the batch (or declare needs_groups)"


@dataclass(frozen=True, slots=True)
class Material:
    """Samples that are scored: images as one tensor, or a list where sizes differ."""

    images: Any
    prompts: Sequence[str]
    metadata: Sequence[dict]

    def pick(self, rows: Sequence[int]) -> Material:
        images = self.images[list(rows)] if isinstance(self.images, Tensor) else [self.images[i] for i in rows]
        return Material(images, [self.prompts[i] for i in rows], [copy.deepcopy(self.metadata[i]) for i in rows])


def material(card: Card) -> Material:
    """COUNT noisy colour gradients of SIDE px, or clips of FRAMES frames for a reward that takes nothing else."""
    generator = torch.Generator().manual_seed(0)
    ramp = torch.linspace(0, 1, SIDE)
    corners = torch.rand(COUNT, 3, 2, generator=generator)
    gradient = corners[:, :, :1, None] * ramp[:, None] + corners[:, :, 1:, None] * ramp[None, :]
    noise = torch.rand(COUNT, 3, SIDE, SIDE, generator=generator)
    images = (0.4 * gradient + 0.2 * noise).clamp(0, 1)
    if card.modality == "video":
        images = torch.stack([images.roll(shift, dims=-1) for shift in range(FRAMES)], dim=1)
    return Material(images, [PROMPTS[i % len(PROMPTS)] for i in range(COUNT)], [{} for _ in range(COUNT)])


class Trials:
    """All trials of one reward on the same samples.

    Args:
        name: of the reward, for the messages.
        reward: as its `build(config)` returns it.
        samples: at least 2 of them, pictures or clips as its card says.
    """

    def __init__(self, name: str, reward: Reward, samples: Material) -> None:
        self.reward, self.card, self.samples = reward, reward.card, samples
        self.entry = WeightedReward(name, reward)
        self.seconds = 0.0
        self.conduct = Conduct(looks_at_inputs=True)
        """In all trials: some rewards do only to a NaN image what they must not do."""

    def once(self, given: Material) -> dict[str, Tensor]:
        return score_once(self.entry, given.images, given.prompts, given.metadata, self.conduct)

    def run(self) -> Iterator[Finding]:
        """Finding after finding; the first trial must pass before there is a second."""
        first = self._tried("scores", self._scores)
        yield first
        yield self._card()
        if not first.good:
            return
        trials: list[tuple[str, Callable[[], Finding]]] = [
            ("same twice", self._twice),
            ("order", self._order),
            ("NaN image", self._nan),
            ("sizes differ", self._sizes),
            ("odd prompts", self._odd),
            ("gradient", self._gradient),
            ("leaves state alone", self._state),
            ("leaves inputs alone", self._inputs),
            ("speed", self._speed),
        ]
        if not self.card.needs_groups:
            trials.insert(2, ("alone as in a batch", self._alone))
        if self.card.modality == "any" and self._first_ndim() == 3:
            trials.insert(-3, ("videos", self._videos))
        for name, trial in trials:
            yield self._tried(name, trial)

    def _tried(self, name: str, trial: Callable[[], Finding]) -> Finding:
        try:
            return trial()
        except RewardError as error:
            return Finding(name, str(error), "mend what the message names, or give prompts it can judge with --prompts")
        except (Exception, SystemExit) as error:  # somebody's code may raise anything
            log.debug("the trial %r raised", name, exc_info=error)
            return Finding(
                name,
                f"raised {described(error)}",
                "score what can be scored, and return NaN for a sample that cannot",
            )

    def _first_ndim(self) -> int:
        return int(self.samples.images[0].ndim)

    # ---- trials

    def _scores(self) -> Finding:
        started = time.perf_counter()
        self.base = self.once(self.samples)
        self.seconds = time.perf_counter() - started
        told = ", ".join(f"{name} {_span(values)}" for name, values in self.base.items())
        if any(values.isnan().all() for values in self.base.values()):
            return Finding("scores", told, "no sample was scored: give pictures and prompts that it can judge")
        if all(values.unique().numel() < 2 for values in self.base.values()):
            told += " (all alike, so what follows shows little: give pictures and prompts that it tells apart)"
        return Finding("scores", f"{told}; one number a sample, within the declared range")

    def _card(self) -> Finding:
        unsaid = [name for name in ("licence", "source") if getattr(self.card, name) in ("", "unknown")]
        open_ = " (no range is declared, so none is checked)" if np.isinf([self.card.low, self.card.high]).all() else ""
        known = f"{self.card.modality}, {self.card.level}, version {self.card.version}{open_}"
        return Finding("card", f"{known}; says no {' and no '.join(unsaid)}" if unsaid else known)

    def _twice(self) -> Finding:
        apart = _apart(self.base, self.once(self.samples))
        remedy = "seed what is random from the sample itself, and put the network in eval()"
        return Finding("same twice", f"differs by {apart:.2g}", remedy if apart > 1e-6 else "")

    def _order(self) -> Finding:
        rows = list(reversed(range(len(self.samples.prompts))))
        apart = _apart({name: values[rows] for name, values in self.base.items()}, self.once(self.samples.pick(rows)))
        remedy = "return the scores in the order of the images, each of its own prompt and metadata"
        return Finding("order", f"reversed samples differ by {apart:.2g}", remedy if apart > _TOLERANCE else "")

    def _alone(self) -> Finding:
        count = len(self.samples.prompts)
        parts = [self.once(self.samples.pick([row])) for row in range(count)]
        apart = _apart(self.base, {name: torch.cat([part[name] for part in parts]) for name in self.base})
        return Finding("alone as in a batch", f"differs by {apart:.2g}", _ALONE if apart > _TOLERANCE else "")

    def _nan(self) -> Finding:
        given = self.samples.pick(range(len(self.samples.prompts)))
        images = [image.clone() for image in given.images]
        images[1][..., 0, 0] = torch.nan
        same = isinstance(given.images, Tensor)
        try:
            result = self.once(Material(torch.stack(images) if same else images, given.prompts, given.metadata))
        except (Exception, SystemExit) as error:
            return Finding("NaN image", f"raises {type(error).__name__}, and the scorer masks that sample")
        numbers = [name for name, values in result.items() if not values[1].isnan()]
        if numbers:
            value = float(result[numbers[0]][1])
            remedy = "return NaN for a picture that is not finite: a failed sample must never look like a scored one"
            return Finding("NaN image", f"{numbers[0]} = {value:.4g} for it", remedy)
        rest = [row for row in range(len(images)) if row != 1]
        apart = _apart(*({name: values[rest] for name, values in each.items()} for each in (self.base, result)))
        if apart > _TOLERANCE and not self.card.needs_groups:
            return Finding("NaN image", f"the others change by {apart:.2g}", "let it spoil no other sample")
        return Finding("NaN image", "is NaN, and spoils no other")

    def _sizes(self) -> Finding:
        given = self.samples.pick(range(len(self.samples.prompts)))
        images = [image[..., : image.shape[-2] - 4 * row, :] for row, image in enumerate(given.images)]
        if min(image.shape[-2] for image in images) < 8:
            images = [image[..., : image.shape[-1] - row] for row, image in enumerate(given.images)]
        result = self.once(Material(images, given.prompts, given.metadata))
        smallest = self.once(Material(images[-1:], given.prompts[-1:], given.metadata[-1:]))
        apart = _apart(smallest, {name: values[-1:] for name, values in result.items()})
        if apart > _TOLERANCE and not self.card.needs_groups:
            return Finding("sizes differ", f"an image differs by {apart:.2g} next to larger ones", _ALONE)
        return Finding("sizes differ", "a list of images is scored, each as it is alone")

    def _odd(self) -> Finding:
        refused = []
        for prompt in ODD:
            given = self.samples.pick([0])
            try:
                self.once(Material(given.images, [prompt], given.metadata))
            except RewardError:
                refused.append(prompt)
            except (Exception, SystemExit) as error:
                return Finding(
                    "odd prompts",
                    f"{prompt[:24]!r} of {len(prompt)} letters raised {described(error)}",
                    "return NaN for a prompt that cannot be judged, or raise RewardError if no run should use it",
                )
        told = f"{len(ODD) - len(refused)} of {len(ODD)} are scored (empty, foreign, 3000 letters)"
        return Finding("odd prompts", f"{told}; the others are refused in words" if refused else told)

    def _gradient(self) -> Finding:
        given = self.samples.pick([0, 1])
        if not self.card.differentiable:
            values = self._raw(given)
            kept = [name for name, value in values.items() if isinstance(value, Tensor) and value.requires_grad]
            remedy = "score under torch.no_grad(), or freeze the weights: the graph of every batch costs memory"
            return Finding("gradient", "not declared; no graph is kept", remedy if kept else "")
        images = [image.clone().requires_grad_() for image in given.images]
        same = isinstance(given.images, Tensor)
        values = self._raw(Material(torch.stack(images) if same else images, given.prompts, given.metadata))
        grads = torch.autograd.grad(sum(value.sum() for value in values.values()), images, allow_unused=True)
        good = all(grad is not None and grad.isfinite().all() and grad.abs().sum() > 0 for grad in grads)
        remedy = "keep the way from pixels to score in torch, in float, and without no_grad; or declare no gradient"
        return Finding("gradient", "reaches every picture" if good else "does not arrive", "" if good else remedy)

    def _raw(self, given: Material) -> dict[str, Any]:
        return called(self.entry, given.images, given.prompts, given.metadata, self.conduct)

    def _videos(self) -> Finding:
        given = self.samples.pick([0, 1])
        frames = [torch.stack([image, image.flip(-1), image.flip(-2)]) for image in given.images]
        same = all(video.shape == frames[0].shape for video in frames)
        self.once(Material(torch.stack(frames) if same else frames, given.prompts, given.metadata))
        return Finding("videos", "are scored")

    def _state(self) -> Finding:
        changed = self.conduct.settings + [f"{whose} random numbers" for whose in self.conduct.random]
        told = (
            f"it changed {', '.join(changed)}" if changed else "random numbers, grad mode, dtype, folder ... as before"
        )
        remedy = f"use a random generator of its own; whatever else it changes, {MEND}"
        return Finding("leaves state alone", told, remedy if changed else "")

    def _inputs(self) -> Finding:
        changed = self.conduct.inputs
        told = f"it changed {', '.join(changed)}" if changed else "as they were"
        return Finding("leaves inputs alone", told, "work on copies of your own" if changed else "")

    def _speed(self) -> Finding:
        started, calls = time.perf_counter(), 0
        while calls == 0 or (time.perf_counter() - started < 0.3 and calls < 20):
            self.once(self.samples)
            calls += 1
        rate = calls * len(self.samples.prompts) / (time.perf_counter() - started)
        return Finding(
            "speed", f"{rate:.1f} samples/s in batches of {len(self.samples.prompts)} ({self.seconds:.2f} s at first)"
        )


def _span(values: Tensor) -> str:
    finite = values[values.isfinite()]
    return f"{float(finite.min()):.4g}..{float(finite.max()):.4g}" if len(finite) else "NaN for all"


def _apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Largest relative difference; infinite where one is NaN and the other is not."""
    worst = 0.0
    for name, values in first.items():
        a, b = values, second[name]
        if not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        difference = ((a - b).abs() / a.abs().clamp(min=1)).nan_to_num(0.0)
        worst = max(worst, float(difference.max()) if len(difference) else 0.0)
    return worst
