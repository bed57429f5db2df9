"""The memory of a plan against a census: allocations of the forwards and of an update on fake tensors, counted anew.

Nothing is shared with flowrl/models/memory/meter.py. Forwards are those of fake tensors on CUDA under autocast of
torch itself. A backward pass on such tensors asks for a card, so the update is on the CPU, under the dtypes of CUDA;
its gradients are those of an earlier microbatch already, as in all microbatches but the first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.core.types import Condition
from flowrl.planning.cuda_rules import cuda_rules
from flowrl.planning.memory import estimate, skeleton
from flowrl.training.optim import Optimizer
from flowrl.training.options import OptimConfig
from tests.tiny_sd3 import ROOT

_ATEN = torch.ops.aten
HALF = "model.dtype=bfloat16"
LORA = "model.lora={rank: 8, alpha: 8}"
FAST = {
    "tiny-sd3, all weights": ("lab/flow_grpo", HALF, "optim.batch_size=1"),
    "tiny-sd": ("lab/sd-flow_grpo", HALF, LORA),
}
SLOW = {
    "tiny-sd3, LoRA": ("lab/flow_grpo", HALF, LORA, "rollout.guidance_scale=3.0"),
    "SD3.5-M": ("sd3/flow_grpo-pickscore",),
    "SD3.5-M, autocast": ("sd3/flow_grpo-pickscore", "model.precision=autocast"),
    "FLUX, checkpointed": ("flux/flow_grpo-pickscore",),
    "Qwen-Image": ("qwen_image/flow_grpo_fast-pickscore",),
    "Wan": ("wan/flow_grpo-ocr",),
}
CASES = FAST | SLOW


def _copied(args: Any) -> int:
    """Bytes of cuDNN's copy of what a convolution takes; one that is a product of matrices has none."""
    x, weight = args[:2]
    return 0 if weight[0, 0].numel() == 1 else x.nbytes


class Census(TorchDispatchMode):
    """The most bytes that storages of a device held at once; `copying`: with what its convolutions copy."""

    def __init__(self, device: str, *, copying: bool = False) -> None:
        super().__init__()
        self.device, self.peak, self._sum, self.copying = device, 0, 0, copying
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outside = {self._storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device:
                number = self._storage(leaf)
                known = self._held.get(number)
                if number in outside or (known is not None and not known[0].expired()):
                    continue
                size = leaf.untyped_storage().nbytes()
                self._held[number] = StorageWeakRef(leaf.untyped_storage()), size
                self._sum += size - (0 if known is None else known[1])
        copied = _copied(args) if self.copying and func.overloadpacket is _ATEN.convolution else 0
        if self._sum + copied > self.peak:  # with the dead ones: only then are the living counted
            self._held = {number: part for number, part in self._held.items() if not part[0].expired()}
            self._sum = sum(size for _, size in self._held.values())
            self.peak = max(self.peak, self._sum + copied)
        return result

    @staticmethod
    def _storage(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False,
              scale: float | None = None, **_: Any) -> Tensor:  # fmt: skip
    """A fused kernel on CUDA, which torch would choose by asking the card."""
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(half), key.to(half), value.to(half)
    assert query.dtype == key.dtype == value.dtype
    if query.dtype == torch.float32:
        return _ATEN._scaled_dot_product_efficient_attention(query, key, value, None, False, scale=scale)[0]
    return _ATEN._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]


@contextmanager
def on(device: str, *modules: nn.Module) -> Iterator[None]:
    """Fake tensors inside the block, those of `modules` on the device."""
    patches: list[Any] = [
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
    ]
    if device == "cuda":
        patches.append(mock.patch.object(F, "scaled_dot_product_attention", attention))
        patches.append(mock.patch.object(Tensor, "pin_memory", lambda own: own))
    for patch in patches:
        patch.start()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            for part in (sub for module in modules for sub in module.modules()):
                for name, p in list(part.named_parameters(recurse=False)):
                    new = torch.empty(p.shape, dtype=p.dtype, device=device)
                    setattr(part, name, nn.Parameter(new, p.requires_grad))
                for name, table in [*part.named_buffers(recurse=False), *vars(part).items()]:
                    if isinstance(table, Tensor):
                        setattr(part, name, torch.empty(table.shape, dtype=table.dtype, device=device))
            yield
    finally:
        for patch in patches:
            patch.stop()


