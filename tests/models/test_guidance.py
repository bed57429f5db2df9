"""Classifier-free guidance with the gradient of one branch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.config.checks import check_model
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.core.strict import validate
from flowrl.core.types import Condition
from flowrl.models import generic
from flowrl.models._guidance import guided
from tests import native, tiny_sd3

RECIPE = "configs/lab/flow_grpo.yaml"


def test_detached_the_gradient_is_the_scale_times_the_conditional_ones():
    """f(x, c) = w tanh(x c): d/dw of u + s (c - u) with u constant is s df/dw at the prompt's condition."""
    w = torch.tensor(0.7, requires_grad=True)
    x, timestep, scale = torch.tensor([[0.3], [-1.2]]), torch.zeros(2), 4.0
    cond, away = Condition({"c": torch.tensor([[2.0], [0.5]])}), Condition({"c": torch.tensor([[-1.0]])})
    grads: list[bool] = []

    def forward(x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
        grads.append(torch.is_grad_enabled())
        return w * torch.tanh(x * cond["c"])

    values = {}
    for forwards in ("joined", "separate", "detached"):
        grads.clear()
        output = guided(forward, x, timestep, cond, away, scale, forwards=forwards)
        (gradient,) = torch.autograd.grad(output.sum(), w)
        values[forwards] = output.detach()
        positive, negative = (float(torch.tanh(x * c).sum()) for c in (cond["c"], away["c"]))
        expected = scale * positive if forwards == "detached" else scale * positive + (1 - scale) * negative
        assert_close(gradient, torch.tensor(expected))
    assert grads == [False, True]
    assert torch.equal(values["separate"], values["detached"])
    assert_close(values["joined"], values["detached"])
    with torch.no_grad():
        guided(forward, x, timestep, cond, away, scale, forwards="detached")
    assert grads[2:] == [False, False]


@pytest.mark.parametrize("name", ["sd", "sd3", "flux true cfg", "qwen_image", "wan"])
def test_every_family_detaches_its_own_combination(name):
    """Against the family's `combine` written out on two forwards of its network, the first one detached."""
    kind = native.KINDS[name]
    gradients = []
    for detached in ("both", "positive"):
        pipe = native.tiny.make(kind.case)
        model = native.adapter(kind.family, pipe, kind.sizes[0], guidance_gradient=detached, **kind.options)
        weights = native.lora(model, noise=0.3)
        if detached == "both":
            _detach_first_half(model, name)
        x, timestep, cond = native.point(model)
        output = model.predict(x, timestep, cond, kind.scale)
        (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum().backward()
        gradients.append({key: p.grad for key, p in weights.parameters.items() if p.grad is not None})
    assert set(gradients[0]) == set(gradients[1])
    largest = max(float(g.abs().max()) for g in gradients[0].values())
    for key, gradient in gradients[0].items():
        assert_close(gradients[1][key], gradient, atol=1e-5 * largest, rtol=1e-4)


def _detach_first_half(model: Any, name: str) -> None:
    """Cut the gradient of the unconditional branch after the network: the first half, or the first call of two."""
    calls = []

    def cut(_: Any, args: Any, kwargs: Any, output: tuple[Tensor]) -> tuple[Tensor]:
        calls.append(1)
        if name in ("qwen_image", "wan"):
            return (output[0].detach(),) if len(calls) % 2 else output
        negative, positive = output[0].chunk(2)
        return (torch.cat([negative.detach(), positive]),)

    model.network.register_forward_hook(cut, with_kwargs=True)


def test_updates_keep_no_activations_of_the_branch_without_gradient():
    """Half of what a joined forward saves for its backward pass, but for weights and what both branches share."""
    saved = {}
    for gradient in ("both", "positive"):
        model = tiny_sd3.adapter(guidance_gradient=gradient)
        tiny_sd3.lora(model)
        x, timestep, cond = native.point(model)
        held, weights = {}, {p.untyped_storage().data_ptr() for p in model.network.parameters()}

        def keep(tensor: Tensor, held: dict[int, int] = held) -> Tensor:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model.predict(x, timestep, cond, 3.0)
        saved[gradient] = sum(size for place, size in held.items() if place not in weights)
        del output
    assert saved["positive"] < 0.6 * saved["both"]


# ---- where there is nothing to detach


def test_a_pipelines_own_call_is_refused():
    with pytest.raises(ConfigError, match=r"guidance_gradient=positive: guidance is inside the pipeline's own call"):
        validate(generic.Config, {"path": "tiny", "guidance_gradient": "positive"}, "model")


@pytest.mark.parametrize(
    ("scale", "reason"), [(1.0, r"training with flow_grpo is without it \(guidance scale 1\)"), (3.0, None)]
)
def test_training_without_guidance_is_refused(scale, reason):
    overrides = ["model.guidance_gradient=positive", f"rollout.guidance_scale={scale}", "eval.guidance_scale=3"]
    resolved = resolve(load_config(RECIPE, overrides))
    adapter = resolved.model.build()
    if reason is None:
        check_model(resolved, adapter)
        return
    with pytest.raises(ConfigError, match=reason):
        check_model(resolved, adapter)
