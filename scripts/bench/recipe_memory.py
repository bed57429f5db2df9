"""What `flowrl plan` says about the memory of the shipped recipes, for `flowrl list recipes`.

    python -m scripts.bench recipe-memory [NAME ...]

runs `flowrl plan` for each recipe (of real models and the quickstart, if none is named) and writes the largest phase of
one process into configs/memory.json. A figure counts for the options that it was made with: `flowrl list recipes`
shows none for a recipe that has changed since.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from flowrl.commands._listed import MEMORY, recipe_tree
from flowrl.core import assets
from flowrl.core.files import write_atomically
from flowrl.data.contents import fingerprint

FILE = Path(__file__).resolve().parents[2] / "configs" / MEMORY
UNITS = {"GiB": 1.0, "MiB": 1 / 1024, "KiB": 1 / 1024**2}


def figure(name: str) -> dict[str, object] | None:
    """{gib, phase, recipe} by the plan of a recipe; None: it gives none."""
    done = subprocess.run([sys.executable, "-m", "flowrl", "plan", name], capture_output=True, text=True, check=False)
    said = re.search(r"largest: (.+), ([\d.,]+) (GiB|MiB|KiB)\.", done.stdout)
    if said is None:
        print(f"{name}: no figure (exit code {done.returncode}) {done.stderr.strip()[:200]}")
        return None
    gib = float(f"{float(said[2].replace(',', '')) * UNITS[said[3]]:.3g}")
    return {"gib": gib, "phase": said[1], "recipe": fingerprint(recipe_tree(name))}


def write(given: list[str]) -> None:
    """Write the figures of some recipes; of none: those of real models and the quickstart."""
    names = given or [one for one in assets.recipes() if not one.startswith(("lab/", "proxy/"))]
    for name in names:
        known = json.loads(FILE.read_text("ascii")) if FILE.is_file() else {}
        made = figure(name)
        if made is not None:
            write_atomically(FILE, json.dumps(dict(sorted((known | {name: made}).items())), indent=1) + "\n")
            print(f"{name}: {made['gib']} GiB, {made['phase']}", flush=True)
