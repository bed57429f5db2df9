"""Processes: joining the group, the few collectives the loop needs, and the launcher; accelerate is used here."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.errors import (
    Abandoned,
    CheckpointError,
    ConfigError,
    Elsewhere,
    Fault,
    LaunchError,
    LostProcess,
    RewardError,
    described,
)
from flowrl.orphans import PARENT

T = TypeVar("T")
PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
"""Where the workers find this flowrl, installed or not."""

BACKEND = "FLOWRL_BACKEND"
"""How processes talk, in a worker's environment; without it nccl between GPUs and gloo between CPUs."""
COMMAND = "FLOWRL_COMMAND"
"""What the user typed, in a worker's environment."""
_PLEA = signal.SIGUSR1
"""From a worker to its launcher: it is saving, and wants more time."""
_LEAVING_S, _GRACE_S, _SAVING_S = 1.0, 30.0, 600.0
"""After a failure of one process: until the others get SIGTERM, until they are killed, and that while one saves."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    shared: list[BaseException] = field(default_factory=list, init=False, compare=False, repr=False)
    """Failures that every process has met at the same place."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            with _lost_told():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _lost_told():
            dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set anywhere; the same answer on every process."""
        if self.size == 1:
            return flag
        tensor = torch.tensor([float(flag)], device=self.device)
        return bool(self.all_reduce_sum(tensor) > 0)

    def barrier(self) -> None:
        self.any(False)

    def together(self, work: Callable[[], T], errors: tuple[type[Exception], ...] = (Exception,)) -> list[T]:
        """Do something on every process; everyone's result, by rank. `work` itself must not wait for others.

        Raises:
            Exception: what `work` raised here.
            Elsewhere: it raised one of `errors` on another process, and not here.
        """
        result, error = None, None
        try:
            result = work()
        except errors as caught:
            error = caught
        everyone = self.gather((result, _told(error, str)))
        failed = next((told for _, told in everyone if told is not None), None)
        if failed is not None:
            raise self.sharing(error or Elsewhere(*failed))
        return [value for value, _ in everyone]

    def agree(self, work: Callable[[], T]) -> list[T]:
        """`together` for what a user can mend: if it fails anywhere with such an error, all stop with it.

        Raises:
            ConfigError, ValueError, RewardError, CheckpointError: what `work` raised here.
            ConfigError: it raised one of them on another process.
        """
        try:
            return self.together(work, (ValueError, RewardError, CheckpointError))
        except Elsewhere as error:
            raise self.sharing(ConfigError(str(error))) from None

    def in_step(self, work: Callable[[], T]) -> T:
        """Do something on every process that waits for no other; where it fails on one, it fails on all of them.

        Raises:
            Exception: what `work` raised here, `SystemExit` among it; a `Fault` is raised on all processes, and
                `Diverged` rather than another.
            Elsewhere: another process failed otherwise, and this one did not.
            Abandoned: on some process, and no other failed.
        """
        result, error = None, None
        try:
            result = work()
        except (Exception, SystemExit, Abandoned) as caught:
            error = caught
        left = isinstance(error, Abandoned)
        ours = isinstance(error, Fault) and not error.of_one_process and not isinstance(error, Elsewhere)
        kind = type(error) if ours else None
        everyone = self.gather((left, kind, None if left else _told(error, described)))
        failed = [(kind, told) for _, kind, told in everyone if told is not None]
        if failed:
            kind, told = min(failed, key=lambda each: each[1][2] == Fault.status)
            own = error is not None and not left and (kind is None or type(error) is kind)
            raise self.sharing(error if own else Elsewhere(*told) if kind is None else kind(told[0]))
        if any(left for left, _, _ in everyone):
            raise Abandoned
        return result  # type: ignore[return-value]  # there is one where nothing failed

    def sharing(self, error: BaseException) -> BaseException:
        """The same error, known to be raised on every process."""
        if self.size > 1:
            self.shared.append(error)
        return error

    def shares(self, error: BaseException) -> bool:
        """Whether all processes leave with an error, or there is no other."""
        return self.size == 1 or any(error is known for known in self.shared)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


ALONE = World(0, 1, torch.device("cpu"))
"""No other process to share anything with."""


def _told(error: BaseException | None, words: Callable[[BaseException], str]) -> tuple[str, int, str] | None:
    """What the other processes are told of a failure: text, exit code, status."""
    if error is None:
        return None
    if isinstance(error, Fault):
        return str(error), error.exit_code, error.status
    return words(error), Fault.exit_code, Fault.status


@contextmanager
def _lost_told() -> Iterator[None]:
    """A collective that breaks off because another process is gone says so."""
    try:
        yield
    except RuntimeError as error:  # gloo has no class of its own
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise LostProcess(
            f"another process of this run has ended ({str(error).splitlines()[0]}); its own message says why"
        ) from error


def require_devices(processes: int) -> str | None:
    """Refuse more processes on this machine than it has GPUs; the backend that the environment chooses, if it does.

    Raises:
        ConfigError: there are too few, or the backend cannot work.
    """
    backend = os.environ.get(BACKEND)
    if backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"the backend {backend!r} (--backend, {BACKEND}) is unknown; there are gloo and nccl")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and not cards:
        raise ConfigError("the backend nccl needs GPUs, and torch sees none; leave --backend out, or choose gloo")
    if cards and processes > cards and backend != "gloo":
        raise ConfigError(
            f"{processes} processes on {cards} GPU{'s' if cards > 1 else ''}: nccl wants one for each process; start "
            f"at most {cards}, or let them share through gloo, which is slower: --backend gloo, or {BACKEND}=gloo"
        )
    return backend


def join() -> World:
    """Join the group that torchrun, accelerate or `--processes` set up; alone otherwise.

    Raises:
        ConfigError: more processes on this machine than GPUs.
        LaunchError: WORLD_SIZE and what accelerate made of it differ (some launchers silently run one process).
    """
    from accelerate import PartialState

    expected, options = int(os.environ.get("WORLD_SIZE", "1")), {}
    if expected > 1:
        backend = require_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        options = {} if backend is None else {"backend": backend}
    state = PartialState(cpu=not torch.cuda.is_available(), **options)
    if state.num_processes != expected:
        raise LaunchError(
            f"WORLD_SIZE={expected}, but accelerate sees {state.num_processes} process(es); "
            "start with torchrun, or with flowrl train CONFIG --processes N"
        )
    return World(state.process_index, state.num_processes, state.device)


def ask_for_time() -> None:
    """Tell the launcher, which is ending this process for another's failure, that a checkpoint is being written."""
    parent = os.environ.get(PARENT)
    if parent is not None and os.getppid() == int(parent):
        os.kill(int(parent), _PLEA)


