"""Run folders, finished or under way, read from their text files alone. P prompts, K evaluation seeds."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from flowrl.apps.gallery import tags, trees
from flowrl.apps.gallery.tags import Tagged
from flowrl.apps.gallery.trees import Tree
from flowrl.core.assets import table
from flowrl.core.errors import ConfigError
from flowrl.core.files import loads, read_rows
from flowrl.data import contents
from flowrl.data.prompt_files import REFERENCE
from flowrl.evaluation import results
from flowrl.media import media
from flowrl.run import status


@dataclass(frozen=True, slots=True)
class Evaluation(Tagged):
    """One `eval/<tag>.json`."""

    guidance_scale: float
    num_inference_steps: int
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]
    scores: dict[str, np.ndarray]
    """Metric -> [P, K]; NaN: the image could not be scored."""
    images: Path
    """Folder of the images."""
    groups: np.ndarray
    """Number of the distinct prompt of each prompt, [P] int64 from 0."""
    made_with: dict[str, str]
    """Fingerprints of model, prompts and rewards (flowrl/run/inputs.py)."""
    digests: np.ndarray
    """Digest of each sample in 8 bits, [P, K] of text."""

    def num_distinct(self, rows: np.ndarray | None = None) -> int:
        """Number of distinct prompts, of those in `rows` [P] bool; None: of all."""
        return len(np.unique(self.groups if rows is None else self.groups[: len(rows)][rows]))

    def image(self, prompt: int, sample: int) -> Path | None:
        """File of an image or video; None if none was saved."""
        return media.find(self.images / f"{prompt:05d}-{sample}")

    def given(self, prompt: int) -> dict[str, Path]:
        """What the prompt edits, and a result that is known, with their names on the page; {}: it edits nothing."""
        stem, found = self.images.with_name(results.SOURCES) / f"{prompt:05d}", dict[str, Path]()
        while (file := media.find(stem.with_name(f"{stem.name}-{len(found)}"))) is not None:
            found[f"source {len(found) + 1}" if found else "source"] = file
        result = media.find(stem.with_name(f"{stem.name}-{REFERENCE}"))
        return found | ({REFERENCE: result} if result is not None else {})

    def mean(self, metric: str) -> float:
        """Mean over prompts of the mean over seeds, without images that could not be scored."""
        return nan_mean(nan_mean(self.scores[metric])) if metric in self.scores else math.nan


@dataclass(frozen=True, slots=True)
class Subject:
    """Kind of the evaluated prompts, in the words of the report."""

    name: str
    """Value in `summary.json`."""
    one: str
    """Singular."""
    short: str
    """Start of a chart's title."""
    on: str
    """End of a heading; "" for held-out prompts."""
    judged: bool = True
    """Whether there is a verdict: not for training prompts."""


SUBJECTS = {
    name: Subject(name, *words) for name, words in table(Path(__file__).with_name("tables.yaml"))["subjects"].items()
}


@dataclass(frozen=True, slots=True)
class Run:
    """Contents of a run folder."""

    folder: Path
    name: str
    config: dict[str, Any]
    config_text: str
    provenance: dict[str, Any]
    rows: list[dict[str, Any]]
    """Rows of `metrics.jsonl`, one for each iteration, ascending."""
    summary: dict[str, Any]
    evaluations: dict[str, Evaluation]
    trees: dict[str, Tree] = field(default_factory=dict)
    """Tag of the evaluation -> tree, for a method on trees."""
    problems: list[str] = field(default_factory=list)
    """Sentences for the reader about missing or changed files."""

    @property
    def during(self) -> list[Evaluation]:
        """Evaluations during training, ascending."""
        return tags.during(self.evaluations)

    @property
    def base(self) -> Evaluation | None:
        return self.evaluations.get("base")

    @property
    def after(self) -> Evaluation | None:
        """The tuned model's evaluation or, while the run is under way, the latest one.

        A finished run that goes on with more iterations still has the evaluation of its first end.
        """
        tuned, during = self.evaluations.get("tuned"), self.during
        if not during or (tuned is not None and (self.finished or tuned.iteration >= during[-1].iteration)):
            return tuned
        return during[-1]

    @property
    def both(self) -> tuple[Evaluation, ...]:
        """(base, after); () while either is missing."""
        return () if self.base is None or self.after is None else (self.base, self.after)

    @property
    def subject(self) -> Subject:
        """Kind of the evaluated prompts, which the summary says once the base is evaluated."""
        return SUBJECTS[self.summary.get("evaluated_on", "no prompts")]

    @property
    def noun(self) -> str:
        """What the model makes, by the first file that was saved: "image", which it is too without one, or "video"."""
        for evaluation in (e for e in (self.base, *self.during, self.after) if e is not None):
            file = evaluation.image(0, 0)
            if file is not None:
                return "image" if file.suffix == ".png" else "video"
        return "image"

    @property
    def finished(self) -> bool:
        return self.summary.get("status") in status.ENDED

    @property
    def begun(self) -> bool:
        """Whether the summary is that of the run's start or resumption, with the iterations and seconds of then."""
        return self.summary.get("status") in ("running", status.DIED)

    @property
    def iterations(self) -> int:
        """Number of trained iterations."""
        stated, last = int(self.summary.get("iterations") or 0), self.rows[-1]["iteration"] if self.rows else 0
        return max(stated, last) if self.begun else stated or last

    def block(self, name: str) -> dict[str, Any]:
        """The mapping `name` of the summary; {} where it has none."""
        block = self.summary.get(name)
        return block if isinstance(block, dict) else {}

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(iterations [N], values [N]) of the rows that have `key`; NaN for null."""
        rows = [row for row in self.rows if key in row]
        values = [row[key] for row in rows]
        if not set(map(type, values)) <= {float, int, bool, type(None)}:
            values = [number(value) for value in values]
        # Ten thousand rows of fifty numbers are common: numpy makes NaN of None itself.
        return np.array([row["iteration"] for row in rows], dtype=float), np.array(values, dtype=float)


def number(value: Any) -> float:
    """`value` as a float; NaN if it is not a number (null, text)."""
    return float(value) if isinstance(value, int | float) else math.nan


def value_at(tree: Any, *path: str) -> Any:
    """`tree[path[0]][path[1]]...`; None if a key is missing, as that of another component."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def nan_mean(values: np.ndarray) -> Any:
    """Mean over the last axis without NaN; NaN, without a warning, if there are no other values."""
    known = np.isfinite(values)
    count = known.sum(-1)
    mean = np.where(known, values, 0.0).sum(-1) / np.maximum(count, 1)
    return np.where(count > 0, mean, np.nan)[()]


