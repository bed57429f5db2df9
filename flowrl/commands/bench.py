"""`flowrl bench`: what the machinery costs."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

app = typer.Typer(help="Benchmarks; they print numbers and judge nothing but their own target.", no_args_is_help=True)

TARGET = 0.10
"""Share of an iteration that may be spent outside the work itself, on tiny-sd3."""
WORK = ("network", "VAE", "text encoder", "reward")


@app.callback()
def _bench() -> None:
    pass


@app.command()
def overhead(
    config: Annotated[str, typer.Argument(help="YAML file; a lab recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=c words.")] = None,
    iterations: Annotated[int, typer.Option("--iterations", help="Measured ones.", min=1)] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Run before, not counted.", min=1)] = 1,
) -> None:
    """Share of an iteration outside network, VAE, text encoder and reward, in this one process."""
    import torch
    from rich.console import Console

    from flowrl.config import load_config, resolve

    rows = measure(resolve(load_config(config, overrides)), iterations, warmup)
    console = Console()
    console.print(_table(rows))
    shares = [overhead_share(row) for row in rows]
    middle = statistics.median(shares)
    console.print(
        f"overhead: {middle:.1%} of an iteration (median of {len(rows)}, {min(shares):.1%} to {max(shares):.1%}), "
        f"target {TARGET:.0%} on tiny-sd3: {'met' if middle < TARGET else 'missed'}; "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}"
    )


class Stopwatch:
    """Seconds by name, of functions wrapped with `timed`; `take` returns and clears them."""

    def __init__(self, synchronise: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.synchronise = synchronise

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time added to `name`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.synchronise()
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.synchronise()
                self.seconds[name] += time.perf_counter() - started

        return wrapped

    def take(self) -> dict[str, float]:
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


def overhead_share(row: dict[str, float]) -> float:
    """Part of `row["iteration"]` that is not work.

    >>> round(overhead_share({"iteration": 2.0, "network": 1.5, "reward": 0.3, "optimizer": 0.1}), 3)
    0.1
    """
    return 1 - sum(row.get(name, 0.0) for name in WORK) / row["iteration"]


def measure(resolved: Any, iterations: int, warmup: int = 1) -> list[dict[str, float]]:
    """Seconds by name of each measured iteration; the parity gate falls into the warm-up."""
    import dataclasses
    import tempfile
    from pathlib import Path

    import torch

    from flowrl.distributed import join
    from flowrl.runs import RunFolder
    from flowrl.trainer import Trainer

    trainer = Trainer(
        dataclasses.replace(resolved, run=dataclasses.replace(resolved.run, iterations=warmup + iterations))
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer.world, trainer.folder, trainer.start = join(), RunFolder(Path(folder)), 0
        trainer._load()
    watch = Stopwatch(torch.cuda.synchronize if trainer.world.device.type == "cuda" else lambda: None)
    rows = []
    with _watched(trainer, watch):
        iterate = watch.timed("iteration", trainer._iterate)
        for number in range(1, warmup + iterations + 1):
            iterate(number)
            rows.append(watch.take())
    return rows[warmup:]


@contextmanager
def _watched(trainer: Any, watch: Stopwatch) -> Iterator[None]:
    """Times the parts of `trainer`, and every backward pass as network; undone at the end."""
    import torch

    places = (
        (trainer.adapter, "predict", "network"),
        (trainer.adapter, "decode", "VAE"),
        (trainer.texts, "lookup", "text encoder"),
        (trainer.scorer, "score", "reward"),
        (trainer.optimizer, "step", "optimizer"),
        (torch.Tensor, "backward", "network"),
    )
    kept = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in places]
    for owner, attribute, name in places:
        setattr(owner, attribute, watch.timed(name, getattr(owner, attribute)))
    try:
        yield
    finally:
        for owner, attribute, function in kept:
            setattr(owner, attribute, function)


def _table(rows: list[dict[str, float]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, title in enumerate(("part", "median s", "share")):
        table.add_column(title, justify="right" if number else "left")
    total = statistics.median(row["iteration"] for row in rows)
    for name in (*WORK, "optimizer"):
        middle = statistics.median(row.get(name, 0.0) for row in rows)
        table.add_row(name, f"{middle:.4f}", f"{middle / total:.1%}")
    rest = [overhead_share(row) * row["iteration"] - row.get("optimizer", 0.0) for row in rows]
    table.add_row("everything else", f"{statistics.median(rest):.4f}", f"{statistics.median(rest) / total:.1%}")
    table.add_row("iteration", f"{total:.4f}", "100.0%")
    return table
