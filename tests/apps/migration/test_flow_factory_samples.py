"""Flow-Factory's trainers on finished samples as recipes: the published values of each on SD 3.5 Medium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from flowrl.algorithms._matching import LagConfig
from flowrl.apps.migration.engine import Draft, convert, recipe_text
from flowrl.apps.migration.tools import TOOLS
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.diffusion.schedules import shift_sigmas
from tests.recipes import at

PUBLISHED = Path(__file__).parent / "published"
TOOL = TOOLS["flow_factory"]
LINEAR = {"flat": 1, "start": 0.0}  # theirs counts 0 after the first epoch, ours its one optimizer step
# Of the sheet of migration and of the published files; CRD draws 20 times of 8 nodes, which no rule here does.
VALUES: dict[str, dict[str, Any]] = {
    "nft": {
        "algorithm.name": "diffusion_nft",
        "algorithm.mix": 1.0,
        "algorithm.old": LINEAR | {"slope": 0.001, "limit": 0.5},
        "algorithm.kl.coef": 0.0,
        "algorithm.times.name": "discrete",
        "algorithm.times.count": 4,
        "algorithm.advantages.name": "group",
        "algorithm.advantages.std": "group",
        "optim.learning_rate": 1e-4,
    },
    "awm": {
        "algorithm.name": "awm",
        "algorithm.weighting": "ghuber",
        "algorithm.power": 0.25,
        "algorithm.clip_range": 1.0,
        "algorithm.advantages.std": "global",
        "algorithm.advantages.clip": 1.0,
        "algorithm.advantage_max": 1.0,
        "algorithm.kl.coef": 1e-4,
        "algorithm.ema_kl.coef": 1.0,
        "algorithm.ema": LINEAR | {"slope": 0.0003, "limit": 0.3},
        "algorithm.off_policy": False,
        "algorithm.times.name": "discrete_wo_init",
        "algorithm.times.count": 6,
        "data.max_prompts": 1024,
        "optim.learning_rate": 3e-4,
        "optim.weight_decay": 1e-4,
    },
    "dgpo": {
        "algorithm.name": "dgpo",
        "algorithm.beta": 10.0,
        "algorithm.clip_range": 0.05,
        "algorithm.kl.coef": 0.001,
        "algorithm.sample_average_from": 200,
        "algorithm.against_average": False,
        "algorithm.reference_guidance": None,
        "algorithm.average": {"flat": 0, "start": 0.0, "slope": 0.001, "limit": 0.3},
        "algorithm.guidance_scale": None,
        "algorithm.times.count": 4,
        "rollout.guidance_scale": 4.5,
        "optim.batch_size": 24,
        "optim.ema.every": 8,
        "optim.ema.warmup": False,
    },
    "crd": {
        "algorithm.name": "crd",
        "algorithm.beta": 1.0,
        "algorithm.fit": "mse",
        "algorithm.pools": None,
        "algorithm.old": {"flat": 0, "start": 0.25, "slope": 0.005, "limit": 0.999},
        "algorithm.sampling": {"flat": 75, "start": 0.0, "slope": 0.0075, "limit": 0.999},
        "algorithm.kl.coef": 0.1,
        "algorithm.least_pull": 0.001,
        "algorithm.reference_guidance": 4.5,
        "algorithm.times.count": 8,
        "optim.updates_per_iteration": 2,
    },
    "dpo": {
        "algorithm.name": "online_dpo",
        "algorithm.beta": 100.0,
        "algorithm.behaviour": "policy",
        "algorithm.times.name": "logit_normal",
        "algorithm.times.count": 1,
        "algorithm.times.shift": 1.0,
        "algorithm.advantages.name": "gdpo",
        "optim.updates_per_iteration": 1,
        "optim.batch_size": 48,
        "rollout.prompts_per_iteration": 24,
        "rollout.group_size": 8,
    },
}
# An average of a linear pace is taken as the method's own network, not for the evaluation.
CHANGES = {
    **{kind: {"train.ema_decay_schedule"} for kind in ("nft", "awm")},
    "dgpo": {"train.switch_ema_ref"},
    "crd": {"train.num_train_timesteps"},
}


def converted(kind: str, folder: Path, *changes: tuple[str, str]) -> Draft:
    text = (PUBLISHED / f"{kind}.yaml").read_text(encoding="ascii")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / f"{kind}.yaml"
    file.write_text(text, encoding="ascii")
    return convert(TOOL, str(file), None, folder)


@pytest.mark.parametrize("kind", sorted(VALUES))
def test_the_published_configuration_has_its_values(kind, tmp_path):
    draft = converted(kind, tmp_path)
    made = tmp_path / "recipe.yaml"
    made.write_text(recipe_text(draft), encoding="ascii")
    tree = resolve(load_config(made), offline=True).tree()
    common = {"algorithm.solver": "ode", "algorithm.advantages.eps": 1e-6, "model.name": "sd3"}
    wanted = common | VALUES[kind]
    assert {key: at(tree, key) for key in wanted} == wanted
    assert {key for key, entry in draft.listed.items() if entry.changes} == CHANGES.get(kind, set())
    assert "rollout.sampler.name" not in draft.lines, "a method on finished samples takes a solver"


@pytest.mark.parametrize("kind", sorted(VALUES))
def test_every_key_is_a_line_or_listed_with_any_trainer(kind, tmp_path):
    tree = yaml.safe_load((PUBLISHED / f"{kind}.yaml").read_text(encoding="ascii"))
    for key, entry in TOOL.keys.items():
        section, _, name = key.partition(".")
        if name and section in ("train", "model", "scheduler") and name not in tree[section]:
            tree[section][name] = list(entry.default) if isinstance(entry.default, tuple) else entry.default
    tree["train"] |= {"timestep_range": 0.6, "kl_type": "v-based"}
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="ascii")
    draft = convert(TOOL, str(file), None, tmp_path)
    used = {key for line in (*draft.lines.values(), *draft.rewards) for key in line.keys}
    assert {key for key in TOOL.keys if key.startswith(("train.", "model.", "scheduler."))} <= set(draft.source.values)
    assert set(draft.source.values) <= used | set(draft.listed)
    other = {"nft": "crd_beta", "awm": "nft_beta", "dgpo": "beta", "crd": "clip_range", "dpo": "kl_beta"}[kind]
    assert draft.listed[f"train.{other}"].reason == f"their trainer {kind} does not read it"


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


@pytest.mark.parametrize(
    ("kind", "old", "new", "key", "reason"),
    [
        ("nft", "dynamics_type: ODE", "dynamics_type: Flow-SDE", "scheduler.dynamics_type", "adds noise"),
        ("nft", "ema_update_interval: 1", "ema_update_interval: 4", "train.ema_update_interval", "every iteration"),
        ("nft", "model_type: sd3-5", "model_type: flux1", "train.timestep_range", "other nodes"),
        ("nft", "timestep_range: 0.5", "timestep_range: [0.1, 0.5]", "train.timestep_range", "0 is taken for 0.1"),
        ("nft", "nft_beta: 1.0", "nft_beta: 1.0\n  nft_betta: 1", "train.nft_betta", "did you mean 'train.nft_beta'"),
        ("dgpo", "clip_kl: false", "clip_kl: true", "train.clip_kl", "false here"),
        ("dgpo", "use_shared_noise: true", "use_shared_noise: false", "train.use_shared_noise", "true here"),
        ("dgpo", "step_per_epoch: 1", "step_per_epoch: 2", "train.ema_ref_max_decay", "each of its 2"),
        ("crd", "weight_temp: -1.0", "weight_temp: 0", "train.weight_temp", "two pools"),
        ("crd", "use_old_for_loss: true", "use_old_for_loss: false", "train.use_old_for_loss", "against `old`"),
        ("dpo", "logit_mean: 0.0", "logit_mean: 0.5", "train.logit_mean", "has 0 here"),
        ("awm", "name: default, learning", "foreach: true, learning", "optimizers.0.foreach", "no such key"),
        ("awm", "eval: {}}", "eval: {num: 2}}", "data.datasets.0.eval", "no such key"),
    ],
)
def test_what_has_no_counterpart_is_listed(kind, old, new, key, reason, tmp_path):
    draft = converted(kind, tmp_path, (old, new))
    assert draft.listed[key].changes
    assert re.search(reason, draft.listed[key].reason)


@pytest.mark.parametrize(
    ("kind", "old", "new", "reason"),
    [
        ("crd", "old_model_decay: 0-0.25-0.005-0.999", "old_model_decay: quick", "steps-start-slope-limit"),
        ("crd", "old_model_decay: 0-0.25-0.005-0.999", "old_model_decay: nan-0-0-1", "steps-start-slope-limit"),
        ("crd", "old_model_decay: 0-0.25-0.005-0.999", "old_model_decay: true", "steps-start-slope-limit"),
        ("awm", "awm_weighting: ghuber", "awm_weighting: t**3", r"must be one of 'Uniform', 't'"),
        ("nft", "timestep_range: 0.5", "timestep_range: [0.5, 0.1]", r"must be in \[0, 1\]"),
        ("nft", "timestep_range: 0.5", "timestep_range: 0.01", "leaves no node of 14 steps"),
        ("dpo", "unique_sample_num_per_epoch: 24", "unique_sample_num_per_epoch: 20", "no whole number"),
        ("dpo", "weighting_scheme: logit_normal", "weighting_scheme: discrete", "'logit_normal', 'uniform'"),
    ],
)
def test_bad_input_is_named(kind, old, new, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        converted(kind, tmp_path, (old, new))


def test_several_data_sets_or_optimizers_are_listed(tmp_path):
    two = ("optimizers:\n", "optimizers:\n  - {name: other, learning_rate: 1.0}\n")
    sets = ("datasets:\n", "datasets:\n    - {name: other, dataset_dir: dataset/ocr}\n")
    draft = converted("awm", tmp_path, two, sets)
    assert draft.listed["optimizers"].changes
    assert draft.listed["data.datasets"].changes
