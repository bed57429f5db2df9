"""The published configurations of other tools, and drafts of recipes made of them, changed or not."""

from pathlib import Path
from typing import Any

from flowrl.apps.migration.engine import Draft, convert, recipe_text
from flowrl.apps.migration.tools import TOOLS
from flowrl.config.load import load_config, resolve

PUBLISHED = Path(__file__).parent / "published"


def text_of(name: str, *changes: tuple[str, str]) -> str:
    """A published file, with each text that is given in place of another."""
    text = (PUBLISHED / name).read_text(encoding="ascii")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def converted(tool: str, folder: Path, text: str, name: str, gpus: int | None = None) -> Draft:
    """The draft of a file of that text; `name`: of the file, of flow_grpo FILE.py:NAME, which has base.py beside it."""
    file, colon, function = name.partition(":")
    (folder / file).write_text(text, encoding="ascii")
    if file == "grpo.py":
        (folder / "base.py").write_text(text_of("base.py.txt"), encoding="ascii")
    return convert(TOOLS[tool], f"{folder / file}{colon}{function}", gpus, folder)


def resolved(draft: Draft, folder: Path) -> Any:
    """The recipe as a run of it has it."""
    made = folder / "recipe.yaml"
    made.write_text(recipe_text(draft), encoding="ascii")
    return resolve(load_config(made), offline=True)


def unmentioned(draft: Draft) -> set[str]:
    """Keys that the configuration sets, and that neither come with a line nor are listed."""
    used = {key for line in (*draft.lines.values(), *draft.rewards) for key in line.keys}
    return draft.source.values.keys() - used - draft.listed.keys()


def changing(draft: Draft) -> set[str]:
    """Keys without a counterpart that change results."""
    return {key for key, entry in draft.listed.items() if entry.changes}