RowReader = Callable[[Path], tuple[list[dict[str, Any]], bool]]
"""Function from `metrics.jsonl` to its rows, and whether a half-written last line was left out."""


def load_run(folder: Path, read: RowReader = read_rows, *, tolerant: bool = False, alive: bool | None = None) -> Run:
    """The contents of a run folder.

    `tolerant`: an evaluation that cannot be read is left out with a sentence, instead of the error: one that is just
    being copied is half written. `alive`: whether a process writes to the folder; None: whether it is locked.

    Raises ConfigError: it is not a run folder, or a file is damaged; with the file and the remedy.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        what = "it has no config.yaml" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{folder} is not a run: {what}; pass the folder that flowrl train wrote, <output>/<name>")
    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML ({error}); restore the file that flowrl train wrote") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a mapping; restore the resolved configuration that flowrl train wrote")
    problems: list[str] = []
    provenance = _read_optional(folder / "provenance.json", problems)
    summary = status.now(_read_optional(folder / status.SUMMARY, problems), folder, alive)
    problems += filter(None, [status.describe(summary)])
    rows = _read_rows(folder / "metrics.jsonl", problems, read)
    record = contents.read(folder)
    for change in () if record is None else record.changes:
        what = "; ".join(change["what"])
        of = "Options have other values" if change.get("options") else "Files have other contents"
        when = f"since iteration {change['iteration']}"
        problems.append(f"{of} {when}; earlier points of the curves are of the old ones: {what}")
    files = sorted((folder / "eval").glob("*.json"))
    evaluations: list[Evaluation] = []
    grown: list[Tree] = []
    for file in files:
        try:
            if file.name.startswith(trees.PREFIX):
                grown.append(trees.read(file))
            else:
                evaluations.append(_read_evaluation(file, folder))
        except ConfigError:
            if not tolerant:
                raise
            problems.append(f"eval/{file.name} cannot be read (half written?); the page leaves it out.")
    return Run(
        folder=folder,
        name=str(config.get("name") or folder.resolve().name),
        config=config,
        config_text=text,
        provenance=provenance,
        rows=rows,
        summary=summary,
        evaluations={e.tag: e for e in evaluations},
        trees={tree.tag: tree for tree in grown},
        problems=problems,
    )


def _read_optional(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON mapping; {} with a sentence in `problems` if it is missing, as in a run under way, or damaged."""
    if not path.is_file():
        problems.append(f"There is no {path.name} yet.")
        return {}
    try:
        document = loads(path.read_text(encoding="utf-8"))
    except ValueError:
        document = None
    if not isinstance(document, dict):
        problems.append(f"{path.name} cannot be read (half written?); the report leaves it out.")
        return {}
    return document


def _read_rows(path: Path, problems: list[str], read: RowReader) -> list[dict[str, Any]]:
    if not path.is_file():
        problems.append("There is no metrics.jsonl yet.")
        return []
    result, torn = read(path)
    if torn:
        problems.append("The last line of metrics.jsonl is half written and was left out.")
    # A resumed run may repeat an iteration: its last row counts.
    rows = {row["iteration"]: row for row in result}
    return [rows[iteration] for iteration in sorted(rows)]


def _read_evaluation(path: Path, folder: Path) -> Evaluation:
    known = results.Evaluation.load(path)
    return Evaluation(
        tag=path.stem,
        iteration=known.iteration,
        guidance_scale=known.guidance_scale,
        num_inference_steps=known.num_inference_steps,
        seeds=tuple(range(known.seeds)),
        prompts=known.prompts,
        scores=known.scores,
        images=folder / "eval" / path.stem,
        groups=known.groups,
        made_with=known.made_with,
        digests=known.digests,
    )
