"""The entries of `rewards`: the reward that one names, and what does not go together."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flowrl.core import registry
from flowrl.core.errors import ConfigError, Fault, described
from flowrl.core.paths import refuse_lost
from flowrl.core.strict import Options, UnknownKey, config_class, validate
from flowrl.reward import Card, LatentReward, Reward, RewardError
from flowrl.scoring.cache import Folder, Memory, ScoreCache
from flowrl.scoring.one_call import one_output, require_three_arguments
from flowrl.scoring.options import RewardEntry
from flowrl.scoring.scorer import doubled_output
from flowrl.scoring.surroundings import MEND, Conduct, kept
from flowrl.scoring.time_limits import TimeLimit
from flowrl.scoring.weighted import WeightedReward

log = logging.getLogger("flowrl")


@dataclass(frozen=True, slots=True)
class RewardPlan:
    """A reward entry with its module; `build` loads its weights, if it has any."""

    entry: RewardEntry
    module: ModuleType
    config: Any

    @property
    def name(self) -> str:
        return self.entry.name or Path(str(self.entry.path)).stem

    @property
    def label(self) -> str:
        """The name with the prefix, for messages."""
        return self.name if self.entry.prefix is None else f"{self.entry.prefix}_{self.name}"

    @property
    def card(self) -> Card | None:
        """The card declared for these options before anything is loaded, without the prefix; None: none is.

        That of the built reward may say more, but has the same outputs. A bare function without one is for images
        until it says otherwise: `image[0]` of a video is a frame, not a colour.
        """
        if hasattr(self.module, "card_of"):
            return self.module.card_of(self.config)
        card = getattr(self.module, "CARD", None)
        if card is not None or hasattr(self.module, "build"):
            return card
        return Card(outputs=(self.name,), source=str(self.entry.path or self.entry.name))

    @property
    def by_people(self) -> bool:
        """Whether people judge, so that only the rollouts of training ask for scores."""
        return self.card is not None and self.card.by_people

    @property
    def on_latents(self) -> bool:
        """Whether it judges latents, which images alone do not have."""
        return self.card is not None and self.card.modality == "latents"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of its values, with the prefix; none where only the built reward knows them."""
        known = () if self.card is None else self.card.outputs
        return tuple(known if self.entry.prefix is None else (f"{self.entry.prefix}_{name}" for name in known))

    def same_component(self, other: "RewardPlan") -> bool:
        """True where both entries name one component with the same own options: it is built and run once."""
        # By name and plain values: a user's file is a new module, with a new Config class, each time it is loaded.
        if self.module.__name__ != other.module.__name__:
            return False
        mine, theirs = (p.config and dataclasses.asdict(p.config) for p in (self, other))
        return mine == theirs

    def build(self, sibling: WeightedReward | None = None) -> WeightedReward:
        """The entry with its component, or with that of `sibling`, an entry of the same component.

        Raises ConfigError: a cache for a reward whose scores depend on the rest of the batch.
        """
        entry, cache = self.entry, None
        reward = self._reward() if sibling is None else sibling.reward
        if entry.cache is not None:
            if reward.card.needs_groups:
                raise ConfigError(
                    f"reward {self.name!r}: cache={entry.cache!r}: its score depends on the other samples of the "
                    "prompt, so it cannot be kept; leave cache out"
                )
            cache = self._cache(reward.card)
            if sibling is not None and sibling.cache is not None and sibling.cache.place == entry.cache:
                cache = sibling.cache
        return WeightedReward(
            name=self.label,
            reward=reward,
            weight=entry.weight,
            outputs=dict(entry.outputs),
            scale=entry.scale,
            offset=entry.offset,
            clip=(entry.clip[0], entry.clip[1]) if entry.clip is not None else None,
            gate=entry.gate,
            retries=entry.retries,
            isolate=entry.isolate,
            max_failed_share=entry.max_failed_share,
            cache=cache,
            renew=entry.renew,
        )

    def _reward(self) -> Reward:
        """The component, named and timed as the entry says.

        Raises RewardError: its outputs, or who or what judges, are not as declared; or people have a `timeout`.
        """
        reward = self._component()
        if isinstance(reward, LatentReward):
            reward = reward.as_reward()
        require_three_arguments(reward.score, self.name)
        if not (reward.on_latents is None) == (reward.card.modality != "latents") == (not self.on_latents):
            raise RewardError(
                f"reward {self.name!r}: its CARD and that of what it builds say modality 'latents' where build(config) "
                "returns a LatentReward, and nowhere else, so that it is known beforehand"
            )
        if self.on_latents and not (reward.card.differentiable and len(reward.card.outputs) == 1):
            raise RewardError(f"reward {self.name!r} judges latents: its card has one output, and differentiable=True")
        if not self.entry.overlap or self.on_latents:
            alone = dataclasses.replace(reward.card, overlap=False, overlap_on_gpu=False)
            reward = dataclasses.replace(reward, card=alone)
        declared = () if self.card is None else self.card.outputs
        if declared and reward.card.outputs != declared:
            raise RewardError(
                f"reward {self.name!r} has the outputs {list(reward.card.outputs)}, but declared {list(declared)}; "
                "where options change them, define card_of(config) beside CARD, so that they are known beforehand"
            )
        if reward.card.by_people != self.by_people:
            raise RewardError(
                f"reward {self.name!r} has by_people={reward.card.by_people}, and its CARD says {self.by_people}; "
                "define card_of(config) beside CARD, so that it is known beforehand"
            )
        if self.by_people and self.entry.timeout is not None:
            raise RewardError(
                f"reward {self.name!r}: timeout={self.entry.timeout:g} ends a call that hangs, and people take their "
                "time; leave it out, and set its own time_limit"
            )
        if self.entry.timeout is not None:
            reward = dataclasses.replace(reward, score=TimeLimit(reward.score, self.entry.timeout))
        return reward if self.entry.prefix is None else reward.prefixed(self.entry.prefix)

    def _component(self) -> Reward | LatentReward:
        if hasattr(self.module, "build"):
            return self._built()
        assert self.card is not None  # a bare function has one
        score = self.module.score if "CARD" in vars(self.module) else one_output(self.module.score)
        return Reward(score=score, card=self.card, compare=getattr(self.module, "compare", None))

    def _built(self) -> Reward | LatentReward:
        conduct = Conduct()
        try:
            with kept(conduct, numbers=False):
                reward = self.module.build(self.config)
        except (Fault, MemoryError, torch.OutOfMemoryError):  # these say what to do, or somebody else does
            raise
        except (Exception, SystemExit) as error:  # somebody's build may raise anything
            log.debug("reward %r cannot be built", self.name, exc_info=error)
            raise RewardError(f"reward {self.name!r} cannot be built: {described(error)}") from error
        _require_kept(conduct, f"reward {self.name!r}: its build(config)", self.module)
        return reward

    def _cache(self, card: Card) -> ScoreCache:
        place = str(self.entry.cache)
        store = Memory() if place == "memory" else Folder(Path(place).expanduser())
        return ScoreCache(
            store,
            self.fingerprint(card),
            place=place,
            images=card.modality in ("edit", "video"),
            prefix=self.entry.prefix,
        )

    def fingerprint(self, card: Card) -> str:
        """Tells this scorer, its version and options from every other: SHA-256, in hexadecimal.

        Of a reward that is not built in the source file is part of it: people change theirs without raising a version.
        """
        name, source = self.module.__name__.removeprefix("flowrl."), ""
        if not name.startswith("rewards.") and self.module.__file__:
            name, source = self.name, hashlib.sha256(Path(self.module.__file__).read_bytes()).hexdigest()
        options = self.config and dataclasses.asdict(self.config)
        start = 0 if self.entry.prefix is None else len(f"{self.entry.prefix}_")
        outputs = [output[start:] for output in card.outputs]
        identity = json.dumps([name, source, card.version, outputs, options], sort_keys=True, default=str)
        return hashlib.sha256(identity.encode()).hexdigest()


