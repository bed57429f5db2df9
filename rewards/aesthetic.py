"""How beautiful is the image, its prompt left aside? LAION's aesthetic heads on CLIP, and version 2.5 on SigLIP.

score = head(e / |e|) with the image's embedding e. All three heads are affine: layers without activations between
them. Versions are on scales of their own:
- v1: one linear layer on CLIP ViT-L/14, as VBench uses it;
- v2: five on the same, the one that DDPO and Flow-GRPO train on; 5 to 6 for present models, 6.5 and more where hacked;
- v2.5: five on SigLIP so400m; 1 to 10, 5.5 and more being good. Its code and weights are AGPL-3: they are not part of
  this package, give the file yourself.

Where an odd number of pixels is left around the centre square, the repositories of v1 and v2 round half of it half to
even (torchvision), DDPO and Flow-GRPO round it down (transformers). v1 does here as the first, v2 as the second;
`half_even_crop` asks for either. One row or column of 224 moves.

A video has the mean over some of its frames.

Source: LAION-AI/aesthetic-predictor; christophschuhmann/improved-aesthetic-predictor;
discus0434/aesthetic-predictor-v2-5 (architecture only).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from flowrl.rewards._vision import checkpoints, clips
from flowrl.rewards._vision.frames import framewise
from flowrl.rewards._vision.options import ClipOptions
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import Card, Images, Reward, RewardError

LEVEL = "experimental"
Version = Literal["v1", "v2", "v2.5"]


@dataclass(frozen=True, slots=True)
class Published:
    """A published head: where it is from, how its file is laid out, and how to know it."""

    backbone: str
    tower: clips.Tower
    prefix: str
    """Prefix of its keys."""
    layers: tuple[str, ...]
    """Keys of its linear layers, in order, without prefix, `.weight` and `.bias`."""
    widths: tuple[int, ...]
    """Widths of its input and of every layer's output."""
    file: str
    where: str
    sha256: str
    fingerprint: tuple[float, ...]
    """Its values at 0, ones / sqrt(d), the first unit vector, +-1 / sqrt(d) in turn; and the norm of its affine map."""
    licence: str


_CLIP, _FIVE = "openai/clip-vit-large-patch14", (1024, 128, 64, 16, 1)
PUBLISHED: dict[Version, Published] = {
    "v1": Published(
        backbone=_CLIP,
        tower="clip",
        prefix="",
        layers=("",),
        widths=(768, 1),
        file="sa_0_4_vit_l_14_linear.pth",
        where="the repository LAION-AI/aesthetic-predictor",
        sha256="2cd4e60f4f24ae3bcd57b847b13c1f3ba27edc28cc1a7f9ce74ee9f421243cba",
        fingerprint=(3.529371738, 1.513129670, 5.402092218, 3.693055377, 28.444395846),
        licence="MIT",
    ),
    "v2": Published(
        backbone=_CLIP,
        tower="clip",
        prefix="layers.",
        layers=("0", "2", "4", "6", "7"),
        widths=(768, *_FIVE),
        file="sac+logos+ava1-l14-linearMSE.pth",
        where="the repository christophschuhmann/improved-aesthetic-predictor",
        sha256="21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0",
        fingerprint=(5.236645845, 4.883284854, 4.545052401, 5.310305383, 17.995624776),
        licence="Apache-2.0",
    ),
    "v2.5": Published(
        backbone="google/siglip-so400m-patch14-384",
        tower="siglip",
        prefix="scoring_head.",
        layers=("0", "2", "4", "6", "8"),
        widths=(1152, *_FIVE),
        file="aesthetic_predictor_v2_5.pth",
        where="the repository discus0434/aesthetic-predictor-v2-5 (AGPL-3)",
        sha256="a6caf256b3dc434273c98dcb12f6bf17c5d4fc647d8df11f038386923dd06220",
        fingerprint=(1.939038294, 3.618319845, 2.709308143, 2.672634210, 25.452311294),
        licence="AGPL-3",
    ),
}
_HUB_COPY = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"
_TOLERANCE = 1e-4


def _bounded(card: Card, value_at_zero: float, norm: float) -> Card:
    """The card with the range of the head: an affine map of a unit vector stays within its norm of its value at 0."""
    return replace(card, low=value_at_zero - norm, high=value_at_zero + norm)


