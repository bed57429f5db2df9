"""A folder with a list of prompts for each style."""

import json
from pathlib import Path

from flowrl.apps.suites.hpdv2 import STYLES


def prompts(folder: Path, count: int = 2) -> Path:
    for style in STYLES:
        (folder / f"{style}.json").write_text(json.dumps([f"{style} of thing {number}" for number in range(count)]))
    return folder
