"""The contract of a benchmark suite, and the tables that all of them give.

A suite is one file, in flowrl/apps/suites/ (with the words of FACTS in facts.yaml there) or a user's own; its name is
the file's. It defines

    LEVEL             "tested", "verified" or "experimental"
    FACTS             Facts: what it is, where its prompts come from, who judges it, what differs from the official way
    items(path)       its prompts, generated (path None) or read
    aggregate(rows, items)    the official table

and, where it has an official evaluator that reads a folder,

    layout(item, k)   the place of a sample in that folder, relative; where several k share a place the file holds their
                      images in one grid, row by row
    extras(items)     further files of that folder: relative place -> text, or an image by its path
    read_results(path, items)    that evaluator's results: (id, k) -> scores

and, where the official code has slips that change its table,

    compat(rows, items)    the table with them (`--compat`)

and, where the reward depends on the prompts,

    rewards(items)    the reward entries that judge them, instead of those of FACTS

and, where its judge answers a list of questions to each image (a reward with `answers`),

    from_answers(answers, item)    the scores of a sample by the answers, in the order of the questions; without it the
                      reward's own scores are taken and the answers are not kept
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from flowrl.core.errors import ConfigError, Remedy
from flowrl.evaluation.suite_intervals import Part as Part  # a name of the contract too
from flowrl.evaluation.suite_intervals import stratified
from flowrl.statistics.intervals import Bounds

KIND = "suites"
Level = Literal["tested", "verified", "experimental"]


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt of a suite."""

    id: str
    """Identity: the noise of its samples depends on it, so it never depends on the order of a list."""
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """All other values of its record, for the judge."""
    tags: tuple[str, ...] = ()
    """Tasks or categories that it belongs to; the suite says which is which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The declaration of a suite."""

    title: str
    source: str
    """Paper and repository, without host names: "arXiv:2310.11513; djghosh13/geneval"."""
    licence: str
    """Of the prompts."""
    prompts: Literal["generated", "shipped", "read"]
    where: str
    """Where to get prompts that are read, in words: "hub dataset OWNER/NAME, file FILE"; else how they are made."""
    images_per_prompt: int
    judge: str
    """Who judges, in words."""
    differs: str
    """What differs here from the official protocol."""
    reward: tuple[dict[str, Any], ...] | None
    """Reward entries that judge by default; None: none does here, so `--judge` or `--export` is needed."""
    level: Level
    num_prompts: int
    """Prompts of the whole official list."""
    videos: bool = False
    """Its samples are videos."""

    @property
    def noun(self) -> str:
        """A sample in one word."""
        return "video" if self.videos else "image"


@dataclass(slots=True)
class Row:
    """A sample: one line of samples.jsonl."""

    id: str
    prompt: str
    k: int
    """Number of the sample of its prompt, from 0."""
    seed: int = 0
    file: str = ""
    """Its image, relative to the folder of the results."""
    scores: dict[str, float | None] = field(default_factory=dict)
    """Raw outputs of the judge; None: not scored."""
    answers: list[Any] = field(default_factory=list)
    """Plain answers of a judge by questions, in the order of the questions."""
    error: str = ""
    """Why it was not scored."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a table: the weighted mean over its parts of the mean of each, with a 95 % interval over prompts."""

    name: str
    mean: float
    low: float
    high: float
    """NaN where the line has no interval."""
    n_prompts: int
    n_images: int
    """Images that it is about."""
    n_scored: int
    """Those of them that have a score."""
    parts: tuple[Part, ...] = ()
    """What the mean is made of, for a paired comparison; empty: it is compared with nothing (a standard deviation)."""
    output: str = ""
    """The score that it is made of, whose judge says whether more is better; "": more is."""
    bounds: Bounds | None = None
    """Least and largest possible value; None: not known."""
    shared: bool = False
    """The parts share their prompts, each of which is drawn with its values in all of them."""


@dataclass(frozen=True, slots=True)
class Table:
    """The result of a suite."""

    lines: tuple[Line, ...]
    headline: str
    """Name of the line that the suite is quoted by; "": the official protocol has no single number."""


# ---- values of rows


Value = Callable[[Row], "float | Sequence[float] | None"]
"""The value of a sample, or those of its test points; None or NaN: not scored."""


