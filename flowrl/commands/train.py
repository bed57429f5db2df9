"""`flowrl train`: align a model; alone, in N processes on this machine, or inside a torchrun group."""

from __future__ import annotations

import os
from typing import Annotated

from flowrl.commands._arguments import Config, Overrides, Processes, option
from flowrl.core.startup import imports

Resume = Annotated[
    bool,
    option(
        "Continuation from the newest checkpoint of the run folder.",
        "Without it a folder that already holds a run is refused.",
        name="--resume",
    ),
]
Accept = Annotated[
    bool,
    option(
        "Permission to resume after your files (rewards, prompts, pairs) have changed.",
        "The run goes on with the new contents and evaluates the base again (docs/files.md).",
        name="--accept-changes",
    ),
]
Backend = Annotated[
    str | None,
    option(
        "Communication between processes: nccl (a GPU each) or gloo (CPUs, or GPUs that are shared).",
        "Default: nccl on GPUs, gloo without.",
    ),
]


def command(
    config: Config,
    overrides: Overrides = None,
    resume: Resume = False,
    accept: Accept = False,
    processes: Processes = 1,
    backend: Backend = None,
) -> None:
    """Train a model, evaluate it before and after, and write the report.

    It runs alone, in N processes, or inside a torchrun group.
    Exit code 0: finished; 2: a fault in the input, nothing was trained; 1: a failure; 128 + n: saved after signal n.
    """
    from flowrl.core.errors import no_exit

    if backend is not None:
        os.environ["FLOWRL_BACKEND"] = backend
    grouped = "WORLD_SIZE" in os.environ
    if processes > 1 and not grouped:
        raise SystemExit(_launch(config, overrides or [], _flags(resume, accept), processes))
    with imports():
        from flowrl.config.load import load_config, resolve
        from flowrl.run.trainer import Trainer

    with no_exit():
        Trainer(resolve(load_config(config, overrides))).fit(resume=resume, accept_changes=accept)


def _flags(resume: bool, accept: bool) -> list[str]:
    return [*(["--resume"] if resume else []), *(["--accept-changes"] if accept else [])]


def _launch(config: str, overrides: list[str], flags: list[str], processes: int) -> int:
    """Validate once, hold the run folder, and run the workers."""
    from flowrl.core.errors import no_exit

    with imports():
        from flowrl.config.load import load_config, resolve
        from flowrl.run.folder import RunFolder
        from flowrl.run.launch import launch
        from flowrl.training.world import require_devices

    with no_exit():
        resolved = resolve(load_config(config, overrides))
    require_devices(processes)
    folder = RunFolder(resolved.run.folder)
    descriptor = folder.lock()
    os.environ["FLOWRL_LOCKED"] = "1"
    try:
        arguments = ["train", config, *overrides, *flags]
        # The workers inherit the lock: it is held until the last of them has ended.
        return launch(arguments, processes, pass_fds=[descriptor], warn=print)
    finally:
        folder.unlock()
