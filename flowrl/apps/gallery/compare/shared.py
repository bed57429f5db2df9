"""What several runs share: prompts, noise and metrics. M runs, P shared prompts, K shared seeds.

The noise of an evaluation belongs to the place of a prompt in its list and to its seed, so a prompt is shared where it
has the same place in all runs.
"""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.apps.gallery import results
from flowrl.apps.gallery.results import Metric
from flowrl.apps.gallery.runs import Evaluation, Run, value_at
from flowrl.apps.plain_text import Named, ends
from flowrl.core.errors import ConfigError
from flowrl.media import digests
from flowrl.statistics.paired import margin

_SHAPE = (("path",), ("height",), ("width",), ("num_frames",), ("call", "num_frames"))
"""Keys of the model that decide the shape of the noise; the frames of a generic one are an argument of its call."""


@dataclass(frozen=True, slots=True)
class SharedMetric:
    """A metric of at least two runs."""

    metric: Metric
    members: tuple[int, ...]
    """Numbers of the runs that have it, from the same reward."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the runs are compared on."""

    runs: tuple[Run, ...]
    compared: tuple[int, ...]
    """Numbers of the runs with an evaluation before and after; the others are listed and not compared."""
    places: np.ndarray
    """[P] places of the shared prompts in each list."""
    prompts: tuple[str, ...]
    groups: np.ndarray
    """[P] number of the distinct prompt of each."""
    seeds: tuple[int, ...]
    metrics: tuple[SharedMetric, ...]
    """The primary one first."""
    left_out: dict[int, list[str]] = field(default_factory=dict)
    """Number of a run -> sentences on what was left out or differs."""

    def table(self, run: int, metric: Metric, *, base: bool) -> np.ndarray:
        """Scores of the base or the tuned model of a run on the shared prompts and seeds, [P, K]; NaN: not scored."""
        return self.scores(self.evaluation(run, base=base), metric)

    def scores(self, evaluation: Evaluation, metric: Metric) -> np.ndarray:
        """Scores of an evaluation of these prompts and seeds, [P, K]; NaN: not scored."""
        columns = [evaluation.seeds.index(seed) for seed in self.seeds]
        scores = evaluation.scores.get(metric.name)
        if scores is None:
            return np.full((len(self.places), len(columns)), np.nan)
        return np.where(np.isfinite(scores), scores, np.nan)[self.places][:, columns]

    def same(self, run: int) -> np.ndarray:
        """Whether base and tuned have the same image in 8 bits, [P, K] bool."""
        columns = [[evaluation.seeds.index(seed) for seed in self.seeds] for evaluation in self.runs[run].both]
        both = zip(self.runs[run].both, columns, strict=True)
        return digests.same(*(e.digests[self.places][:, c] for e, c in both))

    def margin(self, run: int, metric: Metric) -> float:
        """Largest difference of a tie, in units of the metric: of all samples of the run's base."""
        before, after = (e.scores[metric.name] for e in self.runs[run].both)
        return margin(before, after, self.tie)

    @property
    def tie(self) -> float:
        """One rule for all: the largest `eval.tie` of a compared run."""
        return max(self.runs[i].config["eval"]["tie"] for i in self.compared)

    def evaluation(self, run: int, *, base: bool) -> Evaluation:
        before, after = self.runs[run].both
        return before if base else after


def share(runs: Sequence[Run]) -> Shared | None:
    """What the runs share; None: fewer than two have been evaluated before and after.

    Raises ConfigError: runs that share no prompt or no metric; with their names and the remedy.
    """
    compared = tuple(i for i, run in enumerate(runs) if run.both and _scored(run))
    left_out: dict[int, list[str]] = {}
    for i, run in enumerate(runs):
        if i not in compared:
            what = "nothing has been evaluated yet" if not run.base else "the tuned model has not been evaluated yet"
            left_out[i] = [what if not run.both else "its evaluations have no scores"]
    if len(compared) < 2:
        return None
    chosen = [runs[i] for i in compared]
    places, seeds = _common_places(chosen), _common_seeds(chosen)
    _require_common(chosen, places, seeds)
    metrics = _metrics(runs, compared, left_out)
    _say_what_is_missing(runs, compared, places, seeds, left_out)
    first = chosen[0].base
    assert first is not None
    return Shared(
        runs=tuple(runs),
        compared=compared,
        places=places,
        prompts=tuple(first.prompts[p] for p in places),
        groups=first.groups[places],
        seeds=seeds,
        metrics=metrics,
        left_out=left_out,
    )


def same_noise(shared: Shared) -> bool:
    """Whether the compared runs have the same noise at the same place and seed: it also has their size."""
    sizes = [[value_at(shared.runs[i].config, "model", *keys) for keys in _SHAPE] for i in shared.compared]
    return all(size == sizes[0] for size in sizes)


def label_of(runs: Sequence[Run], number: int) -> str:
    """Name of a run, with the end of its folder where another one has the same name."""
    run = runs[number]
    folders = [other.folder.resolve() for other in runs if other.name == run.name]
    place = dict(zip(folders, ends(folders), strict=True))[run.folder.resolve()]
    return run.name if len(folders) == 1 else f"{run.name} ({place})"


def _scored(run: Run) -> Set[str]:
    """Metrics of both base and tuned."""
    before, after = run.both
    return before.scores.keys() & after.scores.keys()


