"""`flowrl eval`: fixed-seed evaluation of a configuration or a run, or a benchmark suite on any model."""

from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.commands._arguments import showing
from flowrl.core.errors import ConfigError, Remedy, no_exit
from flowrl.core.files import out_folder

if TYPE_CHECKING:
    from flowrl.evaluation.results import Evaluation
    from flowrl.run.assembly.parts import Parts
    from flowrl.run.dial import Dial


BATCH = 4
"""Images sampled at once where nothing is said."""


def command(
    target: str,
    overrides: list[str] | None = None,
    accept: bool = False,
    out: Path | None = None,
    strength: float | None = None,
    lora_scale: float | None = None,
    mix: list[str] | None = None,
    suite: str | None = None,
    base: str | None = None,
    lora: list[str] | None = None,
    prompts: Path | None = None,
    judge: list[str] | None = None,
    judge_set: list[str] | None = None,
    samples: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    settings: list[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = BATCH,
    processes: int = 1,
    export: Path | None = None,
    results: list[Path] | None = None,
    rejudge: bool = False,
    compat: bool = False,
    pair_judge: str | None = None,
    pair_set: list[str] | None = None,
    set_measures: str | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Evaluate a run, or any model on a benchmark."""
    own = {"--base": base, "--lora": lora, "--prompts": prompts, "--judge": judge, "--judge-set": judge_set}
    own |= {"--samples": samples, "--steps": steps, "--guidance": guidance, "--set": settings, "--limit": limit}
    own |= {"--export": export, "--results": results, "--rejudge": rejudge, "--compat": compat}
    own |= {"--pair-judge": pair_judge, "--pair-set": pair_set, "--seed": seed or None}
    own |= {"--batch-size": None if batch_size == BATCH else batch_size}
    others = [*(overrides or []), *(["--accept-changes"] if accept else []), *(["--json"] if as_json else [])]
    others += ["--set-measures"] if set_measures else []
    _require_fit(suite, own, others, processes)
    with showing(quiet, as_json):
        dial = None
        if strength is not None or lora_scale is not None or mix:  # the import takes seconds
            from flowrl.run.dial import dial_of

            dial = dial_of(target, strength, lora_scale, mix or [])
        if suite is None:
            return _evaluate(target, overrides, accept, out, set_measures, dial)
        from flowrl.apps.suites.running.options import Judging, Making, Options
        from flowrl.apps.suites.running.procedure import evaluate

        making = Making(samples, steps, guidance, settings or [], limit, seed, batch_size, processes)
        judge, judge_set, pair_set = judge or [], judge_set or [], pair_set or []
        judging = Judging(judge, judge_set, pair_judge, pair_set, export, results or [], rejudge, compat)
        models = {"target": target, "base": base, "loras": lora or []}
        evaluate(Options(**models, suite=suite, prompts=prompts, making=making, judging=judging, out=out, dial=dial))


def _require_fit(suite: str | None, own: dict[str, object], others: list[str], processes: int) -> None:
    """Refuse options of a suite without one, and `others`, those of a configuration, with one."""
    # A guidance of 0 equals False.
    given = [name for name, value in own.items() if value is not None and value is not False]
    given += ["--processes"] if processes > 1 else []
    if suite is None and given:
        raise ConfigError(
            f"{' '.join(given)}: for a benchmark suite, which --suite names (flowrl list suites)",
            Remedy(without=" ".join(given)),
        )
    if suite is not None and others:
        raise ConfigError(
            f"{' '.join(others)}: for an evaluation by a configuration, without --suite",
            [Remedy(without=" ".join(others)), Remedy(without=" ".join(["--suite", *given]))],
        )


def _evaluate(
    target: str,
    overrides: list[str] | None,
    accept: bool,
    out: Path | None,
    measures: str | None,
    dial: "Dial | None",
) -> None:
    """Mean scores with 95 % intervals on a configuration's prompts, and win rates against a run's base."""
    from flowrl.config.load import load_config, resolve

    given = load_config(target, overrides)  # its faults are told before the libraries are imported
    from flowrl.apps import set_measures
    from flowrl.data.contents import require_unedited
    from flowrl.evaluation import moved
    from flowrl.evaluation.results import Evaluation
    from flowrl.evaluation.statistics import accuracy, format_interval, summary
    from flowrl.run import status
    from flowrl.run.inputs import collect
    from flowrl.run.report import best_lines, format_accuracy
    from flowrl.run.trainer import Trainer

    folder = Path(target)
    set_measures.require(measures, folder)
    run = folder if (folder / "config.yaml").is_file() else None
    resolved = resolve(given)
    if run is not None:
        require_unedited(run, collect(resolved), accept=accept)
    saved = folder / "eval" / "base.json"
    # Read before anything is sampled: a damaged file is reported now and not after the evaluation.
    base = Evaluation.load(saved) if run is not None and saved.is_file() else None
    trainer = Trainer(resolved)
    if run is not None and (ended := status.describe(status.read(run))):
        print(f"{run}: {ended}")
    with no_exit():
        place = out_folder(out or (folder / "eval-extra" if run else Path("eval") / resolved.run.name))
        result, at_best = trainer.evaluate_only(run, place, accept, dial)
    parts = trainer.session.parts

    def each_at_its_best(verdict: str) -> None:
        if at_best and resolved.run.eval.verdict == verdict:
            metric = at_best["guidance_search"]["metric"]
            print("\n".join(best_lines(metric, at_best, parts.data.prompts.on)))

    each_at_its_best("best")
    for name, value in summary(result).items():
        print(
            f"{name}: {value['mean']:.4f} ({format_interval(value, '.4f')}, "
            f"{parts.data.prompts.counted(round(value['n']))} x {result.scores[name].shape[1]} seeds)"
        )
    if result.agreement is not None:
        print(format_accuracy(accuracy(result.agreement)))
    if base is not None:
        found = moved.measure(
            moved.saved_pairs(saved.with_suffix(""), place / "eval" / result.tag, range(len(result.prompts)))
        )
        _against(base, result, parts, moved.sentence(found, moved.trained(resolved.tree())))
        if measures:
            print("\n".join(set_measures.lines(saved.with_suffix(""), place / "eval" / result.tag, measures)))
    each_at_its_best("same")


def _against(base: "Evaluation", tuned: "Evaluation", parts: "Parts", change: str) -> None:
    """Print base, paired difference and win rate where both were evaluated alike; then what is known of the images.

    `change`: how far they are from the base's.
    """
    from flowrl.evaluation import best_of, copying, diversity, sharpness
    from flowrl.evaluation.statistics import difference, summary, win_rate
    from flowrl.run.report import format_estimate, format_win_rate

    cards = [] if parts.scorers.watched is None else [entry.reward.card for entry in parts.scorers.watched.distinct]
    higher = {name: card.prefers_more(name) for card in cards for name in card.outputs}
    noun = "video" if parts.sampling.adapter.num_frames > 1 else "image"
    tie, on, alike = parts.evaluator.options.tie, parts.data.prompts.on, False
    for name in (name for name in tuned.scores if name in base.scores):
        if unlike := tuned.unlike(base, name):
            print(f"no win rate by {name}: the run's base was made with other values of: {', '.join(unlike)}")
        else:
            alike, found = True, win_rate(base, tuned, name, higher_is_better=higher[name], tie=tie)
            print(f"base{on} {name} {format_estimate(summary(base)[name])}")
            print(f"paired difference{on} {format_estimate(difference(base, tuned)[name], signed=True)}")
            print(format_win_rate(name, found, on, noun))
    chosen = best_of.facts(base, tuned, parts.scorers.trained) if alike and not tuned.unlike(base) else None
    if chosen is not None:
        for name, value in chosen["judges"].items():
            print(best_of.sentence(chosen["by"], name, value))
    if alike:
        print(change)
    for part in () if tuned.unlike(base, "") else (sharpness, diversity, copying):
        if (known := part.facts(base, tuned)) is not None:
            print(part.sentence(known))
