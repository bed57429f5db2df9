"""The blocks of a denoiser, as diffusers declares them: for sharding, compilation and checkpointing of some of them."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from flowrl.core.errors import ModelError
from flowrl.models.memory.options import Checkpointing


def blocks(network: nn.Module) -> list[nn.Module]:
    """Parts that a network wants to stay whole, inner ones first, for a UNet's blocks are nested; it may declare none.

    As `fully_shard` wants them.
    """
    names = getattr(network, "_no_split_modules", None) or ()
    return [part for part in network.modules() if type(part).__name__ in names][::-1]


def repeated(network: nn.Module) -> list[nn.Module]:
    """Blocks that a network repeats, in its order: those that it declares for compilation, else its innermost blocks.

    None lies in another. Empty where it declares none.
    """
    names = getattr(network, "_repeated_blocks", None) or ()
    found = {part for part in network.modules() if type(part).__name__ in names}
    if not found:
        whole = set(blocks(network))
        found = {part for part in whole if whole.isdisjoint(_inside(part))}
    inner = {part for block in found for part in _inside(block)}
    return [part for part in network.modules() if part in found and part not in inner]


def _inside(block: nn.Module) -> list[nn.Module]:
    return list(block.modules())[1:]


def checkpoint_blocks(network: Any, option: Checkpointing) -> None:
    """Recompute activations of a diffusers network in its backward pass, by `model.gradient_checkpointing`.

    Raises ModelError: the network cannot, or not with some of its blocks.
    """
    if option is False:
        return
    # Whoever trains decides `auto` first; elsewhere nothing is trained, and it costs nothing.
    every = option if isinstance(option, int) and option is not True else 1
    kind, count = type(network).__name__, len(repeated(network))
    shown = option if isinstance(option, str) else str(option).lower()
    if every > max(count, 1):
        has = f"has {count} blocks" if count else "does not declare its blocks (_repeated_blocks, _no_split_modules)"
        raise ModelError(
            f"model.gradient_checkpointing={shown}: {kind} {has}, so there is no every {every}th of them",
            [{"model.gradient_checkpointing": True}, {"model.gradient_checkpointing": False}],
        )
    try:
        network.enable_gradient_checkpointing(*([_every(every, kind)] if every > 1 else []))
    except ValueError as error:
        raise ModelError(
            f"model.gradient_checkpointing={shown}: {kind} has no checkpointing in diffusers",
            {"model.gradient_checkpointing": False},
        ) from error


def _every(n: int, kind: str) -> Callable[..., Any]:
    """What a network calls a block by, the first time in the network's order: the first and each n-th recompute."""
    places: dict[nn.Module, int] = {}

    def call(block: Any, *args: Any) -> Any:
        if not isinstance(block, nn.Module):
            raise ModelError(
                f"model.gradient_checkpointing={n}: {kind} recomputes functions, not blocks, which cannot be counted",
                [{"model.gradient_checkpointing": True}, {"model.gradient_checkpointing": False}],
            )
        if places.setdefault(block, len(places)) % n:
            return block(*args)
        return checkpoint(block, *args, use_reentrant=False)

    return call
