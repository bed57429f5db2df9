"""`deterministic: true`: the same bits from the same state, on a GPU too.

Torch keeps the setting for the whole process, in two degrees: to warn of an operation without a deterministic kernel,
or to refuse it. Where it only warns, the backward passes of attention stay as they are, and differ from run to run. So
gradients are made under the strict degree, and the rollout's forwards too; rewards, whose code is not ours, under the
other. A reward that scores while the rollout goes on shares its setting: then the rollout warns, and the update, which
makes the same forwards, refuses.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flowrl.core.errors import ConfigError
from flowrl.core.startup import imports

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_KERNEL, _CUBLAS = " does not have a deterministic", "is not deterministic because it uses CuBLAS"


def prepare() -> None:
    """Deterministic kernels from here on, with warnings; called before CUDA starts, which reads the environment."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    with imports():  # torch tells its compiler, which it imports for that
        torch.use_deterministic_algorithms(True, warn_only=True)
    # Torch would fill all new memory with NaN, to show reads of it: 3.5 % of the time for the same bits.
    settings: Any = torch.utils.deterministic  # type checkers do not see its property
    settings.fill_uninitialized_memory = False


@contextmanager
def strict() -> Iterator[None]:
    """Inside the block refuse what has no deterministic kernel, if the process is in deterministic mode at all.

    Raises ConfigError: naming the operation.
    """
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    except RuntimeError as error:
        refused = _refusal(str(error))
        if refused is None:
            raise
        raise ConfigError(refused) from error
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


def _refusal(words: str) -> str | None:
    """The message for torch's refusal of an operation; None: the error is another."""
    if _NO_KERNEL in words:
        what = f"the operation {words.partition(_NO_KERNEL)[0].split()[-1]} has no deterministic kernel on this device"
    elif _CUBLAS in words:
        what = (
            f"matrix products are not deterministic with {_WORKSPACE}={os.environ.get(_WORKSPACE)}; leave that out of "
            "the environment, or give it the value :4096:8"
        )
    else:
        return None
    return f"deterministic=true: {what}; with deterministic=false repeated runs differ in their last bits"
