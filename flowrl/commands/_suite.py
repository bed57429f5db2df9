"""`flowrl eval --suite`: a benchmark suite on a model, or on a base and a tuned one with the same noise."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.commands._arguments import reward_entries
from flowrl.commands._suite_pairs import compared, image_change, pair_plan

if TYPE_CHECKING:
    from flowrl.apps.suites.running.drawing import Drawing
    from flowrl.apps.suites.running.folder import ResultsFolder
    from flowrl.apps.suites.running.judging import RewardJudge
    from flowrl.apps.suites.running.runner import Task
    from flowrl.evaluation.suite import Item, Row, Table
    from flowrl.run.judged import Judged
    from flowrl.training.world import World

TABLE, RESULT = "table.md", "result.json"


@dataclass(frozen=True, slots=True)
class Making:
    """How samples are made."""

    samples: int | None
    steps: int | None
    guidance: float | None
    settings: Sequence[str]
    limit: int | None
    seed: int
    batch_size: int
    processes: int


@dataclass(frozen=True, slots=True)
class Judging:
    """Who judges, and how."""

    names: Sequence[str]
    settings: Sequence[str]
    pair_name: str | None
    pair_settings: Sequence[str]
    export: Path | None
    results: Sequence[Path]
    rejudge: bool
    compat: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of the command line; their help is in flowrl/commands/eval.py."""

    target: str
    suite: str
    base: str | None
    loras: Sequence[str]
    prompts: Path | None
    making: Making
    judging: Judging
    out: Path | None

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        if self.out is not None:
            return self.out
        target = Path(self.target)
        if (target / "config.yaml").is_file():
            return target / "suites" / self.suite
        return Path("eval") / f"{self.suite}-{target.stem if target.suffix else target.name}"

    def models(self) -> dict[str, str]:
        """Name of the folder -> the model."""
        return {"model": self.target} | ({} if self.base is None else {"base": self.base})


def evaluate(options: Options) -> None:
    """Make, judge and tabulate.

    Raises:
        ConfigError, ModelError, RewardError: something the user can mend.
        RewardFailure: the judge is away; what was judged is kept.
    """
    from flowrl.apps.suites.running.runner import Task, limited
    from flowrl.core.errors import ConfigError, Remedy
    from flowrl.core.files import out_folder
    from flowrl.evaluation import suite as base
    from flowrl.run.judged import require_model
    from flowrl.scoring.build import require_modality

    suite = base.load_suite(options.suite)
    if options.judging.compat and suite.compat is None:
        words = f"--compat: the official code of {options.suite} has no table of its own"
        raise ConfigError(words, remedies=[Remedy(without="--compat")])
    every = suite.items(options.prompts)
    if not every:
        raise ConfigError(f"--prompts {options.prompts}: there is no prompt in it; give those of {suite.facts.where}")
    if options.judging.results:
        _require_results_alone(options)
    pair = pair_plan(options.judging.pair_name, options.judging.pair_settings, options.base)
    if pair is not None and pair.card is not None:
        require_modality(pair.name, pair.card, videos=suite.facts.videos)
    if not options.judging.results:
        for model in options.models().values():
            require_model(model)
    out_folder(options.folder)
    task = Task(
        suite=suite,
        items=limited(every, options.making.limit),
        samples=options.making.samples or suite.facts.images_per_prompt,
        base_seed=options.making.seed,
        batch_size=options.making.batch_size,
    )
    folders = _folders(options, videos=suite.facts.videos)
    if options.judging.results:
        _take_results(options, task, every, folders)
    else:
        if options.making.processes > 1 and "WORLD_SIZE" not in os.environ:
            code = _launch(options)
            if code:
                raise SystemExit(code)
            return
        if not _make(options, task, every, folders):
            return
    pairs = compared(pair, task, folders, options.folder, rejudge=options.judging.rejudge)
    _report(options, task, len(every), folders, pairs)


