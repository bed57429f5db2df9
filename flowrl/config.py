"""YAML to a typed, frozen, strict configuration.

An unknown key, a wrong type or a value out of range stops with the key, the value, the reason and the
nearest valid name, before any model is loaded. No value is ever changed silently.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from flowrl.checks import check
from flowrl.components import Component, RewardPlan, component, model_component, reward_plan
from flowrl.inputs import stand_ins
from flowrl.locate import located, origin_of
from flowrl.optim import OptimConfig
from flowrl.paths import OUTPUT, PAIRS, PROMPTS, ComponentOf
from flowrl.places import placed
from flowrl.preferences import PreferenceOptions
from flowrl.rollout_options import RolloutConfig
from flowrl.strict import Options, find_config, load_tree, require_positive, validate
from flowrl.types import Member

_EVAL_SHARE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    prompts: Annotated[str | None, PROMPTS] = None
    """Training prompts: a .txt (one a line), a .jsonl, a .json list, a .csv, .tsv or .parquet (further columns are
    metadata), `hf:PATH` or `hf:PATH:SPLIT` for a data set (hub id or folder), or `shapes:train`. Required, unless there
    are pairs."""
    eval_prompts: Annotated[str | None, PROMPTS] = None
    """Held-out prompts, same forms; null: `eval_share` of the training prompts, with pairs none."""
    eval_share: float = _EVAL_SHARE
    """Of the distinct training prompts, where there are no `eval_prompts`: held out for evaluation and never trained
    on, drawn by the seed. 0, or fewer than 32 prompts: evaluated on the training prompts, as every number then says."""
    pairs: Annotated[str | None, PAIRS] = None
    """Preference set, for methods that learn from given pictures (docs/preferences.md)."""
    eval_pairs: Annotated[str | None, PAIRS] = None
    """Held-out pairs, same forms: what the network prefers of them is told at every evaluation."""
    pair_options: PreferenceOptions = field(default_factory=PreferenceOptions)
    """Columns of both sets, and the share of them that may be broken."""
    pairs_per_iteration: int = 64
    """Pairs (or pictures, where a method takes single ones) drawn per iteration, over all processes."""
    max_eval_pairs: int | None = None
    """Look at no more than so many of the held-out pairs, drawn by the seed; null: 500. Latents stay in memory."""
    caption_dropout: float = 0.2
    """Share of the pairs whose caption is replaced by the empty one."""
    crop: Literal["center", "random"] = "center"
    """Which part of a picture is taken, after its short side is brought to the model's size."""
    posterior: Literal["sample", "mean"] = "sample"
    """Of the VAE: what a picture's latents are. A model that was trained on means (tiny-sd3) wants these."""
    flip: bool = True
    """Mirror half of the pairs. Set it to false where captions say left or right, or pictures hold text."""
    max_prompts: int | None = None
    """Use only the first so many training prompts, `eval_share` of them held out."""
    max_eval_prompts: int | None = None
    """Evaluate only the first so many held-out prompts; those of `eval_share` are in random order."""
    prompt_column: str = "prompt"
    """Of a record: the text."""
    image_column: str | None = None
    """Of a record: its picture, or a list of them; null: `image` or `images`, where it has one."""
    subset: str | None = None
    """Of a data set that has several."""
    cache_text: bool | None = None
    """Embed every prompt at the start and free the text encoders; false: when it is drawn. Null: true, but with pairs
    false, since a large set has more captions than memory."""

    def __post_init__(self) -> None:
        require_positive(max_prompts=self.max_prompts, max_eval_prompts=self.max_eval_prompts)
        require_positive(pairs_per_iteration=self.pairs_per_iteration, max_eval_pairs=self.max_eval_pairs)
        if not 0 <= self.eval_share < 1:
            raise ValueError(f"eval_share={self.eval_share} is a share of the prompts: give 0 to below 1")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout={self.caption_dropout} is a share: give 0 to 1")
        if self.prompts is None and self.pairs is None:
            raise ValueError("prompts is required; give training prompts, or pairs for a method that learns from them")
        if self.pairs is None:
            self._refuse_without_pairs()
        elif self.prompts is not None:
            raise ValueError(
                f"prompts={self.prompts!r}: captions of the pairs are the prompts; leave it out, or leave out pairs"
            )
        elif self.eval_share not in (0, _EVAL_SHARE):
            raise ValueError(f"eval_share={self.eval_share} has no meaning with pairs; give eval_pairs or eval_prompts")

    def _refuse_without_pairs(self) -> None:
        defaults = {item.name: item for item in dataclasses.fields(self)}
        for name in (
            "eval_pairs",
            "pairs_per_iteration",
            "max_eval_pairs",
            "caption_dropout",
            "crop",
            "posterior",
            "flip",
        ):
            value = getattr(self, name)
            if value != defaults[name].default:
                raise ValueError(f"{name}={value!r} has no meaning without pairs; give pairs, or leave it out")
        if self.pair_options != PreferenceOptions():
            raise ValueError("pair_options have no meaning without pairs; give pairs, or leave them out")

    @property
    def caches_text(self) -> bool:
        """`cache_text`, where it is null by what is drawn from."""
        return self.pairs is None if self.cache_text is None else self.cache_text


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    every: int = 0
    """Iterations between evaluations on the way; 0: only before and after training."""
    num_inference_steps: int | None = None
    """Null takes rollout's."""
    guidance_scale: float | None = None
    """Null takes rollout's."""
    samples_per_prompt: int = 1
    """Fixed seeds per prompt."""
    batch_size: int = 32
    best_guidance: list[float] = field(default_factory=list)
    """CFG scales tried on the base; the best one is reported beside base and tuned. Empty: not searched."""
    periodic_prompts: int | None = None
    """Prompts of the evaluations on the way; null: all."""
    rewards: Annotated[list[Options], ComponentOf("rewards")] = field(default_factory=list)
    """Further rewards, only looked at; training rewards are always evaluated."""
    save_images: int | None = 64
    """Prompts whose pictures are kept; null keeps all (the report then shows the worst regressions)."""

    def __post_init__(self) -> None:
        require_positive(
            num_inference_steps=self.num_inference_steps,
            samples_per_prompt=self.samples_per_prompt,
            batch_size=self.batch_size,
            periodic_prompts=self.periodic_prompts,
        )
        if self.every < 0:
            raise ValueError(f"every={self.every} must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 20
    """Iterations between checkpoints; the last iteration is always saved."""
    keep: int = 3
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        require_positive(every=self.every, keep=self.keep)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run. `model`, `algorithm`, `rollout.sampler` and `rewards` are the components' own options."""

    name: str
    """Run folder: <output>/<name>."""
    model: Annotated[Options, ComponentOf("models")]
    data: DataConfig
    iterations: int
    rewards: Annotated[list[Options], ComponentOf("rewards")] = field(default_factory=list)
    """What samples are credited by; none for a method that learns from pairs."""
    output: Annotated[str, OUTPUT] = "runs"
    seed: int = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: Annotated[Options, ComponentOf("algorithms")] = field(default_factory=lambda: {"name": "flow_grpo"})
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    deterministic: bool = True
    """Deterministic kernels, so that a resume is bitwise equal; slower on a GPU."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.name) or self.name in (".", ".."):
            raise ValueError(f"name={self.name!r} may hold letters, digits, '.', '_' and '-': it names the run folder")
        if self.iterations < 0:
            raise ValueError(f"iterations={self.iterations} must not be negative")
        geometry(self)

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @property
    def samples_per_iteration(self) -> int:
        """Samples that are drawn, for a method that draws all of them."""
        return self.rollout.prompts_per_iteration * self.rollout.group_size


def geometry(config: RunConfig) -> None:
    """Refuse numbers that do not divide, with the nearest that do: samples into updates, or pairs."""
    rollout, total, what = config.rollout, config.samples_per_iteration, "samples of an iteration"
    made_of = f"prompts_per_iteration={rollout.prompts_per_iteration} x group_size={rollout.group_size}"
    if config.data.pairs is not None:
        total, what = config.data.pairs_per_iteration, "pairs of an iteration"
        made_of = f"data.pairs_per_iteration={total}"
    updates = config.optim.updates_per_iteration
    if total % updates:
        valid = [n for n in range(1, total + 1) if total % n == 0]
        near = sorted(valid, key=lambda n: abs(n - updates))[:3]
        raise ValueError(
            f"optim.updates_per_iteration={updates} does not divide the {total} {what} ({made_of}); "
            f"nearest values that do: {', '.join(map(str, sorted(near)))}"
        )


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read, override, make paths absolute (`flowrl/locate.py`) and validate; components are validated by `resolve`.

    `path` is a YAML file or a run folder, whose name and place then are the run's.

    Raises:
        ConfigError: one clear message, nothing loaded.
    """
    tree, file = load_tree(path, overrides), find_config(path)
    of_a_run = file.name == "config.yaml" and (file.parent / "provenance.json").is_file()
    tree, origin = as_it_was(tree) if of_a_run else tree, origin_of(file, overrides)
    stand_ins(file.parent, tree)
    return placed(RunConfig, tree, lambda: validate(RunConfig, located(RunConfig, tree, origin), ""))


def as_it_was(tree: Options) -> Options:
    """A run folder's configuration, whatever version wrote it: an option that came later has the value that the run
    was made with, where its default is another."""
    data = tree.get("data")
    return tree | {"data": {"eval_share": 0.0} | data} if isinstance(data, dict) else tree


def to_tree(config: Any) -> Options:
    """Plain data of a configuration, every default written out."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def dump(config: RunConfig) -> str:
    """YAML of the resolved configuration."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run with every component found and its options validated; nothing is loaded yet."""

    run: RunConfig
    model: Component
    sampler: Component
    algorithm: Component
    rewards: tuple[RewardPlan, ...]
    eval_rewards: tuple[RewardPlan, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """Where each sample of a slot comes from; empty: the rollout draws all of them."""
        return getattr(self.algorithm.build(), "members", ())

    @property
    def slots(self) -> int:
        """Prompts of an iteration."""
        return self.run.data.pairs_per_iteration if self.members else self.run.rollout.prompts_per_iteration

    @property
    def group_size(self) -> int:
        """Samples of a prompt."""
        return len(self.members) or self.run.rollout.group_size

    @property
    def drawn(self) -> int:
        """Those of them that the rollout draws."""
        return self.members.count("drawn") if self.members else self.run.rollout.group_size

    def tree(self) -> Options:
        """The configuration with every component's defaults written out."""
        tree = to_tree(self.run)
        for place, part in (("model", self.model), ("algorithm", self.algorithm)):
            tree[place] = {"name": part.name} | to_tree(part.config)
        if getattr(self.algorithm.build(), "needs", "edges") == "edges":
            tree["rollout"]["sampler"] = {"name": self.sampler.name} | to_tree(self.sampler.config)
        return tree


def resolve(run: RunConfig, *, offline: bool = False) -> Resolved:
    """Find every component and check what spans several of them.

    Args:
        run: the configuration.
        offline: ask no hub which adapter a model wants.

    Raises:
        ConfigError, ModelError: naming the key, the value and the remedy.
    """
    resolved = placed(RunConfig, to_tree(run), lambda: _found(run, offline=offline))
    check(resolved)
    return resolved


def _found(run: RunConfig, *, offline: bool) -> Resolved:
    """The run with its components, each by itself valid."""
    model = model_component(run.model, offline=offline)
    algorithm = component("algorithms", run.algorithm, "algorithm", "flow_grpo")
    own_sampler = getattr(algorithm.config, "SAMPLER", "flow_sde")
    return Resolved(
        run=run,
        model=model,
        sampler=component("samplers", run.rollout.sampler or {}, "rollout.sampler", own_sampler),
        algorithm=algorithm,
        rewards=tuple(reward_plan(options, f"rewards.{i}") for i, options in enumerate(run.rewards)),
        eval_rewards=tuple(reward_plan(o, f"eval.rewards.{i}") for i, o in enumerate(run.eval.rewards)),
    )
