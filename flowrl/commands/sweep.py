"""`flowrl sweep`: recipes x methods x seeds, one run after another, and one comparison."""

from pathlib import Path

from flowrl.core.errors import ConfigError
from flowrl.core.startup import imports


def command(
    words: list[str], methods: str | None = None, seeds: str = "0", out: Path | None = None, processes: int = 1
) -> None:
    """Train methods and seeds; compare the runs. Configurations too; one run after another.

    The same command goes on after an interruption. Exit code 1: a run failed.
    """
    with imports():
        from flowrl.apps import sweep as _sweep

    recipes = [word for word in words if "=" not in word or Path(word).exists()]
    if not recipes:
        raise ConfigError("CONFIG is missing: name at least one configuration (flowrl list recipes)")
    overrides = [word for word in words if word not in recipes]
    asked = _sweep.cells(recipes, _names(methods), _numbers(seeds), overrides)
    folder = Path("runs", f"sweep-{asked[0].run.rpartition('-s')[0]}") if out is None else out
    made = _sweep.recorded(folder, asked)
    flags = [] if processes == 1 else ["--processes", str(processes)]
    for number, cell in _sweep.run(folder, made, flags, _sweep.trained):
        print(f"sweep: {number + 1} of {len(made)}, {cell.run}: {cell.status}", flush=True)
        if cell.status == "stopped":
            print("sweep: stopped; the same command goes on")
            raise SystemExit(cell.exit_code if (cell.exit_code or 0) > 0 else 128 - (cell.exit_code or 0))
    _finish(folder, made)


def _finish(folder: Path, made: list) -> None:
    """Compare the finished runs, and name the failed ones."""
    from flowrl.apps import sweep as _sweep
    from flowrl.apps.gallery import build

    done = [folder / cell.run for cell in made if cell.status == "finished"]
    page = build(done, folder / "comparison") if len(done) > 1 else None
    _sweep.save(folder, made, None if page is None else str(page))
    if page is not None:
        print(page)
    failed = [cell for cell in made if cell.status == "failed"]
    if failed:
        names = "; ".join(f"{cell.run} (exit code {cell.exit_code}, {folder / cell.run}/train.log)" for cell in failed)
        raise _sweep.SweepFailed(
            f"{len(failed)} of {len(made)} runs failed: {names}. The same command tries them again"
        )


def _names(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    """Seeds of a list such as "0,1,2".

    >>> _numbers("0, 2")
    [0, 2]
    """
    parts = _names(text)
    seeds = [int(part) for part in parts if part.isdecimal()]
    if not parts or len(set(seeds)) < len(parts):
        raise ConfigError(f"--seeds {text}: give different whole numbers, such as 0,1,2")
    return seeds
