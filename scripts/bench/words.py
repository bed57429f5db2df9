"""Arguments and options that several benches share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="Configuration: a YAML file, a run folder, or the name of a recipe.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Options that replace those of CONFIG, such as rewards.0.weight=2."),
]
Page = Annotated[
    Path | None,
    typer.Option(help="Markdown file that takes the result, between its two marks. Default: print alone."),
]
Out = Annotated[
    Path | None,
    typer.Option("--json", help="JSON lines file that each result is appended to at once. Default: print alone."),
]
Random = Annotated[
    bool, typer.Option(help="Random weights of the model's shapes, made on the device, not the model's own.")
]