def shard(num_prompts: int, group_size: int, rank: int, size: int, leaves: int = 1) -> list[tuple[int, int]]:
    """The (slot, sample) pairs of a rank: whole groups while there are prompts enough, else split by sample.

    Neighbouring `leaves` samples, those of a tree, stay together.

    >>> shard(2, 2, 1, 2), shard(1, 4, 1, 2), shard(1, 6, 1, 2, leaves=3)
    ([(1, 0), (1, 1)], [(0, 2), (0, 3)], [(0, 3), (0, 4), (0, 5)])
    """
    if num_prompts >= size:
        low, high = rank * num_prompts // size, (rank + 1) * num_prompts // size
        return [(slot, sample) for slot in range(low, high) for sample in range(group_size)]
    trees = [(slot, first) for slot in range(num_prompts) for first in range(0, group_size, leaves)]
    own = trees[rank * len(trees) // size : (rank + 1) * len(trees) // size]
    return [(slot, first + leaf) for slot, first in own for leaf in range(leaves)]


def largest_shard(num_prompts: int, group_size: int, size: int, leaves: int = 1) -> int:
    """Samples of the rank that has most."""
    return max(len(shard(num_prompts, group_size, rank, size, leaves)) for rank in range(size))


def command_line() -> str:
    """What the user typed, as far as it is known."""
    return os.environ.get(COMMAND) or shlex.join(["flowrl", *sys.argv[1:]])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(
    arguments: Sequence[str],
    processes: int,
    pass_fds: Sequence[int] = (),
    *,
    warn: Callable[[str], None] = lambda text: None,
) -> int:
    """Run `python -m flowrl ARGUMENTS` in N processes and return the exit code of the first that failed.

    Signals are forwarded; when one process ends badly the others get SIGTERM, so that they save, and are ended after a
    grace period, which one that is saving may extend.

    Args:
        arguments: of the command line.
        processes: how many.
        pass_fds: descriptors that they inherit.
        warn: is told, before anything starts, what makes them slow.
    """
    port, cores = free_port(), os.cpu_count() or processes
    usable = _usable_cores()
    if processes > usable:
        warn(f"{processes} processes on {usable} CPU core{'s' if usable > 1 else ''}: they take turns, which is slower")
    children: list[subprocess.Popen] = []
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        _send(children, number)

    numbers = (signal.SIGINT, signal.SIGTERM, _PLEA)
    previous = {n: signal.signal(n, _note(received) if n == _PLEA else forward) for n in numbers}
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
                "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), PACKAGE_ROOT])),
            }
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
            # -P: a user's types.py in the working directory would end Python itself.
            command = [sys.executable, "-P", "-m", "flowrl", *arguments]
            # A session of its own: Ctrl-C reaches the children once, through us.
            children.append(subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=list(pass_fds)))
        return _wait(children, received)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _usable_cores() -> int:
    """Of this process: those of a container, for one."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _note(received: list[int]) -> Callable[[int, object], None]:
    return lambda number, frame: received.append(number)


def _wait(children: list[subprocess.Popen], received: Sequence[int] = (), grace_s: float = _GRACE_S) -> int:
    failed: int | None = None
    asked_at = ended_at = never = float("inf")
    while any(child.poll() is None for child in children):
        now = time.monotonic()
        for child in children:
            code = child.poll()
            if code not in (None, 0) and failed is None:
                # Those that have met the same failure are about to leave with their message.
                failed, asked_at, ended_at = code, now + _LEAVING_S, now + grace_s
        if now > asked_at:
            asked_at = never
            # After a signal of ours they leave anyway, and a second one would end them before they have saved.
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
