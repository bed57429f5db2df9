"""Diagnosis of a run from its folder alone: what keeps it from learning, in plain words, the likeliest cause first.

Each check is a pure function of an `Evidence`. It gives a `Seen`, None where all is well, or raises `Lacking` where the
folder does not have what it needs. `docs/troubleshooting.md` has a section for each.
"""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flowrl.apps.diagnosis.evidence import PAGE, Change, Evidence, Lacking, Number, Seen
from flowrl.apps.gallery.runs import Run
from flowrl.core.assets import table


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the table."""

    name: str
    """Heading of its section in docs/troubleshooting.md, in lower case."""
    weight: float
    """Share, in (0, 1], of a metric that does not rise that it explains when it is there in full. 1: nothing is
    learned at all; about 1/2: learning is slow or leads elsewhere; 0.1: it costs time alone."""
    look: Callable[[Evidence], Seen | None]
    texts: dict[str, Any]
    """The rest of its entry in checks.yaml."""

    def finding(self, seen: Seen, noun: str) -> "Finding":
        """What it saw, in words; `noun`: "image" or "video"."""
        texts = self.texts
        for case in seen.cases:
            texts = texts | self.texts["cases"][case]
        words = {"value": seen.value, "limit": seen.limit, "noun": noun} | seen.words
        sentence, name, *change = (
            text.format(**words) for text in (texts["sentence"], texts["number"], *texts["change"])
        )
        likelihood = round(self.weight * min(max(seen.severity, 0.01), 1.0), 4)
        number = Number(name, seen.value, seen.limit)
        return Finding(
            self.name, likelihood, sentence, number, Change(*change), f"{PAGE}#{self.name.replace(' ', '-')}"
        )


CHECKS = tuple(
    Check(name, entry.pop("weight"), resolve_name(f"{__name__}.{entry.pop('look')}"), entry)
    for name, entry in table(Path(__file__).with_name("checks.yaml"))["checks"].items()
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A check that found something."""

    name: str
    likelihood: float
    """Weight of the check times the severity of what it saw; findings are in falling order of it."""
    sentence: str
    number: Number
    change: Change
    docs: str
    """Page and section."""

    @property
    def advice(self) -> str:
        return f"{self.change.option}: {self.change.value}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found in a run folder, and what was looked at."""

    run: str
    findings: list[Finding]
    looked_at: list[str]
    """Names of the checks that had all that they need."""
    not_looked_at: dict[str, str]
    """Name of a check -> what the folder lacks for it."""

    def plain(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def diagnose(run: Run) -> Diagnosis:
    """All checks of a run folder, as `flowrl.apps.gallery.runs.load_run` read it."""
    evidence = Evidence(run)
    findings, looked, lacking = [], [], {}
    for check in CHECKS:
        try:
            seen = check.look(evidence)
        except Lacking as reason:
            lacking[check.name] = str(reason)
            continue
        looked.append(check.name)
        if seen is not None:
            findings.append(check.finding(seen, run.noun))
    findings.sort(key=lambda finding: -finding.likelihood)
    return Diagnosis(run.name, findings, looked, lacking)


def cause(run: Run) -> list[str]:
    """Lines for the end of a training: the first finding where the held-out metric did not rise; else none."""
    try:
        if Evidence(run).rose:
            return []
    except Lacking:  # nothing was evaluated
        return []
    found = diagnose(run).findings
    if not found:
        return []
    first, command = found[0], f"flowrl diagnose {shlex.quote(str(run.folder))}"
    more = f"{len(found) - 1} more: {command}" if len(found) > 1 else command
    return [f"likely cause: {first.sentence}", f"to change: {first.advice} ({first.docs}; {more})"]
