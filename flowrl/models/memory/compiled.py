"""`model.compile: blocks`: each repeated block of the denoiser through torch.compile, in place, in whole graphs.

A block keeps its name, parameters and hooks; only its forward is compiled, so hooks (FSDP2's gathering) and
checkpointing stay outside of the graphs, saved files have plain names, and blocks of one class share their graphs.

A graph that keeps activations for a backward pass may be fused in another way than one that does not, and round in
another way. So a forward without gradients runs the graph of training too, and drops what it kept after each block:
rollout, replay and the update have one set of kernels. `probe` learns which arguments of a block carry gradients.

Nothing falls back: a graph break, the limit of recompilations, a lack of a compiler end in ModelError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.models.base import ModelAdapter
from flowrl.models.memory.blocks import repeated

LIMIT = 64
"""Graphs of one block's code: classes of arguments (with gradient or not), times roles with and without LoRA, times
shapes (rollout, update, evaluation, their last batches), times widths of a UNet."""


class Block:
    """The compiled forward of one block, in the place of its `forward`."""

    def __init__(self, block: nn.Module, options: dict[str, Any]) -> None:
        self.block, self.plain, self.kind = block, block.forward, type(block).__name__
        self.carrying: frozenset[int | str] | None = None
        """Arguments, by place or name, that carry gradients in training; None: not known, none trains."""
        self._graph: Any = torch.compile(block.forward, fullgraph=True, dynamic=False, options=dict(options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of a network is not compiled; its block is known before its attributes are copied.
        return type(self.block).forward.__get__(memo[id(self.block)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        training = torch.is_grad_enabled()
        if training and self.carrying is None:
            self.carrying = frozenset(key for key, value in _named(args, kwargs) if value.requires_grad)
        if training or self.carrying is None:
            return self._run(args, kwargs)
        with torch.enable_grad():
            for key, value in _named(args, kwargs):
                if key in self.carrying:
                    carrying = value.detach().requires_grad_()
                    if isinstance(key, int):
                        args = (*args[:key], carrying, *args[key + 1 :])
                    else:
                        kwargs[key] = carrying
            output = self._run(args, kwargs)
        return tree_map_only(Tensor, Tensor.detach, output)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with explained(self.kind), _warning():
            return self._graph(*args, **kwargs)


@contextmanager
def _warning() -> Iterator[None]:
    """Deterministic mode, where it is on, in the degree that warns: torch would compile each graph for each degree.

    Backward passes, whose attention is what the strict degree changes, run outside.
    """
    refuses = torch.get_deterministic_debug_mode() == 2
    if refuses:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if refuses:
            torch.use_deterministic_algorithms(True, warn_only=False)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int | str, Tensor]]:
    """The tensors among a block's arguments, by place or name."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            yield key, value


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn failures of the compiler inside the block into ModelError with the reason and the remedy."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        yield
    except FailOnRecompileLimitHit as error:
        raise ModelError(
            f"model.compile=blocks: {what} was compiled {LIMIT} times, for other shapes, roles or settings, and would "
            f"now run uncompiled; fewer batch sizes and image sizes would do",
            {"model.compile": None},
        ) from error
    except TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ModelError(
            f"model.compile=blocks: {what} cannot be compiled whole ({lines[0]}); another option of the model may be "
            "what its code does not compile with",
            {"model.compile": None},
        ) from error


def require_compiler(device: torch.device) -> None:
    """Raise ModelError unless this machine can compile for the device."""
    from torch._dynamo import config

    if config.disable:
        raise ModelError(
            "model.compile=blocks: TORCH_COMPILE_DISABLE=1 in the environment turns torch.compile off",
            {"model.compile": None},
        )
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except (InvalidCxxCompiler, RuntimeError, OSError) as error:
            raise ModelError(
                "model.compile=blocks needs a C++ compiler on the CPU, and there is none: install g++, or name one in "
                "the variable CXX",
                {"model.compile": None},
            ) from error
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise ModelError(
            f"model.compile=blocks needs triton on {device}, and there is none that works with it (the package triton, "
            "and a GPU of compute capability 7.0 or later)",
            {"model.compile": None},
        )


def compile_blocks(network: nn.Module) -> None:
    """Compile the repeated blocks of a denoiser, or of several in a ModuleDict, at their first forward.

    After its LoRA is attached and its weights are cast, before it is split.

    Raises ModelError: the network does not declare its blocks.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, LIMIT)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * LIMIT)
    config.suppress_errors = False  # it would run a block uncompiled
    # Sums and products are rounded where the network rounds them, whatever is fused. In deterministic mode torch turns
    # off what inductor would choose by timing.
    options = {"emulate_precision_casts": True}
    for part in network.values() if isinstance(network, nn.ModuleDict) else (network,):
        found = repeated(part)
        if not found:
            raise ModelError(
                f"model.compile=blocks: {type(part).__name__} does not declare its blocks (_repeated_blocks, "
                "_no_split_modules)",
                {"model.compile": None},
            )
        for block in found:
            if not isinstance(block.forward, Block):
                vars(block)["forward"] = Block(block, options)


def probe(
    adapter: ModelAdapter, cond: Condition, timesteps: Tensor, guidance_scale: float, trained: list[nn.Parameter]
) -> None:
    """One forward and backward of the network, which compiles the blocks: before anything is trained.

    The adapter is on its device, with compiled blocks; `cond` is of B samples. `timesteps`, [T], have one forward each,
    for a network with an expert for each range. `trained` parameters are left without gradients; empty: the forward
    alone is tried.

    Raises ModelError: the compiler is missing, fails, or would leave a block uncompiled.
    """
    drawn = torch.randn(len(cond), *adapter.latent_shape(), generator=torch.Generator().manual_seed(0))
    device = timesteps.device
    with torch.set_grad_enabled(bool(trained)), explained("the denoiser"):
        for timestep in timesteps:
            output = adapter.predict(drawn.to(device), timestep.repeat(len(cond)), cond, guidance_scale)
            if trained:
                output.float().square().mean().backward()
    for parameter in trained:
        parameter.grad = None
