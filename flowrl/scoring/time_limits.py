"""Rewards on threads of their own: what a thread takes along from the one that started it, and a time limit.

Grad mode, autocast, the current GPU with its stream and context variables belong to a thread; with them taken along, a
score is bitwise the one that the starting thread would have computed.
"""

import contextvars
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.core.background import Background


class Ambient:
    """Grad mode, autocast, GPU with its stream, and context variables of this thread, for other threads' functions."""

    def __init__(self) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self.casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self.gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.stream = None if self.gpu is None else torch.cuda.current_stream(self.gpu)
        self.variables = contextvars.copy_context()

    def run(self, function: Callable[..., Any], *given: Any) -> Any:
        """`function(*given)` in these surroundings; from any thread, from several at once."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype, enabled in self.casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if self.gpu is not None:
                stack.enter_context(torch.cuda.device(self.gpu))
                stack.enter_context(torch.cuda.stream(self.stream))
            # A copy: the same context cannot be entered by two threads.
            return self.variables.copy().run(function, *given)


class TimeLimit:
    """A score function that is waited for no longer than `limit_s` seconds; then the batch has failed.

    Python cannot end a thread, so a call that is given up goes on, holding its memory, its device and its batch, and
    what it returns in the end is dropped. No second call is made next to it, since few rewards can be called twice at
    once: the next try waits up to `limit_s` for its end, and every later one fails at once until it has ended. A call
    that keeps the interpreter's lock, or one on a GPU that blocks what others ask of it, still hangs the process.

    Calls must come one at a time, as a Scorer makes them. Images that ask for their gradient are scored by the
    caller's thread without a limit: their graph is to be walked from there.

    Raises (when called):
        TimeoutError: no scores within the limit, or the call that was given up still runs.
    """

    def __init__(self, score: Callable[..., Tensor | Mapping[str, Tensor]], limit_s: float) -> None:
        self.score, self.limit_s = score, limit_s
        self._late: Background | None = None
        self._waited = False
        """The late call has been waited for once more, in vain."""

    def __call__(self, images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor | Mapping[str, Tensor]:
        if any(getattr(image, "requires_grad", False) for image in images):
            return self.score(images, prompts, metadata)
        if self._late is not None and not self._late.ended.wait(0 if self._waited else self.limit_s):
            self._waited = True
            raise TimeoutError(
                f"a call that gave no scores within timeout={self.limit_s:g} s still runs; no other is made beside it"
            )
        work = partial(Ambient().run, self.score, images, prompts, metadata)
        call = Background(work, "flowrl-reward")
        # Late until it has ended: an interrupt may leave this wait, too.
        self._late, self._waited = call, False
        if not call.ended.wait(self.limit_s):
            raise TimeoutError(f"it gave no scores within timeout={self.limit_s:g} s; the call goes on in its thread")
        self._late = None
        return call.result()
