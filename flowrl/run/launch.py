"""The launcher of `--processes N`: starts the workers, forwards signals, ends them after a failure."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flowrl.core.subprocesses import PARENT

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
"""Folder from which the workers import this flowrl, installed or not."""

COMMAND = "FLOWRL_COMMAND"
"""The user's command line, in a worker's environment."""

LOCKED = "FLOWRL_LOCKED"
"""The descriptor of the lock that the launcher holds, in a worker's environment."""

_PLEA = signal.SIGUSR1
"""Signal of a worker to its launcher: it is saving, and needs more time."""

_LEAVING_S, _GRACE_S, _SAVING_S = 1.0, 30.0, 600.0
"""Seconds after a failure of one process until the others get SIGTERM, are killed, and are killed while one saves."""


def ask_for_time() -> None:
    """Ask the launcher, which ends this process after another's failure, for the time to write a checkpoint."""
    parent = os.environ.get(PARENT)
    if parent is not None and os.getppid() == int(parent):
        os.kill(int(parent), _PLEA)


def command_line() -> str:
    """The user's command line, or this process's own."""
    return os.environ.get(COMMAND) or shlex.join(["flowrl", *sys.argv[1:]])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(
    arguments: Sequence[str],
    processes: int,
    lock: int | None = None,
    *,
    warn: Callable[[str], None] = lambda text: None,
) -> int:
    """Run `python -m flowrl ARGUMENTS` in N processes and return the exit code of the first that failed.

    Signals are forwarded. After a failure of one process the others get SIGTERM, so that they save, and are killed
    after a grace period, which a process that is saving may extend. `lock`: descriptor of a locked file, which they
    inherit (`LOCKED`); None: there is none. `warn` is called with a warning before anything starts, if they will be
    slow.
    """
    port, cores = free_port(), os.cpu_count() or processes
    # Such as those of this process's container.
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else cores
    if processes > usable:
        warn(f"{processes} processes on {usable} CPU core{'s' if usable > 1 else ''}: they take turns, which is slower")
    children: list[subprocess.Popen] = []
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        _send(children, number)

    numbers = (signal.SIGINT, signal.SIGTERM, _PLEA)
    previous = {n: signal.signal(n, (lambda n, frame: received.append(n)) if n == _PLEA else forward) for n in numbers}
    try:
        for rank in range(processes):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                PARENT: str(os.getpid()),
                COMMAND: command_line(),
                **({} if lock is None else {LOCKED: str(lock)}),
                "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), PACKAGE_ROOT])),
            }
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
            # -P: a user's types.py in the working directory would end Python itself.
            command = [sys.executable, "-P", "-m", "flowrl", *arguments]
            # A session of its own: Ctrl-C reaches the children once, through us.
            held = () if lock is None else (lock,)
            children.append(subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=held))
        return _wait(children, received)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(children: list[subprocess.Popen], received: Sequence[int] = (), grace_s: float = _GRACE_S) -> int:
    failed: int | None = None
    asked_at = ended_at = never = float("inf")
    while any(child.poll() is None for child in children):
        now = time.monotonic()
        for child in children:
            code = child.poll()
            if code not in (None, 0) and failed is None:
                # Processes with the same failure are about to end with their own message.
                failed, asked_at, ended_at = code, now + _LEAVING_S, now + grace_s
        if now > asked_at:
            asked_at = never
            # After a forwarded signal they end anyway, and a second one would end them before they have saved.
            if not set(received) - {_PLEA}:
                _send(children, signal.SIGTERM)
        if _PLEA in received and failed is not None and grace_s != _SAVING_S:
            grace_s, ended_at = _SAVING_S, now + _SAVING_S
        if now > ended_at:
            _send(children, signal.SIGKILL)
        time.sleep(0.05)
    codes = [child.returncode for child in children]
    worst = failed if failed is not None else next((code for code in codes if code), 0)
    return 128 - worst if worst < 0 else worst


def _send(children: Sequence[subprocess.Popen], number: int) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)