def _evaluations(runs: Sequence[Run]) -> list[Evaluation]:
    return [evaluation for run in runs for evaluation in run.both]


def _common_places(runs: Sequence[Run]) -> np.ndarray:
    """Places at which all evaluations have the same prompt, [P]."""
    every = _evaluations(runs)
    lists = [e.prompts for e in every]
    length, first = min(map(len, lists)), lists[0]
    same = np.ones(length, dtype=bool)
    for e in every[1:]:
        same &= np.asarray([a == b for a, b in zip(first[:length], e.prompts[:length], strict=True)], dtype=bool)
        if e.prompts == first and every[0].made_with.get("prompts") != e.made_with.get("prompts"):
            same[:] = False  # the same texts with other images or targets
    return np.flatnonzero(same)


def _common_seeds(runs: Sequence[Run]) -> tuple[int, ...]:
    every = _evaluations(runs)
    return tuple(seed for seed in every[0].seeds if all(seed in e.seeds for e in every))


def _require_common(runs: Sequence[Run], places: np.ndarray, seeds: Sequence[int]) -> None:
    """Raise ConfigError for runs without a common prompt or seed, by name."""
    for what, found, common in (("prompt", len(places), _common_places), ("seed", len(seeds), _common_seeds)):
        if found:
            continue
        first, *others = runs
        alien = [run for run in others if not len(common([first, run]))] or others
        names = ", ".join(str(run.folder) for run in alien)
        verb = "share" if len(alien) > 1 else "shares"
        raise ConfigError(
            f"{names} {verb} no {what} with {first.folder}: nothing can be compared. The same prompt must have the "
            "same place in the evaluated list, since the noise belongs to it; leave the run out, or make both with "
            "the same data.eval_prompts, data.max_eval_prompts and eval.samples_per_prompt"
        )


def _metrics(runs: Sequence[Run], compared: Sequence[int], left_out: dict[int, list[str]]) -> tuple[SharedMetric, ...]:
    """Metrics of at least two runs, made by the same reward. Raises ConfigError: there is none."""
    own = {i: {m.name: m for m in results.metrics_of(runs[i]) if m.name in _scored(runs[i])} for i in compared}
    names = dict.fromkeys(name for i in compared for name in own[i])
    result: list[SharedMetric] = []
    for name in names:
        having = [i for i in compared if name in own[i]]
        marks = {i: runs[i].both[1].made_with.get(f"score {name}") for i in having}
        usual = Counter(marks.values()).most_common(1)[0][0]
        members = tuple(i for i in having if marks[i] == usual)
        for i in having:
            if i not in members:
                left_out.setdefault(i, []).append(
                    f"the metric {name}: another version of the reward or other options made it"
                )
            elif len(members) == 1:
                left_out.setdefault(i, []).append(f"the metric {name}: no other run has it")
        for i in compared:
            if i not in having and len(members) > 1:
                left_out.setdefault(i, []).append(f"the metric {name}: this run does not have it")
        if len(members) > 1:
            found = [own[i][name] for i in members]
            share_of_passes = all(m.percent for m in found)
            first = found[0]
            result.append(SharedMetric(Metric(name, share_of_passes, first.decimals, first.sign), members))
    if not result:
        have = "; ".join(f"{runs[i].folder} has {', '.join(own[i])}" for i in compared)
        raise ConfigError(
            f"these runs share no metric ({have}): nothing can be compared. Add the reward of one to eval.rewards of "
            "the other, which scores it without training on it, or leave the run out"
        )
    primaries = Counter(str(runs[i].summary.get("primary")) for i in compared)
    order = [name for name, _ in primaries.most_common()]
    return tuple(sorted(result, key=lambda m: order.index(m.metric.name) if m.metric.name in order else len(order)))


def _say_what_is_missing(
    runs: Sequence[Run],
    compared: Sequence[int],
    places: np.ndarray,
    seeds: Sequence[int],
    left_out: dict[int, list[str]],
) -> None:
    """Sentences on prompts and seeds that are not shared, and on settings that differ."""
    given = [_settings(runs[i]) for i in compared]
    usual = {key: Counter(one[key] for one in given).most_common(1)[0][0] for key in given[0]}
    for i in compared:
        run, said = runs[i], left_out.setdefault(i, [])
        before, after = run.both
        named = Named(run.config)
        for name, evaluation in (("base", before), (after.label, after)):
            missing = len(evaluation.prompts) - len(places)
            if missing:
                said.append(
                    f"{missing} of the {len(evaluation.prompts)} prompts of its {name} evaluation have no counterpart "
                    "in every other run"
                )
            extra = [str(seed) for seed in evaluation.seeds if seed not in seeds]
            if extra:
                said.append(f"noise seed {', '.join(extra)} of its {name} evaluation is not in every other run")
        if after.tag != "tuned":
            said.append(f"it is not finished: {after.label} is in the place of the tuned model")
        for key, value in _settings(run).items():
            if value != usual[key]:
                said.append(named(f"compared, but evaluated with {key} {value} (most runs: {usual[key]})"))
        if not said:
            del left_out[i]


def _settings(run: Run) -> dict[str, Any]:
    """Settings of an evaluation that change its images next to the prompts and the seeds."""
    after, model = run.both[1], {"model": "path", "height": "height", "width": "width"}
    found = {"guidance": after.guidance_scale, "steps": after.num_inference_steps}
    return found | {name: value_at(run.config, "model", key) for name, key in model.items()}
