"""flowrl/core/components.json: what lists and messages say of built-in components, so that they import none of them."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.commands._listed import described
from flowrl.commands.list import cells, suite_lines
from flowrl.core import registry
from flowrl.core.strict import dotted
from flowrl.models.base import ModelConfig


def facts(kind: str, name: str) -> dict[str, object]:
    """What is stored of a component."""
    row: dict[str, object] = {"row": cells(kind, name)}
    if kind == "rewards":
        return row | {"shown": described(kind, name)}
    if kind == "suites":
        return row | {"shown": suite_lines(name)}
    config = registry.load(kind, name).Config
    row["options"] = list(dotted(config))
    return row | {"default_sampler": config.default_sampler} if kind == "algorithms" else row


def pages() -> dict[Path, str]:
    """The file's text: a component in a line; infinite bounds as Python writes and reads them."""
    every = {kind: {name: facts(kind, name) for name in registry.names(kind)} for kind in registry.FOLDERS}
    every["models"] = {"": dict[str, object](options=list(dotted(ModelConfig))), **every["models"]}
    kinds = (
        f'"{kind}": {{\n'
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in those.items())
        + "\n}"
        for kind, those in every.items()
    )
    return {registry.PACKAGE / "core" / "components.json": "{\n" + ",\n".join(kinds) + "\n}\n"}
