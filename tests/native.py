"""Shared by the tests of native adapters: adapters around tiny pipelines, those pipelines' own calls, one update."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms.base import Networks
from flowrl.algorithms.flow_grpo import Config as GrpoConfig
from flowrl.algorithms.flow_grpo import FlowGrpo
from flowrl.config.load import load_config, resolve
from flowrl.core import registry
from flowrl.core.strict import validate
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import solver_plan, window
from flowrl.diffusion.process import FlowProcess
from flowrl.models import generic
from flowrl.models.base import LoraSettings
from flowrl.models.weights.roles import Weights, fit_network
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked, Trajectories
from flowrl.run.trainer import Trainer
from flowrl.samplers import ddim, flow_sde
from flowrl.samplers.ode import Ode
from flowrl.training.microbatches import microbatches
from tests import tiny_pipelines as tiny

LORA = LoraSettings(rank=4, alpha=10)
PROMPTS = tiny.PROMPTS


@dataclass(frozen=True)
class Kind:
    """A native adapter around a tiny pipeline."""

    family: str
    case: str
    scale: float
    """Guidance scale that does something."""
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((16, 16), (24, 16))
    """(height, width) twice."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the adapter; the pipeline's own call has the same names."""
    fast: bool = True
    """Part of the default suite."""


_VIDEO: dict[str, Any] = {"family": "wan", "scale": 4.0, "sizes": ((16, 16), (32, 16))}
KINDS: dict[str, Kind] = {
    "sd": Kind("sd", "sd", 3.0),
    "sdxl": Kind("sdxl", "sdxl", 3.0, fast=False),
    "sd3": Kind("sd3", "sd3", 4.5),
    "flux": Kind("flux", "flux", 3.5),
    "flux true cfg": Kind("flux", "flux", 3.5, options={"true_cfg_scale": 3.0, "negative_prompt": "blue"}),
    "qwen_image": Kind("qwen_image", "qwen_image", 4.0),
    "wan": Kind(case="wan", options={"num_frames": 9}, **_VIDEO),
    "wan 2.2": Kind(case="wan_2_2", options={"num_frames": 9}, **_VIDEO),
    "wan 2.2 scales": Kind(case="wan_2_2", options={"num_frames": 9, "guidance_scale_2": 2.0}, **_VIDEO),
    "wan image": Kind(case="wan", options={"num_frames": 1}, **_VIDEO),
}


def kind(name: str, size: tuple[int, int] | None = None) -> tuple[Any, Any]:
    """(adapter, its pipeline), both fresh."""
    own = KINDS[name]
    pipe = tiny.make(own.case)
    return adapter(own.family, pipe, size or own.sizes[0], **own.options), pipe


def tokens(pipe: Any) -> dict[str, int]:
    """Text length of a tiny pipeline, where its call takes one."""
    takes = "max_sequence_length" in inspect.signature(type(pipe).__call__).parameters
    return {"max_sequence_length": tiny.TOKENS} if takes else {}


def adapter(family: str, pipe: Any, size: tuple[int, int], **options: Any) -> Any:
    """The family's adapter around a pipeline in memory."""
    module = registry.load("models", family)
    options = tokens(pipe) | options
    return module.FAMILY.adapter(pipe, module.Config(path="tiny", height=size[0], width=size[1], **options))


def halved(pipe: Any) -> Any:
    """The pipeline with everything but its VAE in bfloat16, as `build` loads it."""
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and name != "vae":
            part.to(torch.bfloat16)
    return pipe


def copied(pipe: Any) -> Any:
    """The same parts in another pipeline, whose scheduler may be replaced."""
    other = copy.copy(pipe)
    other.scheduler = copy.deepcopy(pipe.scheduler)
    return other


def beside(pipe: Any, size: tuple[int, int], **call: Any) -> generic.Generic:
    """The generic adapter around the same pipeline."""
    call = tokens(pipe) | call
    return generic.Generic(pipe, generic.Config(path="tiny", height=size[0], width=size[1], call=call))


def entered(name: str, size: tuple[int, int] | None = None, pipe: Any = None, **options: Any) -> generic.Generic:
    """The generic adapter around the tiny pipeline of that name, a fresh one or the given one."""
    case = (tiny.CASES | tiny.IMAGED | tiny.SOUNDING)[name]
    height, width = size or case.sizes[0]
    made = {"path": "tiny", "height": height, "width": width, "call": dict(case.call)} | options
    return generic.Generic(tiny.make(name) if pipe is None else pipe, validate(generic.Config, made, "model"))


def drawn(model: Any, batch: int, guidance_scale: float, steps: int) -> tuple[Tensor, Tensor]:
    """(starting noise, clean latents) of the adapter under the plain Euler plan."""
    ids = [SampleId(slot, 0) for slot in range(batch)]
    noise = Noise(0, "parity", None, model.latent_shape())
    cond = model.encode(PROMPTS[:batch])
    policy, plan = Policy(model, Ode(), guidance_scale), solver_plan(model.schedule(steps))
    samples, _ = run(policy, plan, noise, Asked(ids, cond, torch.arange(batch)), batch_size=batch)
    return noise.initial(ids), samples.x0


