"""`flowrl list`: what there is, with its level."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def command(
    kind: Annotated[Literal["models", "samplers", "algorithms", "rewards"], typer.Argument(help="What to list.")],
) -> None:
    """Names, levels (tested, verified, experimental) and what each one is."""
    from rich.console import Console
    from rich.table import Table

    from flowrl import registry

    table = Table(show_edge=False, pad_edge=False)
    for title in ("name", "level", "what it is"):
        table.add_column(title)
    for name in registry.names(kind):
        module = registry.load(kind, name)
        first = (module.__doc__ or "").strip().splitlines()[0]
        table.add_row(name, getattr(module, "LEVEL", "experimental"), first)
    Console().print(table)
