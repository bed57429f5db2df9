"""Rewards as the judges of a suite."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.apps.command_line import reward_entries
from flowrl.apps.suites.running.options import Judging
from flowrl.apps.suites.running.runner import PATIENCE, Judgement, Task
from flowrl.core.errors import ConfigError, RewardError, RewardFailure, described
from flowrl.data.prompts import Prompt
from flowrl.evaluation.suite import Item, Suite
from flowrl.reward import REASONS, Images
from flowrl.scoring.build import build_rewards, build_scorer, require_metadata, require_modality
from flowrl.scoring.entries import RewardPlan, check_plans, reward_plan
from flowrl.scoring.surroundings import Batch
from flowrl.scoring.weighted import WeightedReward

_TRIES = 3


class RewardJudge:
    """Reward entries that judge the images of a suite; their weights are loaded here.

    The weights and transforms of `plans` play no part: raw values are kept. All items are checked before anything is
    loaded; `batch_size` images are handed to a reward at once.

    Raises ConfigError: a prompt that a reward cannot judge, or rewards that do not go together; RewardError: a reward
    that cannot be built.
    """

    def __init__(self, plans: Sequence[RewardPlan], suite: Suite, items: Sequence[Item], batch_size: int = 16) -> None:
        prompts = [Prompt(item.text, item.metadata) for item in items]
        where = f"--suite {suite.name}"
        for plan in plans:
            if plan.card is not None:
                require_modality(plan.name, plan.card, videos=suite.facts.videos)
        require_metadata(where, prompts, plans, [plan.card for plan in plans])
        self.plans, self.suite = plans, suite
        self.entries = build_rewards(plans)
        cards = [entry.reward.card for entry in self.entries]
        require_metadata(where, prompts, plans, cards)
        for plan, card in zip(plans, cards, strict=True):
            require_modality(plan.name, card, videos=suite.facts.videos)
        self._errors: list[str] = []
        self._silent: dict[int, int] = {}
        """Place of a reward -> images in a row that it has failed on; of two with one name each counts for itself."""
        self.scorer = build_scorer(
            self.entries, batch_size=batch_size, max_failed_share=1.0, on_error=self._errors.append
        )
        self.whole_prompts = any(card.needs_groups for card in cards)

    @property
    def facts(self) -> dict[str, Any]:
        """Name -> version, fingerprint, direction and options of each reward."""
        return {
            plan.label: {
                "version": entry.reward.card.version,
                "fingerprint": plan.fingerprint(entry.reward.card),
                "outputs": list(entry.reward.card.outputs),
                "higher_is_better": entry.reward.card.higher_is_better,
                "less_is_better": list(entry.reward.card.lower),
                "source": entry.reward.card.source,
                "options": None if plan.config is None else dataclasses.asdict(plan.config),
            }
            for plan, entry in zip(self.plans, self.entries, strict=True)
        }

    def __call__(self, images: Sequence[Tensor], items: Sequence[Item]) -> list[Judgement]:
        """A judgement for each image [3, H, W] or video [F, 3, H, W] in [0, 1].

        Raises:
            RewardFailure: a broken contract, or one of several rewards is away; the runner knows that of a single one.
        """
        stacked = torch.stack(list(images)) if len({image.shape for image in images}) == 1 else list(images)
        scores: list[dict[str, float | None]] = [{} for _ in items]
        answers: list[list[Any]] = [[] for _ in items]
        errors = [""] * len(items)
        for number, entry in enumerate(self.scorer.distinct):
            self._errors.clear()
            heard: list[Any] = []
            if entry.reward.answers is not None and self.suite.from_answers is not None:
                given = self._answered(entry, stacked, items)
                own = [self.suite.from_answers(each, item) for each, item in zip(given, items, strict=True)]
                for kept, each in zip(answers, given, strict=True):
                    kept += [None if math.isnan(value) else value for value in each]
                heard = [value for each in given for value in each if not math.isnan(value)]
            else:
                batch = Batch(stacked, [item.text for item in items], [item.metadata for item in items])
                raw = self.scorer.raw(entry, batch, self._errors)
                rows = zip(*(values.tolist() for values in raw.values()), strict=True)
                own = [{n: v if math.isfinite(v) else None for n, v in zip(raw, row, strict=True)} for row in rows]
            reason = self._errors[-1] if self._errors else ""
            said = any(value is not None for found in own for value in found.values()) or bool(heard)
            # A reward may fail on all of these images, but among several not for `PATIENCE`.
            self._silent[number] = self._silent.get(number, 0) + len(items) if reason and not said else 0
            if len(self.scorer.distinct) > 1 and self._silent[number] >= PATIENCE:
                count = self._silent.pop(number)
                raise RewardFailure(f"reward {entry.name!r} is away: it failed on {count} images in a row ({reason})")
            for place, found in enumerate(own):
                scores[place] |= found
                if reason and any(value is None for value in found.values()):
                    errors[place] = reason
        return [Judgement(*each) for each in zip(scores, answers, errors, strict=True)]

    def _answered(self, entry: WeightedReward, images: Images, items: Sequence[Item]) -> list[list[float]]:
        """Answers to the questions of each sample, NaN where they failed."""
        texts, metadata = [item.text for item in items], [item.metadata for item in items]
        assert entry.reward.answers is not None
        for _ in range(_TRIES):
            token = REASONS.set(self._errors)  # why a question failed: a server that is away raises nothing
            try:
                return entry.reward.answers(images, texts, metadata)
            except RewardError as error:
                raise RewardFailure(str(error)) from error
            except Exception as error:  # a server or somebody's code may raise anything: retry, then mask
                self._errors.append(f"reward {entry.name!r} raised {described(error)}")
            finally:
                REASONS.reset(token)
        return [[math.nan] * len(record.get("questions", (None,))) for record in metadata]


# ---- --judge


def judge_of(judging: Judging, task: Task) -> RewardJudge | None:
    """The judge; None where images are exported for another one."""
    if judging.names:
        trees = reward_entries(judging.names, judging.settings, prefixes=True)
    elif judging.export is not None:
        return None
    elif task.suite.entries(task.items) is None:
        raise ConfigError(
            f"--suite {task.suite.name} has no judge of its own here ({task.suite.facts.judge}); give --judge NAME, or "
            "--export DIR for its official evaluator"
        )
    else:
        # The suite's own judge by name, with the user's options.
        own = {str(entry.get("prefix") or entry["name"]): dict(entry) for entry in task.suite.entries(task.items) or ()}
        changed = reward_entries([str(entry["name"]) for entry in own.values()], judging.settings, prefixes=False)
        trees = {name: entry | changed.get(str(entry["name"]), {}) for name, entry in own.items()}
    plans = [(f"--judge {name}", reward_plan(tree, f"--judge {name}")) for name, tree in trees.items()]
    check_plans(plans)
    return RewardJudge([plan for _, plan in plans], task.suite, task.items)
