"""`flowrl export`: a run's weights in the formats that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from flowrl.commands._arguments import argument, option

Run = Annotated[Path, argument("RUN", "Run folder, such as runs/quickstart.")]
Out = Annotated[Path, option("Folder for the result; it must be new or empty.")]
Format = Annotated[
    Literal["diffusers", "kohya", "merged"],
    option(
        "Format of the weights.",
        "diffusers: a LoRA for diffusers. kohya: a LoRA for ComfyUI (SD3 alone). merged: a whole pipeline.",
        name="--format",
    ),
]


def command(run: Run, out: Out, layout: Format = "diffusers") -> None:
    """Export the trained weights of a run, and print the file or folder to load."""
    from flowrl.run.export import export

    print(export(run, layout, out))
