"""Provenance of the files of `flowrl sample`, and the names that follow from it.

A file is named `<prompt>-<sample>-<mark>`: two numbers of the call, and eight digits of a hash over all that decides
the image: prompt, images, seed, model, adapter, steps, guidance and all other arguments. So a file is overwritten by
the same call alone, which makes the same image again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.run.origin import content


def provenance(made: dict[str, Any], prompt: str, images: Sequence[str], seed: int) -> dict[str, Any]:
    """Plain data of one file: `origin` of its call, prompt, seed, and the contents of the image files."""
    hashes = [{"file": Path(path).name, "sha256": content(Path(path)).hexdigest()} for path in images]
    return {"prompt": prompt, "seed": seed, **made, "images": hashes}


def stem(number: int, sample: int, note: dict[str, Any]) -> str:
    """Name of a file without its suffix; `note` is its provenance.

    >>> stem(3, 0, {"prompt": "a red circle"})
    '00003-0-79564736'
    """
    mark = hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()[:8]
    return f"{number:05d}-{sample}-{mark}"
