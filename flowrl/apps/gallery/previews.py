"""The filmstrip of the user's own prompts (`eval.preview_prompts`): a row for each, a column for each evaluation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.apps.gallery.images import FRAME_PX, Place
from flowrl.apps.gallery.runs import Run
from flowrl.apps.gallery.tags import Tagged, in_order, spread
from flowrl.core.errors import ConfigError
from flowrl.core.files import read_object
from flowrl.evaluation import results
from flowrl.media import media

Shown = tuple[str, tuple[str, ...]]
"""A prompt's text and the names of what it edits."""
FOLDER = "previews"
MAX_COLUMNS = 16
"""Largest number of evaluations that are shown, evenly spaced, with both ends."""
STRIP_BYTES = 4_000_000
"""Bytes of a page for the images, from which on further prompts are left out."""


@dataclass(frozen=True, slots=True)
class Drawn(Tagged):
    """The images of an evaluation."""

    prompts: tuple[Shown, ...] = ()
    """Prompts that were drawn; (): none, as before the option was set."""

    def image(self, run: Path, prompt: Shown) -> Path | None:
        """File of the image or video of a prompt; None if it was not drawn."""
        if prompt not in self.prompts:
            return None
        return media.find(run / FOLDER / self.tag / f"{self.prompts.index(prompt):05d}-0")


def strip(run: Run, place: Place) -> dict[str, Any] | None:
    """Values of the template: {"frames": labels, "rows": one for each prompt, "note"}; None without such prompts.

    Raises ConfigError: a damaged file, with the remedy.
    """
    found = {tag: Drawn(tag, evaluation.iteration) for tag, evaluation in run.evaluations.items()}
    remedy = "delete it: the report leaves these images out"
    for file in sorted((run.folder / FOLDER).glob("*.json")):
        record = read_object(file, remedy)
        try:
            texts, sources = record["prompts"], record.get("sources")
            named = [tuple(map(str, each)) for each in ([()] * len(texts) if sources is None else sources)]
            prompts = tuple(zip(map(str, texts), named, strict=True))
            found[file.stem] = Drawn(file.stem, int(record["iteration"]), prompts)
        except (KeyError, TypeError, ValueError) as error:
            what = f"{file} is not a record of previews ({type(error).__name__}: {error})"
            raise ConfigError(f"{what}; {remedy}") from error
    columns = in_order(found, finished=run.finished)
    # Today's list first, then what earlier evaluations had.
    prompts = list(dict.fromkeys(prompt for each in reversed(columns) for prompt in each.prompts))
    if not prompts:
        return None
    shown, spent = spread(columns, MAX_COLUMNS), 0
    rows: list[dict[str, Any]] = []
    for text, names in prompts:
        if spent > STRIP_BYTES:
            break
        stems = [run.folder / FOLDER / results.SOURCES / Path(name).name for name in names]
        given = [image for stem in stems if (image := place.image(media.find(stem), FRAME_PX)) is not None]
        found = [place.image(each.image(run.folder, (text, names)), FRAME_PX) for each in shown]
        spent += sum(len(image["src"]) for image in (*given, *found) if image)
        cells = [{"label": each.column, "image": one} for each, one in zip(shown, found, strict=True)]
        rows.append({"text": text, "given": given, "cells": cells})
    return {
        "frames": [each.column for each in shown],
        "rows": rows,
        "gaps": any(cell["image"] is None for row in rows for cell in row["cells"]),
        "left_out": len(prompts) - len(rows),
        "columns_left_out": len(columns) - len(shown),
    }
