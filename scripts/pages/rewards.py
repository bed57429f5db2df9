"""docs/rewards.md, from the cards of rewards/, docs/rewards/notes.md and docs/rewards/proxy.md.

Nothing is loaded or downloaded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from flowrl.commands.list import about, direction, span
from flowrl.core import registry
from flowrl.reward import Card

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "rewards.md"
PAGES = ROOT / "docs" / "rewards"
NOTES, PROXY = PAGES / "notes.md", PAGES / "proxy.md"
SEES = {"any": "images, videos", "image": "images", "video": "videos", "edit": "source and result"} | {
    "latents": "latents of one model"
}
HEAD = """# Rewards

Written by `python -m scripts.pages` from the cards of `rewards/` and `docs/rewards/notes.md`; do not edit.

`flowrl list rewards` shows the same table, `flowrl list rewards NAME` shows a whole card with the options. Raw values
are on the published scale of each model; logs, evaluations and reports contain raw values only. Each card is that of
the default options: other options may change the card. Levels: *tested*, a CPU test scores with the reward as it is;
*verified*, real weights were run and there are numbers; *experimental*, the formulas are checked through tiny random
networks of the same architecture.

| reward | what it is | outputs | range, better | input | gradient | level |
|---|---|---|---|---|---|---|
"""
DETAILS = """
Training uses the first output, unless `outputs` names others. "Input" is the kind of sample: a reward for images alone
is refused for a model that makes videos, and the other way round.

## What each reward needs

| reward | resolution | every record needs | memory | transform | licence | source |
|---|---|---|---|---|---|---|
"""
EXAMPLE = """
## Over-optimisation, an example

A learned reward approximates the goal. In the shapes world both the learned reward and the goal can be measured. The
recipes below train on the cosine of `tiny-clip`; `multi_reward` has the verifier of `shapes` as a second reward. All
cells and their commands: [Proxy against gold](rewards/proxy.md).

![the proxy and the strict verifier against iterations](rewards/proxy.svg)
"""


def cards() -> Iterator[tuple[str, str, Card]]:
    """(name, what it is, card) of every built-in reward."""
    for name in registry.names("rewards"):
        module = registry.load("rewards", name)
        yield name, about(module.__doc__), module.CARD


def line(*cells: str) -> str:
    """A row of a table; a bar inside a cell would end it."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def overview(name: str, what: str, card: Card) -> str:
    better = f"{span(card)}, {direction(card)}"
    sees = SEES[card.modality] + (", whole groups" if card.needs_groups else "")
    outputs = ", ".join(f"`{output}`" for output in card.outputs)
    return line(f"`{name}`", what, outputs, better, sees, "yes" if card.differentiable else "", card.level)


def details(name: str, card: Card) -> str:
    scale, offset = card.transform
    transform = "raw" if card.transform == (1.0, 0.0) else f"{scale:.6g} raw{f' {offset:+.6g}' if offset else ''}"
    keys = dict.fromkeys((*card.requires, *(["images"] if card.modality == "edit" else [])))
    needs = [f"`{key}`" for key in keys]
    memory = f"{card.memory_gib:g} GiB" if card.memory_gib else ""
    return line(f"`{name}`", card.resolution, ", ".join(needs), memory, transform, card.licence, card.source)


def options() -> str:
    """What every entry of `rewards` takes, with its default."""
    from flowrl.scoring.options import RewardEntry

    shown = []
    for item in dataclasses.fields(RewardEntry):
        made = item.default_factory
        value = item.default if made is dataclasses.MISSING else made()
        shown.append(f"`{item.name}: {json.dumps(value)}`")
    return ", ".join(shown)


def links() -> str:
    """Links to the other files of docs/rewards/, by their titles."""
    result = []
    for file in sorted(PAGES.glob("*.md")):
        if file != NOTES:
            title = file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            result.append(f"- [{title}](rewards/{file.name})\n")
    return "\n## More\n\n" + "".join(result) if result else ""


def example() -> str:
    """The curves of docs/rewards/proxy.md, and its summary of them."""
    _, _, rest = PROXY.read_text(encoding="utf-8").partition("## In short\n")
    short = rest.partition("\n## ")[0].strip()
    return EXAMPLE + (f"\n{short}\n" if short else "")


def pages() -> dict[Path, str]:
    """The page and its whole text."""
    known = list(cards())
    first = "".join(overview(*each) for each in known)
    second = "".join(details(name, card) for name, _, card in known)
    entry = (
        f"\nEvery entry of `rewards` takes, with these defaults: {options()}. The other keys are the reward's own.\n"
    )
    notes = NOTES.read_text(encoding="utf-8")
    return {FILE: HEAD + first + DETAILS + second + entry + "\n" + notes + example() + links()}
