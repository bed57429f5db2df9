"""The contract of a reward, tried on it: what `flowrl score --check` prints.

An exception that is not a RewardError is allowed for a NaN image (the scorer then finds and masks that sample) and
nowhere else.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.contracts.laws import Broken, Finding, Law, law, require
from flowrl.core.errors import described
from flowrl.reward import Card, Reward, RewardError
from flowrl.scoring.one_call import called, score_once
from flowrl.scoring.steadiness import AGAIN, BY_ITSELF, REPEATABLE, alone_tolerance, difference, rows
from flowrl.scoring.surroundings import MEND, Batch, Conduct
from flowrl.scoring.weighted import WeightedReward

COUNT, SIDE, FRAMES = 6, 64, 4
PROMPTS = ("a red circle", "a blue square", "two green triangles")
ODD = (
    "",
    " ",
    "\u732b\u306e\u7d75 \U0001f408 caf\u00e9 \u0645\u0631\u062d\u0628\u0627",
    '{a} %s \\ "quoted" <b>',
    "word " * 600,
)
_SCORE_WHAT_CAN_BE = "score what can be scored, and return NaN for a sample that cannot"
_BY_FRAMES = (
    "score a video [F, 3, H, W] by its frames, so that equal frames score as their image; or declare modality image"
)
_MEND_MESSAGE = "mend what the message names, or give prompts it can judge with --prompts"


def trial_batch(card: Card) -> Batch:
    """COUNT noisy colour gradients of SIDE px, or videos of FRAMES frames for a reward that takes nothing else."""
    generator = torch.Generator().manual_seed(0)
    ramp = torch.linspace(0, 1, SIDE)
    corners = torch.rand(COUNT, 3, 2, generator=generator)
    gradient = corners[:, :, :1, None] * ramp[:, None] + corners[:, :, 1:, None] * ramp[None, :]
    noise = torch.rand(COUNT, 3, SIDE, SIDE, generator=generator)
    images = (0.4 * gradient + 0.2 * noise).clamp(0, 1)
    if card.modality == "video":
        images = torch.stack([images.roll(shift, dims=-1) for shift in range(FRAMES)], dim=1)
    return Batch(images, [PROMPTS[i % len(PROMPTS)] for i in range(COUNT)], [{} for _ in range(COUNT)])


class RewardTrial:
    """A reward, as its `build(config)` returns it, with the samples on which its laws are tried: at least 2, images or
    videos as its card says. `name` is for messages.
    """

    def __init__(self, name: str, reward: Reward, samples: Batch) -> None:
        self.card, self.samples = reward.card, samples
        self.entry = WeightedReward(name, reward)
        self.base: dict[str, Tensor] = {}
        """Scores of the samples, [B] each, once the first law holds."""
        self.seconds = 0.0
        """Duration of the first call."""
        self.conduct = Conduct(looks_at_inputs=True)
        """Side effects in all trials: some rewards have them only with a NaN image."""

    @property
    def tolerance(self) -> float:
        """Largest difference of a sample's scores in two batches; none for a reward that differs by itself."""
        return alone_tolerance(self.card) if self.card.repeatable else float("inf")

    def unguarded(self, batch: Batch) -> dict[str, Tensor]:
        """Scores of a batch, [B] each; raises whatever the reward raises."""
        return score_once(self.entry, batch, self.conduct)

    def scores(self, batch: Batch, remedy: str = _SCORE_WHAT_CAN_BE) -> dict[str, Tensor]:
        """Scores of a batch that every reward must be able to score; `remedy` is for what it raises.

        Raises Broken: the reward raises, or its scores are not those that its card declares.
        """
        try:
            return self.unguarded(batch)
        except RewardError as error:
            raise Broken(str(error), _MEND_MESSAGE) from error
        except (Exception, SystemExit) as error:  # somebody's code may raise anything
            raise Broken(f"raised {described(error)}", remedy) from error

    def with_images(self, images: Sequence[Tensor]) -> Batch:
        """The first samples with other images, stacked where their own are."""
        first = self.samples.part(0, len(images))
        stacked = isinstance(first.images, Tensor)
        return Batch(torch.stack(list(images)) if stacked else images, first.prompts, first.metadata)

    def run(self) -> Iterator[Finding]:
        """Findings, one a law; where the samples cannot be scored at all, those of the first two laws."""
        for each in LAWS:
            if self.base or each in LAWS[:2]:
                yield each.find(self)


