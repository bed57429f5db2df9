"""The contract of a model: what its adapter owes the loop, wherever the adapter comes from.

That it draws what its pipeline's own call draws needs the pipeline: `flowrl doctor MODEL` compares the two.
"""

import torch
from torch import Tensor

from flowrl.contracts.laws import Law, law, require
from flowrl.models.weights.lora_kinds import adapted_modules
from flowrl.rollout.library import Model
from flowrl.rollout.policy import Evaluations

PROMPTS = ("a red circle", "two blue squares on the left")
STEPS = 4


def latents(model: Model, count: int) -> Tensor:
    """Noise, [count, ...]."""
    return torch.randn(count, *model.latent_shape, generator=torch.Generator().manual_seed(0)).to(model.device)


def guided_scale(model: Model) -> float:
    """A guidance scale that does something; that of none for a model that takes no other."""
    scale = 2 + model.adapter.unguided
    try:
        with torch.no_grad():
            predicted(model, latents(model, 1), [1], (0,), scale)
    except ValueError:
        return model.adapter.unguided
    return scale


def predicted(model: Model, x: Tensor, nodes: list[int], rows: tuple[int, ...], scale: float) -> Tensor:
    """The network's output at nodes of a grid of STEPS, for the prompts `rows`."""
    timesteps = model.adapter.schedule(STEPS).timesteps[nodes].to(model.device)
    return model.adapter.predict(x, timesteps, model.condition([PROMPTS[row] for row in rows]), scale)


@law("grid", "schedule(K) has K timesteps and K + 1 sigmas that fall from at most 1")
def grid(model: Model) -> str:
    for steps in (2, STEPS, 10):
        result = model.adapter.schedule(steps)
        sizes = len(result.timesteps), len(result.sigmas)
        require(len(result) <= steps and sizes[1] == sizes[0] + 1, f"{sizes} timesteps and sigmas for {steps} steps")
        require(0 < float(result.sigmas[0]) <= 1, f"sigma begins at {float(result.sigmas[0]):g}")
    return f"sigma from {float(result.sigmas[0]):g} to {float(result.sigmas[-1]):g}"


@law("conditions", "encode gives one row a prompt, the same alone as next to others")
def conditions(model: Model) -> str:
    together = model.adapter.encode(list(PROMPTS))
    require(len(together) == len(PROMPTS), f"{len(together)} rows for {len(PROMPTS)} prompts")
    return f"{', '.join(together.tensors)}"


@law("prediction", "predict gives x's shape, follows prompt, timestep and guidance, and is finite")
@torch.no_grad()
def prediction(model: Model) -> str:
    x, scale = latents(model, 1), guided_scale(model)
    base = predicted(model, x, [1], (0,), scale)
    require(base.shape == x.shape, f"{tuple(base.shape)} for latents {tuple(x.shape)}")
    require(bool(base.isfinite().all()), "not finite")
    changes = {"prompt": ([1], (1,), scale), "timestep": ([-1], (0,), scale)}
    if scale > model.adapter.unguided:
        changes["guidance scale"] = ([1], (0,), 2 * scale)
    for what, (nodes, rows, other) in changes.items():
        result = predicted(model, x, nodes, rows, other)
        require(not torch.allclose(base, result, atol=1e-6), f"another {what} changes nothing")
    return f"follows {', '.join(changes)}"


@law("replay", "the same prediction bitwise with gradients as without")
def replay(model: Model) -> str:
    x, scale = latents(model, 2), guided_scale(model)
    with torch.no_grad():
        recorded = predicted(model, x, [1, 1], (0, 1), scale)
    replayed = predicted(model, x, [1, 1], (0, 1), scale)
    require(replayed.requires_grad, "carries no gradient: no parameter of the network is trainable")
    apart = float((replayed.detach() - recorded).abs().max())
    require(torch.equal(replayed, recorded), f"differs by {apart:.2g}")
    return "bitwise"


@law("rows", "samples at their own timesteps give what they give alone")
@torch.no_grad()
def rows(model: Model) -> str:
    x, nodes, prompts, scale = latents(model, 3), [3, 1, 2], (0, 1, 0), guided_scale(model)
    together = predicted(model, x, nodes, prompts, scale)
    alone = torch.cat([predicted(model, x[k : k + 1], [nodes[k]], (prompts[k],), scale) for k in range(3)])
    apart = float((together - alone).abs().max())
    return require(torch.allclose(together, alone, atol=2e-5, rtol=1e-4), f"differs by {apart:.2g}")


@law("forwards", "guidance costs as many samples through the network as the adapter says")
@torch.no_grad()
def forwards(model: Model) -> str:
    counter, x, costs = Evaluations(model.adapter.network), latents(model, 1), []
    guided_scale(model)  # the first forward may look at the pipeline too
    for scale in (model.adapter.unguided, guided_scale(model)):
        before, declared = counter.rows, model.adapter.branches(scale)
        predicted(model, x, [1], (0,), scale)
        costs.append(counter.rows - before)
        require(costs[-1] == declared, f"{costs[-1]} at guidance {scale:g}, and it says {declared}")
    return f"{costs[0]} without guidance, {costs[1]} with it"


@law("gradient", "every trained module but those that the adapter declares dead gets a gradient")
def gradient(model: Model) -> str:
    weights = model.weights
    last = "" if not weights.lora else ".lokr_w1" if weights.lora.kind == "lokr" else ".lora_B"
    for node in range(1, STEPS):
        predicted(model, latents(model, 2), [node, node], (0, 1), guided_scale(model)).square().sum().backward()
    got = {name for name, p in weights.parameters.items() if p.grad is not None and float(p.grad.abs().max()) > 0}
    model.adapter.network.zero_grad()
    require(bool(got), "no trained weight has one")
    if not weights.lora:
        return f"reaches {len(got)} of {len(weights.parameters)} tensors"
    # A matrices get theirs once B is not zero.
    adapted, moved = (
        set(adapted_modules(name for name in names if last in name)) for names in (weights.parameters, got)
    )
    dead = set(model.adapter.dead_lora_modules()) & adapted
    require(adapted - moved == dead, f"none at {sorted(adapted - moved)}; it declares {sorted(dead)}")
    return f"reaches {len(moved)} modules; dead: {len(dead)}"


@law("images", "decode gives images [B, 3, H, W] or videos [B, F, 3, H, W], float32 in [0, 1]")
@torch.no_grad()
def images(model: Model) -> str:
    result = model.sample(PROMPTS[0], num_inference_steps=2)
    shape = tuple(result.shape)
    require(result.ndim in (4, 5) and shape[-3] == 3 and shape[0] == 1, f"{shape}")
    require(result.dtype == torch.float32, f"{result.dtype}")
    low, high = float(result.min()), float(result.max())
    require(low >= 0 and high <= 1, f"{low:g} to {high:g}")
    return f"{shape}"


LAWS: tuple[Law[Model], ...] = (grid, conditions, prediction, replay, rows, forwards, gradient, images)
