"""`flowrl score --pairs`: how often a reward prefers what people preferred."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.commands._scored import Sample, rated, scored, warn
from flowrl.core.files import file_sha256, json_ready, write_atomically

if TYPE_CHECKING:
    from flowrl.data.preference_records import Preference
    from flowrl.data.preferences import PreferenceSet
    from flowrl.scoring.entries import RewardPlan

LINES, FACTS = "scores.jsonl", "agreement.json"
STRATA = ("stratum", "category", "operation", "task", "dataset")
"""Columns by whose values the pairs are told apart: the first of them that a set has with at most `_MOST` values."""
_MOST = 24
_NONE = "(none)"
"""Of the records that lack the column."""
_SIDES = ("chosen", "rejected")


def agreement(
    source: str, columns: Sequence[str], plans: Sequence[RewardPlan], batch_size: int, out: Path | None
) -> bool:
    """Print the scores of each pair and the accuracy of each output; True if every output has scored a pair. `source`
    is the preference set, `columns` its columns as `key=value`, as of data.pairs.records; `batch_size` images are
    scored together. `out`: folder for the lines and the numbers; None: they are printed.

    Raises ConfigError: no such set or column, a reward that it lacks something for.
    """
    from flowrl.core.strict import overridden, validate
    from flowrl.data.options import PreferenceOptions
    from flowrl.data.preferences import load_preferences
    from flowrl.data.stored_videos import Frames
    from flowrl.scoring.build import build_rewards, build_scorer, require_metadata

    options = validate(PreferenceOptions, overridden({}, columns), "records")
    pairs = load_preferences(source, "--pairs", options, videos=Frames(None))
    warn(str(pairs.report))
    first = [pair.prompt for pair in [_read(pairs, 0)] if pair is not None]
    require_metadata(f"--pairs {source}", first, plans, [plan.card for plan in plans])
    entries = build_rewards(plans)
    cards = [entry.reward.card for entry in entries]
    require_metadata(f"--pairs {source}", first, plans, cards)
    scorer = build_scorer(entries, batch_size=batch_size, max_failed_share=1.0, on_error=warn)
    # A reward that compares the samples of a prompt compares the two of a pair.
    size = 1 if any(card.needs_groups for card in cards) else max(1, batch_size // 2)
    found = Found(pairs, size)
    lines = list[str]()
    for record in found.records(scored(scorer, found.batches())):
        lines.append(json.dumps(record, ensure_ascii=False))
        if out is None:
            print(lines[-1])
    facts = {name: found.facts(name, higher=card.prefers_more(name)) for card in cards for name in card.outputs}
    if out is not None:
        write_atomically(out / LINES, "".join(f"{line}\n" for line in lines))
        write_atomically(out / FACTS, json.dumps(json_ready(facts), indent=1) + "\n")
    for name, known in facts.items():
        warn(sentence(name, known))
        for value, part in known["strata"].items():
            warn(f"  {sentence(value, part)}")
    return all(known["n"] + known["ties"] for known in facts.values())


class Found:
    """The pairs of a set with their scores, in its order; `size` pairs are read at once."""

    def __init__(self, pairs: PreferenceSet, size: int) -> None:
        self.pairs, self.size, self.unread = pairs, size, 0
        self._content = lru_cache(2**16)(lambda file: file_sha256(Path(file)))
        self.scores: list[tuple[dict[str, float | None], dict[str, float | None]]] = []
        """Of each pair: those of the chosen and of the rejected one."""
        self.asked: list[str] = []
        """What pairs share that are not independent: the source of an edit, else the prompt."""
        self.values: list[tuple[str, ...]] = []
        """The values of `STRATA`."""
        self._open: deque[tuple[Preference, bool]] = deque()
        """Pairs that are being scored, and whether the rejected one comes first."""

    def batches(self) -> Iterator[list[Sample]]:
        """The images of some pairs; which of a pair comes first is drawn, since a judge may prefer a place."""
        batch = list[Sample]()
        for index in range(len(self.pairs)):
            pair = _read(self.pairs, index)
            if pair is None or pair.rejected is None:
                self.unread += 1
                continue
            turned = sha256(pair.key.encode("utf-8", "surrogatepass")).digest()[0] % 2 == 1
            self._open.append((pair, turned))
            for image in (pair.rejected, pair.chosen) if turned else (pair.chosen, pair.rejected):
                batch.append((image, pair.prompt.text, rated(image, pair.prompt.metadata)))
            if len(batch) == 2 * self.size:
                yield batch
                batch = []
        if batch:
            yield batch

    def records(self, samples: Iterator[tuple[Sample, dict[str, float | None]]]) -> Iterator[dict[str, Any]]:
        """The line of each pair, whose scores are kept."""
        for (_, first), (_, second) in zip(samples, samples, strict=True):
            pair, turned = self._open.popleft()
            both = (second, first) if turned else (first, second)
            self.scores.append(both)
            sources = [self._content(file) for file in pair.prompt.images]  # one may have several names
            self.asked.append(repr(sources or pair.prompt.text))
            self.values.append(tuple(_named(pair.prompt.metadata.get(name)) for name in STRATA))
            yield {"pair": pair.key, "prompt": pair.prompt.text} | dict(zip(_SIDES, both, strict=True))

    def facts(self, output: str, *, higher: bool) -> dict[str, Any]:
        """`statistics.paired.win_rate` of the chosen one: `rate` is the share of the pairs that are not tied.

        `prompts` is the number of prompts, or of sources, over which the interval is; `unscored` that of the pairs
        without both scores; `strata` has the same of each value of a column.
        """
        values = [[row[output] for row in both] for both in self.scores]
        table = np.asarray(values, dtype=np.float64).reshape(-1, 2)
        result = self._part(table, np.ones(len(table), dtype=bool), higher)
        columns = (np.asarray([each[place] for each in self.values]) for place in range(len(STRATA)))
        column = next((c for c in columns if 1 < len(set(c.tolist())) <= _MOST), np.zeros(0))
        parts = {
            value: self._part(table, column == value, higher) for value, _ in Counter(column.tolist()).most_common()
        }
        return result | {"unscored": result["unscored"] + self.unread, "strata": parts}

    def _part(self, table: np.ndarray, rows: np.ndarray, higher: bool) -> dict[str, Any]:
        from flowrl.statistics.paired import win_rate

        chosen, rejected = table[rows][:, :1], table[rows][:, 1:]
        asked = [name for name, kept in zip(self.asked, rows, strict=True) if kept]
        groups = np.unique(np.asarray(asked, dtype=str), return_inverse=True)[1].astype(np.int64)
        known = win_rate(rejected, chosen, groups, higher_is_better=higher)
        unscored = len(asked) - known["n"] - known["ties"]
        return known | {"prompts": len(set(asked)), "unscored": unscored}


def sentence(name: str, known: dict[str, Any]) -> str:
    """What `Found.facts` found, in words."""
    from flowrl.run.report import format_interval

    rest = f"{known['ties']} ties ({known['tie_rate']:.1%}), {known['unscored']} not scored"
    if not known["n"]:
        return f"{name}: no accuracy, no pair has two different scores; {rest}"
    return (
        f"{name}: accuracy {known['rate']:.3f} ({format_interval(known, '.3f')}) on {known['n']} pairs; {rest}; "
        f"{known['prompts']} prompts or sources"
    )


def _named(value: Any) -> str:
    return _NONE if value is None or value == "" else str(value)


def _read(pairs: PreferenceSet, index: int) -> Preference | None:
    """A pair; None, with a warning: it cannot be read."""
    from flowrl.data.preference_records import Unreadable

    try:
        return pairs.read(index)
    except Unreadable as error:
        warn(str(error))
        return None