_UNBOUNDED = Card(
    outputs=("aesthetic_v2",),
    modality="any",
    resolution="224 x 224, the centre square",
    memory_gib=1.2,
    image_network="ViT-L-14-quickgelu",
    overlap_on_gpu=True,
    version="v2",
    level=LEVEL,
    licence="Apache-2.0 (head), MIT (CLIP)",
    source="christophschuhmann/improved-aesthetic-predictor",
)
CARD = _bounded(_UNBOUNDED, PUBLISHED["v2"].fingerprint[0], PUBLISHED["v2"].fingerprint[4])


@dataclass(frozen=True, kw_only=True)
class Config(ClipOptions):
    version: Version = "v2"
    """Version of the head; numbers of two are not comparable."""
    head: Annotated[str | None, NAME_OR_PATH] = None
    """Its file (.pth, .safetensors), or a hub id with the file, owner/name/file; null: v2's copy on the hub."""
    published: bool = True
    """Refuse a head whose values are not those of the published one; false for a head of your own."""
    half_even_crop: bool | None = None
    """Half an odd margin of CLIP's centre square is rounded half to even, as by the head's own repository, or down, as
    by DDPO and Flow-GRPO; null: true for v1, false for v2. v2.5 has no margin."""
    backbone: Annotated[str | None, NAME_OR_PATH] = None
    """CLIP ViT-L/14 or SigLIP so400m, a folder or a hub id; null: the one that the head was trained on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version != "v2" and self.head is None:
            known = PUBLISHED[self.version]
            raise ValueError(
                f"version={self.version!r} needs head, the file {known.file} of {known.where}: no hub has a copy of it"
            )
        if self.half_even_crop is not None and PUBLISHED[self.version].tower != "clip":
            raise ValueError(f"half_even_crop is of v1 and v2; version={self.version!r} sees the whole image")

    @property
    def crops_half_even(self) -> bool:
        """`half_even_crop` with the version's own where none is given."""
        return self.version == "v1" if self.half_even_crop is None else self.half_even_crop


@dataclass(frozen=True, slots=True)
class Head:
    """Linear layers in a row: (weight [out, in], bias [out]) each, float32."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Scores [B] of unit embeddings [B, D]."""
        for weight, bias in self.layers:
            embeddings = F.linear(embeddings, weight, bias)
        return embeddings.squeeze(-1)

    def affine(self) -> tuple[Tensor, Tensor]:
        """(w [D], b []), float64: the layers in one."""
        width = self.layers[0][0].shape[1]
        w, b = torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
        for weight, bias in self.layers:
            matrix = weight.detach().double().cpu()
            w, b = matrix @ w, matrix @ b + bias.detach().double().cpu()
        return w[0], b[0]

    def to(self, device: torch.device) -> Head:
        return Head(tuple((weight.to(device), bias.to(device)) for weight, bias in self.layers))


def fingerprint(head: Head) -> tuple[float, ...]:
    """Values at 0, ones / sqrt(d), the first unit vector, +-1 / sqrt(d) in turn; and |w|. In float64."""
    w, b = head.affine()
    even, width = w[0::2].sum(), math.sqrt(len(w))
    values = (b, b + w.sum() / width, b + w[0], b + (2 * even - w.sum()) / width, w.norm())
    return tuple(float(value) for value in values)


def recognise(head: Head) -> Version | None:
    """The published head whose fingerprint this is, within 1e-4; None if it is none of them."""
    result = fingerprint(head)
    for version, known in PUBLISHED.items():
        if all(abs(a - b) <= _TOLERANCE for a, b in zip(result, known.fingerprint, strict=True)):
            return version
    return None


def read_head(weights: Mapping[str, Tensor], version: Version, file: str) -> Head:
    """The head in a file's tensors.

    Raises:
        RewardError: other keys or other shapes than this version's.
    """
    if _layout(weights, PUBLISHED[version]):
        other = next((v for v, known in PUBLISHED.items() if not _layout(weights, known)), None)
        hint = f"it is laid out as {other}'s: set version: {other}" if other else _layout(weights, PUBLISHED[version])
        raise RewardError(f"reward 'aesthetic': {file!r} is not laid out as the head of {version}; {hint}")
    known = PUBLISHED[version]
    names = [f"{known.prefix}{layer}.".lstrip(".") for layer in known.layers]
    return Head(tuple((weights[f"{n}weight"].float(), weights[f"{n}bias"].float()) for n in names))


