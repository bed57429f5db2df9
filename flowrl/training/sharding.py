"""FSDP2: the denoiser's weights split over the processes by rows, gathered block by block where a forward needs them.

A frozen base is split and its LoRA stays whole on every process, trained by the loop's own reduction; so do those of
teachers. Weights that are all trained are split with their gradients, moments and roles: the backward pass sums the
gradients and leaves each process its rows. Every forward and backward is then a step that all processes take together,
so the loops that make them (rollout, evaluation, parity gate, update) repeat a sample, uncounted, while another process
still has work.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from flowrl.core.errors import ModelError
from flowrl.models.base import ModelAdapter
from flowrl.models.memory.blocks import blocks
from flowrl.models.weights.roles import Weights
from flowrl.training.world import World


def split(adapter: ModelAdapter, weights: Weights, world: World, dtype: torch.dtype) -> None:
    """Split the denoiser over all processes and move the adapter to its device, where no network was whole before.

    The adapter is in host memory; its trainable weights are bound again. `dtype` is that of the forward pass.

    Raises ModelError: the network does not declare its blocks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(world.device.type, (world.size,)),
        # Also the outermost part: what stayed gathered would serve the next role's forward with this role's weights.
        "reshard_after_forward": True,
    }
    if weights.lora is not None:
        options["ignored_params"] = set(weights.adapters())
    elif dtype != torch.float32:
        # Gathered in half precision: autocast would keep a copy of every cast weight until the backward pass. Inputs
        # stay as they are: timesteps have more digits than bfloat16.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for network in weights.components.values():
        for block in _blocks(network):
            fully_shard(block, **options)
        fully_shard(network, **options)
        for part in network.modules():
            if isinstance(part, FSDPModule):
                # Sums, as everywhere in the loop: it divides once, by the number of edges of all processes.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    # FSDP2 warns of writing in place into the prediction, a view of the network's output; no code here does that.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    adapter.to(world.device)
    weights.bind()


def _blocks(network: nn.Module) -> list[nn.Module]:
    """The parts that are split one by one."""
    result = blocks(network)
    if not result:
        raise ModelError(
            f"model.shard=true: {type(network).__name__} does not declare its blocks (_no_split_modules)",
            {"model.shard": False},
        )
    return result


def rows(weights: Weights) -> "dict[str, Rows]":
    """The rows of each parameter on this process; empty unless the trained weights are split.

    FSDP2 deals them out in equal runs, the last ones shorter or empty.
    """
    if not weights.split:
        return {}
    result = {}
    for name, parameter in weights.parameters.items():
        mesh, count = parameter.device_mesh, len(parameter)  # type: ignore[attr-defined]
        run = -(-count // mesh.size())
        first = min(mesh.get_local_rank() * run, count)
        result[name] = (first, min(first + run, count))
    return result


def longest(counts: Sequence[dict[int, int]]) -> dict[int, int]:
    """The largest count of each key on any process, keys in order.

    >>> longest([{0: 2}, {3: 1, 0: 1}])
    {0: 2, 3: 1}
    """
    keys: Iterable[int] = sorted({key for each in counts for key in each})
    return {key: max(each.get(key, 0) for each in counts) for key in keys}


Rows = tuple[int, int]
"""Rows of a tensor: the first, and the one after the last."""