def inputs(adapter: Any, batch: int, device: str) -> tuple[Tensor, Tensor, Condition]:
    """Latents, timesteps and conditions of a forward; sets the adapter's empty prompt."""
    blank = adapter.blank_condition(batch)

    def placed(entry: Any) -> Any:
        return [row.to(device) for row in entry] if isinstance(entry, list) else entry.to(device)

    cond = Condition({name: placed(entry) for name, entry in blank.tensors.items()})
    adapter.unconditional = cond.index(torch.zeros(1, dtype=torch.int64))
    x = torch.empty(batch, *adapter.latent_shape(), device=device)
    return x, torch.empty(batch, device=device), cond


_DEPTH = {"num_layers": 4, "num_single_layers": 2, "dual_attention_layers": 2}
"""Largest number of blocks of a kind, or entries of a list of them: more only repeat what is counted."""


def shallow(load: Any) -> Any:
    """`load_config` of diffusers' networks, with few of a real model's blocks."""

    def loaded(kind: Any, *args: Any, **options: Any) -> Any:
        found = load.__func__(kind, *args, **options)
        for key in _DEPTH.keys() & found.keys() if isinstance(found, dict) else ():  # else that of a scheduler
            value, most = found[key], _DEPTH[key]
            found[key] = min(value, most) if isinstance(value, int) else value[:most]
        return found

    return classmethod(loaded)


def counted(device: str, work: Callable[[], Any], *, copying: bool = False) -> int:
    with Census(device, copying=copying) as census:
        work()
    return census.peak


def made(resolved: Resolved) -> tuple[Any, Any]:
    """(adapter, its weights) without values."""
    adapter = skeleton(resolved)
    with torch.device("meta"):
        return adapter, resolved.training.weights(adapter, resolved.model.config, [], 0, "meta")


def forwards(resolved: Resolved) -> dict[str, int]:
    """Bytes of a forward of the rollout and of the decoder."""
    adapter, _ = made(resolved)
    rollout, vae = resolved.run.rollout, adapter.pipeline.vae
    adapter.device = torch.device("cuda")
    with on("cuda", adapter.network, vae), torch.no_grad():
        if not resolved.drawn:
            drawn = {}
        else:
            drawn = {
                "rollout": counted(
                    "cuda",
                    lambda: adapter.predict(*inputs(adapter, rollout.batch_size, "cuda"), rollout.guidance_scale),
                )
            }
        shape = adapter.latent_shape()
        latents = torch.empty(rollout.batch_size, *shape, device="cuda")
        decode = counted("cuda", lambda: adapter.decode(latents), copying=True) + latents.nbytes
    return drawn | {"decode": decode}


def update(resolved: Resolved) -> int:
    """Bytes of a microbatch with its reference, and of the optimizer's step after it if that needs more."""
    adapter, weights = made(resolved)
    batch, scale = (
        resolved.run.optim.batch_size,
        resolved.training.guidance(adapter, resolved.run.rollout.guidance_scale),
    )

    def microbatch() -> None:
        x, timestep, cond = inputs(adapter, batch, "cpu")
        output = adapter.predict(x, timestep, cond, scale).float()
        if resolved.method.roles:
            with torch.no_grad():
                reference = adapter.predict(x, timestep, cond, scale).float()
            output = output - reference
        output.square().mean().backward()

    def gradients() -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in weights.parameters.values()]

    def both() -> None:
        for p in weights.parameters.values():
            p.grad = torch.zeros_like(p)
        microbatch()
        optimizer.step(gradients(), torch.ones(()))

    # The norm is a value, which fake tensors have not: this one is clipped.
    norm = mock.patch("torch.nn.utils.get_total_norm", return_value=2.0)
    with on("cpu", adapter.network), cuda_rules(), norm:
        weights.bind()
        optimizer = Optimizer(weights, OptimConfig(max_grad_norm=1.0), 2)
        optimizer.step(gradients())  # its moments are there before a microbatch
        return counted("cpu", both)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_plans_memory_is_that_of_a_census(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(ConfigMixin, "load_config", shallow(ConfigMixin.load_config))
    recipe, *words = CASES[name]
    resolved = resolve(load_config(f"configs/{recipe}.yaml", words))
    adapter = skeleton(resolved)
    grid = adapter.schedule(resolved.run.rollout.num_inference_steps)
    plan = resolved.algorithm.build().plan(grid, resolved.sampler.build(), 1, 0)
    planned = {phase.name: phase.transient or 0 for phase in estimate(resolved, adapter, plan, prompts=1).phases}
    census = forwards(resolved) | {"update": update(resolved)}
    ratios = {phase: planned[phase] / count for phase, count in census.items()}
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=0.03), (planned, census)
