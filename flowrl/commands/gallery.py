"""`flowrl gallery`: the HTML report of one run, or of several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, finished or not.")],
    accept: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Permission to compare runs that had different contents of a file (reward, prompts, pairs).\n\n"
            "They are shown side by side without a common chart. Without it they are refused.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of index.html.\n\nDefault: RUN/gallery; for several runs gallery-A-B next to the first.",
        ),
    ] = None,
) -> None:
    """Build the HTML report of one run, or of several side by side. It opens from disk."""
    from flowrl.core.files import out_folder
    from flowrl.gallery import build
    from flowrl.gallery.places import PAGE

    print(build(runs, None if out is None else out_folder(out, PAGE), accept))
