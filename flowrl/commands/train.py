"""`flowrl train`: align a model; alone, in N processes on this machine, or inside a torchrun group."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def command(
    config: Annotated[str, typer.Argument(help="YAML file, or a run folder to go on in with --resume.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=c words.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run folder.")] = False,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Resume with other contents of your files, with new baselines.",
        ),
    ] = False,
    processes: Annotated[int, typer.Option("--processes", help="Processes on this machine.", min=1)] = 1,
    backend: Annotated[
        str | None, typer.Option("--backend", help="How processes talk: nccl (GPUs) or gloo (CPUs; shares GPUs).")
    ] = None,
) -> None:
    """Train, evaluate before and after, and write the report."""
    from flowrl.core.errors import no_exit

    if backend is not None:
        os.environ["FLOWRL_BACKEND"] = backend
    grouped = "WORLD_SIZE" in os.environ
    if processes > 1 and not grouped:
        raise SystemExit(_launch(config, overrides or [], _flags(resume, accept), processes))
    from flowrl.config.load import load_config, resolve
    from flowrl.run.trainer import Trainer

    with no_exit():
        Trainer(resolve(load_config(config, overrides))).fit(resume=resume, accept_changes=accept)


def _flags(resume: bool, accept: bool) -> list[str]:
    return [*(["--resume"] if resume else []), *(["--accept-changes"] if accept else [])]


def _launch(config: str, overrides: list[str], flags: list[str], processes: int) -> int:
    """Validate once, hold the run folder, and run the workers."""
    from flowrl.config.load import load_config, resolve
    from flowrl.core.errors import no_exit
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
