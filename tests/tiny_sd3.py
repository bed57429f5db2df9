"""Random tiny SD3 pipelines for tests: the lab's architecture, untrained, built in a tenth of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.base import Networks
from flowrl.algorithms.flow_grpo import Config as GrpoConfig
from flowrl.algorithms.flow_grpo import FlowGrpo
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import window
from flowrl.models.base import LoraSettings, ModelAdapter
from flowrl.models.sd3 import LORA_TARGETS, Config, Sd3
from flowrl.models.weights.roles import Weights, fit_network
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked, Trajectories
from flowrl.samplers import flow_sde
from flowrl.training.microbatches import microbatches
from scripts.pretraining import sd3

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["a red circle", "two blue squares"]
TOKENS = 8
LORA = LoraSettings(rank=4, alpha=10)


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


def lora(model: ModelAdapter, settings: LoraSettings = LORA, *, noise: float = 0.0) -> Weights:
    """LoRA on the adapter's network; `noise` fills the B matrices, so that the update is not zero."""
    weights = Weights(model.network, settings, tuple(settings.targets or LORA_TARGETS), seed=1)
    fit_network(model, weights.components.values(), weights.layers)
    torch.manual_seed(2)
    for name, p in weights.parameters.items():
        if noise and "lora_B" in name:
            p.data = noise * torch.randn_like(p)
    return weights


def output(model: ModelAdapter, guidance_scale: float = 1.0) -> Tensor:
    """The network's output on two fixed samples."""
    torch.manual_seed(3)
    x = torch.randn(2, *model.latent_shape())
    with torch.no_grad():
        return model.predict(x, torch.tensor([900.0, 300.0]), model.encode(PROMPTS), guidance_scale)


def backward(model: ModelAdapter, weights: Weights, *, guidance_scale: float = 1.0, steps: int = 4) -> None:
    """Gradients of one Flow-GRPO update: a rollout of two samples, all its trained steps, advantages +1 and -1."""
    sampler = flow_sde.build(flow_sde.Config())
    policy = Policy(model, sampler, guidance_scale)
    plan = window(model.schedule(steps), 0.7)
    cond, rows = model.encode(PROMPTS), torch.arange(2)
    ids = [SampleId(0, 0), SampleId(1, 0)]
    noise = Noise(0, "test", 1, model.latent_shape())
    samples, edges = run(policy, plan, noise, Asked(ids, cond, rows), batch_size=2)
    drawn = Trajectories(plan, samples, edges, cond, rows)
    advantage = torch.tensor([1.0, -1.0])[edges.sample][:, None]
    algorithm = FlowGrpo(GrpoConfig())
    for batch in microbatches(drawn, advantage, model, batch_size=2):
        algorithm.loss(batch, Networks(policy, weights)).loss.backward()
