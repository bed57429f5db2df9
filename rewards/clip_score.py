"""CLIP score: how well the image fits its prompt, as the cosine of CLIP's embeddings of both.

Three conventions are about, and the output's name says which it is:
- `clip_cos`: the cosine;
- `clip_s`: 2.5 max(cosine, 0), the CLIP-S of the paper;
- `clip_percent`: 100 max(cosine, 0), torchmetrics' scale; it takes the maximum of the batch's mean.

Numbers of two networks are not comparable. CLIP sees what the card's resolution says of the image, as a rule its
centre square, and of the prompt 77 tokens, the start and the end token among them. torchmetrics cuts the end token of a
longer one off; transformers then takes the text's embedding from the start token, the same for every such caption. So
over 77 tokens its scores are others, which are not offered. A video has the mean over some of its frames.

`model: tiny-clip` is the CLIP that comes with the package, trained on the shapes world; with `preprocess: fast`,
gradients reach the image.

Source: arXiv:2104.08718; mlfoundations/open_clip; openai/CLIP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from flowrl.rewards._vision import clips, open_clips
from flowrl.rewards._vision.frames import framewise
from flowrl.rewards._vision.options import ClipOptions
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import Card, Images, Reward, RewardError

LEVEL = "tested"
CARD = Card(
    outputs=("clip_cos",),
    low=-1.0,
    high=1.0,
    modality="any",
    resolution="224 x 224, the centre square",
    memory_gib=1.6,
    image_network="ViT-L-14-quickgelu",
    overlap_on_gpu=True,
    level=LEVEL,
    licence="MIT (code and OpenAI's weights)",
    source="arXiv:2104.08718",
)
_CONVENTIONS = {"cos": ("clip_cos", 1.0), "clip_s": ("clip_s", 2.5), "percent": ("clip_percent", 100.0)}


@dataclass(frozen=True, kw_only=True)
class Config(ClipOptions):
    model: Annotated[str, NAME_OR_PATH] = "openai/clip-vit-large-patch14"
    """A folder, a hub id, the embedded tiny-clip, or a network's name of open_clip (ViT-H-14), with `pretrained`."""
    pretrained: Annotated[str | None, NAME_OR_PATH] = None
    """Weights for a network's name of open_clip: its tag (laion2b_s32b_b79k), a file, a folder or a hub id."""
    backend: Literal["auto", "transformers", "open_clip"] = "auto"
    """"auto": open_clip for its names, its folders, tiny-clip and hf-hub:owner/name; else transformers."""
    tokenizer: Annotated[str | None, NAME_OR_PATH] = None
    """transformers only: a folder or a hub id; null: the model's own."""
    quick_gelu: bool | None = None
    """open_clip only: the activation that the weights were trained with; null: what their tag or configuration says."""
    convention: Literal["cos", "clip_s", "percent"] = "cos"
    """The cosine, 2.5 max(cosine, 0), or 100 max(cosine, 0); "percent" is torchmetrics' up to 77 tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "transformers" and (self.pretrained is not None or self.quick_gelu is not None):
            raise ValueError("pretrained and quick_gelu are open_clip's; with transformers, model brings its weights")
        if self.backend == "open_clip" and self.tokenizer is not None:
            raise ValueError("tokenizer is transformers'; open_clip finds its own")


def card_of(config: Config) -> Card:
    output, factor = _CONVENTIONS[config.convention]
    low = -1.0 if config.convention == "cos" else 0.0
    network = CARD.image_network if config.model == Config.model else ""
    return replace(CARD, outputs=(output,), low=low, high=factor, image_network=network, **config.declared)


def build(config: Config) -> Reward:
    clip, factor = _load(config), _CONVENTIONS[config.convention][1]

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        cosine = (clip.embed_images(images) * clip.embed_texts(prompts)).sum(dim=-1)
        return cosine if config.convention == "cos" else factor * cosine.clamp(min=0)

    default = config.model == Config().model
    card = replace(
        card_of(config),
        resolution=clip.pixels.resolution,
        memory_gib=sum(p.numel() * p.element_size() for p in clip.model.parameters()) / 2**30,
        licence=CARD.licence if default else f"MIT (code); weights: see {config.model}",
    )
    return Reward(framewise(score, config.frames), card)


def _load(config: Config) -> clips.Clip | open_clips.OpenClip:
    options: dict[str, Any] = {"device": config.device, "preprocess": config.preprocess, "dtype": config.dtype}
    options["reward"] = "clip_score"
    ours = config.pretrained is not None or config.quick_gelu is not None or open_clips.is_source(config.model)
    if config.backend == "open_clip" or (config.backend == "auto" and ours):
        if config.tokenizer is not None:
            raise RewardError(
                f"reward 'clip_score': tokenizer is transformers'; open_clip's {config.model!r} has its own"
            )
        return open_clips.load(config.model, config.pretrained, quick_gelu=config.quick_gelu, **options)
    return clips.load(config.model, config.tokenizer or config.model, **options)
