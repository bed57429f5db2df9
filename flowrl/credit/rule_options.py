"""The options of an advantage rule, and what they cannot be together."""

from dataclasses import dataclass
from typing import Literal

from flowrl.core.errors import OptionError
from flowrl.core.strict import require_not_negative
from flowrl.credit.best_of import BestOfConfig
from flowrl.credit.history import HistoryConfig
from flowrl.credit.selection import SelectConfig
from flowrl.credit.spread import SpreadConfig

Std = Literal["global", "within", "group", "none"]
_OWN = {"best_of": "best_of", "history": "batch", "nonzero_factor": "median", "virtual_best": "group or per_reward"}
"""Options of one rule alone, or of two."""


@dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """An advantage rule; a method with one loss per reward adds `separate` to the names."""

    name: Literal["group", "per_reward", "gdpo", "median", "batch", "best_of", "smooth", "leave_one_out"] = "group"
    """The rule; see `flowrl/credit/advantages.py`."""
    std: Std = "global"
    """Divide by the std of all samples of the iteration (`within`: of their distances from their prompt's mean), of the
    prompt's group, or not at all (Dr. GRPO).

    `per_reward`, `gdpo` (`group` only) and `separate` do so reward by reward; `median` has its own scale; `batch` has
    the std of what it compares with, or none; `best_of` the global one, or none; `smooth` that of the group.
    """
    eps: float = 1e-4
    """Added to the std or the median deviation."""
    clip: float | None = 5.0
    """Bound on the absolute advantage; null for none."""
    ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of the std: 0 divides by n (Flow-GRPO), 1 by n - 1 (DanceGRPO, MixGRPO, GDPO)."""
    trimmed_ratio: float = 0.0
    """Share of a group's samples, the lowest, that mean and std leave out."""
    min_deviation: float = 0.1
    """Least deviation of the rule `median`, as a fraction of the group's std."""
    nonzero_factor: bool = False
    """Factor n / (advantages that are not 0) of each group of n by the rule `median` (MC-GRPO); its G samples and one
    more, which is left out, are `rollout.group_size` = G + 1."""
    virtual_best: int = 0
    """Samples of the highest value that the rewards can have, which mean and std of every group count in (NGRPO); of
    `group` and `per_reward`, for methods on the steps of a rollout."""
    history: HistoryConfig | None = None
    """Mean and std of the rule `batch` from the prompt's own rewards, of this and earlier iterations, once there are
    enough; null: always from the batch."""
    best_of: BestOfConfig | None = None
    """Options of the rule `best_of`; null: k = 4 of it."""

    def __post_init__(self) -> None:
        if not self.eps >= 0:
            raise ValueError(f"eps={self.eps} must not be negative")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be positive, or null for none")
        if not 0 <= self.trimmed_ratio < 1:
            raise ValueError(f"trimmed_ratio={self.trimmed_ratio} must be in [0, 1)")
        if self.name in ("gdpo", "smooth") and self.std != "group":
            words = f"std={self.std!r}: {self.name} normalises every reward within its group"
            raise OptionError(words, {"std": "group"})
        if not 0 < self.min_deviation <= 1:
            raise ValueError(f"min_deviation={self.min_deviation} must be in (0, 1]: a part of the group's std")
        require_not_negative(vars(self), "virtual_best")
        if self.name == "median" and self.clip is None:
            raise OptionError("clip=null: its deviation can be next to 0", {"clip": 5.0})
        if self.name in ("median", "batch", "best_of", "smooth", "leave_one_out") and self.trimmed_ratio:
            words = f"trimmed_ratio={self.trimmed_ratio}: the rule {self.name!r} leaves no reward out"
            raise OptionError(words, {"trimmed_ratio": 0.0})
        if self.name == "batch" and self.std in ("group", "within"):
            raise OptionError(f"std={self.std!r}: of a batch there is one std", {"std": "global"})
        if self.name == "best_of" and self.std == "group":
            words = "std='group': a group's best of k rises with its spread, which this would divide out"
            raise OptionError(words, [{"std": "global"}, {"std": "none"}])
        for key, rules in _OWN.items():
            value = vars(self).get(key)  # a rule without the option has a class variable
            if value and self.name not in rules.split():
                std = {"std": "global"} if self.std in ("group", "within") and rules in ("batch", "best_of") else {}
                off = type(value)() if isinstance(value, int) else None
                words = f"{key} belongs to the rule {rules}, and the rule is {self.name!r}"
                raise OptionError(words, [{"name": rules.split()[0]} | std, {key: off}])

    def rule(self) -> "RuleConfig":
        """The rule that samples are compared by."""
        return self

    def selection(self) -> SelectConfig | None:
        """Samples of a prompt that are updated on; None: all."""
        return None

    def spreading(self) -> SpreadConfig | None:
        """How the spread of a group counts; None: it does not."""
        return None

    def check_group(self, group_size: int) -> None:
        """Refuse what a group of this size cannot give; the configuration alone does not know the size."""
        if group_size < 2 and self.name != "batch":
            std = {"advantages.std": "global"} if self.std == "group" else {}
            raise OptionError(
                f"advantages.name={self.name} compares the samples of a prompt, and rollout.group_size={group_size}",
                [{"rollout.group_size": 2}, {"advantages.name": "batch"} | std],
            )
        best = self.best_of or BestOfConfig()
        k = max(best.k, best.end or 1) if self.name == "best_of" else 1
        if k > group_size:
            raise OptionError(
                f"advantages.best_of: of {group_size} samples there is no best of {k}",
                [{"advantages.best_of": {"k": group_size}}, {"rollout.group_size": k}],
            )
        selection = self.selection()
        if selection is not None:
            selection.check_group(group_size)
        if self.trimmed_ratio and group_size - int(group_size * self.trimmed_ratio) < 2:
            raise ValueError(
                f"advantages.trimmed_ratio={self.trimmed_ratio} leaves fewer than 2 of {group_size} samples for mean "
                f"and std; it must stay below {1 - 1 / group_size:.4g}"
            )