def reward_plan(options: Options, where: str) -> RewardPlan:
    """Resolve and validate one entry of `rewards`.

    Raises ConfigError: no such reward, a file without `score`, a bad option.
    """
    common = {f.name for f in dataclasses.fields(RewardEntry)}
    if options.get("name") is None and options.get("path") is None:
        known = ", ".join(registry.names("rewards"))
        raise ConfigError(f"{where}: give either name or path (your own .py file); names: {known}")
    entry = validate(RewardEntry, {k: v for k, v in options.items() if k in common}, where)
    _require_towards_better(entry, where)
    own = {k: v for k, v in options.items() if k not in common}
    name = str(entry.name if entry.path is None else entry.path)
    if entry.path is not None and not entry.path.endswith(".py"):
        raise ConfigError(f"{where}: path={entry.path!r} must be a .py file; use name for a module")
    module = imported("rewards", name, where)
    clash = registry.collision("rewards", name)
    if clash is not None:
        log.warning("%s: %s", where, clash)
    if hasattr(module, "build"):
        try:
            config = validate(config_class(module, where, name), own, where)
        except UnknownKey as error:  # of the reward's own options; the entry has others
            raise UnknownKey(error.place, error.value, [*error.valid, *common]) from None
        refuse_lost(config, where)
        plan = RewardPlan(entry, module, config)
        if plan.on_latents and entry.cache is not None:
            raise ConfigError(
                f"{where}.cache={entry.cache!r}: scores are kept by image, and {name} judges latents",
                {f"{where}.cache": None},
            )
        return plan
    if not callable(getattr(module, "score", None)):
        raise ConfigError(f"{where}: {name} defines neither score(images, prompts, metadata) nor build(config)")
    if own:
        close = registry.suggest(next(iter(own)), sorted(common))
        raise ConfigError(
            f"{where}.{next(iter(own))}: unknown key; {close}a one-file reward without Config takes: "
            f"{', '.join(sorted(common))}"
        )
    return RewardPlan(entry, module, None)


