"""flowrl/commands/listed.json: what `flowrl list` says of built-in components, so that it imports none of them."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.commands._listed import FILE, described
from flowrl.commands.list import cells, suite_lines
from flowrl.core import registry


def facts(kind: str, name: str) -> dict[str, object]:
    """What is stored of a component."""
    row: dict[str, object] = {"row": cells(kind, name)}
    if kind == "rewards":
        return row | {"shown": described(kind, name)}
    return row | {"shown": suite_lines(name)} if kind == "suites" else row


def pages() -> dict[Path, str]:
    """The file's text: a component in a line; infinite bounds as Python writes and reads them."""
    kinds = {
        kind: ",\n".join(f"{json.dumps(name)}: {json.dumps(facts(kind, name))}" for name in registry.names(kind))
        for kind in registry.FOLDERS
    }
    return {FILE: "{\n" + ",\n".join(f'"{kind}": {{\n{rows}\n}}' for kind, rows in kinds.items()) + "\n}\n"}
