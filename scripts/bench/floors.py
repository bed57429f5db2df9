"""The floors of `scripts.bench peers`: a plain call of the pipeline, and a bare loop of forward, backward and AdamW.

Both work on the very modules of a session, so that weights, types, modes and memory formats are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.models.weights.roles import component_names
from flowrl.run.session import Session


class Watch:
    """The forwards of a session's networks since the last `take`: how many of how many rows."""

    def __init__(self, session: Session) -> None:
        self._sizes: Counter[int] = Counter()
        for part in component_names(session.model.network).values():
            part.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first argument of a denoiser is its latents: a tensor, or a list of samples.
        self._sizes[len(args[0] if args else next(iter(kwargs.values())))] += 1

    def take(self) -> Counter[int]:
        """Rows of a forward -> number of forwards."""
        taken, self._sizes = self._sizes, Counter()
        return taken


# ---- rollouts


class PlainCalls:
    """`pipe(...)` with the pipeline's own scheduler, one call a batch, images as tensors.

    Args:
        session: gives networks, VAE, steps, guidance and the size of images.
        batches: texts of each call.

    The embeddings of the texts are made in the first round of calls and kept, as flowrl keeps them.
    """

    def __init__(self, session: Session, batches: Sequence[list[str]]) -> None:
        self.batches, rollout = batches, session.config.rollout
        # Another pipeline: the session's has given its text encoders away.
        adapter = session.resolved.model.build()
        adapter.to(session.world.device)
        self.pipe: Any = adapter.pipeline
        self.options = adapter.own_call(rollout.num_inference_steps, rollout.guidance_scale)
        self.pipe.register_modules(**component_names(session.model.network), vae=session.model.pipeline.vae)
        self.pipe.set_progress_bar_config(disable=True)
        vars(self.pipe)["encode_prompt"] = _remembered(self.pipe.encode_prompt)

    def __call__(self) -> list[Tensor]:
        """Images or videos of each batch."""
        return [
            self.pipe(
                prompt=texts,
                generator=torch.Generator().manual_seed(number),
                output_type="pt",
                return_dict=False,
                **self.options,
            )[0]
            for number, texts in enumerate(self.batches)
        ]


def _remembered(encode: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once for the same arguments."""
    kept: dict[str, Any] = {}

    def answer(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, kwargs))
        if key not in kept:
            kept[key] = encode(*args, **kwargs)
        return kept[key]

    return answer


# ---- updates


@dataclass(eq=False)
class Call:
    """One forward of a network as an update made it."""

    network: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    with_gradient: bool
    target: Tensor | None = None
    """What the loss compares the output with; None: no backward pass follows."""

    def forward(self) -> Tensor:
        with torch.set_grad_enabled(self.with_gradient):
            return output_of(self.network(*self.args, **self.kwargs))


def output_of(result: Any) -> Tensor:
    """The output of a denoiser among what its forward returns."""
    return result if isinstance(result, Tensor) else result[0]


class BareLoop:
    """The forwards of an update again, on the same inputs, with the least around them.

    Each forward that has a backward pass gets a mean squared error; the others are made alone. Where the update moved
    the weights the norm of the gradient is clipped and AdamW steps: fused as flowrl's, at learning rate 0, so that the
    weights stay those of the session.
    """

    def __init__(self, session: Session, calls: Sequence[Call | None]) -> None:
        self.calls, optim = calls, session.config.optim
        self.parameters = list(session.weights.parameters.values())
        self.most = optim.max_grad_norm
        self.adam = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)
        device, precise = session.world.device, session.model.autocasts
        dtype = next(session.model.network.parameters()).dtype
        self.cast = torch.autocast(device.type, dtype=dtype if dtype.itemsize == 2 else torch.bfloat16, enabled=precise)

    def __call__(self) -> None:
        for call in self.calls:
            if call is None:
                self._step()
                continue
            with self.cast:
                output = call.forward()
            if call.target is not None:
                (output.float() - call.target).square().mean().backward()

    def _step(self) -> None:
        if self.most is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.most)
        self.adam.step()
        self.adam.zero_grad()


@contextmanager
def recorded(session: Session) -> Iterator[list[Call | None]]:
    """The forwards of an update inside the block, in their order; None where the optimizer stepped."""
    calls: list[Call | None] = []
    made: list[Call] = []

    def before(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made.append(Call(network, args, kwargs, torch.is_grad_enabled()))
        calls.append(made[-1])

    def after(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        call, output = made[-1], output_of(result)
        if output.requires_grad:
            # Called by a backward pass alone.
            output.register_hook(lambda gradient: _aim(call, gradient))

    parts = component_names(session.model.network).values()
    handles = [part.register_forward_pre_hook(before, with_kwargs=True) for part in parts]
    handles += [part.register_forward_hook(after, with_kwargs=True) for part in parts]
    handles.append(session.optimizer.adam.register_step_post_hook(lambda *_: calls.append(None)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _aim(call: Call, gradient: Tensor) -> None:
    call.target = torch.zeros_like(gradient, dtype=torch.float32)