def _require_results_alone(options: Options) -> None:
    """Refuse --results of another number of models, or next to what judges or exports here."""
    from flowrl.core.errors import ConfigError, Remedy

    judging = options.judging
    if len(judging.results) != len(options.models()):
        raise ConfigError("--results: give one file for MODEL, and with --base a second one, of the base")
    idle = {"--judge": judging.names, "--judge-set": judging.settings, "--export": judging.export}
    given = " ".join(name for name, value in idle.items() if value)
    if given:
        words = f"{given}: --results takes the scores of the official evaluator"
        raise ConfigError(words, remedies=[Remedy(without=given)])


def _folders(options: Options, *, videos: bool) -> dict[str, ResultsFolder]:
    from flowrl.apps.suites.running.folder import ResultsFolder

    return {name: ResultsFolder(options.folder / name, videos) for name in options.models()}


def _launch(options: Options) -> int:
    """Hold the folder and run this command line in several processes."""
    from flowrl.run.folder import RunFolder
    from flowrl.run.launch import launch
    from flowrl.training.world import require_devices

    require_devices(options.making.processes)
    folder = RunFolder(options.folder, "--out")
    descriptor = folder.lock()
    try:
        return launch(sys.argv[1:], options.making.processes, lock=descriptor, warn=print)
    finally:
        folder.unlock()


# ---- images and scores


def _make(options: Options, task: Task, every: Sequence[Item], folders: dict[str, ResultsFolder]) -> bool:
    """Make and judge the samples of every model; whether this process is the first and there are scores to report."""
    from flowrl.apps.suites.running.exchange import export
    from flowrl.apps.suites.running.runner import fill
    from flowrl.display.phases import phase
    from flowrl.run.export import frame_rate
    from flowrl.run.folder import RunFolder
    from flowrl.training.world import join

    world, lock = join(), RunFolder(options.folder, "--out")
    judges: list[RewardJudge | None] = []
    try:
        if world.main:
            lock.hold()
        with phase("loading"):
            world.agree(lambda: judges.append(_judge(options, task)))
        for name, folder in folders.items():
            ready: list[Drawing] = []
            with phase("loading"):
                world.agree(
                    lambda name=name, folder=folder, ready=ready: ready.append(
                        _begin(options, name, folder, every, judges[0], world)
                    )
                )
            world.barrier()
            with phase("sampling", "; a smaller --batch-size takes less"):
                rate = frame_rate(options.models()[name], ready[0].pipeline, ready[0].call)
                fill(task, dataclasses.replace(folder, fps=rate), ready[0], judges[0], world)
        if world.main and options.judging.export is not None:
            for name, folder in folders.items():
                out = options.judging.export if len(folders) == 1 else options.judging.export / name
                print(f"{out}: {export(task, folder, out)} {task.suite.facts.noun}s for the official evaluator")
        return world.main and judges[0] is not None
    finally:
        lock.unlock()
        world.close()


def _judge(options: Options, task: Task) -> RewardJudge | None:
    """The judge; None where images are exported for another one."""
    from flowrl.apps.suites.running.judging import RewardJudge
    from flowrl.core.errors import ConfigError
    from flowrl.scoring.entries import check_plans, reward_plan

    if options.judging.names:
        trees = reward_entries(options.judging.names, options.judging.settings, prefixes=True)
    elif options.judging.export is not None:
        return None
    elif task.suite.entries(task.items) is None:
        raise ConfigError(
            f"--suite {options.suite} has no judge of its own here ({task.suite.facts.judge}); give --judge NAME, or "
            "--export DIR for its official evaluator"
        )
    else:
        trees = _default_entries(task, options.judging.settings)
    plans = [(f"--judge {name}", reward_plan(tree, f"--judge {name}")) for name, tree in trees.items()]
    check_plans(plans)
    return RewardJudge([plan for _, plan in plans], task.suite, task.items)


