"""CLIP of open_clip for rewards: finding, loading and unit embeddings. A helper, not a reward.

The networks are frozen and float32, the image tower in the dtype that is asked for; autocast is off inside. No graph is
kept unless an image asks for gradients.
Source: mlfoundations/open_clip:src/open_clip/factory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from flowrl.rewards._vision.checkpoints import place
from flowrl.rewards._vision.options import DTYPES, Dtype
from flowrl.rewards._vision.pixels import Fit, Interpolation, Pixels, Preprocess
from flowrl.rewards._vision.pool import threads
from torch import Tensor

from flowrl.core.assets import asset_folder
from flowrl.reward import Images, RewardError

CONFIG = "open_clip_config.json"
_WEIGHTS = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin")
_FITS: dict[str, Fit] = {"shortest": "crop", "longest": "pad", "squash": "squash"}


@dataclass(frozen=True, slots=True)
class OpenClip:
    """A loaded CLIP."""

    model: Any
    tokenizer: Any
    pixels: Callable[[Any], Tensor]
    """Images in [0, 1] -> [B, 3, size, size]: `Pixels`, or a reward's own."""
    dtype: torch.dtype = torch.float32
    """Of the image tower."""

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    def embed_images(self, images: Images) -> Tensor:
        """Unit image embeddings, [B, D] float32, of images in [0, 1]."""
        pixels = self.pixels(images).to(self.device, self.dtype)
        with torch.autocast(self.device.type, enabled=False):
            return F.normalize(self.model.encode_image(pixels).float(), dim=-1)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit text embeddings, [B, D]; each distinct text is encoded once, cut at the model's length."""
        distinct = list(dict.fromkeys(texts))
        with torch.autocast(self.device.type, enabled=False):
            features = self.model.encode_text(self.tokenizer(distinct).to(self.device))
        rows = [distinct.index(text) for text in texts]
        return F.normalize(features, dim=-1)[rows]


@dataclass(frozen=True, slots=True)
class _Source:
    """The arguments for open_clip."""

    name: str
    """A network's name, or `local-dir:` or `hf-hub:` and where."""
    weights: str | None
    """Tag or file of a network's name."""
    quick_gelu: bool | None
    """The activation to force; None leaves it to the configuration that comes with the weights."""


def is_source(model: str) -> bool:
    """True where `model` is open_clip's: an embedded CLIP, a folder of its layout, an `hf-hub:` or a network's name."""
    if model.startswith("hf-hub:") or asset_folder(model, CONFIG) or (Path(model).expanduser() / CONFIG).is_file():
        return True
    if "/" in model:
        return False
    import open_clip

    return model in open_clip.list_models()


def load(
    model: str,
    pretrained: str | None,
    *,
    quick_gelu: bool | None,
    device: str | None,
    preprocess: Preprocess,
    reward: str,
    dtype: Dtype = "float32",
) -> OpenClip:
    """A frozen CLIP.

    Args:
        model: an embedded CLIP such as tiny-clip, a folder with open_clip_config.json, a hub id, or a network's name.
        pretrained: of a network's name: its weights, a tag of open_clip, a file, a folder or a hub id.
        quick_gelu: the activation the weights were trained with; None takes what tag or configuration say.
        device: where the network runs; None takes the GPU if there is one.
        preprocess: how images are resized.
        reward: whom messages name.
        dtype: of the image tower; the rest is float32.

    Raises:
        RewardError: nothing there, weights that do not fit, or an activation that nothing tells.
    """
    source = _source(model, pretrained, quick_gelu, f"reward {reward!r}")
    network, tokenizer = _create(source, f"reward {reward!r}", model)
    network.to(place(device)).visual.to(DTYPES[dtype])
    return OpenClip(network, tokenizer, _pixels(network, preprocess, f"reward {reward!r}"), DTYPES[dtype])


def untrained(name: str) -> tuple[Any, Any]:
    """A network of open_clip by its name, for weights that are loaded into it, and its tokenizer; float32."""
    import open_clip

    with torch.random.fork_rng(devices=[]):
        network = open_clip.CLIP(**_architecture(name))
    return network.float().eval().requires_grad_(False), open_clip.get_tokenizer(name)


def _architecture(name: str) -> dict[str, Any]:
    """open_clip's own description of a network, {} for an unknown name."""
    import open_clip

    return open_clip.get_model_config(name) or {}


def _create(source: _Source, who: str, model: str) -> tuple[Any, Any]:
    import open_clip

    # Only the first of the two silences the warning about a tag.
    forced = {True: {"force_quick_gelu": True}, False: {"quick_gelu": False}, None: {}}[source.quick_gelu]
    try:
        # Weights are drawn before they are loaded, from the global random state.
        with torch.random.fork_rng(devices=[]):
            network = open_clip.create_model(
                source.name, source.weights, precision="fp32", require_pretrained=True, weights_only=True, **forced
            )
        tokenizer = open_clip.get_tokenizer(source.name)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        raise RewardError(
            f"{who} cannot load open_clip's {model!r} ({source.weights or source.name}): {error}"
        ) from error
    return network.float().eval().requires_grad_(False), tokenizer


