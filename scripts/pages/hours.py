"""flowrl/commands/measured.json, from docs/gpu_day: ms of forwards on a card, for the hours of `flowrl plan`."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.commands._plan_hours import setting
from flowrl.config.load import load_config, resolve
from flowrl.planning.checkpointing import choice
from flowrl.planning.memory import skeleton
from scripts.bench.gpu.session import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "flowrl" / "commands" / "measured.json"
CARDS = {"NVIDIA H200": 139.8, "NVIDIA H100 80GB HBM3": 79.2}
"""Card, as torch calls it -> its memory in GiB."""
TAKEN = ("now", "stored")
"""Variants whose options are those of a recipe, or a recipe that recomputes nothing; others are comparisons."""


def words(line: dict[str, Any]) -> tuple[str, ...]:
    """The overrides of a line's run."""
    given = line.get("overrides", "")
    return (*(re.split(r" (?=[\w.]+=)", given) if given else ()), *VARIANTS[line["variant"]])


@cache
def _setting(recipe: str, *words: str) -> dict[str, Any]:
    resolved = resolve(load_config(recipe, list(words)), offline=True)
    return json.loads(json.dumps(setting(resolved, skeleton(resolved))))


@cache
def _recomputes(memory: float, recipe: str, *words: str) -> bool:
    """Whether its updates recompute, `auto` as on a card of so many GiB."""
    resolved = resolve(load_config(recipe, list(words)), offline=True)
    every = resolved.model.config.gradient_checkpointing
    return choice(resolved, int(memory * 2**30), 1).on if every == "auto" else bool(every)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The newest measurement of each card and setting: a forward of the rollout and, where it was taken, an update."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    lines = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    # A stable sort: of one call the later line wins, and an update belongs to the rollout of its own call and batch.
    for line in sorted(lines, key=lambda line: line.get("call", 0)):
        if line.get("variant") not in TAKEN or line["what"] not in ("rollout", "update") or "rows" not in line:
            continue
        own = _setting(line["config"], *words(line))
        key, source = (line["device"], json.dumps(own)), {name: line[name] for name in ("call", "batch", "config")}
        if line["what"] == "rollout":
            taken = {"ms": line["ms_per_forward"], "rows": line["rows"]}
            newest[key] = {"card": line["device"], **source, "setting": own, "forward": taken, "update": None}
        elif key in newest and source.items() <= newest[key].items():
            newest[key]["update"] = {
                "ms": line["ms_per_microbatch"],
                "rows": line["rows"],
                "trained_rows": line["trained_rows"],
                "step_ms": line["ms_per_optimizer_step"],
                "recomputes": _recomputes(CARDS[line["device"]], line["config"], *words(line)),
            }
    return list(newest.values())


def pages() -> dict[Path, str]:
    """The table: cards and their memory, and a measurement in a line."""
    found = rows(ROOT / "docs" / "gpu_day")
    cards = {card: memory for card, memory in CARDS.items() if any(row["card"] == card for row in found)}
    lines = ",\n".join(json.dumps(row) for row in found)
    return {FILE: f'{{"cards": {json.dumps(cards)},\n"rows": [\n{lines}\n]}}\n'}
