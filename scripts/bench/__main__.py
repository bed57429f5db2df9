"""Benches of flowrl itself: `python -m scripts.bench WHAT ...` in the repository's root."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import Group, handle
from flowrl.core.startup import own_process
from scripts.bench.gpu import commands as gpu_commands
from scripts.bench.words import Config, Overrides, Page

app = typer.Typer(
    cls=Group,
    help="Benches of flowrl's own machinery, each with its target.",
    epilog="Results: docs/performance.md",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
for one in (gpu_commands.profile, gpu_commands.ceilings, gpu_commands.attention, gpu_commands.gpu):
    app.command()(one)


@app.command()
def overhead(
    config: Config,
    overrides: Overrides = None,
    iterations: Annotated[int, typer.Option(help="Measured iterations.", min=1)] = 5,
    warmup: Annotated[int, typer.Option(help="Iterations before them, not measured.", min=1)] = 1,
    page: Page = None,
) -> None:
    """Measure the share of an iteration outside network, VAE, text encoder and reward, in one process."""
    from flowrl.config.load import load_config, resolve
    from scripts.bench.overhead import measure, report
    from scripts.bench.page import cpu, show

    show(report(measure(resolve(load_config(config, overrides)), iterations, warmup), config, cpu()), page, "overhead")


@app.command()
def start(
    config: Config = "quickstart",
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="Measured processes of each kind.", min=1)] = 3,
    page: Page = None,
) -> None:
    """Measure the start of `flowrl train` up to its first iteration, without the base's evaluation, next to imports."""
    from scripts.bench.page import cpu, show
    from scripts.bench.start import report

    show(report(config, overrides or [], rounds, cpu()), page, "start")


@app.command()
def reentry(
    calls: Annotated[int, typer.Option(help="Measured pairs of calls; more narrow the interval.", min=10)] = 300,
    batch: Annotated[int, typer.Option(help="Samples of a call.", min=1)] = 2,
    guidance: Annotated[float, typer.Option(help="Guidance scale of the calls.")] = 4.5,
    page: Page = None,
) -> None:
    """Measure the cost of the generic adapter's `predict` above the native sd3 adapter's, on tiny-sd3."""
    import torch

    from scripts.bench.page import show
    from scripts.bench.reentry import cost, report

    show(report(cost(calls, batch, guidance), batch, guidance, torch.get_num_threads()), page, "reentry")


@app.command()
def copies(
    config: Config = "configs/lab/edit-awm.yaml",
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="Measured pairs of evaluations.", min=1)] = 5,
) -> None:
    """Measure the share of an evaluation that the copy index takes, in CPU time."""
    from flowrl.config.load import load_config, resolve
    from scripts.bench.copies import cost, report

    print(report(cost(resolve(load_config(config, overrides)), rounds), config))


@app.command()
def exploration(
    config: Config,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(help="Prompts whose candidates are all sampled in full.", min=1)] = 8,
    rounds: Annotated[int, typer.Option(help="Timed pairs of rollouts.", min=1)] = 3,
) -> None:
    """Compare the first look of two-stage exploration with the full rollout: ranking and seconds."""
    from flowrl.config.load import load_config, resolve
    from scripts.bench.exploration import report

    print(report(resolve(load_config(config, overrides)), prompts, rounds))


@app.command()
def trees(
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="Measured iterations of each method.", min=1)] = 10,
    page: Page = None,
) -> None:
    """Measure iterations of BranchGRPO, DanceGRPO and MixGRPO on tiny-sd3: 20 steps, 16 leaves."""
    from scripts.bench.page import cpu, show
    from scripts.bench.trees import measure, report

    show(report(measure(overrides or [], rounds), cpu()), page, "trees")


@app.command()
def peers(
    config: Config = "lab/flow_grpo",
    overrides: Overrides = None,
    pairs: Annotated[int, typer.Option(help="Measured pairs of each row; more narrow the intervals.", min=5)] = 20,
    page: Page = None,
) -> None:
    """Compare rollouts and updates with plain diffusers loops of the same work: the pipeline's call, a bare loop."""
    from scripts.bench.page import cpu, show
    from scripts.bench.peers import measure, report

    show(report(*measure(config, overrides or [], pairs), cpu()), page, "peers")


@app.command()
def serve(
    seconds: Annotated[float, typer.Option(help="Measured time in seconds, after a warm-up of 2 s.", min=1)] = 10.0,
    clients: Annotated[int, typer.Option(help="Number of clients, each with one open request.", min=1)] = 32,
    items: Annotated[int, typer.Option(help="Images of a request.", min=1)] = 16,
    core: Annotated[int, typer.Option(help="Number of the CPU core that the server runs on.", min=0)] = 0,
) -> None:
    """Measure images per second and the latency of a reward server with `jpeg` on one core (Linux)."""
    from scripts.bench.serve import report

    print(report(seconds, clients, items, core))


@app.command()
def gallery(
    prompts: Annotated[int, typer.Option(help="Prompts of a run.", min=1)] = 200,
    seeds: Annotated[int, typer.Option(help="Images of a prompt.", min=1)] = 4,
    size: Annotated[int, typer.Option(help="Side of an image in pixels.", min=1)] = 512,
    words: Annotated[int, typer.Option(help="Words of a prompt.", min=1)] = 12,
    runs: Annotated[int, typer.Option(help="More than one: their comparison.", min=1)] = 1,
    rows: Annotated[int, typer.Option(help="Rows of metrics.jsonl, of 45 numbers; 0: 40 rows of 2.", min=0)] = 0,
    paint: Annotated[bool, typer.Option("--paint", help="Open the page in Chromium five times, too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="The live page instead of the report.")] = False,
    keep: Annotated[Path | None, typer.Option(help="An empty folder for the runs; default: a temporary one.")] = None,
) -> None:
    """Measure what a report, or the live page, of synthetic runs costs: size, seconds, peak memory."""
    from scripts.bench.gallery import report

    print(report((prompts, seeds, size, words), runs, rows, paint=paint, watch=watch, keep=keep))


@app.command()
def pair_check(
    pairs: Annotated[int, typer.Option(help="Pairs of edits.", min=4)] = 2000,
    sources: Annotated[int, typer.Option(help="Sources that they share.", min=1)] = 200,
    rounds: Annotated[int, typer.Option(help="Measured rounds of both.", min=1)] = 3,
) -> None:
    """Measure `flowrl pairs --check` against the bare decoding of the set's files on two processes (Linux)."""
    from scripts.bench.pair_check import report

    print(report(pairs, sources, rounds))


@app.command()
def watching(
    pairs: Annotated[int, typer.Option(help="Pairs of whole runs.", min=1)] = 8,
    iterations: Annotated[int, typer.Option(help="Iterations of a run.", min=3)] = 40,
    shares: Annotated[bool, typer.Option("--shares", help="The parts alone, in one run.")] = False,
) -> None:
    """Measure what guard, trackers, display and a live page cost a run: the quickstart with and without them."""
    from scripts.bench import watching

    if shares:
        watching.shares(iterations)
    else:
        watching.compare(pairs, iterations)


@app.command()
def recipe_memory(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Recipes. Default: the quickstart and real models'.")
    ] = None,
) -> None:
    """Write what `flowrl plan` says about the memory of recipes into configs/memory.json."""
    from scripts.bench.recipe_memory import write

    write(names or [])


def main() -> None:
    """Run a bench; exit codes as those of `flowrl`."""
    own_process()
    try:
        app(prog_name="python -m scripts.bench")
    except Exception as error:
        handle(error)


if __name__ == "__main__":
    main()