def _source(model: str, pretrained: str | None, quick_gelu: bool | None, who: str) -> _Source:
    import open_clip

    folder = asset_folder(model, CONFIG) or Path(model).expanduser()
    by_name = model in open_clip.list_models()
    if pretrained is not None and not by_name:
        raise RewardError(
            f"{who}: pretrained={pretrained!r} goes with the name of a network of open_clip, such as ViT-H-14; "
            f"model={model!r} brings its own weights"
        )
    if by_name and pretrained is not None:
        return _named(model, pretrained, quick_gelu, who)
    if (folder / CONFIG).is_file():
        return _Source(f"local-dir:{folder}", None, quick_gelu)
    if by_name:
        raise RewardError(f"{who}: model={model!r} is a network without weights; give pretrained, a tag or a file")
    if folder.exists():
        raise RewardError(f"{who}: the folder model={model!r} has no {CONFIG}; save the model as open_clip does")
    if model.startswith("hf-hub:"):
        return _Source(model, None, quick_gelu)
    if not _hub_id(model):
        raise RewardError(
            f"{who}: model={model!r} is neither a folder, nor an embedded CLIP, nor a network of open_clip; a hub id "
            "looks like 'owner/name'"
        )
    return _Source(f"hf-hub:{model}", None, quick_gelu)


def _hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _named(model: str, pretrained: str, quick_gelu: bool | None, who: str) -> _Source:
    """A network by its name, with the activation that its weights were trained with."""
    import open_clip

    tag = open_clip.get_pretrained_cfg(model, pretrained)
    if tag:
        # ViT-L-14 with the tag openai is GELU by its name and QuickGELU by its weights; open_clip only warns. Others,
        # roberta-ViT-B-32 for one, are QuickGELU by their name and have tags that say nothing.
        known = bool(tag.get("quick_gelu") or _architecture(model).get("quick_gelu"))
        if quick_gelu is not None and quick_gelu != known:
            raise RewardError(
                f"{who}: quick_gelu={quick_gelu}, but {model}'s weights {pretrained!r} were trained with {known}; "
                "leave it out"
            )
        return _Source(model, pretrained, known)
    weights = _weights(pretrained, model, who)
    if quick_gelu is None and not model.endswith("-quickgelu"):
        raise RewardError(
            f"{who}: weights that are no tag of open_clip do not say which activation they were trained with; set "
            "quick_gelu: true (those of OpenAI, DFN, MetaCLIP) or false (LAION, DataComp, PickScore, HPS)"
        )
    return _Source(model, weights, quick_gelu)


def _weights(pretrained: str, name: str, who: str) -> str:
    """File of weights: the file itself, the one in a folder, or one from the hub.

    Raises:
        RewardError: there is none.
    """
    import open_clip
    from open_clip.pretrained import download_pretrained_from_hf

    path = Path(pretrained).expanduser()
    if path.is_file():
        return str(path)
    if path.is_dir():
        result = next((path / file for file in _WEIGHTS if (path / file).is_file()), None)
        if result is None:
            raise RewardError(f"{who}: the folder pretrained={pretrained!r} has none of {', '.join(_WEIGHTS)}")
        return str(result)
    if _hub_id(pretrained):
        try:
            return download_pretrained_from_hf(pretrained)
        except OSError as error:
            raise RewardError(f"{who} cannot load pretrained={pretrained!r} from the hub: {error}") from error
    tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none"
    raise RewardError(
        f"{who}: pretrained={pretrained!r} is neither a file or folder, nor a tag of {name}; its tags: {tags}"
    )


def _pixels(network: Any, preprocess: Preprocess, who: str) -> Pixels:
    """Preprocessing as the configuration of the weights has it.

    Raises:
        RewardError: one that is not built here.
    """
    options = network.visual.preprocess_cfg
    size = options["size"]
    sides = set(size) if isinstance(size, (tuple, list)) else {size}
    if len(sides) != 1 or options["interpolation"] not in get_args(Interpolation):
        raise RewardError(
            f"{who}: images of size {size} by {options['interpolation']} interpolation are not supported; squares by "
            f"{' or '.join(get_args(Interpolation))} are"
        )
    return Pixels(
        size=int(sides.pop()),
        preprocess=preprocess,
        fit=_FITS[options["resize_mode"]],
        mean=tuple(options["mean"]),
        std=tuple(options["std"]),
        interpolation=options["interpolation"],
        fill=options["fill_color"] / 255,
        half_even_crop=True,
        threads=threads(network.logit_scale.device),
    )
