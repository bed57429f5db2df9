"""A worker process as the server sees it: started, handed batches with a deadline, ended when it hangs.

A process and not a thread, for a thread cannot be ended: a reward that hangs would keep its memory, its GPU and, inside
a library that holds the interpreter's lock, the whole server. A process also dies alone where an image crashes a
decoder. Workers are forked from a process that has imported torch and nothing more: one takes the place of another at
once, and inherits no thread, socket or GPU context of the server.
"""

import asyncio
import functools
import json
import multiprocessing
import os
import socket
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Protocol

from flowrl.apps.serving.frames import LENGTHS, Result, pack_frame, pack_items
from flowrl.apps.serving.messages import Item

_BUILD_S = 1800.0
"""Seconds that loading a reward's weights may take."""
_END_S = 2.0
"""A worker that was told to end and has not after this is killed."""
_BUFFER = 1 << 20
_SAFE_PATH = "PYTHONSAFEPATH"


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flowrl.apps.serving.worker", "flowrl.scoring.entries", "flowrl.media.transport"])
    # multiprocessing starts it by `python -c`, which looks in the working directory first: a user's types.py there
    # would end it.
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
    return context


def _work(connection: socket.socket) -> None:
    """In the worker. The server itself imports nothing of it: it needs no torch."""
    os.environ.pop(_SAFE_PATH, None)  # a reward may start scripts of its own
    from flowrl.apps.serving.worker import main

    main(connection)


class WorkerDied(RuntimeError):
    """The process ended in the middle of a batch."""


class WorkerFailed(RuntimeError):
    """The reward could not be built; the text says why."""


class Runner(Protocol):
    """Scores one batch at a time; what a `Batcher` hands its batches to."""

    async def start(self) -> dict[str, Any]:
        """Build the reward: {"card", "fingerprint", "options", "versions"}. Again after `kill`, or a death."""
        ...

    async def run(self, items: Sequence[Item]) -> list[Result]: ...

    async def close(self) -> None:
        """End it, waiting a moment."""
        ...

    def kill(self) -> None: ...


class Worker:
    """A `Runner` in a process of its own; `options` are the entry of the reward, as in a configuration."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.process: ForkServerProcess | None = None
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def start(self) -> dict[str, Any]:
        """Start the process and wait for its reward.

        Raises WorkerFailed: it cannot be built, or not in time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # No daemon: a reward may have processes of its own.
            self.process = _context().Process(target=_work, args=(theirs,), name="flowrl reward")
            await asyncio.to_thread(self.process.start)
        self.reader, self.writer = await asyncio.open_connection(sock=ours, limit=_BUFFER)
        try:
            async with asyncio.timeout(_BUILD_S):
                found = await self._ask(pack_frame(self.options))
        except TimeoutError:
            self.kill()
            raise WorkerFailed(f"the reward was not ready after {_BUILD_S:g} s") from None
        except WorkerDied as error:
            raise WorkerFailed(str(error)) from None
        if "failed" in found:
            await self.close()
            raise WorkerFailed(found["failed"])
        return found

    async def run(self, items: Sequence[Item]) -> list[Result]:
        """Results of the items, in their order.

        Raises WorkerDied: the process ended.
        """
        return await self._ask(pack_items(list(items)))

    async def _ask(self, frame: list[bytes]) -> Any:
        assert self.reader is not None
        assert self.writer is not None
        try:
            self.writer.writelines(frame)
            await self.writer.drain()
            head, _ = LENGTHS.unpack(await self.reader.readexactly(LENGTHS.size))
            return json.loads(await self.reader.readexactly(head))
        except (OSError, asyncio.IncompleteReadError):
            self.kill()
            code = None if self.process is None else self.process.exitcode
            raise WorkerDied(f"the worker process ended (exit code {code})") from None

    async def close(self) -> None:
        if self.process is None or self.process.pid is None:
            return  # a signal came before it was started
        if self.writer is not None:
            self.writer.close()
        await asyncio.to_thread(self.process.join, _END_S)
        self.kill()

    def kill(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.process is not None and self.process.pid is not None:
            self.process.kill()
            # SIGKILL: the wait is short, unless the kernel itself is stuck in a driver.
            self.process.join(_END_S)
