"""Models of the generic adapter whose configurations are embedded: the published sizes, without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowrl.core import registry
from tests.tiny_sd3 import ROOT

REAL: dict[str, tuple[dict[str, Any], dict[str, int], tuple[int, ...], float]] = {
    "hunyuan-video-1.5-720p-t2v": (
        {"height": 352, "width": 624, "call": {"num_frames": 81}},
        {
            "transformer": 8_326_608_160,
            "vae": 1_260_634_115,
            "text_encoder": 7_070_619_136,
            "text_encoder_2": 219_314_944,
        },
        (32, 21, 22, 39),
        9 * 0.95 / (1 + 8 * 0.95),  # the second of twenty at shift 9
    ),
    "ltx-video": (
        {"height": 480, "width": 704, "call": {"num_frames": 97}},
        {"transformer": 1_923_385_472, "vae": 419_193_649, "text_encoder": 4_762_310_656},
        (13 * 15 * 22, 128),
        0.9919,
    ),
}
"""Folder -> (options, parameters, latents, the second of twenty sigmas)."""


@pytest.mark.parametrize("folder", REAL)
def test_the_real_shape_is_the_published_one(folder):
    options, parameters, latents, second = REAL[folder]
    module = registry.load("models", "generic")
    model = module.skeleton(
        module.Config(path="any", dtype="bfloat16", **options), ROOT / "assets" / "model_configs" / folder
    )
    parts = {name: part for name, part in model.pipeline.components.items() if isinstance(part, torch.nn.Module)}
    assert {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()} == parameters
    assert model.latent_shape() == latents
    sigmas = model.schedule(20).sigmas
    assert float(sigmas[1]) == pytest.approx(second, abs=1e-4)
    assert float(sigmas[-1]) == 0
    modules = {name for name, _ in model.network.named_modules()}
    assert all(any(name.endswith(f".{target}") for name in modules) for target in model.lora_targets)
    assert set(model.dead_lora_modules()) <= modules


def test_each_has_the_scale_of_its_own_guidance():
    """The guider is a component like the others; without one the scale would have no place."""
    folder = ROOT / "assets" / "model_configs" / "hunyuan-video-1.5-720p-t2v"
    module = registry.load("models", "generic")
    model = module.skeleton(module.Config(path="any", height=64, width=64, call={"num_frames": 5}), folder)
    assert model.pipeline.guider.config.guidance_scale == 6.0
    assert model.branches(6.0) == 2
