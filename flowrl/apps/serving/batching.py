"""Samples of many requests joined into batches for one reward, and shared out over its workers.

Each worker has one batch at a time, which is the lock on its model. A batch that hangs or kills its worker is tried
again request by request, so that only the request with the bad sample pays for it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.apps.serving.counters import Counters
from flowrl.apps.serving.frames import Result, failed
from flowrl.apps.serving.messages import Item, Limits, Refusal
from flowrl.apps.serving.process import Runner, WorkerDied, WorkerFailed

log = logging.getLogger("flowrl")
_RESTART_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before a reward that cannot be built is tried again; the last one for ever."""


@dataclass(slots=True, eq=False)
class _Job:
    """The items of one request."""

    items: Sequence[Item]
    results: list[Result | None]
    done: asyncio.Future[None]

    def settle(self, row: int, result: Result) -> None:
        self.results[row] = result
        if not self.done.done() and all(result is not None for result in self.results):
            self.done.set_result(None)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A sample in the queue."""

    job: _Job
    row: int
    alone: bool = False
    """Was in a batch that hung or died: only with others of its request."""

    @property
    def item(self) -> Item:
        return self.job.items[self.row]


class Batcher:
    """The queue of the reward `name` with `runners`, the workers that serve it: at most `max_batch` samples are handed
    to it at once, and a batch that is not full waits `max_wait_s` for more.
    """

    def __init__(
        self,
        name: str,
        runners: Sequence[Runner],
        limits: Limits,
        counters: Counters,
        *,
        max_batch: int = 64,
        max_wait_s: float = 0.02,
    ) -> None:
        self.name, self.runners, self.limits, self.counters = name, runners, limits, counters
        self.max_batch, self.max_wait_s = max_batch, max_wait_s
        self.about: dict[str, Any] = {}
        """The reward: card, fingerprint, options, versions; known when its workers have started."""
        self.live = 0
        self._queue: deque[_Waiting] = deque()
        self._held = 0
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        counters.watch("flowrl_waiting_items", lambda: len(self._queue), reward=name)
        counters.watch("flowrl_live_workers", lambda: self.live, reward=name)

    async def start(self) -> None:
        """Start all workers.

        Raises WorkerFailed: the reward cannot be built.
        """
        answers = await asyncio.gather(*(runner.start() for runner in self.runners), return_exceptions=True)
        for one in answers:
            if isinstance(one, BaseException):
                await self.close()
                raise one
        assert isinstance(answers[0], dict)
        self.about = answers[0]
        self.live = len(self.runners)
        self._tasks = [asyncio.create_task(self._serve(runner)) for runner in self.runners]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(runner.close() for runner in self.runners))

    async def score(self, items: Sequence[Item]) -> list[Result]:
        """Results of the items, in their order.

        Raises Refusal: 503 too many are waiting, 504 no answer in time.
        """
        if len(self._queue) + len(items) > self.limits.waiting:
            text = f"{len(self._queue)} samples are waiting for {self.name!r}; try again, or another server"
            raise Refusal(503, "busy", text)
        size = sum(len(image.data) for item in items for image in (item.image, *item.sources))
        if self._held + size > self.limits.waiting_bytes:
            text = f"{self._held} bytes of images are waiting for {self.name!r}; try again, or another server"
            raise Refusal(503, "busy", text)
        self._held += size
        job = _Job(items, [None] * len(items), asyncio.get_running_loop().create_future())
        self._queue.extend(_Waiting(job, row) for row in range(len(items)))
        self._arrived.set()
        try:
            async with asyncio.timeout(self.limits.request_s):
                await job.done
        except TimeoutError:
            raise Refusal(504, "late", f"no answer of {self.name!r} within {self.limits.request_s:g} s") from None
        finally:
            # Whoever gave up waits no more: its samples are not scored for nobody.
            job.done.cancel()
            self._held -= size
        self.counters.add("flowrl_items_total", len(items), reward=self.name)
        for result in job.results:
            if result is not None and result["error"] is not None:
                self.counters.add("flowrl_item_errors_total", reward=self.name, kind=result["error"]["kind"])
        return [result for result in job.results if result is not None]

    # ---- batches

    async def _serve(self, runner: Runner) -> None:
        while True:
            batch = await self._collect()
            if batch and not await self._run(runner, batch):
                self.live -= 1
                await self._restart(runner)
                self.live += 1

    async def _collect(self) -> list[_Waiting]:
        """The next batch, from the front of the queue; it waits a moment for more where there is room."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        if not (self._queue[0].alone or self.about["card"]["needs_groups"]):
            closes = asyncio.get_running_loop().time() + self.max_wait_s
            while len(self._queue) < self.max_batch:
                self._arrived.clear()
                try:
                    async with asyncio.timeout_at(closes):
                        await self._arrived.wait()
                except TimeoutError:
                    break
        return self._take()

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        pixels = 0
        while self._queue:
            head = self._queue[0]
            if head.job.done.done():
                self._queue.popleft()
                continue
            if batch and not self._fits(batch, head, pixels):
                break
            batch.append(self._queue.popleft())
            pixels += head.item.pixels
        return batch

    def _fits(self, batch: list[_Waiting], head: _Waiting, pixels: int) -> bool:
        if self.about["card"]["needs_groups"]:  # whole requests, one at a time
            return head.job is batch[0].job
        if len(batch) >= self.max_batch or pixels + head.item.pixels > self.limits.pixels:
            return False
        return head.job is batch[0].job or not (head.alone or batch[0].alone)

    async def _run(self, runner: Runner, batch: list[_Waiting]) -> bool:
        """Score a batch and settle it; False if the worker must be started anew."""
        self.counters.add("flowrl_batches_total", reward=self.name)
        single = all(one.job is batch[0].job for one in batch)
        try:
            async with asyncio.timeout(self.limits.score_s):
                results = await runner.run([one.item for one in batch])
                if len(results) != len(batch):
                    raise RuntimeError(f"{len(results)} results for {len(batch)} samples")
        except TimeoutError:
            log.warning("reward %r took longer than %g s: its worker is ended", self.name, self.limits.score_s)
            kind, text, final = "time", f"the reward took longer than {self.limits.score_s:g} s", single
        except WorkerDied as error:
            log.warning("reward %r: %s", self.name, error)
            # The death may have had nothing to do with the batch: a single request has a second try too.
            kind, text, final = "died", str(error), single and batch[0].alone
        except Exception as error:  # whatever it is, the next requests must still be served
            log.exception("reward %r: a batch failed outside of the reward", self.name)
            kind, text, final = "failed", f"{type(error).__name__}: {error}", single
        else:
            for one, result in zip(batch, results, strict=True):
                one.job.settle(one.row, result)
            return True
        runner.kill()
        if final:
            for one in batch:
                one.job.settle(one.row, failed(tuple(self.about["card"]["outputs"]), kind, text))
        else:
            for one in batch:
                one.alone = True
            self._queue.extendleft(reversed(batch))
            self._arrived.set()
        return False

    async def _restart(self, runner: Runner) -> None:
        tries = 0
        while True:
            await asyncio.sleep(_RESTART_S[min(tries, len(_RESTART_S) - 1)])
            tries += 1
            self.counters.add("flowrl_worker_restarts_total", reward=self.name)
            try:
                about = await runner.start()
            except (WorkerFailed, OSError) as error:  # OSError: no process or socket to be had at the moment
                log.warning("reward %r cannot be started again: %s", self.name, error)
                continue
            if about["fingerprint"] == self.about["fingerprint"]:
                return
            # Its file was edited: half of a run would be scored by another reward.
            log.warning("reward %r is not what it was when the server started; restart the server", self.name)
            runner.kill()
