"""`flowrl pairs`: preference pairs from a model and its rewards, the best and the worst of each prompt's samples.

A round draws G samples of every training prompt, in an order of its own; prompt by prompt they become a pair, a tie or
nothing. The result of a prompt in a round depends on (seed, round, prompt) alone, so the pairs are the same for any
batch size, any number of processes, and wherever an earlier call was interrupted. Nothing is trained.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.apps.pairs.folder import IMAGES, Done, PairFolder
from flowrl.apps.pairs.plan import OWN, Wanted, check, made_with, rollout_plan, training_prompts
from flowrl.config.resolved import Resolved
from flowrl.core.errors import Abandoned, ConfigError
from flowrl.core.files import fsync, json_ready
from flowrl.core.rng import derive, permutation
from flowrl.core.types import SampleId
from flowrl.data.prompt_files import REFERENCE
from flowrl.data.prompts import Prompt, require_images
from flowrl.display.console import log, set_up_logging
from flowrl.display.phases import phase
from flowrl.media import media
from flowrl.models.weights.roles import freeze
from flowrl.planning.out_of_memory import explaining
from flowrl.planning.parity import require_own_call
from flowrl.rollout.noise import Noise
from flowrl.run.assembly.model import sampling_of
from flowrl.run.folder import RunFolder, provenance
from flowrl.run.people.votes import image_name, keep_file, source_column
from flowrl.run.texts import embedded
from flowrl.scoring.build import build_scorers, require_fit
from flowrl.scoring.probing import probe
from flowrl.scoring.scorer import Scores
from flowrl.training.divergence import remedy
from flowrl.training.metrics import Timer
from flowrl.training.sampling import Drawing, Share
from flowrl.training.signals import Signals
from flowrl.training.world import World, join

_PLACES = ("images", REFERENCE)
"""Keys of an edit's record with paths, which a set that is moved would not find."""
PATIENCE = 30
"""Prompts in a row, and at least a whole round of them, that may give no pair before the command gives up."""


@dataclass(frozen=True, slots=True)
class Group:
    """The result of a prompt's samples in one round."""

    number: int
    """Number of the prompt."""
    best: int
    """Number of the sample, as `worst`."""
    worst: int
    margin: float
    """Difference of the weighted sums of the training values; NaN where fewer than two samples have one."""
    masked: int
    """Samples without a value."""
    scores: tuple[dict[str, float | None], dict[str, float | None]]
    """Scores of the best and of the worst: the weighted sum as `total`, and the raw outputs."""


def enough(done: Done, prompts: int, wanted: Wanted) -> bool:
    """Whether there are as many pairs as wanted, or no more are to be expected."""
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
    both = [json_ready({name: float(values[k]) for name, values in named.items()}) for k in (best, worst)]
    return Group(number, best, worst, float(total[best] - total[worst]), masked, (both[0], both[1]))


