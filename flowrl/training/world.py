"""Processes: joining the group, the few collectives of the loop, failures in step; accelerate's state is made here."""

import datetime
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.core.errors import (
    Abandoned,
    CheckpointError,
    ConfigError,
    Elsewhere,
    Fault,
    LaunchError,
    LostProcess,
    Remedy,
    RewardError,
    described,
)
from flowrl.core.subprocesses import PATIENCE_S
from flowrl.display.display import working

log = logging.getLogger("flowrl")
T = TypeVar("T")

BACKEND = "FLOWRL_BACKEND"
"""Backend of the processes, in a worker's environment; without it nccl between GPUs and gloo between CPUs."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    shared: list[BaseException] = field(default_factory=list, init=False, compare=False, repr=False)
    """Failures that all processes have in common."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            with _naming_lost_process():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _naming_lost_process():
            dist.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """True on every process if the flag is set on one of them."""
        return self.flags(flag)[0]

    def flags(self, *flags: bool) -> tuple[bool, ...]:
        """`any` of several flags at once."""
        if self.size == 1:
            return flags
        tensor = torch.tensor([float(flag) for flag in flags], device=self.device)
        return tuple(value > 0 for value in self.all_reduce_sum(tensor).tolist())

    def barrier(self) -> None:
        self.any(False)

    def together(self, work: Callable[[], T], errors: tuple[type[Exception], ...] = (Exception,)) -> list[T]:
        """Do something on every process; the results of all, by rank. `work` itself must not wait for others.

        Raises Exception: what `work` raised here; Elsewhere: it raised one of `errors` on another process, and not
        here.
        """
        result, error = None, None
        try:
            result = work()
        except errors as caught:
            error = caught
        outcomes = self.gather((result, _failure_of(error, str)))
        failed = next((failure for _, failure in outcomes if failure is not None), None)
        if failed is not None:
            raise self.sharing(error or Elsewhere(*failed))
        return [value for value, _ in outcomes]

    def agree(self, work: Callable[[], T]) -> list[T]:
        """`together` for errors that a user can mend: if one process has such an error, all stop with it.

        Raises ConfigError, ValueError, RewardError, CheckpointError: what `work` raised here; ConfigError: it raised
        one of them on another process.
        """
        try:
            return self.together(work, (ValueError, RewardError, CheckpointError))
        except Elsewhere as error:
            raise self.sharing(ConfigError(str(error))) from None

    def in_step(self, work: Callable[[], T]) -> T:
        """Do something on every process that waits for no other; a failure on one process is one on all of them.

        Raises:
            Exception: what `work` raised here, `SystemExit` among it; a `Fault` is raised on all processes, and
                `Diverged` rather than another.
            Elsewhere: another process failed otherwise, and this one did not.
            Abandoned: on some process, and no other failed.
        """
        result: list[T] = []
        error: BaseException | None = None
        try:
            result.append(work())
        except (Exception, SystemExit, Abandoned) as caught:
            error = caught
        left = isinstance(error, Abandoned)
        ours = isinstance(error, Fault) and not error.of_one_process and not isinstance(error, Elsewhere)
        kind = type(error) if ours else None
        outcomes = self.gather((left, kind, None if left else _failure_of(error, described)))
        failed = [(kind, failure) for _, kind, failure in outcomes if failure is not None]
        if failed:
            kind, failure = min(failed, key=lambda each: each[1][2] == Fault.status)
            if error is not None and not left and (kind is None or type(error) is kind):
                raise self.sharing(error)
            raise self.sharing(Elsewhere(*failure) if kind is None else kind(failure[0]))
        if any(left for left, _, _ in outcomes):
            raise Abandoned
        return result[0]

    def sharing(self, error: BaseException) -> BaseException:
        """The same error, recorded as one that every process raises."""
        if self.size > 1:
            self.shared.append(error)
        return error

    def shares(self, error: BaseException) -> bool:
        """True if all processes end with an error, or there is no other process."""
        return self.size == 1 or any(error is known for known in self.shared)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


ALONE = World(0, 1, torch.device("cpu"))
"""A single process."""


def _failure_of(error: BaseException | None, words: Callable[[BaseException], str]) -> tuple[str, int, str] | None:
    """Text, exit code and status of a failure, for the other processes."""
    if error is None:
        return None
    if isinstance(error, Fault):
        return str(error), error.exit_code, error.status
    return words(error), Fault.exit_code, Fault.status


@contextmanager
def _naming_lost_process() -> Iterator[None]:
    """Raise LostProcess for a collective that fails because another process has ended."""
    try:
        with working("waiting for the other processes"):
            yield
    except RuntimeError as error:  # gloo has no class of its own
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise LostProcess(
            f"another process of this run has ended ({str(error).splitlines()[0]}); its own message has the reason"
        ) from error


def require_devices(processes: int) -> str | None:
    """Refuse more processes on this machine than it has GPUs; the backend from the environment, None without one.

    Raises ConfigError: there are too few, or the backend cannot work.
    """
    backend = os.environ.get(BACKEND)
    if backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"the backend {backend!r} (--backend, {BACKEND}) is unknown; there are gloo and nccl")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and not cards:
        raise ConfigError(
            "the backend nccl needs GPUs, and torch sees none",
            [Remedy(without="--backend"), Remedy(flag="--backend gloo")],
        )
    if cards and processes > cards and backend != "gloo":
        raise ConfigError(
            f"{processes} processes on {cards} GPU{'s' if cards > 1 else ''}: nccl needs one for each process and "
            "through gloo, which is slower, they share them",
            [Remedy(flag=f"--processes {cards}"), Remedy(flag="--backend gloo")],
        )
    return backend


def unused_accelerator() -> str | None:
    """The sentence for a machine whose accelerator torch sees and flowrl leaves alone; None on CUDA, ROCm and the CPU.

    Runs are computed on CUDA (ROCm calls itself so in torch) and on the CPU, and nowhere else: on another device no
    number of this project was ever checked.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or torch.cuda.is_available():
        return None
    return f"torch sees an accelerator of type {found.type!r}, which flowrl does not use: this runs on the CPU"


def join() -> World:
    """Join the group of torchrun, accelerate or `--processes`; a single process otherwise.

    Raises ConfigError: more processes on this machine than GPUs; LaunchError: WORLD_SIZE and accelerate's number of
    processes differ (some launchers silently run one).
    """
    from accelerate import PartialState

    expected = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {}
    if expected > 1:
        backend = require_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        options = {"timeout": datetime.timedelta(seconds=PATIENCE_S)}
        options |= {} if backend is None else {"backend": backend}
    state = PartialState(cpu=not torch.cuda.is_available(), **options)
    if state.num_processes != expected:
        raise LaunchError(
            f"WORLD_SIZE={expected}, but accelerate sees {state.num_processes} process(es); "
            "start with torchrun, or with flowrl train CONFIG --processes N"
        )
    assert state.device is not None
    if state.process_index == 0 and (sentence := unused_accelerator()):
        log.warning(sentence)
    return World(state.process_index, state.num_processes, state.device)


def shard(num_prompts: int, group_size: int, rank: int, size: int, leaves: int = 1) -> list[tuple[int, int]]:
    """The (slot, sample) pairs of a rank: whole groups if there are enough prompts, else groups split by sample.

    The `leaves` neighbouring samples of a tree stay together.

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
    """Number of samples of the rank that has the most."""
    return max(len(shard(num_prompts, group_size, rank, size, leaves)) for rank in range(size))
