"""Published weights as they lie on disk or on the hub, put into a network without a tensor missing. A helper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flowrl.reward import RewardError

Network = TypeVar("Network", bound=nn.Module)


def place(device: str | None) -> torch.device:
    """Where a network runs; none takes the GPU if there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def whole(kind: Any, name: str, *, reward: str, unused: tuple[str, ...] = (), **options: Any) -> Any:
    """`kind.from_pretrained(name, **options)` of transformers, frozen; what that raises is the caller's to word.

    Args:
        kind: a class of transformers.
        name: a folder or a hub id.
        reward: its name, for messages.
        unused: beginnings of the names of weights that take no part in a score, which may be missing.
        **options: of `from_pretrained`.

    Raises:
        RewardError: the checkpoint lacks weights; transformers draws them at random with no more than a warning.
    """
    with torch.random.fork_rng(devices=[]):
        network, info = kind.from_pretrained(name, output_loading_info=True, **options)
    # Of parameters alone: buffers, such as tables of positions, are computed where a file has none.
    drawn = {key for key, _ in network.named_parameters()} & info["missing_keys"]
    lacking = sorted(key for key in drawn if not key.startswith(unused))
    if lacking:
        raise RewardError(
            f"reward {reward!r}: {name!r} is no {type(network).__name__}: it lacks {len(lacking)} of its weights, such "
            f"as {lacking[0]!r}"
        )
    return network.eval().requires_grad_(False)


def find(where: str, name: str, *, reward: str) -> Path:
    """The file `name` of `where`: that file itself, a folder that has it, or a repository of the hub.

    Raises:
        RewardError: there is no such file, or the hub cannot be reached.
    """
    path = Path(where).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / name).is_file():
            raise RewardError(f"reward {reward!r}: the folder {where} has no {name}")
        return path / name
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(where, name))
    except (OSError, ValueError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load {name} of {where!r}; give a file, a folder or a hub id that can be "
            f"reached: {error}"
        ) from error


def read(path: Path, *, reward: str) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a .pt or .pth file without running code from it.

    Raises:
        RewardError: the file is broken, or holds anything but tensors.
    """
    import pickle

    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise RewardError(f"reward {reward!r} cannot read the weights {path}: {error}") from error
    if not (isinstance(tensors, Mapping) and all(isinstance(value, Tensor) for value in tensors.values())):
        raise RewardError(f"reward {reward!r}: {path} is not a file of weights (a mapping of names to tensors)")
    return dict(tensors)


def hollow(make: Callable[[], Network]) -> Network:
    """The network that `make` builds, its parameters without storage until `fill`; no random number is drawn."""
    from accelerate import init_empty_weights

    # Buffers stay real: those that no file holds, such as rotary frequencies, are computed as the network is built.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        return make()


def fill(network: nn.Module, tensors: Mapping[str, Tensor], *, reward: str, source: Path) -> None:
    """Put `tensors` in the place of the network's own, frozen; every name must be met.

    Raises:
        RewardError: names or shapes differ; the message has the first ones.
    """
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in tensors.items()}
    both = sorted(wanted.keys() & given.keys())
    differences = {
        "missing": sorted(wanted.keys() - given.keys()),
        "not known": sorted(given.keys() - wanted.keys()),
        "of another shape": [
            f"{name}: {given[name]}, not {wanted[name]}" for name in both if given[name] != wanted[name]
        ],
    }
    lines = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in differences.items()
        if names
    ]
    if lines:
        raise RewardError(f"reward {reward!r}: {source} holds other weights than the network's: {'; '.join(lines)}")
    network.load_state_dict(tensors, strict=True, assign=True)
    network.eval().requires_grad_(False)
