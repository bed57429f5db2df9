"""`flowrl ask`: a checkpoint, images or an evaluation of a run that is under way, or its end."""

import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.registry import suggest

_DOES = {
    **{"save": "the run saves", "sample": "the run draws the images"},
    **{"evaluate": "the run evaluates", "stop": "the run ends"},
}
_LOOK_S, _SAY_S = 0.2, 1.0
"""Seconds between looks for the answer, and until the screen says what is waited for."""


def command(
    run: Path,
    word: str,
    prompt: list[str] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    seed: int | None = None,
    no_wait: bool = False,
) -> None:
    """Ask a run to save, sample, evaluate or stop. Its training does not change by a bit.

    It is done after the iteration under way (stop: before the next forward). Ctrl-C withdraws a request that still
    waits. Exit code 0: done; 1: it failed, or the run ended before; 2: a fault in the input; 130: withdrawn.
    """
    from flowrl.run import desk as requests

    given = {"prompts": prompt, "steps": steps, "guidance": guidance, "seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    known = _checked(run, word, options)
    name = requests.submit(run, known, options)
    if no_wait:
        print(f"asked {run} to {word}; the answer will be in {run / requests.ASKED / f'{name}.json'}")
        return
    try:
        answer = answered(run, name, word)
    except KeyboardInterrupt:
        withdrawn = requests.withdraw(run, name)
        file = run / requests.ASKED / f"{name}.json"
        print("the request is withdrawn" if withdrawn else f"it was taken up already; the answer will be in {file}")
        raise SystemExit(130) from None
    print(answer["text"])
    for one in answer.get("paths", {}).get("images", ()):
        print(run / one)
    raise SystemExit(0 if answer.get("state") == "done" else 1)


def _checked(run: Path, word: str, options: dict[str, Any]) -> Any:
    """The word, if a run that takes it is under way in the folder. Raises ConfigError: with the remedy."""
    from flowrl.run import desk as requests
    from flowrl.run import status

    if word not in requests.WORDS:
        close = suggest(word, list(requests.WORDS))
        raise ConfigError(f"WORD={word!r}: {close}there are: {', '.join(requests.WORDS)}")
    if options and word != "sample":
        given = " ".join(f"--{name.removesuffix('s')}" for name in options)
        raise ConfigError(f"{given}: for sample alone", Remedy(without=given))
    if not (run / "config.yaml").is_file():
        what = "it has no config.yaml" if run.is_dir() else "there is no such folder"
        raise ConfigError(f"{run} is not a run: {what}; pass the folder that flowrl train writes, <output>/<name>")
    if not status.is_locked(run):
        raise ConfigError(_ended(run))
    if not requests.is_open(run):
        raise ConfigError(
            f"the process that uses {run} takes no requests: it is another command than flowrl train, or a run that "
            "has not begun or is about to end; ask again, or wait until it has ended"
        )
    return word


def _ended(run: Path) -> str:
    """Why a run without a process takes no request, and the remedy."""
    from flowrl.run import status

    summary, there = status.read(run), shlex.quote(str(run))
    if summary.get("status") in status.ENDED:
        ended = "was ended by its guard" if summary["status"] == status.GUARDED else "has finished"
        return (
            f"the run in {run} {ended}: flowrl sample {there} draws images of it, flowrl eval {there} evaluates it, "
            "and its weights are in adapter/; iterations=N with --resume trains on"
        )
    how = status.describe(summary) or f"It has not begun. Go on with: flowrl train {there} --resume"
    return f"the run in {run} has ended. {how}"


def answered(run: Path, name: str, word: str) -> dict[str, Any]:
    """The answer to a request, once it is final; or that the run has ended without one."""
    from flowrl.run import desk as requests
    from flowrl.run import status

    began, line = time.monotonic(), _Line()
    while True:
        locked = status.is_locked(run)  # before the look: a run answers first, and ends then
        found = requests.answer_to(run, name)
        if found is not None and found["state"] != "under way":
            line.close()
            return found
        if not locked:
            line.close()
            taken = "while it was done" if found is not None else "before it was taken up"
            requests.withdraw(run, name)
            return {"state": "dropped", "text": f"{_ended(run)} (The run ended {taken}.)"}
        if (waited := time.monotonic() - began) > _SAY_S:
            until = "waiting until the run has saved and ended" if word == "stop" else None
            text = _DOES[word] if found is not None else until
            line.show(text or f"waiting for the end of iteration {_finished(run) + 1}", waited)
        time.sleep(_LOOK_S)


def _finished(run: Path) -> int:
    """The last iteration with a row, by the end of the file."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - (1 << 16)))
            found = re.findall(rb'"iteration": (\d+)', file.read())
    except FileNotFoundError:
        found = []
    return int(found[-1]) if found else 0


class _Line:
    """One line on the error stream, redrawn in a terminal; elsewhere each text once."""

    def __init__(self) -> None:
        self.last = ""

    def show(self, text: str, seconds: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text} ({seconds:.0f} s)\x1b[K")
        elif text != self.last:
            sys.stderr.write(f"{text}\n")
        self.last = text
        sys.stderr.flush()

    def close(self) -> None:
        if self.last and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