def own_call(pipe: Any, size: tuple[int, int], noise: Tensor, steps: int, **call: Any) -> tuple[Tensor, Tensor]:
    """(latents after the loop, images) of the pipeline's own call from the same noise."""
    prompts = PROMPTS[: len(noise)]
    call = tokens(pipe) | {"output_type": "pt", "return_dict": False} | call
    if isinstance(call.get("negative_prompt"), str):
        call["negative_prompt"] = [call["negative_prompt"]] * len(prompts)
    options = {"height": size[0], "width": size[1], "num_inference_steps": steps, "latents": noise}
    with tiny.stepped(pipe) as left:
        images = pipe(prompt=prompts, **options | call)[0]
    return left[-1], images


def compare(model: Any, pipe: Any, size: tuple[int, int], batch: int, scale: float, **call: Any) -> None:
    """Assert that latents and images of the adapter are those of the pipeline's own call."""
    noise, x0 = drawn(model, batch, scale, 4)
    expected, images = own_call(pipe, size, noise, 4, **call)
    assert not torch.allclose(noise, expected, atol=0.1)
    assert images.std() > 0.01
    assert_close(x0, expected, atol=1e-4, rtol=0)
    assert_close(model.decode(x0), images.reshape(model.decode(x0).shape), atol=1e-4, rtol=0)


def point(model: Any) -> tuple[Tensor, Tensor, Any]:
    """Two samples at different timesteps, and their conditions."""
    grid = model.schedule(4).timesteps
    x = torch.randn(2, *model.latent_shape(), generator=torch.Generator().manual_seed(3))
    return x, torch.stack([grid[1], grid[3]]), model.encode(PROMPTS)


@torch.no_grad()
def output(model: Any, guidance_scale: float) -> Tensor:
    """Its prediction there."""
    x, timestep, cond = point(model)
    return model.predict(x, timestep, cond, guidance_scale)


def lora(model: Any, settings: LoraSettings = LORA, *, noise: float = 0.0) -> Weights:
    """LoRA on the adapter's network; `noise` fills the B matrices, so that the update is not zero."""
    weights = Weights(model.network, settings, tuple(settings.targets or model.lora_targets), seed=1)
    fit_network(model, weights.components.values(), weights.layers)
    torch.manual_seed(2)
    for name, p in weights.parameters.items():
        if noise and "lora_B" in name:
            p.data = noise * torch.randn_like(p)
    return weights


def backward(
    model: Any, weights: Weights, guidance_scale: float = 1.0, steps: int = 4, prompts: Sequence[str] = PROMPTS
) -> Any:
    """Gradients of one Flow-GRPO update: a rollout of two samples, all its trained steps; returns the largest |log
    ratio| of the replay at the rollout's own batches."""
    law: Any = flow_sde if isinstance(model.process, FlowProcess) else ddim
    policy, plan = Policy(model, law.build(law.Config()), guidance_scale), window(model.schedule(steps), 0.7)
    cond, rows, ids = model.encode(prompts), torch.arange(2), [SampleId(0, 0), SampleId(1, 0)]
    noise = Noise(0, "test", 1, model.latent_shape())
    samples, edges = run(policy, plan, noise, Asked(ids, cond, rows), batch_size=2)
    advantage = torch.tensor([1.0, -1.0])[edges.sample][:, None]
    algorithm = FlowGrpo(GrpoConfig())
    worst = 0.0
    drawn = Trajectories(plan, samples, edges, cond, rows)
    order = edges.step.argsort(stable=True)  # both samples at one step, as the rollout had them
    for batch in microbatches(drawn, advantage, model, batch_size=2, order=order):
        networks = Networks(policy, weights)
        ratio = algorithm.log_ratio(networks.transition(batch), batch, policy.sampler)
        worst = max(worst, float(ratio.detach().abs().max()))
        algorithm.loss(batch, networks).loss.backward()
    return worst


def trained(weights: Weights, kind: str) -> set[str]:
    """Adapted modules whose `kind` matrix has a gradient."""
    found = {name: p.grad for name, p in weights.parameters.items() if kind in name}
    return {name.partition(".lora_")[0] for name, grad in found.items() if grad is not None and grad.abs().max() > 0}


def two_iterations(folder: Path, family: str, pipe: Any, size: tuple[int, int], **model: Any) -> dict:
    """`flowrl train` with Flow-GRPO and the JPEG reward on the pipeline, saved to a folder and loaded again."""
    pipe.save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    options = {"height": size[0], "width": size[1], "max_sequence_length": tiny.TOKENS} | model
    tree = {
        "name": "run",
        "output": str(folder / "runs"),
        "iterations": 2,
        "model": {"name": family, "path": str(folder / "model"), "lora": {"rank": 4, "alpha": 10}, **options},
        "data": {"prompts": str(folder / "prompts.txt")},
        "rollout": {
            "sampler": {"name": "flow_sde", "noise_level": 0.7},
            "num_inference_steps": 3,
            "guidance_scale": 3.0,
            "prompts_per_iteration": 2,
            "group_size": 2,
            "batch_size": 2,
        },
        "algorithm": {"name": "flow_grpo", "clip_range": 1e-3},
        "rewards": [{"name": "jpeg"}],
        "optim": {"learning_rate": 1e-3, "batch_size": 2},
        "eval": {"batch_size": 2, "num_inference_steps": 2, "save_images": 0},
        "checkpoint": {"every": 2, "keep": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return Trainer(resolve(load_config(str(folder / "run.yaml")))).fit()
