"""Best of n where images are sampled: which of a prompt are kept, by whose score, and what their notes say."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.apps.command_line import reward_entries
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError, Remedy, RewardFailure
from flowrl.data.prompts import Prompt
from flowrl.media.eight_bits import EightBitImages
from flowrl.media.media import SELECTED
from flowrl.scoring.build import build_rewards, build_scorer, require_metadata, require_modality
from flowrl.scoring.entries import RewardPlan, reward_plan
from flowrl.scoring.scorer import Scorer


@dataclass(frozen=True, slots=True)
class BestOf:
    """The `keep` best of the images of a prompt."""

    keep: int
    scorer: Scorer

    def __call__(self, levels: Sequence[Tensor], prompt: Prompt, seed: int) -> dict[int, dict[str, Any]]:
        """Number of each kept image, the best first -> what its note says; of equal ones the lowest seeds are kept.
        `levels` are images [3, H, W] or videos [F, 3, H, W] of one prompt in 8 bits, of the seeds from `seed` on.

        Raises RewardFailure: fewer than `keep` have a score; ConfigError: a reward that does not judge what the model
        makes.
        """
        count = len(levels)
        for entry in self.scorer.distinct:
            require_modality(entry.name, entry.reward.card, videos=levels[0].ndim == 4)
        images = EightBitImages(torch.stack(list(levels)), torch.ones(count, dtype=torch.bool))
        found = self.scorer.score(images, [prompt.text] * count, [prompt.metadata] * count)
        total = found.total.tolist()
        best = sorted((k for k in range(count) if total[k] == total[k]), key=lambda k: -total[k])[: self.keep]
        if len(best) < self.keep:
            raise RewardFailure(f"{len(best)} of {count} images of {prompt.text[:60]!r} have a score; nothing is kept")
        by = " + ".join(entry.name for entry in self.scorer.entries if entry.weight)
        note = {"how": f"best of {count} by {by}", "keep": self.keep, "seeds": [seed + k for k in range(count)]}
        scores = {name: [None if x != x else x for x in values.tolist()] for name, values in found.raw.items()}
        note |= {"chosen_by": [None if x != x else x for x in total], "scores": scores}
        return {k: {SELECTED: note} for k in best}


def best_of(
    count: int | None, keep: int | None, reward: str | None, target: str, prompts: Sequence[Prompt], drawn: int
) -> BestOf | None:
    """What --best-of, --keep and --reward ask for, with its rewards loaded; None: nothing. `count` images to choose
    from, `keep` of them, None: one. `reward`: a name or a .py file; None: those that the run was trained on. All
    prompts are checked; `drawn` is what --count says.

    Raises ConfigError: options that do not go together, or a reward that cannot choose; with the reason.
    """
    own = [name for name, value in (("--keep", keep), ("--reward", reward)) if value is not None]
    if count is None and own:
        words = " ".join(own)
        raise ConfigError(f"{words}: for --best-of, which is not given", Remedy(without=words))
    if count is None:
        return None
    if drawn != 1:
        raise ConfigError(
            f"--count {drawn}: --best-of {count} draws {count} of each prompt, and --keep says how many stay",
            Remedy(without="--count"),
        )
    if (keep or 1) >= count:
        why = f"--best-of {count} with --keep {keep or 1} leaves none out, so it chooses nothing"
        out = "--keep" if count > 1 else " ".join(["--best-of", *own])
        raise ConfigError(why, Remedy(without=out))
    plans = _plans(reward, target)
    require_metadata("PROMPT", prompts, plans, [plan.card for plan in plans])
    entries = build_rewards(plans)
    for entry in entries:
        card = entry.reward.card
        reasons = {
            "people give its scores": card.by_people,
            "its score of an image depends on the others": card.needs_groups,
            "it judges latents, and only images are at hand": card.modality == "latents",
        }
        for why in (why for why, holds in reasons.items() if holds):
            raise ConfigError(f"--best-of {count}: the reward {entry.name!r} cannot choose, since {why}; give another")
    require_metadata("PROMPT", prompts, plans, [entry.reward.card for entry in entries])
    return BestOf(keep or 1, build_scorer(entries))


def _plans(reward: str | None, target: str) -> list[RewardPlan]:
    """The reward of the option, else those of the run that count."""
    if reward is not None:
        (tree,) = reward_entries([reward], [], prefixes=False).values()
        return [reward_plan(tree, f"--reward {reward}")]
    run = (Path(target) / "config.yaml").is_file()
    plans = [plan for plan in resolve(load_config(target)).rewards if plan.entry.weight] if run else []
    if not plans:
        what = "was trained on no reward" if run else "is no run, so it has no rewards of its own"
        raise ConfigError(f"--best-of: {target!r} {what}; name one with --reward")
    return plans
