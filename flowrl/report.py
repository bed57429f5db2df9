"""Before and after: the base evaluation, the final one, `summary.json`, and the gallery."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from flowrl.evaluate import Evaluation
from flowrl.gallery import build as build_gallery
from flowrl.heldout import RunPrompts
from flowrl.metrics import log
from flowrl.reward import WeightedReward
from flowrl.statistics import difference, summary, win_rate

if TYPE_CHECKING:
    from flowrl.trainer import Trainer

# Prompts on which the candidates for the base's best CFG are compared; the winner is then evaluated in full.
_GUIDANCE_PROMPTS = 128


def _heaviest(trainer: Trainer) -> WeightedReward | None:
    """The reward that is trained on most, else the heaviest of those that are looked at; None without any."""
    scorer = trainer.scorer or trainer.watched
    return None if scorer is None else max(scorer.entries, key=lambda e: abs(e.weight))


def primary_metric(trainer: Trainer) -> str | None:
    """The output that is trained on most: the first of the heaviest reward's shares; None without a reward."""
    entry = _heaviest(trainer)
    return None if entry is None else next(iter(entry.shares()))


def _saved(trainer: Trainer, tag: str, guidance_scale: float) -> Evaluation | None:
    """An evaluation that is there and was made as it would be now."""
    file, evaluator = trainer.folder.path / "eval" / f"{tag}.json", trainer.evaluator
    if not file.is_file():
        return None
    found, prompts = Evaluation.load(file), tuple(prompt.text for prompt in evaluator.prompts)
    settings = (tag, trainer.iteration, guidance_scale, trainer.eval_steps, prompts, evaluator.samples_per_prompt)
    unlike = Evaluation(*settings, {}, made_with=dict(evaluator.made_with)).unlike(found)
    if unlike:
        log.warning("%s was made with other values of: %s; it is made anew", file, ", ".join(unlike))
    return None if unlike else found


def evaluate_base(trainer: Trainer) -> tuple[Evaluation, Evaluation | None]:
    """The untouched model at the evaluation's guidance, and at its best one where that is another.

    Called before a checkpoint is put back. What the run folder has is taken if it was made as it would be now.
    """
    base = _saved(trainer, "base", trainer.eval_guidance)
    kept = base is not None
    if base is None:
        base = _with_base_weights(trainer, "base", trainer.eval_guidance)
        metric = primary_metric(trainer)
        if metric is not None and base.prompts:
            on = trainer.prompts.counted(len(base.prompts))
            log.info("base: %s %s on %s", metric, _format(summary(base)[metric]), on)
    return base, (_best_guidance(trainer, base, kept=kept) if trainer.config.eval.best_guidance else None)


def announce(trainer: Trainer, before: tuple[Evaluation, Evaluation | None]) -> None:
    """The summary of a run under way."""
    _write(trainer, "running", *before, None)


def _with_base_weights(trainer: Trainer, tag: str, guidance_scale: float, **options: Any) -> Evaluation:
    # The base is its own reference: it prefers nothing.
    return trainer.evaluate(tag, iteration=0, guidance_scale=guidance_scale, judge=False, **options)


def _best_guidance(trainer: Trainer, base: Evaluation, *, kept: bool) -> Evaluation | None:
    """`kept`: the base was evaluated by an earlier call of the program."""
    entry, folder = _heaviest(trainer), trainer.folder.path / "eval"
    assert entry is not None  # flowrl/checks.py
    metric = next(iter(entry.shares()))
    stale = sorted(folder.glob("base-guidance-*.json"))
    for file in stale:
        found = _saved(trainer, file.stem, Evaluation.load(file).guidance_scale)
        if found is not None:
            return found
    if trainer.start and kept and not stale:  # the search found that the base's own scale is its best
        return None
    trainer.world.barrier()  # everybody has read them
    for file in stale if trainer.world.main else ():
        file.unlink()
    means = {base.guidance_scale: float(base.scores[metric][:_GUIDANCE_PROMPTS].mean())}
    for scale in trainer.config.eval.best_guidance:
        if scale not in means:
            trial = _with_base_weights(trainer, "trial", scale, limit=_GUIDANCE_PROMPTS, save=False, tree=False)
            means[scale] = float(trial.scores[metric].mean())
    better = entry.reward.card.higher_is_better
    scale = (max if better else min)(means, key=lambda s: means[s])
    told = ", ".join(f"{s:g}: {m:.3f}" for s, m in sorted(means.items()))
    log.info("base by CFG%s: %s", trainer.prompts.on, told)
    if scale == base.guidance_scale:
        return None
    # Trees have the guidance of training: the base's is drawn already.
    return _with_base_weights(trainer, f"base-guidance-{scale:g}", scale, tree=False)


