"""Best against best: base and tuned, each at the guidance that is best for it, chosen on captions of the training.

The scales of `eval.best_guidance` and the recipe's own are compared on the first captions that the run trains on, with
noise of their own: neither the judged captions nor their noise take part in the choice.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.errors import ConfigError
from flowrl.core.rng import derive
from flowrl.data.given_samples import Given
from flowrl.data.prompts import Prompt, identity
from flowrl.display.console import log
from flowrl.evaluation.evaluator import PLACES, Evaluator
from flowrl.evaluation.held_out import RunPrompts
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import difference, summary
from flowrl.run.assembly.rewards import Scorers
from flowrl.run.inputs import prompts_mark
from flowrl.run.session import Session
from flowrl.scoring.build import build_scorer, require_metadata
from flowrl.scoring.weighted import WeightedReward

CAPTIONS = 128
"""Captions on which the scales are compared."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A model at its best guidance."""

    evaluation: Evaluation
    """Of the evaluated prompts."""
    means: dict[float, float]
    """Scale -> mean of the metric on the captions of the search."""


def captions(prompts: RunPrompts, given: Given | None) -> list[Prompt]:
    """The first distinct captions that a run trains on, in the order of their file."""
    found: dict[Any, Prompt] = {}
    own = (Prompt(text, {}, images) for text, images in given.pairs.captions()) if given else prompts.train
    for prompt in own:
        found.setdefault(identity(prompt), prompt)
        if len(found) == CAPTIONS:
            break
    return list(found.values())


def heaviest(scorers: Scorers) -> WeightedReward | None:
    """The evaluated reward with the largest weight: a trained one, else of `eval.rewards`; None without any."""
    trained, watched = scorers.trained, scorers.watched
    entries = (trained and trained.evaluated) or (watched.entries if watched is not None else ())
    return max(entries, key=lambda e: abs(e.weight), default=None)


def saved(session: Session, evaluator: Evaluator, file: Path, guidance_scale: float) -> Evaluation | None:
    """An evaluation that was written, if it was made as the evaluator would make it now."""
    if not file.is_file():
        return None
    result, prompts = Evaluation.load(file), tuple(prompt.text for prompt in evaluator.prompts)
    now = replace(
        result,
        guidance_scale=guidance_scale,
        num_inference_steps=session.eval_steps,
        prompts=prompts,
        seeds=evaluator.options.samples_per_prompt,
        made_with=dict(evaluator.made_with),
    )
    unlike = now.unlike(result)
    if unlike:
        log.warning("%s was made with other values of: %s; it is made again", file, ", ".join(unlike))
    return None if unlike else result


