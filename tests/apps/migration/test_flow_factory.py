"""Configurations of Flow-Factory as recipes: what has no counterpart, bad input, and what is computed."""

import re
from pathlib import Path

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from flowrl.algorithms._matching import LagConfig
from flowrl.apps.migration.engine import Draft
from flowrl.core.errors import ConfigError
from flowrl.diffusion.schedules import shift_sigmas
from tests.apps.migration import drafts
from tests.tables import table

GRPO = "sd3_5"


def converted(kind: str, folder: Path, *changes: tuple[str, str], gpus: int | None = None) -> Draft:
    return drafts.converted("flow_factory", folder, drafts.text_of(f"{kind}.yaml", *changes), f"{kind}.yaml", gpus)


def test_the_average_warms_up_by_epochs_as_theirs_does(tmp_path):
    """At the end of epoch e from 0, where e + 1 is a multiple of the interval 4: min(0.9, (1 + e) / (10 + e))."""
    ema = drafts.resolved(converted(GRPO, tmp_path), tmp_path).run.optim.ema
    assert ema is not None
    theirs = [min(0.9, (1 + e) / (10 + e)) if (e + 1) % 4 == 0 else 1.0 for e in range(100)]
    # Two optimizer steps an epoch; after the odd ones there is no update.
    assert [ema.weight(n) for n in range(1, 200, 2)] == [1.0] * 100
    assert [ema.weight(n) for n in range(2, 201, 2)] == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "old", "new", "key", "reason"),
    table(__file__, "flow_factory_listed"),
)
def test_what_has_no_counterpart_is_listed(kind, old, new, key, reason, tmp_path):
    draft = converted(kind, tmp_path, (old, new))
    assert draft.listed[key].changes
    assert re.search(reason, draft.listed[key].reason)


def test_a_lora_all_steps_and_the_guard(tmp_path):
    draft = converted(GRPO, tmp_path, ("finetune_type: full", "finetune_type: lora\n  lora_rank: 64"))
    assert draft.lines["model.lora.alpha"].value == 128, "twice the rank"
    draft = converted(GRPO, tmp_path, ("num_sde_steps: 1", "num_sde_steps: 3"))
    assert (draft.lines["algorithm.name"].value, draft.lines["algorithm.sde_steps"].value) == ("flow_grpo", [1, 2, 3])
    draft = converted(GRPO, tmp_path, ("trainer_type: grpo", "trainer_type: grpo-guard"))
    assert draft.lines["algorithm.reweight"].value == "none"
    assert draft.listed["scheduler.num_sde_steps"].changes
    steps = ("gradient_step_per_epoch: 2", "gradient_accumulation_steps: 12")
    assert converted(GRPO, tmp_path, steps).lines["optim.updates_per_iteration"].value == 4, "768 / (8 x 2 x 12)"