def finish(trainer: Trainer, before: tuple[Evaluation, Evaluation | None]) -> dict[str, Any]:
    """Evaluate the result, write the summary and the gallery, and say what came out."""
    base, best = before
    tuned = _saved(trainer, "tuned", trainer.eval_guidance)
    if tuned is None or tuned.iteration != trainer.iteration:
        tuned = trainer.evaluate("tuned")
    result = _write(trainer, "finished", base, best, tuned)
    if trainer.world.main:
        started = time.monotonic()
        page = build_gallery([trainer.folder.path])
        _tell(primary_metric(trainer), result, best, trainer.prompts)
        log.info("report: %s (%.1f s)", page, time.monotonic() - started)
    trainer.world.barrier()
    return result


def _tell(metric: str | None, result: dict[str, Any], best: Evaluation | None, prompts: RunPrompts) -> None:
    if metric is not None and metric in result["difference"]:
        on = prompts.on
        log.info("base%s  %s %s", on, metric, _format(result["base"][metric]))
        if best is not None:
            rival = _format(result["base_best_guidance"][metric])
            log.info("base with its best CFG %g%s  %s %s", best.guidance_scale, on, metric, rival)
        log.info("tuned%s %s %s", on, metric, _format(result["tuned"][metric]))
        log.info("paired difference%s %s", on, _format(result["difference"][metric], signed=True))
        log.info("%s", told_win_rate(metric, result["win_rate"][metric], on))
        if prompts.name == "training prompts":
            log.info("%s", prompts.remark)
    if "implicit_accuracy" in result:
        log.info("%s", told_accuracy(result["implicit_accuracy"]))


def told_accuracy(found: dict[str, float]) -> str:
    """What the network prefers of held-out pairs, in a sentence."""
    return f"implicit accuracy on held-out pairs {_format(found)}"


def told_mean(prompts: RunPrompts, key: str, value: float) -> str:
    """An evaluation's mean, as a row has it: of held-out pairs, or of the evaluated prompts."""
    what = "" if key == "eval/implicit_accuracy" else prompts.on
    return f"{key.removeprefix('eval/')}{what} {value:.3f}" if what else f"held-out {key[5:]} {value:.3f}"


def told_win_rate(metric: str, found: dict[str, float], on: str = "") -> str:
    """A win rate in a sentence; `on` is what it is of, where that are no held-out prompts."""
    if not found["n"]:
        return f"win rate{on} by {metric}: no picture of the {found['ties']} differs from the base's"
    return (
        f"win rate{on} by {metric}: {found['rate']:.1%} of {found['n']} pictures that are not tied (95 % interval "
        f"{found['low']:.1%} to {found['high']:.1%}); {found['ties']} ties, {found['tie_rate']:.1%}"
    )


def _write(
    trainer: Trainer, status: str, base: Evaluation, best: Evaluation | None, tuned: Evaluation | None
) -> dict[str, Any]:
    watched = () if trainer.watched is None else trainer.watched.distinct
    lower = [e.reward.card.outputs for e in watched if not e.reward.card.higher_is_better]
    result: dict[str, Any] = {
        "status": status,
        "iterations": trainer.iteration,
        "seconds": round(trainer.seconds, 1),
        **trainer.prompts.facts(),
        "primary": primary_metric(trainer),
        "lower_is_better": [name for outputs in lower for name in outputs],
        "base": summary(base),
    }
    rival = best or base
    result["base_best_guidance"] = summary(rival) | {"guidance_scale": rival.guidance_scale}
    if tuned is not None:
        result |= {"tuned": summary(tuned), "difference": difference(base, tuned)}
        result["win_rate"] = {
            name: win_rate(base, tuned, name, higher_is_better=name not in result["lower_is_better"])
            for name in result["difference"]
        }
        if tuned.agreement is not None:
            result["implicit_accuracy"] = tuned.agreement.interval()
    if trainer.world.main:
        trainer.folder.write_json("summary.json", result)
    return result


def _format(value: dict[str, float], *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    mean, low, high = (format(value[name], f"{sign}.4f") for name in ("mean", "low", "high"))
    return f"{mean} (95 % interval {low} to {high}, n = {value['n']})"
