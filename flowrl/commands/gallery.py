"""`flowrl gallery`: the HTML report of one run, or of several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path | None, typer.Option("--out", help="Default: <first run>/gallery/index.html.")] = None,
) -> None:
    """Build the report; it opens from disk."""
    from flowrl.config import ConfigError
    from flowrl.gallery import build

    try:
        print(build(runs, out))
    except ValueError as error:
        raise ConfigError(str(error)) from None
