"""The filmstrip of the user's own prompts (`eval.preview_prompts`): a row for each, a column for each evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.apps.gallery.images import FRAME_PX, Place
from flowrl.apps.gallery.runs import Run
from flowrl.core.errors import ConfigError
from flowrl.core.files import read_object
from flowrl.media import media

FOLDER = "previews"
MAX_COLUMNS = 16
"""Largest number of evaluations that are shown, evenly spaced, with both ends."""
STRIP_BYTES = 4_000_000
"""Bytes of a page for the images, from which on further prompts are left out."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The images of an evaluation."""

    tag: str
    iteration: int
    prompts: tuple[str, ...] = ()
    """Prompts that were drawn; (): none, as before the option was set."""

    @property
    def label(self) -> str:
        if self.tag.startswith("iteration-"):
            return str(self.iteration)
        return f"{self.tag} ({self.iteration})" if self.iteration else self.tag

    def image(self, run: Path, prompt: str) -> Path | None:
        """File of the image or video of a prompt; None if it was not drawn."""
        if prompt not in self.prompts:
            return None
        return media.find(run / FOLDER / self.tag / f"{self.prompts.index(prompt):05d}-0")


def strip(run: Run, place: Place) -> dict[str, Any] | None:
    """Values of the template: {"frames": labels, "rows": one for each prompt, "note"}; None without such prompts.

    Raises:
        ConfigError: a damaged file, with the remedy.
    """
    columns = _columns(run)
    # Today's list first, then what earlier evaluations had.
    prompts = list(dict.fromkeys(text for each in reversed(columns) for text in each.prompts))
    if not prompts:
        return None
    chosen = np.linspace(0, len(columns) - 1, min(MAX_COLUMNS, len(columns))).round().astype(int)
    shown, spent = [columns[i] for i in chosen], 0
    rows: list[dict[str, Any]] = []
    for text in prompts:
        if spent > STRIP_BYTES:
            break
        pictures = [place.picture(each.image(run.folder, text), FRAME_PX) for each in shown]
        spent += sum(len(picture["src"]) for picture in pictures if picture)
        cells = [{"label": each.label, "picture": one} for each, one in zip(shown, pictures, strict=True)]
        rows.append({"text": text, "cells": cells})
    return {
        "frames": [each.label for each in shown],
        "rows": rows,
        "gaps": any(cell["picture"] is None for row in rows for cell in row["cells"]),
        "left_out": len(prompts) - len(rows),
        "columns_left_out": len(columns) - len(shown),
    }


def _columns(run: Run) -> list[Drawn]:
    """Base, evaluations during training, tuned, with and without images."""
    found = {tag: Drawn(tag, evaluation.iteration) for tag, evaluation in run.evaluations.items()}
    found |= {file.stem: _read(file) for file in sorted((run.folder / FOLDER).glob("*.json"))}
    tuned = found.get("tuned")
    during = sorted((each for tag, each in found.items() if tag.startswith("iteration-")), key=lambda d: d.iteration)
    during = [each for each in during if tuned is None or each.iteration != tuned.iteration]
    later = [each for each in (*during, tuned) if each is not None]
    if not run.finished:  # as in the filmstrip of the evaluated prompts
        later.sort(key=lambda each: each.iteration)
    return [*([found["base"]] if "base" in found else []), *later]


def _read(file: Path) -> Drawn:
    remedy = "delete it: the report leaves these images out"
    record = read_object(file, remedy)
    try:
        return Drawn(file.stem, int(record["iteration"]), tuple(map(str, record["prompts"])))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is not a record of previews ({type(error).__name__}: {error}); {remedy}") from error
