"""The contract of a suite, tried on its prompts with made-up scores: nothing is drawn, and no judge is loaded."""

import dataclasses
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath

from flowrl.contracts.laws import Finding, law, require
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import Item, Line, Row, Suite
from flowrl.evaluation.suite_intervals import stratified
from flowrl.scoring.build import require_modality
from flowrl.scoring.entries import RewardPlan, reward_plan
from flowrl.statistics.intervals import Bounds

FEW, SAMPLES, NEAR = 60, 2, 1e-7
"""Prompts that tables are made of, samples of each, and how near two means are that are one."""
NOWHERE = Path("flowrl-check", "no-such-prompts.txt")


class SuiteTrial:
    """A suite with the prompts on which its laws are tried.

    `suite` is as `suite_of` reads it from its module; `prompts` as `--prompts` takes them, None for a suite that makes
    or ships its own. `outputs`: scores with the ends of their range, such as an official evaluator's; None: those of
    its own judge.

    Raises ConfigError: the suite reads its prompts, and none are given.
    """

    def __init__(
        self, suite: Suite, prompts: str | Path | None = None, outputs: Mapping[str, Bounds] | None = None
    ) -> None:
        self.suite, self.prompts, self._outputs = suite, None if prompts is None else Path(prompts), outputs
        if self.prompts is None and suite.facts.prompts == "read":
            raise ConfigError(f"{suite.name}: its prompts are read, so add prompts=PATH; they are: {suite.facts.where}")

    @cached_property
    def items(self) -> list[Item]:
        return self.suite.items(self.prompts)

    @cached_property
    def few(self) -> list[Item]:
        """At most `FEW` prompts, spread over the list."""
        return self.items[:: -(-len(self.items) // FEW)]

    @cached_property
    def plans(self) -> list[RewardPlan]:
        """The suite's own judges, checked and not built."""
        return [reward_plan(dict(entry), "judge") for entry in self.suite.entries(self.items) or ()]

    @cached_property
    def outputs(self) -> Mapping[str, Bounds]:
        """Each score with the ends of its range, from 0 on: below it a judge punishes what no table counts."""
        cards = [plan.card for plan in self.plans if plan.card is not None]
        own = {name: (max(0.0, c.low), c.high if math.isfinite(c.high) else 1.0) for c in cards for name in c.outputs}
        return self._outputs or own or {"judge": (0.0, 1.0)}

    def rows(self, share: Callable[[int], float]) -> list[Row]:
        """Judged samples; `share` says of the n-th where in their ranges its scores and answers are, NaN: missing."""
        asked, result = None if self._outputs else self.suite.from_answers, list[Row]()
        for n, item in enumerate(item for item in self.few for _ in range(SAMPLES)):
            value = share(n)
            given = [value] * len(item.metadata.get("questions", ())) if asked else []
            scores = {name: low + value * (top - low) for name, (low, top) in self.outputs.items()}
            scores = asked(given, item) if asked else {k: None if math.isnan(v) else v for k, v in scores.items()}
            kept = [None if math.isnan(value) else value for value in given]
            result.append(Row(item.id, item.text, n % SAMPLES, scores=scores, answers=kept))
        return result

    def lines(self, share: Callable[[int], float]) -> dict[str, Line]:
        """Name -> line of the table of `rows`."""
        return {line.name: line for line in self.suite.aggregate(self.rows(share), self.few).lines}

    def run(self) -> Iterator[Finding]:
        """Findings, one a law; without prompts nothing else can be tried."""
        for each in LAWS:
            yield (finding := each.find(self))
            if each is items and not finding.good:
                return


def _drawn(n: int) -> float:
    return random.Random(n).random()


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NEAR, abs_tol=NEAR)


@law("facts", "fill every word of FACTS, without host names (hub dataset OWNER/NAME)")
def facts(trial: SuiteTrial) -> str:
    own = dataclasses.asdict(trial.suite.facts)
    empty = [key for key, value in own.items() if isinstance(value, str) and not value.strip()]
    require(not empty, f"{', '.join(empty)} is empty")
    host = re.search(r"https?:|www\.|\S*\.(com|org|co)/", str(own))
    require(host is None, f"names the host {host and host[0]!r}")
    require(own["level"] in ("tested", "verified", "experimental"), f"level={own['level']!r}")
    require(min(own["images_per_prompt"], own["num_prompts"]) >= 1, "images_per_prompt or num_prompts is below 1")
    return f"{own['prompts']} prompts, {own['level']}, {own['licence']}"


@law("prompts", "refuse another --prompts (refuse_path), or say of one that is missing where to get it (require_path)")
def prompts(trial: SuiteTrial) -> str:
    own = trial.suite.facts
    for path in (None, NOWHERE) if own.prompts == "read" else (NOWHERE,):
        try:
            trial.suite.items(path)
        except ConfigError as error:
            require(own.prompts != "read" or own.where in str(error), f"without the place: {error}")
        else:
            require(False, f"takes the prompts {path}")
    count = len(trial.suite.items(trial.prompts))
    require(own.prompts == "read" or count == own.num_prompts, f"{count} prompts, and num_prompts={own.num_prompts}")
    return f"{count} of officially {own.num_prompts}"


@law("items", "ids that are distinct and name files, texts that are not empty, metadata as JSON has it, tags of words")
def items(trial: SuiteTrial) -> str:
    own = trial.items
    require(bool(own), "there is none")
    require(len({item.id for item in own}) == len(own), "two have one id")
    for item in own:
        require(isinstance(item.id, str) and bool(re.fullmatch(r"[\w.-]+", item.id)), f"the id {item.id!r}")
        require(isinstance(item.text, str) and bool(item.text.strip()), f"{item.id} has the text {item.text!r}")
        require(json.loads(json.dumps(item.metadata)) == item.metadata, f"{item.id} has the metadata {item.metadata}")
        require(all(isinstance(tag, str) for tag in item.tags), f"{item.id} has the tags {item.tags!r}")
    return f"{len(own)}, such as {own[0].id}: {own[0].text[:40]!r}"


@law("read again", "the same prompts in the same order: the noise of a sample follows its id")
def read_again(trial: SuiteTrial) -> str:
    require(trial.suite.items(trial.prompts) == trial.items, "another list")
    return "alike"


@law("judges", "reward entries of FACTS that a configuration takes, for its images or videos; or an official evaluator")
def judges(trial: SuiteTrial) -> str:
    for plan in trial.plans:
        if plan.card is not None:
            require_modality(plan.name, plan.card, videos=trial.suite.facts.videos)
    require(bool(trial.plans) or trial.suite.read_results is not None, "nobody judges it")
    return ", ".join(plan.label for plan in trial.plans) or "the official evaluator"


@law("answers", "from_answers gives None where a question has no answer (NaN), else a number")
def answers(trial: SuiteTrial) -> str:
    asked = trial.suite.from_answers
    if asked is None:
        return "none are asked for"
    for item in trial.few:
        count = len(item.metadata.get("questions", ()))
        require(count > 0, f"{item.id} has no questions in its metadata")
        whole, lost = asked([1.0] * count, item), asked([math.nan] * count, item)
        require(all(value is not None and math.isfinite(value) for value in whole.values()), f"{whole} for yes alone")
        require(all(value is None for value in lost.values()), f"{lost} for answers that are missing")
    return "a failed question is no score"


@law("table", "lines of distinct names, one of them the headline; finite means in low..high and bounds; plain numbers")
def table(trial: SuiteTrial) -> str:
    found = trial.suite.aggregate(trial.rows(_drawn), trial.few)
    names = [line.name for line in found.lines]
    require(bool(names) and len(set(names)) == len(names), f"the lines {names}")
    require(found.headline in ("", *names), f"the headline {found.headline!r} is no line")
    for line in found.lines:
        require(math.isfinite(line.mean), f"{line.name} is {line.mean}, and every sample has a score")
        for low, high in ((line.low, line.high), line.bounds or (math.nan, math.nan)):
            held = math.isnan(low) or low - NEAR <= line.mean <= high + NEAR
            require(held, f"{line.name} is {line.mean:.4g}, outside of {low:.4g}..{high:.4g}")
        json.dumps([line.name, line.mean, line.low, line.high, line.n_prompts, line.n_images, line.n_scored])
    return f"{len(names)} lines, headline {found.headline or 'none'}"


@law("parts", "a line is the weighted mean of its parts, by which two models are compared; weights above 0")
def parts(trial: SuiteTrial) -> str:
    lines = [line for line in trial.lines(_drawn).values() if line.parts]
    for line in lines:
        weights, mean = [part.weight for part in line.parts], stratified(line.parts)[0]
        require(all(0 < weight < math.inf for weight in weights), f"{line.name} has the weights {weights}")
        require(_near(mean, line.mean), f"{line.name} is {line.mean:.6g}, and its parts have the mean {mean:.6g}")
    require(bool(lines), "no line has any")
    return f"{len(lines)} lines can be compared"


@law("order of rows", "the same means for the rows in any order")
def order(trial: SuiteTrial) -> str:
    mixed = trial.rows(_drawn)
    random.Random(0).shuffle(mixed)
    before, after = trial.lines(_drawn), {line.name: line for line in trial.suite.aggregate(mixed, trial.few).lines}
    other = [each for each in before if each not in after or not _near(before[each].mean, after[each].mean)]
    require(not other, f"another mean of {', '.join(other)}")
    return "says nothing"


@law("range", "a line with bounds has its upper one where every score is at its top, its lower one where all are at 0")
def ends(trial: SuiteTrial) -> str:
    bounded = 0
    for end, name in ((0, "bottom"), (1, "top")):
        for line in trial.lines(lambda n, end=end: float(end)).values():
            if line.bounds is not None:
                bounded += end
                apart = not _near(line.mean, line.bounds[end])
                require(not apart, f"{line.name} is {line.mean:.6g} at the {name}, and not {line.bounds[end]:g}")
    return f"{bounded} lines reach their bounds" if bounded else "no line declares bounds"


@law("missing score", "leave a sample without a score out, and count it (n_scored): it is never a 0")
def missing(trial: SuiteTrial) -> str:
    whole, lost = trial.lines(lambda n: 1.0), trial.lines(lambda n: 1.0 if n else math.nan)
    for name, line in lost.items():
        alike = math.isnan(line.mean) or (name in whole and _near(line.mean, whole[name].mean))
        require(alike, f"without one of equal scores {name} is {line.mean:.4g}")
    require(any(line.n_scored < line.n_images for line in lost.values()), "n_scored does not say that one is missing")
    empty = [name for name, line in trial.lines(lambda n: math.nan).items() if not math.isnan(line.mean)]
    require(not empty, f"{', '.join(empty)}: a mean without any score")
    return "is left out and counted"


@law("official folder", "a place of its own in the folder for each prompt, relative and inside")
def folder(trial: SuiteTrial) -> str:
    suite = trial.suite
    if suite.layout is None:
        require(suite.read_results is None, "results are read of a folder that is never written")
        return "there is none"
    places = [suite.layout(item, 0) for item in trial.items] + list(suite.extras(trial.items) if suite.extras else ())
    outside = [each for each in places if each.startswith("/") or ".." in PurePosixPath(each).parts]
    require(not outside, f"the place {', '.join(outside[:1])}")
    require(len(set(places)) == len(places), "two prompts or files share a place")
    return f"such as {places[0]}"


LAWS = (facts, prompts, items, read_again, judges, answers, table, parts, order, ends, missing, folder)
