"""The optimizers of `optim.name`: which library makes them, their state as flat tensors, and its bytes.

adamw               torch's fused AdamW: two float32 moments a weight
adamw_8bit          two 8-bit moments a weight with a float32 scale for 256 of them (Dettmers et al., arXiv 2110.02861)
paged_adamw         float32 moments that leave a full GPU for the host (CUDA's managed memory)
paged_adamw_8bit    both
adafactor           second moments of rows and columns, no first one (arXiv 1804.04235): transformers' class
                    without relative steps, so that `learning_rate` has AdamW's unit; the second moment decays by
                    1 - t^-0.8, and an update whose root mean square exceeds 1 is scaled down to it
muon                torch's: momentum 0.95, made orthogonal by 5 Newton-Schulz steps, times 0.2 sqrt(longest side), so
                    that `learning_rate` has AdamW's unit (arXiv 2502.16982); weights that are no matrix have AdamW
"""

import importlib
import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, Remedy
from flowrl.training.options import Name, Settings

PLAIN = "adamw"
OF_TORCH = (PLAIN, "muon")
_CLASSES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}
"""Name -> class of bitsandbytes."""
_FLOAT, _BLOCK, _LEAST_8BIT, _LEAST_PAGED = 4, 256, 4096, 100_000


def require(name: Name, device: torch.device) -> None:
    """Raise ConfigError where the optimizer's library is not installed, or it cannot work on the device."""
    if name not in _CLASSES:
        return
    if name.startswith("paged") and device.type != "cuda":
        raise ConfigError(
            f"optim.name={name}: pages move between a CUDA GPU and its host, and this run is on {device.type}",
            {"optim.name": "adamw_8bit" if name.endswith("8bit") else "adamw"},
        )
    if device.type not in ("cpu", "cuda", "xpu"):
        raise ConfigError(
            f"optim.name={name}: bitsandbytes has no optimizer for {device.type}",
            [{"optim.name": "adafactor"}, {"optim.name": "adamw"}],
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"optim.name={name} needs bitsandbytes", Remedy(command="pip install 'flowrl[quant]'"))


def make(name: Name, parameters: Sequence[Tensor], settings: Settings) -> Any:
    """The optimizer over parameters, which are on their device. Raises ConfigError: as `require`."""
    if name == "adafactor":
        from transformers.optimization import Adafactor

        fixed: dict[str, Any] = {"relative_step": False, "scale_parameter": False, "warmup_init": False}
        return Adafactor(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, **fixed)
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if name == "muon":
        return _Muon(parameters, options)
    if name == PLAIN:
        return torch.optim.AdamW(parameters, **options, fused=True)
    require(name, parameters[0].device)
    return getattr(importlib.import_module("bitsandbytes.optim"), _CLASSES[name])(parameters, **options)


class _Muon:
    """Muon over the matrices among the parameters and AdamW over the others, with one table of states."""

    def __init__(self, parameters: Sequence[Tensor], options: dict[str, Any]) -> None:
        matrices = [p for p in parameters if p.ndim == 2]
        if not matrices:
            raise ConfigError(
                f"optim.name=muon makes matrices orthogonal, and none of the {len(parameters)} trained weights is one: "
                f"their dimensions are {sorted({p.ndim for p in parameters})} (a convolution has 4)",
                {"optim.name": PLAIN},
            )
        lr, decay, others = options["lr"], options["weight_decay"], [p for p in parameters if p.ndim != 2]
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        self.parts: list[torch.optim.Optimizer] = [muon]
        if others:
            self.parts.append(torch.optim.AdamW(others, **options, fused=True))
        self.state = muon.state
        for part in self.parts:
            part.state = self.state
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()


def restored(key: str, value: Tensor, parameter: Tensor) -> Any:
    """An entry of a parameter's state as the optimizer keeps it; not for those `OF_TORCH`.

    The libraries count steps in Python integers.
    """
    return int(value) if key == "step" else value.to(parameter.device).clone()


def state_bytes(name: Name, shapes: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Bytes of the state of weights of these shapes: (on the device, paged, which give way where it is full)."""
    resident = paged = 0
    for shape in shapes:
        count = math.prod(shape)
        if name == "adafactor":
            rows, columns = count // max(shape[-1], 1) if shape else 1, 0
            if len(shape) > 1:
                columns = count // max(shape[-2], 1)
            resident += _FLOAT * (rows + columns if len(shape) > 1 else count)
            continue
        if name == "muon":
            resident += _FLOAT * count * (1 if len(shape) == 2 else 2)
            continue
        small = not name.endswith("8bit") or count < _LEAST_8BIT
        values = 2 * count * (_FLOAT if small else 1)
        resident += 0 if small else 2 * _FLOAT * math.ceil(count / _BLOCK)
        if name.startswith("paged") and count >= _LEAST_PAGED:
            paged += values
        else:
            resident += values
    return resident, paged