def _default_entries(task: Task, settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> entry of the suite's own judge, with the user's options."""
    entries = {str(entry.get("prefix") or entry["name"]): dict(entry) for entry in task.suite.entries(task.items) or ()}
    changed = reward_entries([str(entry["name"]) for entry in entries.values()], settings, prefixes=False)
    return {name: entry | changed.get(str(entry["name"]), {}) for name, entry in entries.items()}


def _begin(
    options: Options, name: str, folder: ResultsFolder, every: Sequence[Item], judge: RewardJudge | None, world: World
) -> Drawing:
    """Load a model and begin its folder."""
    from flowrl.core.versions import versions
    from flowrl.run.folder import commit
    from flowrl.run.launch import command_line

    loaded = _load(options, name)
    drawing = _drawing(options, loaded, world, videos=folder.videos)
    made = _identity(options, every) | {
        key: value for key, value in loaded.origin(dict(drawing.call), options.making.guidance).items() if key != "run"
    }
    scheduler = loaded.pipeline.scheduler
    config = {key: value for key, value in dict(scheduler.config).items() if not key.startswith("_")}
    made |= {"pipeline": type(loaded.pipeline).__name__, "dtype": str(loaded.pipeline.dtype)}
    made |= {"scheduler": {"class": type(scheduler).__name__} | config}
    if world.main:
        if options.judging.rejudge:
            folder.forget_judge()
        facts = versions() | {"commit": commit(), "device": str(world.device), "processes": world.size}
        facts |= {"command": command_line(), "target": options.models()[name]}
        folder.begin(made, {} if judge is None else judge.facts, facts)
    return drawing


def _identity(options: Options, every: Sequence[Item]) -> dict[str, Any]:
    """What decides which samples there are, and their noise."""
    from flowrl.apps.suites.running.runner import fingerprint

    return {"suite": options.suite, "prompts": fingerprint(every), "base_seed": options.making.seed}


def _load(options: Options, name: str) -> Judged:
    """The model of a folder's name; the base of a run, or of a model with --lora, may be named by the model itself."""
    from flowrl.core.errors import ConfigError, Remedy
    from flowrl.run.judged import load

    if name == "model":
        result = load(options.target, loras=options.loras)
    else:
        own = Path(options.models()[name]).resolve() == Path(options.target).resolve()
        is_run = (Path(options.target) / "config.yaml").is_file()
        if own and not is_run and not options.loras:
            raise ConfigError(f"--base {options.base} is MODEL itself: there is nothing to compare; name another model")
        result = load(options.models()[name], base=own and is_run)
    if result.noise is not None:
        raise ConfigError(
            f"{options.target!r} learned the initial noise of its own prompts, and those of a suite are others",
            remedies=[Remedy(without="--suite")],
        )
    return result


def _drawing(options: Options, loaded: Judged, world: World, *, videos: bool) -> Drawing:
    """The pipeline on this process's device, with the arguments of its call."""
    from flowrl.apps.suites.running.drawing import Drawing
    from flowrl.commands._call import call_of

    pipeline, making = loaded.pipeline, options.making
    pipeline.to(world.device)
    pipeline.set_progress_bar_config(disable=True)
    call = call_of(pipeline, loaded.call, making.steps, making.guidance, making.settings)
    drawing = Drawing(pipeline, call, making.seed, videos)
    drawing.require_text_to_image()
    return drawing


def _take_results(options: Options, task: Task, every: Sequence[Item], folders: dict[str, ResultsFolder]) -> None:
    """Put the scores of the official evaluator into the folders."""
    from flowrl.apps.suites.running.exchange import fingerprint, of_models, with_results

    given = of_models(list(folders), options.judging.results)
    made = _identity(options, every)
    for folder in folders.values():
        folder.require_made(made)
    for name, folder in folders.items():
        rows = with_results(task, folder, file := given[name])
        print(f"--results {file}: those of {name}, {options.models()[name]}")
        if options.judging.rejudge:
            folder.forget_judge()
        folder.take_results(rows, {"official evaluator": {"results": fingerprint(file)}})


# ---- the table


def _report(
    options: Options,
    task: Task,
    listed: int,
    folders: dict[str, ResultsFolder],
    pairs: tuple[dict[str, Any] | None, str],
) -> None:
    """Write table.md and result.json, and print the table; `listed` is the number of prompts before --limit."""
    from flowrl.apps.suites.running.comparison import compare, markdown, plain, unlike
    from flowrl.apps.suites.running.judge_noise import judge_noise, noise_text
    from flowrl.apps.suites.running.runner import rows_of
    from flowrl.core.files import json_ready, write_atomically

    suite = task.suite
    aggregate = suite.compat if options.judging.compat and suite.compat is not None else suite.aggregate
    tables: dict[str, Table] = {name: aggregate(rows_of(task, folder), task.items) for name, folder in folders.items()}
    headers = {name: folder.header for name, folder in folders.items()}
    judges = headers["model"]["judged_by"].values()
    lower = {output for judge in judges for output in _lower(judge)}
    changes = compare(tables["base"], tables["model"], lower) if "base" in tables else []
    note = _note(options, task, listed, headers["model"]) + unlike(headers)
    named = {f"{name}: {options.models()[name]}": table for name, table in tables.items()}
    noise = judge_noise(task, folders["base" if "base" in folders else "model"])
    change = image_change(task, folders)
    page = markdown(suite, named, changes, note, change)
    pair_text = f"{pairs[1].rstrip()} {change}\n" if pairs[1] else ""
    text = "\n".join(filter(None, (page, noise_text(noise), pair_text)))
    result = {
        "suite": options.suite,
        "settings": note,
        "differs": suite.facts.differs,
        "models": {name: {"target": options.models()[name], **plain(table)} for name, table in tables.items()},
        "changes": [dataclasses.asdict(one) for one in changes],
        "images": change,
        "judge_noise": noise,
        "pairs": pairs[0],
        "headers": headers,
    }
    write_atomically(options.folder / TABLE, text)
    write_atomically(options.folder / RESULT, json.dumps(json_ready(result), indent=1) + "\n")
    print(text)
    print(f"{options.folder / TABLE}, {options.folder / RESULT}")
    _require_scores(tables, {name: rows_of(task, folder) for name, folder in folders.items()})


def _require_scores(tables: dict[str, Table], rows: dict[str, list[Row]]) -> None:
    """Exit with code 1 if no sample of a model is scored, with the judge's own reason."""
    empty = [name for name, table in tables.items() if not any(line.n_scored for line in table.lines)]
    for name in empty:
        reason = next((row.error for row in rows[name] if row.error), "the judge gave NaN, which means: not scored")
        print(f"{name}: none of {len(rows[name])} samples is scored: {reason}", file=sys.stderr)
    if empty:
        raise SystemExit(1)


def _lower(judge: dict[str, Any]) -> list[str]:
    """Outputs of a judge of which less is better; a judgement of an earlier version knows one direction."""
    return judge.get("less_is_better", [] if judge.get("higher_is_better", True) else judge["outputs"])


def _note(options: Options, task: Task, listed: int, header: dict[str, Any]) -> str:
    made, official = header["made_with"], task.suite.facts.num_prompts
    whole = f"the {official} official prompts" if listed == official else f"{listed} prompts (officially {official})"
    own = {str(entry["name"]) for entry in task.suite.entries(task.items) or ()} | {"official evaluator"}
    foreign = "" if own & set(header["judged_by"]) else ", which is not the suite's own: compare with nothing published"
    lora = "" if not options.loras else f", LoRA {', '.join(options.loras)}"
    return (
        f"{len(task.items)} of {whole}, {task.samples} {task.suite.facts.noun}{'s' if task.samples > 1 else ''} each; "
        f"{made['pipeline']}, {made['steps']} steps, guidance {made['guidance']}, {made['dtype']}, seed "
        f"{options.making.seed}{lora}. Judge: {', '.join(header['judged_by']) or 'none'}{foreign}."
    )
