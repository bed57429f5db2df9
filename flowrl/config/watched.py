"""The watched metrics of a run, evaluated outputs that no weight of the reward trains on, and what a guard needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flowrl.config.resolved import Resolved
from flowrl.config.schema import GuardConfig
from flowrl.core.errors import ConfigError
from flowrl.core.registry import suggest
from flowrl.scoring.options import RewardEntry
from flowrl.scoring.weighted import WeightedReward


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward of the run as far as it says what is trained on, from its plan or from the built reward."""

    outputs: tuple[str, ...]
    """Names of its values; (): only the built reward knows them."""
    shares: dict[str, float] = field(default_factory=dict)
    """Output -> share in the training value; {}: the first output alone."""
    weight: float = 1.0
    gate: str | None = None
    """Output that opens its gate."""

    @classmethod
    def of(cls, outputs: tuple[str, ...], entry: RewardEntry | WeightedReward) -> "Scored":
        return cls(outputs, entry.outputs, entry.weight, None if entry.gate is None else entry.gate.output)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The outputs that its entry names, else the first."""
        return tuple(name for name, share in self.shares.items() if share) if self.shares else self.outputs[:1]


def trained_outputs(trained: Iterable[Scored]) -> set[str]:
    """Outputs that the training value depends on, that of a gate among them."""
    used = [one for one in trained if one.weight]
    gates = {one.gate for one in used if one.gate is not None}
    return gates.union(*(one.chosen for one in used))


def watched_outputs(trained: Sequence[Scored], evaluated: Sequence[Scored]) -> list[str]:
    """Watched metrics in order: those of `eval.rewards` (`evaluated`) first, then what else is scored."""
    taken = trained_outputs(trained)
    named = [name for one in evaluated for name in one.chosen]
    # An output with weight 0 is looked at on purpose.
    named += [name for one in trained if not one.weight for name in one.chosen]
    every = named + [name for one in (*evaluated, *trained) for name in one.outputs]
    return [name for name in dict.fromkeys(every) if name not in taken]


def require_watched(guard: GuardConfig, trained: Sequence[Scored], evaluated: Sequence[Scored]) -> None:
    """Refuse a guard without a metric to watch, as far as the outputs are known.

    Raises ConfigError: the metric is trained on, or is not scored; or there is none.
    """
    if not guard.asked:
        return
    taken, watched = trained_outputs(trained), watched_outputs(trained, evaluated)
    open_ = any(not one.outputs for one in (*trained, *evaluated))  # only the built reward knows its outputs
    others = f"watch one of {', '.join(watched)}" if watched else "add a reward to eval.rewards"
    if guard.metric in taken:
        raise ConfigError(
            f"guard.metric={guard.metric}: the run trains on it, so it rises while other things get worse; {others}"
        )
    if guard.metric is not None and guard.metric not in watched and not open_:
        raise ConfigError(
            f"guard.metric={guard.metric}: no reward of the run has that output; "
            f"{suggest(guard.metric, watched)}{others}"
        )
    if guard.metric is None and not watched and not open_:
        raise ConfigError(
            f"guard.mode={guard.mode}: the run trains on all that it evaluates "
            f"({', '.join(sorted(taken)) or 'nothing'}), and a guard watches another metric, which another reward in "
            "eval.rewards would have",
            {"guard.mode": "off"},
        )


def check_guard(resolved: Resolved) -> None:
    """Refuse a guard that has nothing to look at, before anything is loaded.

    Raises ConfigError: no evaluations during training, no prompts to evaluate, or no metric to watch.
    """
    run, guard = resolved.run, resolved.run.guard
    if not guard.asked:
        return
    key = f"guard.metric={guard.metric}" if guard.mode is None else f"guard.mode={guard.mode}"
    if not run.eval.every:
        raise ConfigError(
            f"{key}: eval.every is 0, so there is no evaluation during training to look at",
            [{"eval.every": 20}, {"guard.mode": "off"}],
        )
    if run.data.prompts is None and run.data.eval_prompts is None:
        raise ConfigError(
            f"{key}: no prompts are evaluated, since there are no data.eval_prompts", {"guard.mode": "off"}
        )
    require_watched(guard, *_parts(resolved))


def _parts(resolved: Resolved) -> list[list[Scored]]:
    """The entries of `rewards` and of `eval.rewards` that are evaluated: not what people judge."""
    both = resolved.rewards, resolved.eval_rewards
    return [[Scored.of(plan.outputs, plan.entry) for plan in plans if not plan.by_people] for plans in both]


def unwatched(resolved: Resolved) -> list[str]:
    """A note where a method climbs the gradient of its rewards, and no reward that is not trained watches."""
    run, parts = resolved.run, _parts(resolved)
    if not resolved.training.climbs:
        return []
    watched = watched_outputs(*parts) or not all(one.outputs for part in parts for one in part)
    missing = [] if watched else ["a reward that is not trained on to eval.rewards"]
    missing += [] if run.eval.every else ["eval.every=20"]
    missing += ["guard.mode=rollback"] if run.guard.mode in ("off", False) else []
    return missing and [
        f"nothing watches this run but the rewards whose gradient {resolved.algorithm.name} climbs, and those rise "
        f"while the images get worse, within tens of updates: add {', '.join(missing)} (docs/watching/guard.md)"
    ]
