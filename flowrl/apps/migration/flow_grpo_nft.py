"""DiffusionNFT, whose configurations have flow_grpo's form and some keys more (NVlabs/DiffusionNFT, 2025-09-22)."""

from __future__ import annotations

from typing import Any

from flowrl.apps.migration.engine import Draft

_SOLVERS = {"dpm2": "dpm2_midpoint", "dpm1": "dpm1", **dict.fromkeys(("flow", "dance", "ddim"), "ode")}
_OLD = {0: "none", 1: "ramp", 2: "late"}
_MODES = {name: name for name in ("all", "positive_only", "negative_only", "one_only", "binary")}
REWARDS: dict[str, tuple[dict[str, Any], str]] = {
    "hpsv2": ({"name": "hpsv2"}, "of DiffusionNFT"),
    "clipscore": ({"name": "clip_score"}, "DiffusionNFT divides by 100, as ours"),
}
"""Rewards that flow_grpo does not have, or scales otherwise."""


def solver(draft: Draft) -> None:
    """The solver of the rollout."""
    name = draft.choice("sample.solver", _SOLVERS)
    draft.put("algorithm.solver", name, "sample.solver", "sample.deterministic")
    if not draft.switch("sample.deterministic"):
        reason = "theirs adds noise to the rollout; the method takes a solver without noise here"
        draft.leave("sample.deterministic", reason, changes=True)
    if draft.given("sample.noise_level"):
        draft.leave("sample.noise_level", "the rollout is without noise", changes=False)


def updates(draft: Draft, samples: int, accumulation: int) -> None:
    """The optimizer steps of an iteration, from the samples of a GPU."""
    part = draft.whole("train.batch_size")
    draft.put("optim.batch_size", part, "train.batch_size", note="per process, memory alone")
    how = "samples of a GPU / (b in training x accumulation)"
    steps = draft.quotient(samples, part * accumulation, "optim.updates_per_iteration", how)
    keys = ("sample.num_batches_per_epoch", "train.batch_size", "train.gradient_accumulation_steps")
    draft.put(
        "optim.updates_per_iteration", steps, *keys, note=f"{samples} samples of a GPU / ({part} x {accumulation})"
    )


def method(draft: Draft) -> None:
    """The options of the method but for its advantages."""
    draft.put("algorithm.mix", float(draft.number("beta")), "beta")
    draft.put("algorithm.old", draft.choice("decay_type", _OLD), "decay_type")
    draft.put("algorithm.mode", draft.choice("train.adv_mode", _MODES), "train.adv_mode")
    draft.put("algorithm.kl.coef", float(draft.number("train.beta", least=0)), "train.beta")
    draft.put("algorithm.times.name", "permutation", note="in their code")
    draft.put("algorithm.times.count", None, note="all of the share")
    share = float(draft.number("train.timestep_fraction", least=0))
    draft.put("algorithm.times.fraction", share, "train.timestep_fraction")
    if draft.number("sample.guidance_scale") > 1:
        reason = "their script takes none in training, as here, and fails there with a scale above 1"
        draft.leave("sample.guidance_scale", reason, changes=True)


def average(draft: Draft) -> None:
    """Their average, one update for each optimizer step."""
    draft.put("optim.ema.decay", 0.9, "train.ema", note="in their code")
    draft.put("optim.ema.every", 1, note="in their code")