@pytest.mark.parametrize(
    ("kind", "old", "new", "reason"),
    table(__file__, "flow_factory_refused"),
)
def test_bad_input_is_named(kind, old, new, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        converted(kind, tmp_path, (old, new))


def test_another_number_of_gpus_than_the_file_states_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--gpus 4: .* states 8"):
        converted(GRPO, tmp_path, gpus=4)


@pytest.mark.parametrize(
    ("steps", "fraction", "strategy"),
    [(10, 0.6, "discrete"), (14, 0.5, "discrete"), (20, 0.9, "discrete_with_init"), (10, 0.99, "discrete_wo_init")],
)
def test_the_nodes_that_are_drawn_are_those_of_their_bound_on_the_models_grid(steps, fraction, strategy, tmp_path):
    times = ("time_sampling_strategy: discrete", f"time_sampling_strategy: {strategy}")
    grid = ("num_inference_steps: 14", f"num_inference_steps: {steps}")
    draft = converted("nft", tmp_path, times, grid, ("timestep_range: 0.5", f"timestep_range: {fraction}"))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    reached = int((scheduler.timesteps >= 1000 * (1 - fraction)).sum())
    share = draft.lines["algorithm.times.fraction"].value
    assert int(steps * share) == reached - 1, "their last node bounds the strata and is never drawn"


def test_their_shift_of_the_fraction_walked_is_ours_of_sigma_by_the_inverse(tmp_path):
    """Theirs: sigma = 1 - s f / (1 + (s - 1) f) of a fraction f that is walked from noise."""
    changes = ("time_sampling_strategy: discrete", "time_sampling_strategy: uniform")
    draft = converted("nft", tmp_path, changes)
    shift, low = (draft.lines[f"algorithm.times.{name}"].value for name in ("shift", "low"))
    fraction = torch.linspace(0, 0.5, 9, dtype=torch.float64)
    theirs = 1 - 3 * fraction / (1 + 2 * fraction)
    # 1 / 3 is written with six digits, which moves sigma by at most as much.
    assert torch.allclose(shift_sigmas(1 - fraction, shift), theirs, atol=1e-6)
    assert low == 0.5, "1 - range"
    logit = converted("nft", tmp_path, ("strategy: discrete", "strategy: logit_normal"))
    assert logit.listed["train.timestep_range"].changes


def test_paces_count_optimizer_steps_where_theirs_count_epochs(tmp_path):
    two = ("gradient_step_per_epoch: 1", "gradient_step_per_epoch: 2")
    old = "algorithm.old"
    draft = converted("nft", tmp_path, two, ("flat_steps: 0", "flat_steps: 75"), ("0.001", "0.0075"))
    assert [draft.lines[f"{old}.{name}"].value for name in ("flat", "slope", "limit")] == [152, 0.00375, 0.5]
    # Theirs, at the end of epoch e from 0: 0 before epoch 75, then (e - 75) x 0.0075; ours after 2 (e + 1) steps.
    pace = LagConfig(**{name: draft.lines[f"{old}.{name}"].value for name in ("flat", "start", "slope", "limit")})
    assert [pace.decay(2 * (e + 1)) for e in (0, 74, 75, 76, 99, 500)] == pytest.approx([0, 0, 0, 0.0075, 0.18, 0.5])
    draft = converted("nft", tmp_path, ("piecewise_linear", "constant"))
    assert [draft.lines[f"{old}.{name}"].value for name in ("flat", "start", "slope", "limit")] == [0, 0.5, 0, 0.5]
    draft = converted("nft", tmp_path, ("piecewise_linear", "cosine"))
    assert draft.listed["train.ema_decay_schedule"].changes
    draft = converted("nft", tmp_path, ("off_policy: true", "off_policy: false"))
    assert draft.lines[old].value == "none"
    assert not draft.listed["train.ramp_rate"].changes, "its default, and nothing follows"
    draft = converted("crd", tmp_path, ("old_model_decay: 0-0.25-0.005-0.999", "old_model_decay: 2"))
    assert [draft.lines[f"{old}.{name}"].value for name in ("flat", "slope", "limit")] == [75, 0.0075, 0.999]


def test_several_data_sets_or_optimizers_are_listed(tmp_path):
    two = ("optimizers:\n", "optimizers:\n  - {name: other, learning_rate: 1.0}\n")
    sets = ("datasets:\n", "datasets:\n    - {name: other, dataset_dir: dataset/ocr}\n")
    draft = converted("awm", tmp_path, two, sets)
    assert draft.listed["optimizers"].changes
    assert draft.listed["data.datasets"].changes


def test_a_range_of_two_bounds_is_written_as_its_fall_and_rise(tmp_path):
    draft = converted("sd3_5", tmp_path, ("clip_range: 1.0e-4", "clip_range: [-1.0e-4, 2.0e-4]"))
    assert draft.lines["algorithm.clip_range"].value == [1e-4, 2e-4]
    assert drafts.resolved(draft, tmp_path).algorithm.config.clip_range == [1e-4, 2e-4]
