"""`scripts.bench overhead`: the share of an iteration outside the work, which is the network, VAE, encoder and reward.

The work is timed where it begins: the forward of the denoiser's modules, `decode` and `encode` of the VAE, the reward's
own function. Adapters, guidance, samplers, losses, checks, copies, the optimizer and the files are overhead. A backward
pass is network as a whole.

On the CPU seconds are those of the process on the CPU, so that another job on the machine does not count.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TARGET = 0.04
"""Largest share of an iteration outside WORK, on tiny-sd3."""
WORK = ("network", "VAE", "text encoder", "reward")
PARTS = ("noise", "around the VAE", "around the reward", "spread of the images", "optimizer and averages")
"""Parts of the rest."""


class Stopwatch:
    """Seconds by name of the functions wrapped with `timed`; `take` returns and clears them.

    What a timed function calls in its turn counts under its own name alone.
    """

    def __init__(
        self, synchronise: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.synchronise, self.clock = synchronise, clock
        self._inside: list[float] = []
        """Seconds of the timed calls inside each call under way."""

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time added to `name`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.synchronise()
            self._inside.append(0.0)
            started = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.synchronise()
                took = self.clock() - started
                self.seconds[name] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return wrapped

    def take(self) -> dict[str, float]:
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


def whole(row: dict[str, float]) -> float:
    """Seconds of an iteration: the sum of its parts."""
    return sum(row.values())


def overhead_share(row: dict[str, float]) -> float:
    """Share of an iteration outside WORK; its parts are disjoint, "iteration" is what no other name has.

    >>> round(overhead_share({"iteration": 0.1, "network": 1.5, "reward": 0.3, "noise": 0.1}), 3)
    0.1
    """
    return 1 - sum(row.get(name, 0.0) for name in WORK) / whole(row)


def measure(resolved: Any, iterations: int, warmup: int = 1) -> list[dict[str, float]]:
    """Seconds by name of each measured iteration; the parity gate is in the warm-up."""
    import torch

    from flowrl.run.session import Session

    session = Session(
        dataclasses.replace(resolved, run=dataclasses.replace(resolved.run, iterations=warmup + iterations))
    )
    gpu = session.world.device.type == "cuda"
    watch = Stopwatch(torch.cuda.synchronize) if gpu else Stopwatch(clock=time.process_time)
    rows = []
    with watched(session, watch):
        iterate = watch.timed("iteration", session.step)
        for number in range(1, warmup + iterations + 1):
            iterate(number)
            rows.append(watch.take())
    return rows[warmup:]


def places(session: Any) -> list[tuple[Any, str, str]]:
    """(owner, attribute, name) of each function that is timed."""
    import torch

    from flowrl.models.weights.roles import component_names
    from flowrl.rollout.noise import Noise
    from flowrl.run import collector

    model, scorer = session.model, session.rewards
    vae = None if model.pipeline is None else model.pipeline.components.get("vae")
    images = [(model, "decode")] if vae is None else [(vae, "decode"), (vae, "encode")]
    return [
        *((network, "forward", "network") for network in component_names(model.network).values()),
        (torch.Tensor, "backward", "network"),
        *((owner, attribute, "VAE") for owner, attribute in images),
        (model, "encode", "text encoder"),
        *((entry.reward, "score", "reward") for entry in (() if scorer is None else scorer.distinct)),
        *((Noise, attribute, "noise") for attribute in ("initial", "step", "common")),
        (collector, "group_image_std", "spread of the images"),
        *(((model, "decode", "around the VAE"),) if vae is not None else ()),
        *(((scorer, "raw", "around the reward"),) if scorer is not None else ()),
        (session.optimizer, "step", "optimizer and averages"),
    ]


@contextmanager
def watched(session: Any, watch: Stopwatch) -> Iterator[None]:
    """Time the parts of a session; undone at the end."""
    put: list[tuple[Any, str, Any]] = []
    try:
        for owner, attribute, name in places(session):
            function = getattr(owner, attribute)
            # A reward has slots; of an instance with a dictionary the function is its class's.
            own = vars(owner).get(attribute) if "__dict__" in dir(owner) else function
            put.append((owner, attribute, own))
            _set(owner, attribute, watch.timed(name, function))
        yield
    finally:
        for owner, attribute, before in reversed(put):
            if before is None:  # it was that of the class
                delattr(owner, attribute)
            else:
                _set(owner, attribute, before)


def _set(owner: Any, attribute: str, function: Callable[..., Any]) -> None:
    try:
        setattr(owner, attribute, function)
    except dataclasses.FrozenInstanceError:  # a reward is frozen
        object.__setattr__(owner, attribute, function)


def report(rows: list[dict[str, float]], recipe: str, machine: str) -> str:
    """The result as Markdown."""
    import torch

    total = statistics.median(map(whole, rows))
    lines = ["| part | s | share |", "|---|---|---|"]
    rest = "everything else"
    named = [{rest if name == "iteration" else name: seconds for name, seconds in row.items()} for row in rows]
    for name in (*WORK, *PARTS, rest):
        middle = statistics.median(row.get(name, 0.0) for row in named)
        lines.append(f"| {name} | {middle:.4f} | {middle / total:.1%} |")
    shares = [overhead_share(row) for row in rows]
    middle = statistics.median(shares)
    verdict = "met" if middle < TARGET else "missed"
    return "\n".join(
        [
            *lines,
            f"| iteration | {total:.4f} | 100.0% |",
            "",
            f"Overhead, all but {', '.join(WORK[:-1])} and {WORK[-1]}: {middle:.1%} of an iteration of {recipe} "
            f"(median of {len(rows)}, {min(shares):.1%} to {max(shares):.1%}). "
            f"Target on tiny-sd3: below {TARGET:.0%}: {verdict}. "
            f"One process, {torch.get_num_threads()} thread(s), {machine}, torch {torch.__version__}.",
        ]
    )
