"""The real SD1.5, SD2.1 and SDXL from their embedded configurations: counts, grids, LoRA, a plan without downloads."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flowrl.commands.plan import command
from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.models import sd
from flowrl.models.base import LoraSettings
from flowrl.models.weights.roles import Weights
from flowrl.planning import memory
from tests.tables import table
from tests.tiny_sd3 import ROOT

CONFIGS = ROOT / "assets" / "model_configs"
REAL = table(__file__, "published_unets")


def real(name: str) -> Any:
    module = registry.load("models", REAL[name][0])
    return module.skeleton(module.Config(path="any", dtype="float16"), CONFIGS / name)


@pytest.mark.parametrize("name", REAL)
def test_the_real_shape_is_the_published_one(name):
    _, counts, prediction, latents, embeddings, modules = REAL[name]
    model = real(name)
    parts = {k: p for k, p in model.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    assert {k: sum(p.numel() for p in part.parameters()) for k, part in parts.items()} == counts
    assert (model.prediction_type, list(model.latent_shape())) == (prediction, latents)
    assert {part: list(shape) for part, shape in model.condition_shapes().items()} == embeddings
    assert model.distilled is None
    grid = model.schedule(50)
    assert grid.timesteps.int().tolist() == list(range(981, 0, -20))
    assert float(grid.alphas[0]) == pytest.approx(0.005776**0.5, abs=1e-5)
    assert float(grid.alphas[-1]) == pytest.approx(0.99915**0.5, abs=1e-5)
    with torch.device("meta"):
        weights = Weights(model.network, LoraSettings(rank=4, alpha=4), model.lora_targets, seed=0)
    assert sum(key.endswith("lora_A.default.weight") for key in weights.parameters) == modules


def run_file(folder: Path, path: str, **model: Any) -> Path:
    """A small run of that model."""
    (folder / "prompts.txt").write_text("a cat\na dog\n")
    tree = {
        "name": "run",
        "iterations": 1,
        "model": {"path": path, "dtype": "float16", "lora": {"rank": 4, "alpha": 4}, **model},
        "data": {"prompts": str(folder / "prompts.txt")},
        "rollout": {"sampler": {"name": "ddim"}, "num_inference_steps": 4, "guidance_scale": 1.0, "batch_size": 2}
        | {"prompts_per_iteration": 2, "group_size": 2},
        "algorithm": {"name": "flow_grpo"},
        "rewards": [{"name": "jpeg"}],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def plan(capsys: Any, file: Path, *words: str) -> str:
    """What `flowrl plan` prints, in one line."""
    command(str(file), list(words))
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_plan_of_sd15_needs_no_download(tmp_path, capsys):
    text = plan(capsys, run_file(tmp_path, "stable-diffusion-v1-5/stable-diffusion-v1-5", height=64, width=64))
    assert "859,520,964" in text
    assert "LoRA rank 4, alpha 4, 128 modules" in text
    assert "751.00 sde, trained" in text
    assert "is distilled" not in text


def test_a_plan_says_that_a_model_is_distilled_and_refuses_cfg_and_flow_laws(tmp_path, capsys, monkeypatch):
    folder = Path(shutil.copytree(CONFIGS / "sd21", tmp_path / "turbo"))
    kind = "EulerAncestralDiscreteScheduler"
    changes = {"_class_name": kind, "timestep_spacing": "trailing", "prediction_type": "epsilon"}
    for name, values in (("scheduler/scheduler_config", changes), ("model_index", {"scheduler": ["diffusers", kind]})):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    model = sd.skeleton(sd.Config(path="any", height=64, width=64), folder)
    monkeypatch.setattr(memory, "skeleton", lambda resolved: model)
    # The measurement itself has its tests, and takes seconds.
    monkeypatch.setattr("flowrl.commands.plan.estimated", lambda *given: ({}, None))
    file = run_file(tmp_path, str(folder), height=64, width=64)
    nft = ("rollout.sampler=null", "algorithm={name: diffusion_nft, times: {name: subset, count: 2}}")
    for words, reason in (
        ((), None),
        ((*nft, "optim.batch_size=2"), None),
        (
            ("rollout.guidance_scale=4.0",),
            r"rollout\.guidance_scale=4: .*takes no CFG, whose scale is 1 then",
        ),
        (
            ("rollout.sampler={name: flow_sde}",),
            r"'flow_sde' needs.*try 'rollout\.sampler=\{.name.: .ddim., .eta.: 1\.0\}'",
        ),
    ):
        with nullcontext() if reason is None else pytest.raises(ConfigError, match=reason):
            command(str(file), list(words))
        text = " ".join(capsys.readouterr().out.split())
        assert ("note: the model is distilled adversarially (SD-Turbo" in text) == (reason is None)
        assert ("pulls a distilled one towards blurred means" in text) == (words[:2] == nft)
        assert ("999.00 sde, trained" in text) == (words == ())


@pytest.mark.parametrize(
    ("method", "clean", "reason"),
    [
        (
            "{name: ddpo, kl: {coef: 0.1, divisor: flow_grpo}}",
            False,
            r"kl\.divisor=flow_grpo .*try algorithm\.kl\.divisor=variance",
        ),
        ("{name: ddpo, kl: {coef: 0.1}}", False, "measured elsewhere"),
        ("{name: ddpo, timestep_fraction: 0.3}", True, r"timestep_fraction=0\.3 of 3 trained steps keeps none"),
        ("{name: ddpo, timestep_fraction: 0.3}", False, "measured elsewhere"),
        ("{name: dpok, buffer: 15, batch: 4}", False, "buffer=15 holds less than the 16 transitions"),
        ("{name: dpok, buffer: 15, batch: 4}", True, "measured elsewhere"),
    ],
)
def test_a_plan_refuses_what_the_models_path_and_last_step_do_not_allow(
    method, clean, reason, tmp_path, capsys, monkeypatch
):
    def stop(*_: Any, **__: Any) -> None:
        raise ConfigError("measured elsewhere")

    folder = Path(shutil.copytree(CONFIGS / "sd15", tmp_path / "sd15"))
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"set_alpha_to_one": clean}))
    model = sd.skeleton(sd.Config(path="any", height=64, width=64), folder)
    monkeypatch.setattr(memory, "skeleton", lambda resolved: model)
    # The measurement itself has its tests, and takes seconds.
    monkeypatch.setattr("flowrl.commands.plan.estimated", stop)
    words = [f"algorithm={method}", "optim.updates_per_iteration=1"]
    with pytest.raises(ConfigError, match=reason):
        command(str(run_file(tmp_path, str(folder), height=64, width=64)), words)
