"""The prompts of a run: those that it is trained on, those that it is evaluated on, and the name of the latter.

A number is held-out if the run never trains on its prompts. Without `data.eval_prompts` a share of `data.prompts` is
split off; if that is impossible, every number is of training prompts and is named so.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flowrl.config.resolved import Resolved
from flowrl.config.schema import RunConfig, to_tree
from flowrl.core.errors import ConfigError
from flowrl.core.rng import derive
from flowrl.core.types import Identity
from flowrl.data.prompt_sources import Columns, load_prompts
from flowrl.data.prompts import Prompt, identity

LEAST = 32
"""Distinct prompts below which none are held out."""
Name = Literal["held-out prompts", "training prompts", "its own prompts", "no prompts"]


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The prompts of a run. Pairs bring their own captions: `listed` and `train` are empty then."""

    listed: list[Prompt]
    """`data.prompts`, in the file's order."""
    train: list[Prompt]
    """Prompts of `listed` that are trained on."""
    evaluated: list[Prompt]
    name: Name
    """Name of the evaluated prompts, next to every number of theirs."""
    source: str
    """Origin of the evaluated prompts; "": there are none."""
    share: float | None = None
    """Share of the distinct prompts that is held out; None: they are not split."""
    remark: str = ""
    """Remark for readers of the numbers: why none are held out, or how many of them are training prompts too."""

    @property
    def looked_up(self) -> tuple[str, list[Prompt]]:
        """(key, prompts) of the list that holds the evaluated prompts: messages give the number in that list."""
        if self.source.startswith("data.eval_prompts"):
            return "data.eval_prompts", self.evaluated
        return "data.prompts", self.evaluated if self.share is None else self.listed

    @property
    def on(self) -> str:
        """Suffix for the name of a number: its prompts, or "" for held-out ones."""
        return f" on {self.name}" if self.name in ("training prompts", "its own prompts") else ""

    def counted(self, count: int) -> str:
        """A count of the evaluated prompts, in words."""
        return f"{count} of its own prompts" if self.name == "its own prompts" else f"{count} {self.name}"

    def facts(self) -> dict[str, Any]:
        """Facts for `summary.json`."""
        held_out = {"source": self.source, "prompts": len(self.evaluated), "share": self.share}
        return {
            "evaluated_on": self.name,
            "held_out": held_out if self.name == "held-out prompts" else None,
            "trained_prompts": len(self.train),
        }

    def describe(self) -> str:
        """Counts, in words."""
        train, evaluated = len(self.train), len(self.evaluated)
        if self.name == "held-out prompts":
            return f"{train} train and {evaluated} held-out prompts"
        if self.name == "its own prompts":
            return f"{train} prompts of its own, {evaluated} of them evaluated"
        return f"{train} training prompts, {evaluated} of them evaluated and none held out"


def splits(resolved: Resolved) -> bool:
    """True if `data.eval_share` holds prompts out, where there are enough."""
    data = resolved.run.data
    given = data.prompts is None or data.eval_prompts is not None
    return not given and data.eval_share > 0 and not resolved.training.own_prompts


def run_prompts(config: RunConfig, own: bool) -> RunPrompts:
    """Read the prompts of a run, and hold some out if the configuration names none for its evaluations.

    `own`: the method learns about its training prompts alone, and none are split off.

    Raises ConfigError: as `load_prompts`.
    """
    data = config.data
    columns = Columns(data.prompt_column, data.image_column, data.subset)
    listed: list[Prompt] = []
    if data.prompts is not None:
        listed = load_prompts(data.prompts, "data.prompts", columns, data.max_prompts)
    if data.eval_prompts is not None:
        given = load_prompts(data.eval_prompts, "data.eval_prompts", columns, data.max_eval_prompts)
        name, remark = ("its own prompts", "") if own else _overlap(listed, given)
        return RunPrompts(
            listed, listed, given, name, _describe_share("data.eval_prompts", data.eval_prompts), remark=remark
        )
    if data.prompts is None:
        remark = "data.eval_prompts is not set: nothing is drawn before and after"
        return RunPrompts([], [], [], "no prompts", "", remark=remark)
    source, first = _describe_share("data.prompts", data.prompts), listed[: data.max_eval_prompts]
    if own:
        return RunPrompts(listed, listed, first, "its own prompts", source)
    count = len({identity(prompt) for prompt in listed})
    if data.eval_share == 0 or count < LEAST:
        why = "data.eval_share is 0" if data.eval_share == 0 else f"{count} are fewer than {LEAST} distinct prompts"
        return RunPrompts(listed, listed, first, "training prompts", source, remark=_none_held_out(why))
    train, held_out = split(listed, data.eval_share, config.seed)
    source = f"data.eval_share={data.eval_share:g} of {source}, drawn by seed {config.seed}"
    evaluated = held_out[: data.max_eval_prompts]
    return RunPrompts(listed, train, evaluated, "held-out prompts", source, data.eval_share)