def _require_towards_better(entry: RewardEntry, where: str) -> None:
    """Refuse a factor below 0. Raises ConfigError: naming the option."""
    for option, value in (("weight", entry.weight), ("scale", entry.scale)):
        if value is not None and value < 0:
            raise ConfigError(
                f"{where}.{option}={value:g} must not be below 0, which would train towards what is worse: an output "
                "of which less is better is negated already (its card's less_is_better); weight 0 only looks at the "
                "reward, and one that is to fall is the negative score of a file of your own",
                {f"{where}.{option}": -value},
            )


def imported(kind: str, name: str, where: str) -> ModuleType:
    """The module of a component, which may be somebody else's.

    Raises ConfigError: there is none, it raises, or it leaves the process changed.
    """
    conduct = Conduct()
    try:
        with kept(conduct, numbers=False):
            module = registry.load(kind, name)
    except registry.UnknownName as error:
        raise ConfigError(f"{where}: {error}") from None
    except (Exception, SystemExit) as error:  # a user's file may raise anything when it is run
        log.debug("%s: %s cannot be imported", where, name, exc_info=error)
        raise ConfigError(f"{where}: {name} cannot be imported: {described(error)}") from error
    _require_kept(conduct, f"{where}: {name}, when it is imported,", module)
    return module


def _require_kept(conduct: Conduct, what: str, module: ModuleType) -> None:
    """Refuse somebody's code that leaves the process changed; it is put back already, and may count on it.

    What a library does under a component of ours is put back alone.
    """
    if conduct.settings and not module.__name__.startswith("flowrl."):
        raise ConfigError(f"{what} changes {' and '.join(conduct.settings)} for the whole process; {MEND}")


def check_plans(plans: Sequence[tuple[str, RewardPlan]], *, latents: bool = False) -> None:
    """Refuse (key, entry)s that cannot stand side by side, before any of them is built.

    `latents`: those of the samples are at hand, and not only images.

    Raises ConfigError: an output of two rewards, two entries of one reward that name or time it differently, or a
    reward on latents where there are none.
    """
    blind = next((f"{key}: {plan.name}" for key, plan in plans if plan.on_latents and not latents), None)
    if blind is not None:
        raise ConfigError(
            f"{blind} judges a model's latents under the condition of the prompt, and only images are at hand here; it "
            "scores what a run samples (`rewards` and `eval.rewards` of a configuration), and of images a reward that "
            "`flowrl list rewards` shows for them"
        )
    distinct: list[tuple[str, RewardPlan]] = []
    for key, plan in plans:
        earlier = next(((where, other) for where, other in distinct if plan.same_component(other)), None)
        if earlier is None:
            distinct.append((key, plan))
            continue
        where, other = earlier
        mine, theirs = vars(plan.entry), vars(other.entry)
        for option in ("prefix", "timeout", "renew", "overlap"):
            if mine[option] != theirs[option]:
                raise ConfigError(
                    f"{key}.{option}={mine[option]}: it is the reward of {where} ({plan.name}) with the same options, "
                    f"which is built and run once, and there it is {theirs[option]}; set it alike in both"
                )
    clash = doubled_output([(f"{key} ({plan.label})", plan.outputs) for key, plan in distinct])
    if clash is not None:
        raise ConfigError(clash)