@law("scores", "one number a sample, within the declared range")
def scores(trial: RewardTrial) -> str:
    started = time.perf_counter()
    base = trial.scores(trial.samples)
    trial.seconds = time.perf_counter() - started
    spans = ", ".join(f"{name} {_span(values)}" for name, values in base.items())
    scored = not any(values.isnan().all() for values in base.values())
    require(scored, spans, "no sample was scored: give images and prompts that it can judge")
    trial.base = base
    if all(values.unique().numel() < 2 for values in base.values()):
        spans += " (all alike, so what follows shows little: give images and prompts that it tells apart)"
    return f"{spans}; one number a sample, within the declared range"


@law("card", "a licence and a source")
def card(trial: RewardTrial) -> str:
    own = trial.card
    missing = [name for name, value in (("licence", own.licence), ("source", own.source)) if value in ("", "unknown")]
    open_ = " (no range is declared, so none is checked)" if np.isinf([own.low, own.high]).all() else ""
    known = f"{own.modality}, {own.level}, version {own.version}{open_}"
    return f"{known}; no {' and no '.join(missing)}" if missing else known


@law("same twice", REPEATABLE)
def same_twice(trial: RewardTrial) -> str:
    apart = difference(trial.base, trial.scores(trial.samples))
    measured = f"differs by {apart:.2g}"
    if not trial.card.repeatable:
        return f"{measured}, as declared"
    return require(apart <= AGAIN, measured)


@law("order", "return the scores in the order of the images, each of its own prompt and metadata")
def order(trial: RewardTrial) -> str:
    reverse = list(reversed(range(len(trial.samples))))
    apart = difference(rows(trial.base, reverse), trial.scores(trial.samples.pick(reverse)))
    measured = f"reversed samples differ by {apart:.2g}"
    return require(apart <= trial.tolerance, measured)


@law("alone as in a batch", BY_ITSELF)
def alone(trial: RewardTrial) -> str:
    if trial.card.needs_groups:
        return "not tried: a score depends on its group"
    parts = [trial.scores(trial.samples.pick([row])) for row in range(len(trial.samples))]
    apart = difference(trial.base, {name: torch.cat([part[name] for part in parts]) for name in trial.base})
    return require(apart <= trial.tolerance, f"differs by {apart:.2g}")


@law("NaN image", "return NaN for an image that is not finite: a failed sample must never look like a scored one")
def nan_image(trial: RewardTrial) -> str:
    images = [image.clone() for image in trial.samples.images]
    images[1][..., 0, 0] = torch.nan
    try:
        result = trial.unguarded(trial.with_images(images))
    except (Exception, SystemExit) as error:
        return f"raises {type(error).__name__}, and the scorer masks that sample"
    for name, values in result.items():
        require(bool(values[1].isnan()), f"{name} = {float(values[1]):.4g} for it")
    others = [row for row in range(len(images)) if row != 1]
    apart = difference(rows(trial.base, others), rows(result, others))
    kept = apart <= trial.tolerance or trial.card.needs_groups
    require(kept, f"the others change by {apart:.2g}", "let it spoil no other sample")
    return "is NaN, and spoils no other"


@law("sizes differ", BY_ITSELF)
def sizes_differ(trial: RewardTrial) -> str:
    given = trial.samples
    images = [image[..., : image.shape[-2] - 4 * row, :] for row, image in enumerate(given.images)]
    if min(image.shape[-2] for image in images) < 8:
        images = [image[..., : image.shape[-1] - row] for row, image in enumerate(given.images)]
    batch = Batch(images, given.prompts, given.metadata)
    result, smallest = trial.scores(batch), len(batch) - 1
    if not trial.card.needs_groups:
        apart = difference(trial.scores(batch.pick([smallest])), rows(result, [smallest]))
        require(apart <= trial.tolerance, f"an image differs by {apart:.2g} next to larger ones")
    return "a list of images is scored, each as it is alone"


