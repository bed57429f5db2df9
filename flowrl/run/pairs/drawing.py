"""`flowrl pairs`: preference pairs from a model and its rewards, the best and the worst of each prompt's samples.

A round draws G samples of every training prompt, in an order of its own; prompt by prompt they become a pair, a tie or
nothing. What comes of a prompt in a round depends on (seed, round, prompt) alone, so the pairs are the same whatever
the batch, the number of processes, or the place where an earlier call was interrupted. Nothing is trained.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.resolved import Resolved
from flowrl.core import media
from flowrl.core.console import Progress, log, set_up_logging
from flowrl.core.errors import Abandoned, ConfigError
from flowrl.core.files import fsync, json_ready
from flowrl.core.phases import phase
from flowrl.core.rng import derive, permutation
from flowrl.core.types import SampleId
from flowrl.data.prompts import Prompt, require_images
from flowrl.data.text_cache import Texts
from flowrl.models.base import ModelAdapter, decoded
from flowrl.models.savings import cast_frozen
from flowrl.models.weights import Weights, component_names
from flowrl.planning.out_of_memory import explaining
from flowrl.rollout.loop import RunOptions, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.run.folder import RunFolder, provenance
from flowrl.run.pairs.folder import IMAGES, Done, PairFolder
from flowrl.run.pairs.plan import OWN, Wanted, check, made_with, rollout_plan, training_prompts
from flowrl.scoring.build import build_rewards, build_scorer, probe, require_metadata, require_modality
from flowrl.scoring.scorer import Scorer, Scores
from flowrl.training.divergence import Health, remedy
from flowrl.training.signals import Signals
from flowrl.training.world import World, join

PATIENCE = 30
"""Groups of samples, and at least a whole round of them, that may give no pair before the command gives up."""


@dataclass(frozen=True, slots=True)
class Group:
    """What came of a prompt's samples in one round."""

    number: int
    """Of the prompt."""
    best: int
    worst: int
    margin: float
    """Of the weighted sums of the training values; NaN where fewer than two samples have one."""
    masked: int
    """Samples without a value."""
    scores: tuple[dict[str, float | None], dict[str, float | None]]
    """Of the best and the worst: the weighted sum as `total`, and the raw outputs."""


def enough(done: Done, prompts: int, wanted: Wanted) -> bool:
    """There are as many pairs as wanted, or it is no use to go on."""
    if wanted.count is None:
        return done.groups >= prompts
    return done.pairs >= wanted.count or done.groups - done.last_pair >= max(prompts, PATIENCE)


def group_scores(number: int, scores: Scores) -> Group:
    """The best and the worst of a prompt's scores; of equal ones the first."""
    total = scores.total.double()
    valid = total.isfinite()
    masked = int((~valid).sum())
    if int(valid.sum()) < 2:
        return Group(number, 0, 0, math.nan, masked, ({}, {}))
    best = int(total.masked_fill(~valid, -math.inf).argmax())
    worst = int(total.masked_fill(~valid, math.inf).argmin())
    named = {"total": total, **scores.raw}
    told = [json_ready({name: float(values[k]) for name, values in named.items()}) for k in (best, worst)]
    return Group(number, best, worst, float(total[best] - total[worst]), masked, (told[0], told[1]))


