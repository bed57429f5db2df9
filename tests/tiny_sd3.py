"""Random tiny SD3 pipelines for tests: the lab's architecture, untrained, built in a tenth of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.models.base import ModelAdapter
from flowrl.models.pipelines.distilled import Distilled
from flowrl.models.sd3 import Config, Sd3
from flowrl.models.weights.roles import Weights
from scripts.pretraining import sd3
from tests import native
from tests.native import LORA, lora

__all__ = ["LORA", "PROMPTS", "ROOT", "TOKENS", "adapter", "backward", "lora", "output", "pipeline", "save", "student"]
ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["a red circle", "two blue squares"]
TOKENS = 8


def pipeline(seed: int = 0, *, sd35: bool = False, **scheduler: Any) -> Any:
    """`sd35` adds what SD3.5 Medium has over SD3: dual attention in the first blocks and normalised queries."""
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    made = sd3.build_pipeline(seed)
    if sd35:
        torch.manual_seed(seed)
        own = {key: value for key, value in made.transformer.config.items() if not key.startswith("_")}
        own |= {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
        made.transformer = SD3Transformer2DModel(**own)
    if scheduler:
        made.scheduler = FlowMatchEulerDiscreteScheduler(**scheduler)
    made.vae.register_to_config(scaling_factor=0.7, shift_factor=0.1)
    made.set_progress_bar_config(disable=True)
    return made


def adapter(made: Any = None, **options: Any) -> Sd3:
    """An adapter around a pipeline in memory."""
    return Sd3(pipeline() if made is None else made, Config(path="tiny", max_sequence_length=TOKENS, **options))


def save(folder: Path, made: Any = None) -> Path:
    """A pipeline folder."""
    (pipeline() if made is None else made).save_pretrained(folder)
    return folder


def student(folder: Path, **options: Any) -> Path:
    """A folder of a pipeline that says it is distilled on its scheduler's four noise levels."""
    nodes = (1.0, 0.75, 0.5, 0.25)
    save(folder, pipeline(**options, shift=1.0, shift_terminal=0.25))
    Distilled(kind="nodes", sigmas=nodes, evidence="the test", declared=True).write(folder)
    return folder


def output(model: ModelAdapter, guidance_scale: float = 1.0) -> Tensor:
    """The network's output on two fixed samples."""
    torch.manual_seed(3)
    x = torch.randn(2, *model.latent_shape())
    with torch.no_grad():
        return model.predict(x, torch.tensor([900.0, 300.0]), model.encode(PROMPTS), guidance_scale)


def backward(model: ModelAdapter, weights: Weights, **options: Any) -> None:
    """Gradients of one Flow-GRPO update on two prompts; `options` as of `native.backward`."""
    native.backward(model, weights, prompts=PROMPTS, **options)