class GuidanceSearch:
    """Finds the best guidance of the network's weights. Raises ConfigError: a reward that cannot judge a caption."""

    def __init__(self, session: Session) -> None:
        parts, entry = session.parts, heaviest(session.parts.scorers)
        assert entry is not None  # flowrl/config/checks.py
        self.session, self.metric = session, next(iter(entry.shares()))
        self.sign = 1 if entry.reward.card.prefers_more(self.metric) else -1
        self.scales = list(dict.fromkeys([session.eval_guidance, *session.config.eval.best_guidance]))
        prompts, given = parts.data.prompts, parts.data.given
        found = captions(prompts, given)
        _require_judged(session, entry, found, "data.prompts" if given is None else "captions of data.pairs")
        evaluated = {identity(prompt) for prompt in parts.evaluator.prompts}
        shared = sum(identity(prompt) in evaluated for prompt in found)
        what = "of its own prompts" if prompts.name == "its own prompts" else "training captions"
        how = f"chosen by {self.metric} on {len(found)} {what}"
        how += f", {shared} of which are evaluated too" if shared else ""
        self.facts: dict[str, Any] = {"metric": self.metric, "captions": len(found), "evaluated_too": shared}
        self.facts["how"] = f"{how}, with other noise"
        # A gate may look at another reward, and moves no raw score.
        scorer = build_scorer([replace(entry, gate=None)])
        scorer.stop = session.stop.here
        self.evaluator = replace(
            parts.evaluator,
            scorer=scorer,
            prompts=tuple(found),
            options=replace(parts.evaluator.options, save_images=0, diversity=0),
            seed=derive(0, "guidance search"),
            made_with=dict(parts.evaluator.made_with) | {"prompts": prompts_mark(found)},
            place=PLACES[1],
            sources=None,
        )

    @property
    def coming(self) -> int:
        """Images that this process draws at most for a model."""
        whole, samples = self.session.parts.evaluator, self.evaluator.options.samples_per_prompt
        count = len(self.scales) * len(self.evaluator.prompts) + len(whole.prompts)
        return count * samples // self.session.world.size

    def base(self, run: Path) -> Evaluation:
        """That of the untrained model at the recipe's guidance, made anew where the run folder's is unlike it."""
        session, file = self.session, run / PLACES[0] / "base.json"
        found = saved(session, session.parts.evaluator, file, session.eval_guidance)
        return found or session.evaluate("base", iteration=0, pairs=False, tree=False)

    def __call__(self, own: Evaluation, kept: Path | None = None) -> Chosen:
        """The model of `own`, an evaluation at the recipe's guidance, at its best guidance.

        `kept`: a run folder whose evaluations of the same weights are not made again.
        """
        means: dict[float, float] = {}
        for scale in self.scales:
            found = self._made(self.evaluator, f"{own.tag}-search-{scale:g}", own, scale, kept)
            means[scale] = summary(found)[self.metric]["mean"]
        listed = ", ".join(f"{s:g}: {m:.3f}" for s, m in sorted(means.items()))
        log.info("%s by CFG: %s (%s)", own.tag, listed, self.facts["how"])
        # Without a single score there is no mean; of equal ones the recipe's own is the first.
        best = max(means, key=lambda scale: np.nan_to_num(self.sign * means[scale], nan=-np.inf))
        if best == own.guidance_scale:
            return Chosen(own, means)
        return Chosen(self._made(self.session.parts.evaluator, f"{own.tag}-guidance-{best:g}", own, best, kept), means)

    def _made(self, evaluator: Evaluator, tag: str, own: Evaluation, scale: float, kept: Path | None) -> Evaluation:
        """The kept evaluation, or a new one."""
        file = None if kept is None else kept / evaluator.place / f"{tag}.json"
        found = None if file is None else saved(self.session, evaluator, file, scale)
        if found is not None and found.iteration == own.iteration:
            return found
        # Trees have the guidance of training, and a guidance has no preference.
        return self.session.evaluate(
            tag, iteration=own.iteration, guidance_scale=scale, evaluator=evaluator, pairs=False, tree=False
        )

    def entries(self, base: Chosen, tuned: Chosen | None, rows: np.ndarray | None = None) -> dict[str, Any]:
        """Entries of `summary.json`; `rows`: the prompts that count, [P] bool, None: all."""
        before, after = (one and (one.evaluation if rows is None else one.evaluation.of(rows)) for one in (base, tuned))
        assert before is not None
        result: dict[str, Any] = {"base_best_guidance": level(before)}
        found = {"base": base.means} | ({} if tuned is None else {"tuned": tuned.means})
        if after is not None:
            result |= {"tuned_best_guidance": level(after), "difference_best_guidance": difference(before, after)}
        scales = {name: {f"{scale:g}": mean for scale, mean in means.items()} for name, means in found.items()}
        return result | {"guidance_search": self.facts | scales}


def level(evaluation: Evaluation) -> dict[str, Any]:
    """Means with intervals, and the guidance that they were made with."""
    return summary(evaluation) | {"guidance_scale": evaluation.guidance_scale}


def _require_judged(session: Session, entry: WeightedReward, found: list[Prompt], key: str) -> None:
    watched, resolved = session.parts.scorers.watched, session.resolved
    plans = [plan for plan in (*resolved.rewards, *resolved.eval_rewards) if not plan.by_people]
    assert watched is not None
    plan = next(plan for plan, each in zip(plans, watched.entries, strict=True) if each is entry)
    try:
        require_metadata(key, found, [plan], [entry.reward.card])
    except ConfigError as error:
        raise ConfigError(
            f"eval.best_guidance: the scales are compared on captions that are trained on. {error}",
            {"eval.best_guidance": []},
        ) from None
