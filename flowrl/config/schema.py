"""The typed, frozen configuration of a run.

An unknown key, a wrong type or a value out of range is refused with the key, the value, the reason and the nearest
valid name before a model is loaded. No value is changed silently.
"""

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from flowrl.config.trackers import entries
from flowrl.core.errors import OptionError, Remedy
from flowrl.core.paths import OUTPUT, PROMPTS, ComponentOf
from flowrl.core.strict import Options, require_not_negative, require_positive
from flowrl.data.options import DataConfig
from flowrl.rollout.options import RolloutConfig
from flowrl.statistics.paired import TIE_SHARE
from flowrl.training.options import OptimConfig


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation with fixed seeds before, during and after training."""

    every: int = 0
    """Iterations between evaluations during training; 0: only before and after it."""
    num_inference_steps: int | None = None
    """Denoising steps of an evaluation; null: those of `rollout`."""
    guidance_scale: float | None = None
    """Guidance scale of an evaluation; null: that of `rollout`."""
    samples_per_prompt: int = 1
    """Samples of each prompt, at seeds 0, 1, ...; more of them narrow the intervals."""
    batch_size: int = 32
    """Samples per forward; changes memory and speed alone."""
    diversity: int | None = None
    """Number of prompts, the first ones, whose diversity is measured: how unlike 4 samples are. Missing samples are
    drawn and not scored. null: 128 prompts where samples_per_prompt is 4 or more, else none; 0: none."""
    tie: float = TIE_SHARE
    """Largest difference of two scores that a win rate counts as a tie, as a share of the std of the base's scores.
    Scores that are all 0 or 1 tie where they are equal, and so do images that are equal in 8 bits. 0: equal scores."""
    best_guidance: list[float] = field(default_factory=list)
    """Guidance scales that are tried, beside the evaluation's own, on base and tuned: the first 128 training captions
    choose for each, and both are reported at their best too. Empty: none."""
    verdict: Literal["same", "best"] = "same"
    """Title of report and card: base and tuned at the `same` guidance, or each at its `best` of `best_guidance`."""
    periodic_prompts: int | None = None
    """Number of prompts, the first ones, in evaluations during training; null: all."""
    rewards: Annotated[list[Options], ComponentOf("rewards")] = field(default_factory=list)
    """Rewards that are evaluated and not trained on; those of training are always evaluated."""
    save_images: int | None = 64
    """Number of prompts whose images are saved; null: all, and the report can show the worst regressions."""
    videos: Literal["webp", "mp4"] = "webp"
    """Files of saved videos. `webp` needs nothing, and below 128 px nothing is lost. `mp4` needs the extra `video`:
    large videos are far smaller and sooner written, and all lose detail of colour."""
    preview_prompts: Annotated[list[str] | str, PROMPTS] = field(default_factory=list)
    """Prompts of your own, a list or a file as for `data.prompts`, at most 64: drawn at every evaluation on fixed noise
    for the filmstrip of the report, never scored. Empty: none."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "num_inference_steps", "samples_per_prompt", "batch_size", "periodic_prompts")
        require_not_negative(vars(self), "every", "diversity")
        if not 0 <= self.tie < math.inf:
            raise ValueError(f"tie={self.tie} must be a number from 0; 0 counts equal scores alone as ties")
        if self.verdict == "best" and not self.best_guidance:
            raise OptionError(
                "verdict='best': best_guidance is empty, so no best guidance is sought",
                [{"verdict": "same"}, {"best_guidance": [4.0]}],
            )
        if self.save_images is not None and self.save_images < 0:
            raise ValueError(f"save_images={self.save_images} must not be negative; null saves all, 0 none")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The guard: what is looked at in every evaluation during training, and what an alarm does."""

    metric: str | None = None
    """Watched metric: an evaluated output that no weight of the reward trains on; null: the first one there is."""
    mode: Literal["off", "warn", "stop", "rollback", False] | None = None
    """What an alarm does: `warn` says it, `stop` ends the run with its last weights, `rollback` with the best ones.
    null: warn where there are evaluations during training and a watched metric, else off; false is off."""
    patience: int = 2
    """Evaluations in a row that lose against the base, or against the best one so far, before that is an alarm.
    A larger number lets a passing dip pass and stops later; 1 stops at the first loss, by chance too."""
    diversity: float | None = 0.8
    """Least share of the base's image std among the samples of a prompt; null: not looked at."""
    degeneracy: float | None = 3.0
    """Largest distance of the images' signs from the base's, in standard deviations; null: not looked at."""
    kl_budget: float | None = None
    """Largest `policy/kl_reference` of an iteration, as the method logs it; null: not looked at."""
    norm_ratio: float | None = 1.5
    """Largest `matching/norm_ratio` of an iteration, where the method logs it; null: not looked at."""
    copying: float | None = 0.1
    """Of edits: rise of the copy index above the base's that must surely not be passed; null: not looked at."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "patience", "diversity", "degeneracy", "kl_budget", "norm_ratio")
        require_not_negative(vars(self), "copying")
        for name, of in (("diversity", "of the base's"), ("copying", "of the images")):
            if (value := vars(self)[name]) is not None and value >= 1:
                raise ValueError(f"{name}={value} must be below 1: it is a share {of}")

    @property
    def asked(self) -> bool:
        """True if the configuration asks for a guard, which must then be possible."""
        return self.mode in ("warn", "stop", "rollback") or (self.mode is None and self.metric is not None)

    @property
    def acts(self) -> bool:
        """True if an alarm ends the run."""
        return self.mode in ("stop", "rollback")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of a run."""

    every: int = 20
    """Iterations between checkpoints; the last iteration is always saved."""
    keep: int = 3
    """Number of checkpoints that are kept, the newest ones."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "every", "keep")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run. `model`, `algorithm`, `rollout.sampler` and each of `rewards` hold a component's own options."""

    name: str
    """Name of the run folder, <output>/<name>: letters, digits, ".", "_" and "-"."""
    model: Annotated[Options, ComponentOf("models")]
    """Model to train: `path`, and perhaps `name`, the adapter (default: by the pipeline's class)."""
    data: DataConfig
    """Training and evaluation data."""
    iterations: int
    """Number of iterations, each a rollout with its updates; 0: only the evaluations."""
    rewards: Annotated[list[Options], ComponentOf("rewards")] = field(default_factory=list)
    """Rewards of the samples, with their weights; empty for a method that learns from pairs."""
    output: Annotated[str, OUTPUT] = "runs"
    """Folder of run folders, relative to the working directory."""
    seed: int = 0
    """Seed of all noise, orders and splits of data."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of an iteration: prompts, samples, steps, sampler."""
    algorithm: Annotated[Options, ComponentOf("algorithms")] = field(default_factory=lambda: {"name": "flow_grpo"})
    """Training method: `name`, or `path` of a .py file, and its options."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and updates."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluations."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """The guard against over-optimisation, at every evaluation during training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    trackers: list[Any] = field(default_factory=list)
    """Trackers that are sent rows, evaluations and the summary: names, or mappings of `name` and options; empty: none.
    docs/watching/trackers.md has the names; a tracker may be added when a run is resumed."""
    deterministic: bool = True
    """Deterministic kernels, which make a resumed run bitwise equal; false: faster on a GPU.
    An operation of the update that has no such kernel stops the run, and is named."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.name) or self.name in (".", ".."):
            raise ValueError(f"name={self.name!r} may hold letters, digits, '.', '_' and '-': it names the run folder")
        require_not_negative(vars(self), "iterations")
        geometry(self)
        if self.trackers:
            entries(self.trackers)

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @property
    def samples_per_iteration(self) -> int:
        """Samples of an iteration, for a method that draws all of them."""
        return self.rollout.prompts_per_iteration * self.rollout.group_size


def geometry(config: RunConfig) -> None:
    """Refuse a number of updates that does not divide the samples, or pairs, of an iteration; names the nearest."""
    rollout, total, what = config.rollout, config.samples_per_iteration, "samples of an iteration"
    made_of = f"prompts_per_iteration={rollout.prompts_per_iteration} x group_size={rollout.group_size}"
    if config.data.pairs is not None:
        total, what = config.data.pairs.per_iteration, "pairs of an iteration"
        made_of = f"data.pairs.per_iteration={total}"
    updates = config.optim.updates_per_iteration
    if total % updates:
        valid = [n for n in range(1, total + 1) if total % n == 0]
        near = sorted(valid, key=lambda n: abs(n - updates))[:3]
        raise OptionError(
            f"optim.updates_per_iteration={updates} does not divide the {total} {what} ({made_of})",
            remedies=[Remedy({"optim.updates_per_iteration": number}) for number in sorted(near)],
        )


def to_tree(config: Any) -> Options:
    """Plain data of a configuration with all defaults."""
    return json.loads(json.dumps(dataclasses.asdict(config)))