class Pairing:
    """Draws, judges and writes.

    Args:
        resolved: the configuration; its algorithm and optimizer do not matter.
        prompts: its training prompts.
        wanted: see there.
        world: the processes; each takes whole prompts.

    Raises:
        ConfigError, ModelError, RewardError: something the user can mend.
    """

    def __init__(self, resolved: Resolved, prompts: Sequence[Prompt], wanted: Wanted, world: World) -> None:
        config, self.dtype = resolved.run, resolved.model.config.dtype
        self.config, self.prompts, self.wanted, self.world = config, prompts, wanted, world
        require_metadata("data.prompts", prompts, resolved.rewards, [plan.card for plan in resolved.rewards])
        entries = build_rewards(resolved.rewards)
        self.scorer: Scorer = build_scorer(entries)
        self.adapter: ModelAdapter = resolved.model.build()
        if self.adapter.num_frames > 1:
            raise ConfigError(
                "model.num_frames: `flowrl pairs` makes pairs of pictures, and this model makes clips; set it to 1"
            )
        for entry in self.scorer.distinct:
            require_modality(entry.name, entry.reward.card, videos=False)
        require_images(prompts, self.adapter, "data.prompts", prompts[0])
        _freeze(resolved, self.adapter, world)
        probe(self.scorer, prompts[:2], self.adapter)
        self.texts = Texts(self.adapter, prompts, cache=config.data.caches_text)
        self.policy = Policy(self.adapter, resolved.sampler.build(), config.rollout.guidance_scale)
        schedule = self.adapter.schedule(config.rollout.num_inference_steps)
        try:
            self.plan = rollout_plan(resolved, schedule)
        except ValueError as error:
            raise ConfigError(f"rollout: {error}") from None
        self.signals = Signals()
        self.scorer.stop = self.signals.here

    def fill(self, folder: PairFolder) -> None:
        """Go on until there is enough.

        Raises:
            Stopped: a signal came; all but the prompts under way is in the folder.
            RewardError: too many samples could not be scored; what was done before is in the folder.
        """
        with self.signals.listening():
            while not enough(folder.done, len(self.prompts), self.wanted):
                self._step(folder)

    def _step(self, folder: PairFolder) -> None:
        """The next prompts, as many as an iteration of training has: what is scored together is then the same."""
        done, prompts = folder.done, len(self.prompts)
        number, place = divmod(done.groups, prompts)
        order = permutation(prompts, self.config.seed, "pairs", number).tolist()
        chosen = order[place : place + self.config.rollout.prompts_per_iteration]
        images: dict[int, Tensor] = {}
        try:
            own = self.world.in_step(lambda: self._attempt(number, self._own(chosen), images))
            self.signals.honour(self.world)
        except Abandoned:
            if self.world.main:
                log.info("stopped: %s; the same command goes on", folder.done)
            raise self.signals.stopped(self.world) from None
        groups = {group.number: group for part in self.world.gather(own) for group in part}
        used = self._used([groups[k] for k in chosen], done.pairs)
        kept = [group for group in used if group.margin > self.wanted.margin]
        self.world.together(lambda: [self._keep(folder, number, g, images) for g in kept if g.number in images])
        lines = [self._line(number, group) for group in kept]
        if self.world.main:
            folder.append(lines, _tally(used, kept))
            log.info("round %d: %d of %d prompts; %s", number + 1, place + len(used), prompts, folder.done)
        folder.done = self.world.gather(folder.done)[0]

    def _attempt(self, number: int, own: Sequence[int], images: dict[int, Tensor]) -> list[Group]:
        """This process's groups; `images` is given the best and the worst of each, [2, 3, H, W]."""
        if not own:
            return []
        bar = Progress(len(own) * self.wanted.per_prompt, f"round {number + 1}", show=self.world.main)
        try:
            return self._draw(number, own, bar, images)
        finally:
            bar.close()

    def _own(self, chosen: Sequence[int]) -> Sequence[int]:
        rank, size = self.world.rank, self.world.size
        return chosen[rank * len(chosen) // size : (rank + 1) * len(chosen) // size]

    def _draw(self, number: int, own: Sequence[int], bar: Progress, images: dict[int, Tensor]) -> list[Group]:
        config, group = self.config, self.wanted.per_prompt
        noise = Noise(config.seed, "pairs", number, self.adapter.latent_shape(), config.rollout.shared_noise)
        ids = [SampleId(prompt, k) for prompt in own for k in range(group)]
        rows = torch.arange(len(own)).repeat_interleave(group)
        cond = self.texts.lookup([self.prompts[prompt] for prompt in own])
        parts: list[Tensor] = []
        health = Health()

        def decode(start: int, x0: Tensor) -> None:
            if self.signals.here():
                raise Abandoned
            where = rows[start : start + len(x0)]
            with phase("decode"):
                parts.append(health.seen(x0, decoded(self.adapter, x0.to(self.world.device), cond, where).cpu()))

        options = RunOptions(device=self.world.device, progress=bar.update, finished=decode, stop=self.signals.here)
        size, wanted = config.rollout.batch_size, Asked(ids, cond, rows)
        with torch.no_grad(), phase("rollout"):
            run(self.policy, self.plan, noise, wanted, batch_size=size, options=options)
        if health.diverged:
            why = remedy(self.dtype, config.optim, None, trained=False, in_decoder=health.in_decoder)
            raise health.error(f"in round {number + 1}", why)
        drawn, asked = torch.cat(parts), [self.prompts[i.slot] for i in ids]
        scores = self.scorer.score(drawn, [p.text for p in asked], [p.metadata for p in asked])
        groups = []
        for place, prompt in enumerate(own):
            part = slice(place * group, (place + 1) * group)
            raw = {name: value[part] for name, value in scores.raw.items()}
            groups.append(group_scores(prompt, Scores(raw, scores.values[:, part], scores.weights)))
            images[prompt] = drawn[part][[groups[-1].best, groups[-1].worst]]
        return groups

    def _used(self, groups: Sequence[Group], before: int) -> list[Group]:
        """Those up to the last pair that is wanted."""
        used: list[Group] = []
        for group in groups:
            if self.wanted.count is not None and before >= self.wanted.count:
                break
            used.append(group)
            before += group.margin > self.wanted.margin
        return used

    def _keep(self, folder: PairFolder, number: int, group: Group, images: dict[int, Tensor]) -> None:
        for image, name in zip(images[group.number], self._names(number, group), strict=True):
            fsync(media.write(image, folder.path / name.removesuffix(".png")))
        fsync(folder.path / IMAGES)

    def _names(self, number: int, group: Group) -> tuple[str, str]:
        """Paths of the best and the worst, relative to the folder."""
        stem = f"{IMAGES}/{number:03d}-{group.number:06d}"
        return f"{stem}-{group.best:03d}.png", f"{stem}-{group.worst:03d}.png"

    def _line(self, number: int, group: Group) -> dict[str, Any]:
        prompt, (chosen, rejected) = self.prompts[group.number], self._names(number, group)
        drawn = {"seed": self.config.seed, "round": number, "prompt": group.number}
        drawn |= {"chosen": group.best, "rejected": group.worst}
        own = (prompt.text, chosen, rejected, group.margin, *group.scores, drawn)
        return dict(zip(OWN, own, strict=True)) | prompt.metadata


def _freeze(resolved: Resolved, adapter: ModelAdapter, world: World) -> None:
    """The network that draws, on its device: the untouched one, with `model.init_lora` where one is set."""
    options = resolved.model.config
    if options.lora is not None and options.init_lora is not None:
        weights = Weights(adapter.network, options.lora, adapter.lora_targets, derive(resolved.run.seed, "lora"))
        weights.load_lora(options.init_lora)
    adapter.network.requires_grad_(False)
    cast_frozen(component_names(adapter.network).values(), options)
    adapter.to(world.device)


def _tally(used: Sequence[Group], kept: Sequence[Group]) -> dict[str, int]:
    """What the groups came to, to be added up."""
    last = max((place for place, group in enumerate(used, 1) if group in kept), default=0)
    unscored = sum(math.isnan(group.margin) for group in used)
    return {
        "groups": len(used),
        "pairs": len(kept),
        "ties": len(used) - len(kept) - unscored,
        "unscored": unscored,
        "masked_samples": sum(group.masked for group in used),
        "last_pair": last,
    }


def make(resolved: Resolved, wanted: Wanted, out: Path) -> Done:
    """Fill the folder `out`, or go on filling it, with the processes of this group; how far it is then.

    Raises:
        ConfigError, ModelError, RewardError: something the user can mend.
        Stopped: a signal came.
    """
    check(resolved, wanted)
    world, lock = join(), RunFolder(out, "--out")
    try:
        set_up_logging(None, main=world.main)
        prompts = training_prompts(resolved)
        facts = {"provenance": provenance(resolved, str(world.device), world.size)}
        folder = PairFolder(out, made_with(resolved, prompts, wanted), facts)
        folder.done = world.agree(lambda: _begin(folder, lock) if world.main else folder.done)[0]
        if not enough(folder.done, len(prompts), wanted):
            if folder.done.groups and world.main:
                log.info("going on behind %s", folder.done)
            ready: list[Pairing] = []
            with explaining(resolved, world):
                with phase("loading"):
                    world.agree(lambda: ready.append(Pairing(resolved, prompts, wanted, world)))
                ready[0].fill(folder)
        return folder.done
    finally:
        lock.unlock()
        world.close()


def _begin(folder: PairFolder, lock: RunFolder) -> Done:
    if "FLOWRL_LOCKED" not in os.environ:
        lock.lock()
    return folder.begin()
