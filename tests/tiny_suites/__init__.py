"""Every suite as a tiny one: prompts of its form, results of its official evaluator, and a judge that needs no weights.

A file of a few prompts as `--prompts` takes it, lists/NAME.*, or a module for the suite with

    prompts(folder) -> Path      that file, or a folder; for suites that read their prompts
    results(folder, places) -> Path    results of the official evaluator; `places` are the samples as (item, k, relative
                                 place in the exported folder); for suites that read them

A suite that makes its prompts and reads no results needs neither.
"""

import csv
import hashlib
import importlib
import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flowrl.apps.suites.running.runner import Judgement
from flowrl.evaluation.suite import Item, Suite

FOLDER = Path(__file__).parent


def tiny(name: str) -> ModuleType | None:
    """The module of a suite; None: it needs none."""
    return importlib.import_module(f"{__name__}.{name}") if (FOLDER / f"{name}.py").is_file() else None


def prompts(name: str, suite: Suite, folder: Path) -> Path | None:
    """What `--prompts` is given in the tests."""
    if suite.facts.prompts != "read":
        return None
    if any(FOLDER.glob(f"lists/{name}.*")):
        return listed(name, folder)
    own = tiny(name)
    assert own is not None, f"write {FOLDER / 'lists' / name}, see {__doc__}"
    return own.prompts(folder)


def listed(name: str, folder: Path) -> Path:
    """A copy of the suite's file in lists/."""
    (file,) = FOLDER.glob(f"lists/{name}.*")
    return Path(shutil.copy(file, folder))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The text of a .csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


class StandIn:
    """A judge in [0, 1]: the brightness of an image, and answers of 0 or 1 by a hash of question and image."""

    def __init__(self, suite: Suite, fails: Sequence[int] = ()) -> None:
        self.suite, self.fails, self.calls, self.seen = suite, set(fails), 0, 0
        self.whole_prompts = False

    @property
    def facts(self) -> dict[str, Any]:
        return {"stand_in": {"version": "1", "outputs": ["stand_in"], "higher_is_better": True}}

    def __call__(self, images: Sequence[Tensor], items: Sequence[Item]) -> list[Judgement]:
        self.calls += 1
        return [self._one(image, item) for image, item in zip(images, items, strict=True)]

    def _one(self, image: Tensor, item: Item) -> Judgement:
        self.seen += 1
        if self.seen in self.fails:
            return Judgement({"stand_in": None}, [], "the server does not answer")
        bright = float(image.mean(dtype=torch.float64))
        questions = item.metadata.get("questions")
        if questions is None or self.suite.from_answers is None:
            return Judgement({"stand_in": bright})
        answers = [float(hashlib.sha256(f"{q}{bright:.3f}".encode()).digest()[0] % 2) for q in questions]
        return Judgement(self.suite.from_answers(answers, item), answers)