def split(prompts: Sequence[Prompt], share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts to train on, in their order; held-out ones, in a random order, each once).

    Records of one prompt identity (text and images) are on the same side. The choice depends on the seed and on the set
    of prompts, not on their order or on the folders of their images; at least one prompt is on each side.
    """
    groups: dict[Identity, list[Prompt]] = {}
    for prompt in prompts:
        same = groups.setdefault(identity(prompt), [])
        if prompt not in same:  # one text may have records that differ
            same.append(prompt)
    order = sorted(groups, key=lambda one: derive(seed, "held-out prompts", key_of(*one)))
    count = min(max(round(share * len(order)), 1), len(order) - 1)
    chosen = order[:count]
    held_out, left = [prompt for one in chosen for prompt in groups[one]], set(order[count:])
    return [prompt for prompt in prompts if identity(prompt) in left], held_out


def guards_half(prompts: Sequence[Prompt], seed: int) -> np.ndarray:
    """The half of P prompts that a guard looks at, [P] bool; the run's final numbers may come from the others.

    Prompts of one identity are in the same half. The choice depends on the seed and the set of identities, not on their
    order; of an odd number the guard has the smaller half.
    """
    order = sorted({identity(p) for p in prompts}, key=lambda one: derive(seed, "guard", key_of(*one)))
    chosen = set(order[: len(order) // 2])
    return np.asarray([identity(p) in chosen for p in prompts], dtype=bool)


def _describe_share(key: str, source: str) -> str:
    """Key and name of a list, without its folder."""
    return f"{key}={Path(source).name if Path(source).is_absolute() else source}"


def key_of(text: str, images: Sequence[str]) -> int:
    """A number of 256 bits of a prompt identity, the same for any folder of its images."""
    text = json.dumps([text, [Path(image).name for image in images]])
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def _overlap(train: Sequence[Prompt], given: Sequence[Prompt]) -> tuple[Name, str]:
    """Name of the prompts in `data.eval_prompts`, and a remark on those that are training prompts too."""
    known = {identity(prompt) for prompt in train}
    both = sum(identity(prompt) in known for prompt in given)
    if both == len(given):
        return "training prompts", _none_held_out("all of data.eval_prompts are training prompts")
    return "held-out prompts", f"{both} of the {len(given)} held-out prompts are training prompts too" if both else ""


def _none_held_out(why: str) -> str:
    return (
        f"no prompts are held out ({why}): evaluations are on training prompts, so their numbers are not held-out "
        "and give no verdict; name others in data.eval_prompts"
    )


_DECIDES = ("prompts", "eval_prompts", "prompt_column", "image_column", "subset", "max_prompts", "eval_share")
"""Options of `data` that decide which prompts are held out."""


def require_same_split(trained: RunConfig, now: RunConfig, prompts: RunPrompts) -> None:
    """Refuse to name the prompts of an evaluation held-out if the run folder's `trained` run may have used them.

    Raises ConfigError: they are a share of `data.prompts`, and another one than training held out.
    """
    if prompts.share is None:
        return
    then, here = to_tree(trained.data), to_tree(now.data)
    changed = [f"data.{key} was {then[key]!r}, now {here[key]!r}" for key in _DECIDES if then[key] != here[key]]
    if trained.seed != now.seed:
        changed.append(f"seed was {trained.seed}, now {now.seed}")
    if changed:
        raise ConfigError(
            f"{'; '.join(changed)}: another share of data.prompts would be held out than the run was trained without; "
            "leave it as it was, or name the prompts in data.eval_prompts"
        )