@law("odd prompts", "return NaN for a prompt that cannot be judged, or raise RewardError if no run should use it")
def odd_prompts(trial: RewardTrial) -> str:
    first, refused = trial.samples.part(0, 1), 0
    for prompt in ODD:
        try:
            trial.unguarded(Batch(first.images, [prompt], first.metadata))
        except RewardError:
            refused += 1
        except (Exception, SystemExit) as error:
            text = f"{prompt[:24]!r} of {len(prompt)} letters raised {described(error)}"
            raise Broken(text) from error
    scored = f"{len(ODD) - refused} of {len(ODD)} are scored (empty, foreign, 3000 letters)"
    return f"{scored}; the others are refused in words" if refused else scored


@law("gradient", "where it is declared, it reaches every image; else no graph is kept")
def gradient(trial: RewardTrial) -> str:
    def raw(batch: Batch) -> dict[str, Any]:
        return called(trial.entry, batch, trial.conduct)

    if not trial.card.differentiable:
        values = raw(trial.samples.part(0, 2)).values()
        kept = any(isinstance(value, Tensor) and value.requires_grad for value in values)
        remedy = "score under torch.no_grad(), or freeze the weights: the graph of every batch costs memory"
        require(not kept, "not declared, and a graph is kept", remedy)
        return "not declared; no graph is kept"
    images = [image.clone().requires_grad_() for image in trial.samples.images[:2]]
    total = torch.stack([value.sum() for value in raw(trial.with_images(images)).values()]).sum()
    grads = torch.autograd.grad(total, images, allow_unused=True)
    good = all(grad is not None and grad.isfinite().all() and grad.abs().sum() > 0 for grad in grads)
    remedy = "keep the way from pixels to score in torch, in float, and without no_grad; or declare no gradient"
    require(good, "does not arrive", remedy)
    return "reaches every image"


@law("videos", _BY_FRAMES)
def videos(trial: RewardTrial) -> str:
    if trial.card.modality != "any":
        return f"not tried: modality {trial.card.modality}"
    given = trial.samples
    stills = [image if image.ndim == 3 else image[0] for image in given.images]
    apart = difference(
        trial.scores(trial.with_images(stills), _BY_FRAMES),
        trial.scores(trial.with_images([still.expand(3, -1, -1, -1) for still in stills]), _BY_FRAMES),
    )
    measured = f"a video of equal frames differs from its image by {apart:.2g}"
    require(apart <= trial.tolerance, measured)
    count = sum(image.ndim != 3 for image in given.images)
    own = {0: "", len(given): "; all samples are videos"}.get(count, f"; {count} of {len(given)} samples are videos")
    return measured + own


@law("leaves state alone", f"use a random generator of its own; whatever else it changes, {MEND}")
def state_alone(trial: RewardTrial) -> str:
    changed = trial.conduct.settings + [f"{whose} random numbers" for whose in trial.conduct.random]
    require(not changed, f"it changed {', '.join(changed)}")
    return "random numbers, grad mode, dtype, folder ... as before"


@law("leaves inputs alone", "work on copies of your own")
def inputs_alone(trial: RewardTrial) -> str:
    require(not trial.conduct.inputs, f"it changed {', '.join(trial.conduct.inputs)}")
    return "as they were"


@law("speed", "it is measured")
def speed(trial: RewardTrial) -> str:
    started, calls, count = time.perf_counter(), 0, len(trial.samples)
    while calls == 0 or (time.perf_counter() - started < 0.3 and calls < 20):
        trial.scores(trial.samples)
        calls += 1
    rate = calls * count / (time.perf_counter() - started)
    return f"{rate:.1f} samples/s in batches of {count} ({trial.seconds:.2f} s at first)"


LAWS: tuple[Law[RewardTrial], ...] = (
    *(scores, card, same_twice, order, alone, nan_image, sizes_differ, odd_prompts, gradient, videos),
    *(state_alone, inputs_alone, speed),
)


def _span(values: Tensor) -> str:
    finite = values[values.isfinite()]
    return f"{float(finite.min()):.4g}..{float(finite.max()):.4g}" if len(finite) else "NaN for all"
