"""ImageReward: how much people prefer the image for its prompt, by a BLIP tuned on 137,000 comparisons.

raw = (head(h) - 0.16717362830052426) / 1.0333394966054072, h the first token's last hidden state of a BERT that reads
the prompt and looks at the image's tokens; about -2.3 to 2. It sees the centre square, 224 x 224, and the prompt's
first 35 tokens. In use as a training reward it has been reported to corrupt images of FLUX
(XueZeyue/DanceGRPO#36): it is the better hold-out.

The network is transformers' BLIP. Published name -> name there:

    blip.visual_encoder.cls_token, .pos_embed    vision.embeddings.class_embedding, .position_embedding
    blip.visual_encoder.patch_embed.proj.*       vision.embeddings.patch_embedding.*
    blip.visual_encoder.blocks.N.norm1, .norm2   vision.encoder.layers.N.layer_norm1, .layer_norm2
    blip.visual_encoder.blocks.N.attn.qkv, .proj vision.encoder.layers.N.self_attn.qkv, .projection
    blip.visual_encoder.blocks.N.mlp.*           vision.encoder.layers.N.mlp.*
    blip.visual_encoder.norm.*                   vision.post_layernorm.*
    blip.text_encoder.*                          text.*
    mlp.layers.0, 2, 4, 6, 7                     head.0, 1, 2, 3, 4 (dropout between, none after training)

Left out, for they take no part in a score: blip.vision_proj, blip.text_proj and the buffer position_ids.

Source: arXiv:2304.05977; THUDM/ImageReward:ImageReward/ImageReward.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from flowrl.rewards._vision import checkpoints, clips
from flowrl.rewards._vision.pixels import Pixels
from flowrl.rewards._vision.pool import stacked, threads
from torch import Tensor, nn

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import Card, Images, Reward, RewardError

LEVEL = "experimental"
MEAN, STD = 0.16717362830052426, 1.0333394966054072
TEXT_LENGTH = 35
# BLIP's ViT, base as large, has heads of 64 channels.
_HEAD_WIDTH = 64

CARD = Card(
    outputs=("image_reward",),
    modality="image",
    resolution="224 x 224, the centre square",
    memory_gib=1.7,
    overlap_on_gpu=True,
    level=LEVEL,
    licence="Apache-2.0 (code and weights)",
    source="arXiv:2304.05977",
)

_RENAMED = (
    (r"^mlp\.layers\.(\d)\.", lambda m: f"head.{'02467'.index(m[1])}."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
)
_UNUSED = re.compile(r"^blip\.(vision_proj|text_proj)\.|\.position_ids$")


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[str, NAME_OR_PATH] = "THUDM/ImageReward"
    """Folder or hub id with ImageReward.pt and med_config.json (1.8 GB)."""
    tokenizer: Annotated[str, NAME_OR_PATH] = "bert-base-uncased"
    """Tokenizer: a folder or a hub id."""
    preprocess: clips.Preprocess = "exact"
    """"exact": PIL on 8 bits, as the published scores; "fast": float tensors, through which gradients flow."""
    device: str | None = None
    """Where the network runs; none takes the GPU if there is one."""


def renamed(name: str) -> str | None:
    """The name in transformers' layout of a published one; none where it takes no part in a score.

    >>> renamed("blip.visual_encoder.blocks.3.attn.proj.bias")
    'vision.encoder.layers.3.self_attn.projection.bias'
    """
    if _UNUSED.search(name):
        return None
    for pattern, replacement in _RENAMED:
        name, result = re.subn(pattern, replacement, name)
        if result:
            break
    return name


def raw_score(head: Tensor) -> Tensor:
    """The published scale: mean 0 and deviation 1 on the authors' data.

    >>> round(float(raw_score(torch.tensor(1.2005131247))), 6)
    1.0
    """
    return (head - MEAN) / STD


class Network(nn.Module):
    """BLIP's two towers and the head; sizes are read off the published tensors and med_config.json."""

    def __init__(self, tensors: Mapping[str, Tensor], text: Mapping[str, Any]) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        width, _, patch, _ = tensors["vision.embeddings.patch_embedding.weight"].shape
        places = tensors["vision.embeddings.position_embedding"].shape[1] - 1
        self.image_size = patch * round(places**0.5)
        blocks = {name.split(".")[3] for name in tensors if name.startswith("vision.encoder.layers.")}
        self.vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=tensors["vision.encoder.layers.0.mlp.fc1.weight"].shape[0],
                num_hidden_layers=len(blocks),
                num_attention_heads=width // _HEAD_WIDTH,
                image_size=self.image_size,
                patch_size=patch,
                layer_norm_eps=1e-6,
                hidden_act="gelu",
            )
        )
        same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        more = ("max_position_embeddings", "layer_norm_eps", "hidden_act")
        options: dict[str, Any] = {"attn_implementation": "eager"} | {key: text[key] for key in same + more}
        self.text = BlipTextModel(
            # The file's own encoder_width is that of a smaller ViT: the authors' code overrides it as well.
            BlipTextConfig(
                encoder_hidden_size=width,
                # Used for generation alone, and out of range in a small vocabulary.
                bos_token_id=None,
                sep_token_id=None,
                **options,
            ),
            add_pooling_layer=False,
        )
        sizes = [tensors[f"head.{i}.weight"].shape for i in range(5)]
        self.head = nn.Sequential(*(nn.Linear(inputs, outputs) for outputs, inputs in sizes))

    def forward(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Head output, [B], of pixels [B, 3, S, S] and tokens [B, L] with their mask."""
        seen = self.vision(pixel_values=pixels).last_hidden_state
        # All of the image's tokens are attended to, so that they need no mask.
        read = self.text(input_ids=tokens, attention_mask=mask, encoder_hidden_states=seen)
        return self.head(read.last_hidden_state[:, 0])[:, 0]


def load(config: Config) -> Network:
    """The network with the published weights, frozen, float32.

    Raises:
        RewardError: a file is missing or holds other weights.
    """
    path = checkpoints.find(config.model, "ImageReward.pt", reward="image_reward")
    beside = str(path.parent) if Path(config.model).expanduser().exists() else config.model
    sizes = json.loads(checkpoints.find(beside, "med_config.json", reward="image_reward").read_text(encoding="utf-8"))
    published = checkpoints.read(path, reward="image_reward")
    tensors = {new: value.float() for name, value in published.items() if (new := renamed(name)) is not None}
    try:
        network = checkpoints.hollow(lambda: Network(tensors, sizes))
    except KeyError as error:
        raise RewardError(f"reward 'image_reward': {path} or its med_config.json lacks {error}") from None
    checkpoints.fill(network, tensors, reward="image_reward", source=path)
    return network.to(checkpoints.place(config.device))


def pixels(image: Tensor, size: int, preprocess: clips.Preprocess) -> Tensor:
    """[3, size, size]: shortest side by bicubic, centre square, CLIP's constants; NaN where it is not finite."""
    # The margin is rounded half to even, as torchvision does.
    return Pixels(size=size, preprocess=preprocess, half_even_crop=True)([image])[0]


def card_of(config: Config) -> Card:
    return dataclasses.replace(CARD, differentiable=config.preprocess == "fast")


def build(config: Config) -> Reward:
    from transformers import AutoTokenizer

    network = load(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward 'image_reward' cannot load the tokenizer {config.tokenizer!r}; give a folder or a hub id that can "
            f"be reached: {error}"
        ) from error
    device = next(network.parameters()).device
    prepare = partial(pixels, size=network.image_size, preprocess=config.preprocess)
    count = threads(device) if config.preprocess == "exact" else 1

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        prepared = stacked(prepare, images, count)
        words = tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=TEXT_LENGTH, return_tensors="pt"
        )
        with torch.autocast(device.type, enabled=False):
            head = network(prepared.to(device), words["input_ids"].to(device), words["attention_mask"].to(device))
        return raw_score(head)

    return Reward(score=score, card=card_of(config))
