"""Processes: joining the group, the few collectives the loop needs, and the launcher; accelerate is used here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.errors import Fault, LaunchError

T = TypeVar("T")
PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
"""Where the workers find this flowrl, installed or not."""


class Elsewhere(Fault, RuntimeError):
    """Another process failed in what all of them did together; the message is its own."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
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
        everyone = self.gather((result, None if error is None else str(error)))
        if error is not None:
            raise error
        failed = next((text for _, text in everyone if text is not None), None)
        if failed is not None:
            raise Elsewhere(failed)
        return [value for value, _ in everyone]

    def agree(self, error: Exception | None, kinds: Sequence[type[Exception]]) -> None:
        """Leave together: where something failed on any process, the same kind of error is raised on all of them.

        Args:
            error: what failed here, of one of the kinds, whose only argument is their text; None: nothing.
            kinds: of what may fail; if several have, the first of them is what is raised.
        """
        place = next((k for k, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
        told = [each for each in self.gather(None if error is None else (place, type(error), str(error))) if each]
        if not told:
            return
        _, kind, text = min(told, key=lambda each: each[0])
        raise error if error is not None and type(error) is kind else kind(text)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


ALONE = World(0, 1, torch.device("cpu"))
"""No other process to share anything with."""


def join() -> World:
    """Join the group that torchrun, accelerate or `--processes` set up; alone otherwise.

    Raises:
        LaunchError: WORLD_SIZE and what accelerate made of it differ (some launchers silently run one process).
    """
    from accelerate import PartialState

    expected = int(os.environ.get("WORLD_SIZE", "1"))
    state = PartialState(cpu=not torch.cuda.is_available())
    if state.num_processes != expected:
        raise LaunchError(
            f"WORLD_SIZE={expected}, but accelerate sees {state.num_processes} process(es); "
            "start with torchrun, or with flowrl train CONFIG --processes N"
        )
    if os.environ.get("FLOWRL_PARENT"):
        watch_parent(int(os.environ["FLOWRL_PARENT"]))
    return World(state.process_index, state.num_processes, state.device)


def watch_parent(parent: int, interval_s: float = 0.2) -> None:
    """End this process when its launcher is gone, even by kill -9."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(arguments: Sequence[str], processes: int, pass_fds: Sequence[int] = ()) -> int:
    """Run `python -m flowrl ARGUMENTS` in N processes and return the exit code of the first that failed.

    Signals are forwarded; when one process ends badly the others are ended after a grace period.
    """
    port, cores = free_port(), os.cpu_count() or processes
    children: list[subprocess.Popen] = []
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(processes):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "FLOWRL_PARENT": str(os.getpid()),
                "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), PACKAGE_ROOT])),
            }
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
            # -P: a user's types.py in the working directory would end Python itself.
            command = [sys.executable, "-P", "-m", "flowrl", *arguments]
            # A session of its own: Ctrl-C reaches the children once, through us.
            children.append(subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=list(pass_fds)))
        return _wait(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(children: list[subprocess.Popen], grace_s: float = 10.0) -> int:
    failed: int | None = None
    deadline = float("inf")
    while any(child.poll() is None for child in children):
        for child in children:
            code = child.poll()
            if code not in (None, 0) and failed is None:
                failed, deadline = code, time.monotonic() + grace_s
        if time.monotonic() > deadline:
            for child in children:
                if child.poll() is None:
                    child.kill()
        time.sleep(0.05)
    codes = [child.returncode for child in children]
    worst = failed if failed is not None else next((code for code in codes if code), 0)
    return 128 - worst if worst < 0 else worst
