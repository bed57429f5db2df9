"""`flowrl export`: a run's weights in the formats that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, such as runs/quickstart.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the result; it must be new or empty.")],
    layout: Annotated[
        Literal["diffusers", "kohya", "merged"],
        typer.Option(
            "--format",
            help="Format of the weights.\n\n"
            "diffusers: a LoRA for diffusers. kohya: a LoRA for ComfyUI (SD3 alone). merged: a whole pipeline.",
        ),
    ] = "diffusers",
) -> None:
    """Export the trained weights of a run, and print the file or folder to load."""
    from flowrl.run.export import export

    print(export(run, layout, out))
