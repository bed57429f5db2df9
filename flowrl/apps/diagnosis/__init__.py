"""Diagnosis of a run from its folder alone: what keeps it from learning, in plain words, the likeliest cause first.

Each check is a pure function of an `Evidence`. It gives a `Seen`, None where all is well, or raises `Lacking` where the
folder does not have what it needs. `docs/troubleshooting.md` has a section for each.
"""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flowrl.apps.diagnosis import rewards, settings, updates
from flowrl.apps.diagnosis.evidence import PAGE, Change, Evidence, Lacking, Number, Seen
from flowrl.apps.gallery.runs import Run

__all__ = [
    "CHECKS",
    "Change",
    "Check",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Lacking",
    "Number",
    "Seen",
    "cause",
    "diagnose",
]


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the table."""

    name: str
    """Heading of its section in docs/troubleshooting.md, in lower case."""
    weight: float
    """Share, in (0, 1], of a metric that does not rise that it explains when it is there in full. 1: nothing is
    learned at all; about 1/2: learning is slow or leads elsewhere; 0.1: it costs time alone."""
    look: Callable[[Evidence], Seen | None]


CHECKS = (
    Check("dead groups", 1.0, updates.dead_groups),
    Check("reward saturated", 0.95, rewards.reward_saturated),
    Check("reward scale", 0.95, rewards.reward_scale),
    Check("gradient vanishes", 0.9, updates.gradient_vanishes),
    Check("weights hardly move", 0.85, updates.weights_hardly_move),
    Check("reward is noise", 0.85, rewards.reward_noise),
    Check("clip always acts", 0.8, updates.clip_always),
    Check("clip never acts", 0.75, updates.clip_never),
    Check("learning rate schedule ended", 0.75, updates.schedule_ended),
    Check("gradient explodes", 0.7, updates.gradient_explodes),
    Check("kl runs away", 0.65, updates.kl_runaway),
    Check("ratio below one", 0.6, updates.ratio_below_one),
    Check("text too long", 0.6, settings.text_cut),
    Check("evaluation unlike training", 0.6, settings.evaluation_differs),
    Check("scorers disagree", 0.55, rewards.scorers_disagree),
    Check("one reward decides", 0.5, rewards.one_reward_dominates),
    Check("blur", 0.45, settings.blur),
    Check("too few samples", 0.4, rewards.too_few_samples),
    Check("one slow phase", 0.1, settings.slow_phase),
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
            anchor = check.name.replace(" ", "-")
            likelihood = round(check.weight * min(max(seen.severity, 0.01), 1.0), 4)
            place = f"{PAGE}#{anchor}"
            findings.append(Finding(check.name, likelihood, seen.sentence, seen.number, seen.change, place))
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
