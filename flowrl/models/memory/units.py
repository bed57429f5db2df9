"""A decoder whose units, one convolution block each, are computed again in the backward pass.

diffusers recomputes an AutoencoderKL by whole resolutions, and the largest of them is most of what it saves; the VAEs
of Wan and Qwen-Image not at all, because their units change lists that all of them share.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_PLAIN = ("ResnetBlock2D", "Upsample2D")
_CAUSAL = ("WanResidualBlock", "WanResample", "QwenImageResidualBlock", "QwenImageResample")


def recompute_units(decoder: nn.Module) -> bool:
    """Let the known units of a VAE's decoder recompute their activations; False: it has none."""
    found = {part: type(part).__name__ for part in decoder.modules()}
    for part, name in found.items():
        if name in _PLAIN + _CAUSAL:
            part.forward = partial(_causal if name in _CAUSAL else _plain, part.forward)
    return not {*_PLAIN, *_CAUSAL}.isdisjoint(found.values())


def _recomputed(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Nothing in a decoder is random, and reading the generators' states would wait for the device.
    return checkpoint(work, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _plain(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return _recomputed(forward, *args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)


def _causal(
    forward: Callable[..., Tensor], x: Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None
) -> Tensor:
    """A unit that reads the ends of earlier frames in its slots of a list, from the place that is next, and moves on.

    Both times it is given copies, and the list is changed once.
    """
    if feat_cache is None or feat_idx is None:
        return _plain(forward, x)
    if not torch.is_grad_enabled():
        return forward(x, feat_cache, feat_idx)
    first, before = feat_idx[0], list(feat_cache)

    def unit(x: Tensor) -> tuple[Tensor, list[Any]]:
        slots, place = list(before), [first]
        out = forward(x, slots, place)
        return out, slots[first : place[0]]

    out, own = _recomputed(unit, x)
    end = first + len(own)
    feat_cache[first:end], feat_idx[0] = own, end
    before[:] = [None] * first + before[first:end]  # the slots of others need not stay alive for it
    return out