def _layout(weights: Mapping[str, Tensor], known: Published) -> str:
    """The reason why the tensors are not a head of this kind, or ""."""
    wanted: dict[str, tuple[int, ...]] = {}
    for layer, inside, outside in zip(known.layers, known.widths, known.widths[1:], strict=False):
        name = f"{known.prefix}{layer}.".lstrip(".")
        wanted |= {f"{name}weight": (outside, inside), f"{name}bias": (outside,)}
    if set(weights) != set(wanted):
        return f"it has the keys {sorted(weights)}, not {sorted(wanted)}"
    wrong = [name for name, shape in wanted.items() if tuple(weights[name].shape) != shape]
    return f"{wrong[0]!r} is {list(weights[wrong[0]].shape)}, not {list(wanted[wrong[0]])}" if wrong else ""


def load_head(config: Config) -> Head:
    """The head of the configuration, known by its values if it has to be a published one.

    Raises:
        RewardError: no such file, another layout, another version's values, or values of no published head.
    """
    path = _file(config.head or _HUB_COPY)
    head = read_head(checkpoints.read(path, reward="aesthetic"), config.version, str(path))
    if not config.published:
        return head
    version = recognise(head)
    if version != config.version:
        known, result = PUBLISHED[config.version], hashlib.sha256(path.read_bytes()).hexdigest()
        like = f"it is the head of {version}: set version: {version}" if version else "its values are those of none"
        raise RewardError(
            f"reward 'aesthetic': {str(path)!r} is not the published head of {config.version}; {like}. Its sha256 is "
            f"{result}, that of {known.file} of {known.where} is {known.sha256}; for a head of your own, set "
            "published: false"
        )
    return head


def _file(head: str) -> Path:
    local = Path(head).expanduser()
    if local.is_file():
        return local
    if head.count("/") != 2 or head.startswith((".", "/", "~")):
        raise RewardError(
            f"reward 'aesthetic': head={head!r} is no file; give one that is here, or a hub id with the file, "
            "owner/name/file"
        )
    repository, _, file = head.rpartition("/")
    return checkpoints.find(repository, file, reward="aesthetic")


def card_of(config: Config) -> Card:
    """With the published head's range; a head of your own has its own."""
    known = PUBLISHED[config.version]
    version = config.version if config.published else f"{config.version}, own head {config.head}"
    return replace(
        _bounded(CARD, known.fingerprint[0], known.fingerprint[4]),
        outputs=(f"aesthetic_{config.version.replace('.', '_')}",),
        memory_gib=1.2 if known.tower == "clip" else 1.6,
        image_network=CARD.image_network if known.tower == "clip" else "",
        version=f"{version}, half-even crop" if config.crops_half_even else version,
        **config.declared,
        licence=f"{known.licence if config.published else 'unknown'} (head), "
        f"{'MIT (CLIP)' if known.tower == 'clip' else 'Apache-2.0 (SigLIP)'}",
        source=known.where.removeprefix("the repository "),
    )


def build(config: Config) -> Reward:
    known, head = PUBLISHED[config.version], load_head(config)
    backbone = config.backbone or known.backbone
    vision = clips.load_vision(
        backbone,
        known.tower,
        device=config.device,
        preprocess=config.preprocess,
        reward="aesthetic",
        half_even_crop=config.crops_half_even,
        dtype=config.dtype,
    )
    if vision.width != known.widths[0]:
        raise RewardError(
            f"reward 'aesthetic': backbone={backbone!r} embeds in {vision.width} numbers, the head takes "
            f"{known.widths[0]}; use {known.backbone}"
        )
    placed = head.to(vision.model.device)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        embeddings = vision.embed_images(images)
        with torch.autocast(embeddings.device.type, enabled=False):
            return placed(embeddings)

    w, b = head.affine()
    card = replace(_bounded(card_of(config), float(b), float(w.norm())), resolution=vision.pixels.resolution)
    return Reward(framewise(score, config.frames), card)