class Pairing:
    """Draws and scores samples, and writes the pairs; each process takes whole prompts.

    The algorithm and the optimizer of the configuration do not matter.

    Raises ConfigError, ModelError, RewardError: something the user can mend.
    """

    def __init__(self, resolved: Resolved, prompts: Sequence[Prompt], wanted: Wanted, world: World) -> None:
        config, options = resolved.run, resolved.model.config
        self.config, self.prompts, self.wanted, self.world = config, prompts, wanted, world
        people = next((plan for plan in resolved.rewards if plan.by_people), None)
        if people is not None:
            raise ConfigError(
                f"rewards: {people.name} asks people in a training alone; give another reward, or let people choose "
                "from a run's images: `flowrl vote RUN` makes pairs of their votes"
            )
        scorer, _ = build_scorers(resolved.rewards, (), prompts, ("data.prompts", ()))
        assert scorer is not None  # a method that draws samples has rewards
        adapter = resolved.model.build()
        self.suffix, self.fps = (".webp" if adapter.num_frames > 1 else ".png"), adapter.fps
        require_fit(scorer, adapter)
        require_images(prompts, adapter, "data.prompts", prompts[0])
        adapter.check_steps(config.rollout.num_inference_steps, "rollout.num_inference_steps")
        adapter.check_guidance(config.rollout.guidance_scale, "rollout.guidance_scale")
        freeze(adapter, options, derive(config.seed, "lora"))
        adapter.to(world.device)
        require_own_call(adapter, [config.rollout.guidance_scale], world)
        probe(scorer, prompts[:2], adapter)
        sampling = sampling_of(resolved, adapter, embedded(resolved, adapter, prompts, world), world)
        probe(scorer, prompts[:2], adapter, texts=sampling.texts)
        advice = partial(remedy, options, config.optim, None)
        self.scorer, self.sampling = scorer, replace(sampling, remedy=advice)
        try:
            self.plan = rollout_plan(resolved, sampling.schedule)
        except ValueError as error:
            raise ConfigError.about(error, "rollout: ", place="rollout") from None
        self.signals = Signals()
        scorer.stop = self.signals.here

    def fill(self, folder: PairFolder) -> None:
        """Draw until there are enough pairs.

        Raises Stopped: a signal came; the folder holds everything but the unfinished prompts. RewardError: too many
        samples could not be scored; the folder holds everything before.
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
        try:
            own = self._draw(number, chosen)
            self.signals.honour(self.world)
        except Abandoned:
            if self.world.main:
                log.info("stopped: %s; the same command goes on", folder.done)
            raise self.signals.stopped(self.world) from None
        groups = {group.number: group for part in self.world.gather([group for group, _ in own]) for group in part}
        used = self._used([groups[k] for k in chosen], done.pairs)
        kept = [group for group in used if group.margin > self.wanted.margin]
        numbers = {group.number for group in kept}
        images = [(group, both) for group, both in own if group.number in numbers]
        self.world.together(lambda: [self._keep(folder, number, group, both) for group, both in images])
        lines = [self._line(number, group) for group in kept]
        if self.world.main:
            folder.append(lines, _tally(used, kept))
            log.info("round %d: %d of %d prompts; %s", number + 1, place + len(used), prompts, folder.done)
        folder.done = self.world.gather(folder.done)[0]

    def _draw(self, number: int, chosen: Sequence[int]) -> list[tuple[Group, Tensor]]:
        """This process's prompts, each with its best and worst, images [2, 3, H, W] or videos [2, F, 3, H, W] uint8."""
        rank, size, group = self.world.rank, self.world.size, self.wanted.per_prompt
        own = chosen[rank * len(chosen) // size : (rank + 1) * len(chosen) // size]
        if not own:
            return self.world.in_step(list)
        rollout, shape = self.config.rollout, self.sampling.adapter.latent_shape()
        wanted = Share(
            when=f"round {number + 1}",
            prompts=self.prompts,
            ids=[SampleId(prompt, k) for prompt in own for k in range(group)],
            plan=self.plan,
            noise=Noise(self.config.seed, "pairs", number, shape, rollout.shared_noise),
            batch_size=rollout.batch_size,
        )
        stop = self.signals.stop(self.world, sharded=False)
        drawn = Drawing(self.sampling, self.scorer, wanted, Timer(), stop)()
        images, scores = drawn.images, drawn.scores
        groups = []
        for place, prompt in enumerate(own):
            part = slice(place * group, (place + 1) * group)
            raw = {name: value[part] for name, value in scores.raw.items()}
            result = group_scores(prompt, Scores(raw, scores.values[:, part], scores.weights))
            groups.append((result, images.levels[part][[result.best, result.worst]]))
        return groups

    def _used(self, groups: Sequence[Group], before: int) -> list[Group]:
        """The groups up to the last pair that is wanted."""
        used: list[Group] = []
        for group in groups:
            if self.wanted.count is not None and before >= self.wanted.count:
                break
            used.append(group)
            before += group.margin > self.wanted.margin
        return used

    def _keep(self, folder: PairFolder, number: int, group: Group, images: Tensor) -> None:
        for file in self.prompts[group.number].images:
            keep_file(folder.path, file)
        for image, name in zip(images, self._names(number, group), strict=True):
            fsync(media.write(image, folder.path / name.removesuffix(self.suffix), fps=self.fps))
        fsync(folder.path / IMAGES)

    def _names(self, number: int, group: Group) -> tuple[str, str]:
        """Paths of the best and the worst, relative to the folder."""
        stem = f"{IMAGES}/{number:03d}-{group.number:06d}"
        return f"{stem}-{group.best:03d}{self.suffix}", f"{stem}-{group.worst:03d}{self.suffix}"

    def _line(self, number: int, group: Group) -> dict[str, Any]:
        prompt, (chosen, rejected) = self.prompts[group.number], self._names(number, group)
        drawn = {"seed": self.config.seed, "round": number, "prompt": group.number}
        drawn |= {"chosen": group.best, "rejected": group.worst}
        own = (prompt.text, chosen, rejected, group.margin, *group.scores, drawn)
        metadata = {key: value for key, value in prompt.metadata.items() if not prompt.images or key not in _PLACES}
        sources = [image_name(Path(file).read_bytes(), Path(file).suffix) for file in prompt.images]
        return dict(zip(OWN, own, strict=True)) | source_column(sources) | metadata


def _tally(used: Sequence[Group], kept: Sequence[Group]) -> dict[str, int]:
    """Counts of the groups, to be added to those of the folder."""
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
    """Fill the folder `out`, or go on filling it, with the processes of this group; the state that it has then.

    Raises ConfigError, ModelError, RewardError: something the user can mend; Stopped: a signal came.
    """
    check(resolved, wanted)
    world, lock = join(), RunFolder(out, "--out")
    try:
        set_up_logging(None, main=world.main)
        prompts = training_prompts(resolved)
        facts = {"provenance": provenance(resolved, str(world.device), world.size), "edits": bool(prompts[0].images)}
        folder = PairFolder(out, made_with(resolved, prompts, wanted), facts)

        def begin() -> Done:
            lock.hold()
            folder.require_own = lock.require_own
            return folder.begin()

        folder.done = world.agree(lambda: begin() if world.main else folder.done)[0]
        if not enough(folder.done, len(prompts), wanted):
            if folder.done.groups and world.main:
                log.info("going on after %s", folder.done)
            ready: list[Pairing] = []
            with explaining(resolved, world):
                with phase("loading"):
                    world.agree(lambda: ready.append(Pairing(resolved, prompts, wanted, world)))
                ready[0].fill(folder)
        return folder.done
    finally:
        lock.unlock()
        world.close()
