"""The procedure of a suite: a benchmark on a model, or on a base and a tuned one with the same noise."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.apps.command_line import call_of, in_processes
from flowrl.apps.suites.running import exchange
from flowrl.apps.suites.running.drawing import Drawing
from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.apps.suites.running.judging import RewardJudge, judge_of
from flowrl.apps.suites.running.options import Options, require_results_alone
from flowrl.apps.suites.running.pairs import compared, pair_plan
from flowrl.apps.suites.running.report import report
from flowrl.apps.suites.running.runner import Task, fill, fingerprint, limited
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.files import out_folder
from flowrl.core.versions import versions
from flowrl.display.phases import phase
from flowrl.evaluation.suite import Item, load_suite
from flowrl.run.folder import RunFolder, commit
from flowrl.run.judged import Judged, load, require_model
from flowrl.run.launch import command_line
from flowrl.run.trained import frame_rate
from flowrl.scoring.build import require_modality
from flowrl.training.world import World, join


def evaluate(options: Options) -> None:
    """Make, judge and tabulate.

    Raises ConfigError, ModelError, RewardError: something the user can mend. RewardFailure: the judge is away; what was
    judged is kept.
    """
    suite = load_suite(options.suite)
    if options.judging.compat and suite.compat is None:
        words = f"--compat: the official code of {options.suite} has no table of its own"
        raise ConfigError(words, Remedy(without="--compat"))
    every = suite.items(options.prompts)
    if not every:
        raise ConfigError(f"--prompts {options.prompts}: there is no prompt in it; give those of {suite.facts.where}")
    if options.judging.results:
        require_results_alone(options)
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
    folders = {name: ResultsFolder(options.folder / name, suite.facts.videos) for name in options.models()}
    if options.judging.results:
        _take_results(options, task, every, folders)
    else:
        if options.making.processes > 1 and "WORLD_SIZE" not in os.environ:
            code = in_processes(options.folder, options.making.processes)
            if code:
                raise SystemExit(code)
            return
        if not _make(options, task, every, folders):
            return
    pairs = compared(pair, task, folders, options.folder, rejudge=options.judging.rejudge)
    report(options, task, len(every), folders, pairs)


# ---- images and scores


def _make(options: Options, task: Task, every: Sequence[Item], folders: dict[str, ResultsFolder]) -> bool:
    """Make and judge the samples of every model; whether this process is the first and there are scores to report."""
    world, lock = join(), RunFolder(options.folder, "--out")
    judges: list[RewardJudge | None] = []
    try:
        if world.main:
            lock.hold()
        with phase("loading"):
            world.agree(lambda: judges.append(judge_of(options.judging, task)))
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
                count = exchange.export(task, folder, out)
                print(f"{out}: {count} {task.suite.facts.noun}s for the official evaluator")
        return world.main and judges[0] is not None
    finally:
        lock.unlock()
        world.close()


def _begin(
    options: Options, name: str, folder: ResultsFolder, every: Sequence[Item], judge: RewardJudge | None, world: World
) -> Drawing:
    """Load a model on this process's device and begin its folder."""
    loaded, making = _load(options, name), options.making
    loaded.pipeline.to(world.device)
    loaded.pipeline.set_progress_bar_config(disable=True)
    settings = making.steps, making.guidance, making.settings
    call = call_of(loaded.pipeline, loaded.call, *settings, loaded.distilled)
    drawing = Drawing(loaded.pipeline, call, making.seed, folder.videos)
    drawing.require_inputs(every)
    made = _identity(options, every) | {
        key: value for key, value in loaded.origin(dict(call), making.guidance).items() if key != "run"
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
    return {"suite": options.name, "prompts": fingerprint(every), "base_seed": options.making.seed}


def _load(options: Options, name: str) -> Judged:
    """The model of a folder's name; the base of a run, or of a model with --lora, may be named by the model itself."""
    if name == "model":
        result = load(options.target, loras=options.loras, dial=options.dial)
    else:
        own = Path(options.models()[name]).resolve() == Path(options.target).resolve()
        is_run = (Path(options.target) / "config.yaml").is_file()
        if own and not is_run and not options.loras:
            raise ConfigError(f"--base {options.base} is MODEL itself: there is nothing to compare; name another model")
        result = load(options.models()[name], base=own and is_run)
    if result.noise is not None:
        raise ConfigError(
            f"{options.target!r} learned the initial noise of its own prompts, and those of a suite are others",
            Remedy(without="--suite"),
        )
    return result


def _take_results(options: Options, task: Task, every: Sequence[Item], folders: dict[str, ResultsFolder]) -> None:
    """Put the scores of the official evaluator into the folders."""
    given = exchange.of_models(list(folders), options.judging.results)
    made = _identity(options, every)
    for folder in folders.values():
        folder.require_made(made)
    for name, folder in folders.items():
        rows = exchange.with_results(task, folder, file := given[name])
        print(f"--results {file}: those of {name}, {options.models()[name]}")
        if options.judging.rejudge:
            folder.forget_judge()
        folder.take_results(rows, {"official evaluator": {"results": exchange.fingerprint(file)}})
