"""`flowrl gallery`: the HTML report of one run, or of several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    accept: Annotated[
        bool,
        typer.Option("--accept-changes", help="Also runs of which a file had other contents each, without one chart."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of index.html; default: RUN/gallery, of several gallery-A-B beside them."),
    ] = None,
) -> None:
    """Build the report; it opens from disk."""
    from flowrl.core.files import out_folder
    from flowrl.gallery import build
    from flowrl.gallery.places import PAGE

    print(build(runs, None if out is None else out_folder(out, PAGE), accept))