def outputs_of(rows: Iterable[Row]) -> list[str]:
    """Names of the scores of all rows, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.scores))


def score(output: str) -> Value:
    """The value of a sample by one output."""
    return lambda row: row.scores.get(output)


def chosen_output(rows: Sequence[Row], official: str) -> str:
    """The official output where the rows have it, else their first one: that of another judge."""
    found = outputs_of(rows)
    return official if official in found or not found else found[0]


def numbers(value: float | Sequence[float] | None) -> tuple[float, ...]:
    """Values of a sample as numbers; NaN for one without any."""
    if value is None:
        return (math.nan,)
    return (float(value),) if isinstance(value, int | float) else tuple(map(float, value))


def part(rows: Iterable[Row], value: Value, weight: float = 1.0) -> Part:
    """The values of samples by prompt: equal texts are one prompt."""
    values: dict[str, tuple[float, ...]] = {}
    for row in rows:
        values[row.prompt] = values.get(row.prompt, ()) + numbers(value(row))
    return Part(values, weight)


def line(
    name: str,
    groups: Sequence[Sequence[Row]],
    value: Value,
    *,
    weights: Sequence[float] | None = None,
    scale: float = 1.0,
    output: str = "",
    bounds: Bounds | None = None,
) -> Line:
    """The mean over groups of rows of the mean of each, with its stratified interval. `groups` are rows of each
    stratum; an empty one has no mean, and then the line has none. `weights` None: equal. `scale`: factor of every
    value, such as 100. `output`: the score that the value is. `bounds`: least and largest possible value; None: not
    known.
    """

    def scaled(row: Row) -> tuple[float, ...]:
        return tuple(scale * one for one in numbers(value(row)))

    weights = [1.0] * len(groups) if weights is None else weights
    parts = tuple(part(rows, scaled, weight) for rows, weight in zip(groups, weights, strict=True))
    images = [row for rows in groups for row in rows]
    scored = sum(any(not math.isnan(one) for one in numbers(value(row))) for row in images)
    return line_of(name, parts, len(images), scored, output=output, bounds=bounds)


def line_of(
    name: str, parts: tuple[Part, ...], n_images: int, n_scored: int, *, output: str = "", bounds: Bounds | None = None
) -> Line:
    """A line of given parts; `line` for rows."""
    mean, low, high = stratified(parts, bounds)
    prompts = len({text for one in parts for text in one.values})
    return Line(name, mean, low, high, prompts, n_images, n_scored, parts, output, bounds)


def by_tag(rows: Sequence[Row], items: Sequence[Item], tags: Sequence[str]) -> dict[str, list[Row]]:
    """Rows of each tag, in the order of `tags`; a tag without rows is left out."""
    owned = {item.id: item.tags for item in items}
    groups = {tag: [row for row in rows if tag in owned[row.id]] for tag in tags}
    return {tag: group for tag, group in groups.items() if group}


def tags_of(items: Iterable[Item], place: int = 0) -> list[str]:
    """The distinct tags at a place, in order of appearance."""
    return list(dict.fromkeys(item.tags[place] for item in items if len(item.tags) > place))


# ---- the registry


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite with all that its module defines."""

    name: str
    facts: Facts
    items: Callable[[Path | None], list[Item]]
    aggregate: Callable[[Sequence[Row], Sequence[Item]], Table]
    layout: Callable[[Item, int], str] | None = None
    extras: Callable[[Sequence[Item]], Mapping[str, str | Path]] | None = None
    read_results: Callable[[Path, Sequence[Item]], dict[tuple[str, int], dict[str, float | None]]] | None = None
    from_answers: Callable[[Sequence[float], Item], dict[str, float | None]] | None = None
    rewards: Callable[[Sequence[Item]], tuple[dict[str, Any], ...]] | None = None
    compat: Callable[[Sequence[Row], Sequence[Item]], Table] | None = None

    def entries(self, items: Sequence[Item]) -> tuple[dict[str, Any], ...] | None:
        """Reward entries that judge by default; None: none does here."""
        return self.facts.reward if self.rewards is None else self.rewards(items)


def name_of(place: str) -> str:
    """The name of a suite by what was given for it: that of a file is its stem."""
    return Path(place).stem if place.endswith(".py") else place


def load_suite(name: str) -> Suite:
    """The suite of a built-in name, .py file or dotted path. Raises ConfigError: there is none, or its file raises."""
    from flowrl.scoring.entries import imported

    return suite_of(name_of(name), imported(KIND, name, f"--suite {name}"))


def suite_of(name: str, module: ModuleType) -> Suite:
    """The suite that a module defines. Raises ConfigError: it lacks a part that every suite has."""
    own = vars(module)
    if lacking := [part for part in ("FACTS", "items", "aggregate") if part not in own]:
        raise ConfigError(f"{name} is not a suite: its file must define {', '.join(lacking)} (docs/judging/suites.md)")
    optional = {key: own.get(key) for key in ("layout", "extras", "read_results", "from_answers", "rewards", "compat")}
    return Suite(name, own["FACTS"], own["items"], own["aggregate"], **optional)


# ---- prompts that are read


def require_path(path: Path | None, name: str, facts: Facts, forms: str) -> Path:
    """The file or folder of prompts that the user gave.

    Raises ConfigError: none was given, or there is none; says where to get it and in which forms it is read.
    """
    if path is None:
        raise ConfigError(
            f"--suite {name}: its prompts do not come with flowrl ({facts.licence}); give them with --prompts PATH. "
            f"They are here: {facts.where}. Accepted: {forms}"
        )
    if not path.expanduser().exists():
        raise ConfigError(
            f"--prompts {path}: there is no such file or folder; the prompts of {name} are here: {facts.where}. "
            f"Accepted: {forms}"
        )
    return path.expanduser()


def refuse_path(path: Path | None, name: str) -> None:
    """Raise ConfigError where a suite that generates or ships its prompts was given others."""
    if path is not None:
        raise ConfigError(f"--prompts {path}: {name} makes its own prompts", Remedy(without="--prompts"))
