"""`scripts.bench profile`, `ceilings`, `attention` and `gpu`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scripts.bench.words import Config, Out, Overrides, Random

if TYPE_CHECKING:
    from scripts.bench.gpu.records import Records
    from scripts.bench.gpu.session import Bench


def profile(
    config: Config,
    overrides: Overrides = None,
    random: Random = False,
    out: Annotated[Path, typer.Option(help="File whose name the traces (JSON, Chrome's format) begin with.")] = Path(
        "trace.json"
    ),
) -> None:
    """Profile one step of a rollout and one update: traces, and the ten largest costs of each."""
    from scripts.bench.gpu import profile as profiles
    from scripts.bench.gpu.session import opened

    with opened(config, overrides or [], random=random) as bench:
        found = profiles.both(bench)
    for name, each in found.items():
        print(f"{profiles.report(name, each)}\n")
    for file in profiles.write(found, out):
        print(f"trace: {file}")


def ceilings(
    out: Out = None,
    size: Annotated[int, typer.Option(help="Rows of the square matrices; smaller ones for the CPU.", min=16)] = 8192,
    copied_mib: Annotated[int, typer.Option(help="MiB of a copy.", min=1)] = 4096,
    repeats: Annotated[int, typer.Option(help="Measured calls of each.", min=1)] = 10,
) -> None:
    """Measure what the device can do at most: matrix products by type, and copies."""
    from scripts.bench.gpu import ceilings as kinds

    records = _records(out)
    kinds.measure(_device(), size, copied_mib, repeats, records)
    _finish(records)


def attention(
    out: Out = None,
    divisor: Annotated[
        int, typer.Option(help="Divides rows, heads and tokens of the shapes; above 1 for the CPU.", min=1)
    ] = 1,
    dtype: Annotated[str, typer.Option(help="Type: bfloat16, float16 or float32.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Measured calls of each.", min=1)] = 5,
) -> None:
    """Measure the backends of attention at the models' shapes: time, error, the default, equal bits."""
    from flowrl.core.errors import ConfigError
    from flowrl.models.base import torch_dtype
    from scripts.bench.gpu import attention as backends

    if dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"--dtype {dtype}: there are: bfloat16, float16, float32")
    records = _records(out)
    backends.measure(_device(), torch_dtype(dtype), divisor, repeats, records)
    _finish(records)


def gpu(
    config: Config,
    overrides: Overrides = None,
    random: Random = False,
    what: Annotated[
        str,
        typer.Option(
            help="What is measured, by commas: gate, rollout, update, decode, memory, noise, profile, checkpoint."
        ),
    ] = "gate,rollout,update",
    batches: Annotated[str, typer.Option(help="Samples of a forward, by commas. Default: rollout.batch_size.")] = "",
    variants: Annotated[
        str,
        typer.Option(
            help="Variants, by commas: now (the recipe), autocast, native, compile, checkpointing, stored, positive, "
            "vae-float32, vae-bfloat16, vae-channels-last."
        ),
    ] = "now",
    repeats: Annotated[int, typer.Option(help="Measured calls of each; the median counts.", min=1)] = 3,
    out: Out = None,
) -> None:
    """Measure the phases of a run on small rollouts with random rewards: ms, TFLOP/s, memory, gate."""
    from scripts.bench.gpu.records import Records
    from scripts.bench.gpu.session import VARIANTS, opened

    wanted = _chosen("--what", what, _measurements())
    counts = [_count(word) for word in batches.split(",") if word]
    records = _records(out, config=config)
    first: dict[int, Any] = {}
    for variant in _chosen("--variants", variants, VARIANTS):
        words = [*(overrides or []), *VARIANTS[variant]]
        names: dict[str, Any] = {"variant": variant, "overrides": " ".join(overrides or [])}
        errors = Records(None)
        start = partial(opened, config, words, random=random)
        opened_at_all = errors.attempt(
            lambda s=start, n=names: _measure(s, wanted, counts, repeats, records, n, first=first)
        )
        if not opened_at_all:
            records.add(what="open", **names, error=errors.rows[0]["error"])
    _finish(records)


def _measure(
    start: Callable[[], Bench],
    wanted: list[str],
    counts: list[int],
    repeats: int,
    records: Records,
    names: dict[str, Any],
    *,
    first: dict[int, Any],
) -> dict[str, Any]:
    """All measurements of a variant, in one session; `first` is kept between variants."""
    from dataclasses import replace

    from scripts.bench.gpu.phases import WHAT

    with start() as bench:
        for name in WHAT:
            if name not in wanted:
                continue
            for count in counts or [bench.batch]:
                sized = replace(bench, batch=count, first=first)
                records.attempt(lambda n=name, b=sized: WHAT[n](b, repeats), what=name, **names, batch=count)
    return {}


def _measurements() -> dict[str, Any]:
    from scripts.bench.gpu.phases import WHAT

    return WHAT


def _chosen(key: str, words: str, known: dict[str, Any]) -> list[str]:
    """Names of an option; raises ConfigError for an unknown one."""
    from flowrl.core.errors import ConfigError
    from flowrl.core.registry import suggest

    result = [word.strip() for word in words.split(",") if word.strip()]
    for word in result:
        if word not in known:
            raise ConfigError(f"{key} {word}: {suggest(word, list(known))}there are: {', '.join(known)}")
    return result


def _count(word: str) -> int:
    from flowrl.core.errors import ConfigError

    if not word.strip().isdigit() or int(word) < 1:
        raise ConfigError(f"--batches {word}: give whole numbers from 1, by commas")
    return int(word)


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _records(out: Path | None, **common: Any) -> Records:
    import torch

    from scripts.bench.gpu.clock import device_name
    from scripts.bench.gpu.records import Records

    return Records(out, device=device_name(_device()), torch=torch.__version__, **common)


def _finish(records: Records) -> None:
    """Print the table; exit code 1 where nothing could be measured."""
    from scripts.bench.gpu.records import table

    first = records.rows[0] if records.rows else {}
    print(f"{first.get('device')}, torch {first.get('torch')}\n")
    print(table(records.rows, leave_out=("device", "torch", "config", "overrides", "spent_s")))
    if not records.succeeded:
        raise SystemExit(1)
