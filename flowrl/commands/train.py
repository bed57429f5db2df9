"""`flowrl train`: align a model; alone, in N processes on this machine, or inside a torchrun group."""

import os
import time
from typing import TYPE_CHECKING, Any, Literal

from flowrl.commands._arguments import showing
from flowrl.core.errors import no_exit
from flowrl.core.startup import imports

if TYPE_CHECKING:
    from flowrl.run.report import Finished


def command(
    config: str,
    overrides: list[str] | None = None,
    resume: bool = False,
    accept: bool = False,
    processes: int = 1,
    backend: Literal["nccl", "gloo"] | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Train a model and report what it gained. It is evaluated with the same seeds before and after.

    It runs alone, in N processes, or inside a torchrun group.
    Exit code 0: finished; 2: a fault in the input, nothing was trained; 1: a failure; 128 + n: saved after signal n.
    """
    if backend is not None:
        os.environ["FLOWRL_BACKEND"] = backend
    given = overrides or []  # with --accept-changes a word without a value is a key that may have another one
    words, keys = (given, []) if not accept else ([w for w in given if "=" in w], [w for w in given if "=" not in w])
    with showing(quiet, as_json) as display:
        if processes > 1 and "WORLD_SIZE" not in os.environ:
            flags = {"--resume": resume, "--accept-changes": accept, "--quiet": quiet, "--json": as_json}
            on = [*keys, *(flag for flag, given in flags.items() if given)]
            raise SystemExit(_launch(config, words, on, processes))
        display.result = _train(config, words, resume, keys or accept)


def _train(config: str, overrides: list[str], resume: bool, accept: bool | list[str]) -> dict[str, Any]:
    from flowrl.display.display import working

    with working("loading the libraries"), imports():
        from flowrl.config.load import load_config, resolve

        run = load_config(config, overrides)  # its faults are told before the libraries are imported
        from flowrl.run.trainer import Trainer

    with no_exit():
        trainer = Trainer(resolve(run))
        return trainer.fit(resume=resume, accept_changes=accept, after=AFTER)


def report(run: "Finished") -> None:
    """Build the run's page, `gallery/index.html`.

    Raises ConfigError: a file of the run folder is damaged; WriteError: the disk is full or not writable.
    """
    from flowrl.apps.gallery import build
    from flowrl.display.console import log
    from flowrl.display.display import working

    started = time.monotonic()
    with working("building the report"):
        page = build([run.folder])
    log.info("report: %s (%.1f s)", page, time.monotonic() - started)


def likely_cause(run: "Finished") -> None:
    """Say what kept the run from learning, if it did not. Raises ConfigError: a file of the run folder is damaged."""
    from flowrl.apps.diagnosis import cause
    from flowrl.apps.gallery.runs import load_run
    from flowrl.display.console import verdict

    for line in cause(load_run(run.folder)):
        verdict.info("%s", line)


def card(run: "Finished") -> None:
    """Write the card of the trained weights, `adapter/README.md`; a failure is told and the card is missing."""
    from flowrl.apps.publish.card import try_card
    from flowrl.display.display import working
    from flowrl.run.handover import FOLDER

    with working("writing the model card"):
        try_card(run.folder, run.folder / FOLDER, "adapter")


AFTER = (report, likely_cause, card)
"""What comes after a run of this command, in this order."""


def _launch(config: str, overrides: list[str], flags: list[str], processes: int) -> int:
    """Validate once, hold the run folder, and run the workers."""
    with imports():
        from flowrl.config.load import load_config, resolve
        from flowrl.config.trackers import require
        from flowrl.display.console import log, set_up_logging

        set_up_logging(None, main=True)
        run = load_config(config, overrides)
        from flowrl.run.desk import open_desk
        from flowrl.run.folder import RunFolder
        from flowrl.run.launch import launch
        from flowrl.training.world import require_devices

    with no_exit():
        resolved = resolve(run)
        require(resolved.run.trackers)
    require_devices(processes)
    folder = RunFolder(resolved.run.folder)
    descriptor = folder.lock()
    open_desk(folder.path)
    try:
        arguments = ["train", config, *overrides, *flags]
        # The workers inherit the lock: it is held until the last of them has ended.
        return launch(arguments, processes, lock=descriptor, warn=log.warning)
    finally:
        folder.unlock()
