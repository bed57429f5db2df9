"""`flowrl export`: a run's weights as other programs read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def command(
    run: Annotated[Path, typer.Argument(help="Run folder, such as runs/quickstart.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; new or empty.")],
    layout: Annotated[
        Literal["diffusers", "kohya", "merged"],
        typer.Option("--format", help="diffusers: a LoRA; kohya: one for ComfyUI; merged: a whole pipeline."),
    ] = "diffusers",
) -> None:
    """Write the trained weights; prints the file or folder to load."""
    from flowrl.run.export import export

    print(export(run, layout, out))
