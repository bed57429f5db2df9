"""A judge that compares two images: each pair of base and tuned is shown in both orders.

Judges prefer a place as well as an image. So an image is preferred only where it is in both orders; where the answer
follows the place the pair counts 1/2, and its share is reported as position bias. A judge that always says "first"
thus gives 1/2 everywhere and a bias of 1.

    pairs.jsonl      one line a pair: id, k, what was answered in each order, the preference

Source: both orders as Pref-GRPO (CodeGoat24/Pref-GRPO) and LLM-as-a-judge, arXiv:2306.05685.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.apps.command_line import reward_entries
from flowrl.apps.suites.running.folder import ResultsFolder, append_lines, lines_of
from flowrl.apps.suites.running.runner import PATIENCE, Task
from flowrl.core.errors import ConfigError, Remedy, RewardError, RewardFailure, described
from flowrl.data.prompts import distinct_numbers
from flowrl.display.display import Progress
from flowrl.display.phases import phase
from flowrl.evaluation.suite import Item
from flowrl.reward import CompareFunction, Images
from flowrl.scoring.build import build_rewards
from flowrl.scoring.entries import RewardPlan, check_plans, reward_plan
from flowrl.statistics.paired import over_prompts, prompt_means

FILE = "pairs.jsonl"
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Preferences:
    """Answers about B pairs; NaN: not judged."""

    base_first: Tensor
    """P(the first, which is the base's, is preferred), [B] float64."""
    tuned_first: Tensor
    """P(the first, which is the tuned one's, is preferred), [B] float64."""

    @property
    def tuned(self) -> Tensor:
        """1 where the tuned image is preferred in both orders, 0 where the base's is, else 1/2; [B] float64."""
        shown_first, shown_second = (self.tuned_first - 0.5).sign(), (0.5 - self.base_first).sign()
        agreed = torch.where(shown_first == shown_second, shown_first, 0.0)
        return torch.where(self._missing, torch.nan, 0.5 + agreed / 2)

    @property
    def biased(self) -> Tensor:
        """1 where the same place is preferred in both orders, else 0; [B] float64."""
        same = (self.tuned_first - 0.5) * (self.base_first - 0.5) > 0
        return torch.where(self._missing, torch.nan, same.double())

    @property
    def _missing(self) -> Tensor:
        """Whether an order was not answered, [B] bool; the sign of NaN is 0."""
        return self.base_first.isnan() | self.tuned_first.isnan()


def judge_pairs(
    compare: CompareFunction, base: Images, tuned: Images, prompts: Sequence[str], metadata: Sequence[dict]
) -> Preferences:
    """Both orders of B pairs of images [3, H, W] in [0, 1] of the same prompts and noise. `compare`: P(the first is
    preferred), [B], NaN where the question failed; called once for each order.

    Raises RewardError: not one answer for each pair, or one outside 0 to 1.
    """
    answers = [compare(*pair, prompts, metadata) for pair in ((base, tuned), (tuned, base))]
    for values in answers:
        known = values[~values.isnan()]
        if values.shape != (len(prompts),) or bool(((known < 0) | (known > 1)).any()):
            raise RewardError(
                f"a judge of pairs answered {list(values.shape)} for {len(prompts)} pairs, or not in [0, 1]"
            )
    return Preferences(*(values.detach().cpu().double() for values in answers))


class PairJudge:
    """A reward that compares two images, as `--pair-judge`; its weights are loaded here.

    Raises ConfigError: a reward that judges one image at a time; RewardError: a reward that cannot be built.
    """

    def __init__(self, plan: RewardPlan) -> None:
        (self.entry,) = build_rewards([plan])
        compare = self.entry.reward.compare
        if compare is None:
            raise ConfigError(
                f"--pair-judge {plan.label}: it judges one image at a time; take vlm_judge, whose rubric `preference` "
                "compares two, or a reward of yours with `compare`"
            )
        self.compare, self.plan, self.reason = compare, plan, ""

    @property
    def facts(self) -> dict[str, Any]:
        """Plain data of all that decides the answers."""
        card = self.entry.reward.card
        return {"name": self.plan.label, "version": card.version, "fingerprint": self.plan.fingerprint(card)}

    def __call__(self, base: Sequence[Tensor], tuned: Sequence[Tensor], items: Sequence[Item]) -> Preferences:
        """Both orders of each pair; NaN where the judge failed three times, with the `reason`.

        Raises RewardFailure: a broken contract.
        """
        texts, metadata = [item.text for item in items], [item.metadata for item in items]
        self.reason = ""
        for _ in range(_TRIES):
            try:
                return judge_pairs(self.compare, list(base), list(tuned), texts, metadata)
            except RewardError as error:
                raise RewardFailure(str(error)) from error
            except Exception as error:  # a server or somebody's code may raise anything: retry, then mask
                self.reason = f"--pair-judge {self.plan.label} raised {described(error)}"
        nothing = torch.full((len(items),), torch.nan, dtype=torch.float64)
        return Preferences(nothing, nothing)


@dataclass(slots=True)
class PairRow:
    """A pair: one line of pairs.jsonl."""

    id: str
    k: int
    prompt: str
    base_first: float | None
    tuned_first: float | None
    preference: float | None
    """Of the tuned image; None: not judged."""
    biased: float | None
    judge: str
    """Fingerprint of the judge and of both models."""
    error: str = ""


def compare_folders(
    task: Task, folders: Mapping[str, ResultsFolder], judge: PairJudge, out: Path, *, rejudge: bool = False
) -> list[PairRow]:
    """Judge the pairs of two folders of images; one row for each sample of the task.

    `folders` are those of "base" and "model", with all their images; `out` is that of pairs.jsonl: pairs that are there
    are not judged again. `rejudge`: set the lines of another judge aside.

    Raises ConfigError: lines of another judge or other models. RewardFailure: the judge is away; what was judged is
    kept, and the same call goes on.
    """
    made = {name: folder.header.get("made_with") for name, folder in folders.items()}
    mark = hashlib.sha256(json.dumps([judge.facts, made], sort_keys=True).encode()).hexdigest()[:16]
    file, known = out / FILE, dict[tuple[str, int], PairRow]()
    for row in lines_of(file, PairRow) if file.is_file() else ():
        if row.judge != mark:
            if not rejudge:
                raise ConfigError(
                    f"{file} holds pairs judged by another judge, or of other models; another --out keeps it",
                    Remedy(flag="--rejudge"),
                )
            known.clear()
            file.rename(out / f"pairs-judged-{1 + len(list(out.glob('pairs-judged-*.jsonl')))}.jsonl")
            break
        known[row.id, row.k] = row
    todo = [one for one in task.all() if (row := known.get((one[0].id, one[1]))) is None or row.preference is None]
    bar = Progress(len(todo), "pairs", show=True)
    failed, answered = list[PairRow](), False
    for start in range(0, len(todo), task.batch_size):
        for row in _judged(todo[start : start + task.batch_size], folders, judge, mark):
            known[row.id, row.k] = row
            failed = [*failed, row] if row.preference is None else []
            answered |= row.preference is not None
            append_lines(file, [asdict(row)])
            bar.update(1)
            if len(failed) >= PATIENCE:
                raise _away(failed, out)
    bar.close()
    if failed and not answered:
        raise _away(failed, out)
    return [known[item.id, k] for item, k in task.all()]


def _judged(
    batch: Sequence[tuple[Item, int]], folders: Mapping[str, ResultsFolder], judge: PairJudge, mark: str
) -> Iterator[PairRow]:
    base, tuned = ([folders[name].read(*one) for one in batch] for name in ("base", "model"))
    found = judge(base, tuned, [item for item, _ in batch])
    # Of two images that are equal in 8 bits none wins, whatever a judge answers that answers differently each time.
    alike = torch.tensor([torch.equal(one, other) for one, other in zip(base, tuned, strict=True)])
    wins = torch.where(alike & ~found.tuned.isnan(), 0.5, found.tuned)
    columns = [values.tolist() for values in (found.base_first, found.tuned_first, wins, found.biased)]
    for (item, k), first, second, tuned_wins, biased in zip(batch, *columns, strict=True):
        reason = (judge.reason or "the judge gave no answer") if math.isnan(tuned_wins) else ""
        numbers = [None if math.isnan(value) else value for value in (first, second, tuned_wins, biased)]
        answers, verdict = (numbers[0], numbers[1]), (numbers[2], numbers[3])
        yield PairRow(item.id, k, item.text, *answers, *verdict, mark, reason)


def _away(failed: Sequence[PairRow], out: Path) -> RewardFailure:
    return RewardFailure(
        f"the judge of pairs is away: it failed on {len(failed)} pairs in a row ({failed[-1].error}); all that was "
        f"made and judged so far is kept in {out}: give the same command again to go on once it is back"
    )


def summary(rows: Sequence[PairRow]) -> dict[str, float]:
    """Win rate of the tuned model with its 95 % interval over prompts, and the position bias.

    Returns:
        `rate` (a pair without a verdict counts 1/2), `low`, `high`, `n` prompts, `position_bias` (share of the judged
        pairs whose answer followed the place), counts `wins`, `losses`, `ties`, `pairs`, `judged`.
    """
    prompts = list(dict.fromkeys(row.id for row in rows))
    place = {prompt: number for number, prompt in enumerate(prompts)}
    texts = {row.id: row.prompt for row in rows}
    table = np.full((len(prompts), 1 + max((row.k for row in rows), default=0)), np.nan)
    for row in rows:
        table[place[row.id], row.k] = np.nan if row.preference is None else row.preference
    groups = np.asarray(distinct_numbers([texts[prompt] for prompt in prompts]), dtype=np.int64)
    found = over_prompts(prompt_means(table), groups, bounds=(0.0, 1.0))
    result = {"rate": found["mean"], "low": found["low"], "high": found["high"], "n": found["n"]}
    values = [row.preference for row in rows if row.preference is not None]
    biased = [row.biased for row in rows if row.biased is not None]
    result |= {"position_bias": sum(biased) / len(biased) if biased else math.nan}
    result |= {"wins": values.count(1.0), "losses": values.count(0.0), "ties": values.count(0.5)}
    return result | {"pairs": len(rows), "judged": len(values)}


def text(found: Mapping[str, float], judge: str) -> str:
    """The section of table.md."""
    share, bias = (f"{found[key]:.4f}" for key in ("rate", "position_bias"))
    ends = "none" if math.isnan(found["low"]) else f"{found['low']:.4f} to {found['high']:.4f}"
    counts = f"{found['wins']} wins, {found['losses']} losses, {found['ties']} without a verdict, which count 1/2"
    return (
        f"## Pairs\n\n{judge} saw {found['judged']} of {found['pairs']} pairs in both orders. Win rate of the tuned "
        f"model: {share} (95 % interval: {ends}, {found['n']} prompts): {counts}. Position bias: {bias} of the "
        "answers followed the place.\n"
    )


# ---- --pair-judge


def pair_plan(judge: str | None, settings: Sequence[str], base: str | None) -> RewardPlan | None:
    """The entry of --pair-judge, checked before anything is made; None: there is none.

    Raises ConfigError: no --base to compare with, settings without a judge, or a bad option.
    """
    if judge is None:
        if settings:
            raise ConfigError(
                f"--pair-set {settings[0]}: it is an option of a --pair-judge", Remedy(without="--pair-set")
            )
        return None
    if base is None:
        raise ConfigError(
            f"--pair-judge {judge}: pairs have images of two models, and no --base names the other",
            Remedy(without="--pair-judge --pair-set" if settings else "--pair-judge"),
        )
    (tree,) = reward_entries([judge], settings, prefixes=False).values()
    if judge == "vlm_judge":
        tree = {"rubric": "preference"} | tree
    plan = reward_plan(tree, f"--pair-judge {judge}")
    check_plans([(f"--pair-judge {judge}", plan)])
    return plan


def compared(
    plan: RewardPlan | None, task: Task, folders: Mapping[str, ResultsFolder], out: Path, *, rejudge: bool
) -> tuple[dict[str, Any] | None, str]:
    """(plain result, section of table.md) of the pairs; (None, "") without a judge of pairs.

    Raises RewardFailure: the judge is away; what was judged is kept.
    """
    if plan is None:
        return None, ""
    with phase("loading"):
        judge = PairJudge(plan)
    found = summary(compare_folders(task, folders, judge, out, rejudge=rejudge))
    return {**found, "judge": judge.facts}, text(found, plan.label)
