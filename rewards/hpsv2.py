"""HPS v2: how much people prefer the image for its prompt, by a CLIP ViT-H/14 tuned on choices of people.

raw = cos(image, text), about 0.20 to 0.37; tables print it times 100. The two releases are not comparable, so the
output carries the version: `hpsv2_1` or `hpsv2_0`. The longest side is resized to 224 and the rest is black, so unlike
other CLIPs this one sees the whole image; the resizing is done on float tensors and may overshoot [0, 1]. Of the
prompt it sees 77 tokens. A video has the mean over some of its frames.

The networks are of one kind and cannot be told apart by their weights' shapes: the file's name tells which it is, and
`sha256` where you give it.

Source: arXiv:2306.09341; tgxs002/HPSv2:hpsv2/src/open_clip/transform.py.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from flowrl.rewards._vision import checkpoints, clips, open_clips
from flowrl.rewards._vision.arrays import eight_bit, finite
from flowrl.rewards._vision.frames import framewise
from flowrl.rewards._vision.options import DTYPES, ClipOptions
from flowrl.rewards._vision.pixels import broken, normalised, padded, resized_shape
from flowrl.rewards._vision.pool import stacked, threads
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import Card, Images, Reward, RewardError

LEVEL = "experimental"
Version = Literal["v2.1", "v2.0"]
ARCHITECTURE = "ViT-H-14"
"""open_clip's name: GELU, not QuickGELU."""
_HUB = "xswu/HPSv2"
_FILES: dict[Version, str] = {"v2.1": "HPS_v2.1_compressed.pt", "v2.0": "HPS_v2_compressed.pt"}

CARD = Card(
    outputs=("hpsv2_1",),
    low=-1.0,
    high=1.0,
    modality="any",
    resolution="224 x 224, the whole image between bars",
    memory_gib=3.7,
    image_network=ARCHITECTURE,
    overlap_on_gpu=True,
    version="HPS v2.1",
    level=LEVEL,
    licence="Apache-2.0 (code and weights)",
    source="arXiv:2306.09341",
)


@dataclass(frozen=True, kw_only=True)
class Config(ClipOptions):
    version: Version = "v2.1"
    """Release of the weights; numbers of two are not comparable."""
    weights: Annotated[str | None, NAME_OR_PATH] = None
    """The release's file, a folder with it, or a .safetensors of its state_dict; null: that of the hub."""
    sha256: str | None = None
    """SHA-256 of the file of weights; another file is refused."""
    antialias: bool = True
    """As today's torchvision resizes; false: as before its 0.17, when the published tables were made."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames < 1:
            raise ValueError(f"frames={self.frames} must be at least 1")


def prepared(image: Tensor, size: int, *, preprocess: clips.Preprocess = "fast", antialias: bool = True) -> Tensor:
    """[3, size, size] of an image [3, H, W] in [0, 1]: longest side to `size`, black bars, normalised.

    NaN all over where the image holds NaN or inf.
    """
    if image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"an image must be [3, H, W], got {list(image.shape)}")
    if not finite(image):
        return broken(image, size, preprocess)
    exact = preprocess == "exact"
    pixels = torch.from_numpy(eight_bit(image)).permute(2, 0, 1).float() / 255 if exact else image.float()
    height, width = pixels.shape[-2:]
    shape = resized_shape(height, width, size, "pad")
    if shape != (height, width):
        # No clamp: the published code has none on its float tensors.
        pixels = F.interpolate(pixels[None], shape, mode="bicubic", antialias=antialias, align_corners=False)[0]
    return normalised(padded(pixels, size))


def find_weights(config: Config) -> Path:
    """The file of weights, certain to be no other release's by its name, and by its hash if that is given.

    Raises:
        RewardError: no such file, another release's, or another hash.
    """
    name = _FILES[config.version]
    path = checkpoints.find(config.weights or _HUB, name, reward="hpsv2")
    other = next((version for version, file in _FILES.items() if path.name == file and version != config.version), None)
    if other:
        raise RewardError(
            f"reward 'hpsv2': {path.name} holds {other}, but version={config.version!r} is asked for; set "
            f"version: {other}, or give {name}"
        )
    if config.sha256 is not None:
        with path.open("rb") as file:
            result = hashlib.file_digest(file, "sha256").hexdigest()
        if result != config.sha256.lower():
            raise RewardError(f"reward 'hpsv2': {str(path)!r} has sha256 {result}, not {config.sha256}")
    return path


def _load(path: Path, device: str | None) -> tuple[Any, Any]:
    state = _state(path)
    network, tokenizer = open_clips.untrained(ARCHITECTURE)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise RewardError(f"reward 'hpsv2': {str(path)!r} holds no {ARCHITECTURE} of open_clip: {error}") from error
    return network.to(checkpoints.place(device)), tokenizer


def _state(path: Path) -> Mapping[str, Tensor]:
    """Weights of a .safetensors, or under "state_dict" of the published file."""
    if path.suffix == ".safetensors":
        return checkpoints.read(path, reward="hpsv2")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise RewardError(f"reward 'hpsv2': {str(path)!r} is not laid out as {_FILES['v2.1']}: {error!r}") from error


def card_of(config: Config) -> Card:
    return replace(
        CARD,
        outputs=(f"hpsv2_{config.version[-1]}",),
        version=f"HPS {config.version}" + ("" if config.antialias else ", no antialias"),
        **config.declared,
    )


def build(config: Config) -> Reward:
    network, tokenizer = _load(find_weights(config), config.device)
    size, dtype = network.visual.image_size[0], DTYPES[config.dtype]
    network.visual.to(dtype)
    prepare = partial(prepared, size=size, preprocess=config.preprocess, antialias=config.antialias)
    count = threads(network.logit_scale.device) if config.preprocess == "exact" else 1
    clip = open_clips.OpenClip(network, tokenizer, lambda images: stacked(prepare, images, count), dtype)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        return (clip.embed_images(images) * clip.embed_texts(prompts)).sum(dim=-1)

    return Reward(framewise(score, config.frames), card_of(config))
