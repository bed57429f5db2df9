"""Tables of cases that stand in a YAML file beside their test: what is data, not code."""

from pathlib import Path
from typing import Any

from flowrl.core.strict import parse_yaml


def table(test: str, name: str) -> Any:
    """What `name`.yaml holds, in the folder of the module `test` (its `__file__`)."""
    file = Path(test).parent / f"{name}.yaml"
    return parse_yaml(file.read_text(encoding="utf-8"), str(file))
