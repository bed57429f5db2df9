"""The blocks of an SD3 transformer as a judge, and its folder. A helper, not a reward.

The trunk runs as the transformer does, up to the norm before its output; the image tokens there, normalised, are
pooled by mean and maximum, and a small head gives a logit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.reward import RewardError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ENTRIES = ("prompt_embeds", "pooled")
KIND = "LatentJudge"


class Judge(nn.Module):
    """Latents with their noise levels and prompts -> logits.

    Args:
        trunk: the configuration of diffusers' SD3Transformer2DModel.
        hidden: width of the head.
    """

    def __init__(self, trunk: Mapping[str, Any], hidden: int = 128) -> None:
        from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

        super().__init__()
        self.config = {"trunk": dict(trunk), "hidden": hidden}
        whole: Any = SD3Transformer2DModel.from_config(dict(trunk))
        self.pos_embed, self.time_text_embed = whole.pos_embed, whole.time_text_embed
        self.context_embedder, self.transformer_blocks = whole.context_embedder, whole.transformer_blocks
        width = whole.inner_dim
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Sequential(nn.Linear(2 * width, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one sample's latents."""
        facts = self.config["trunk"]
        return facts["in_channels"], facts["sample_size"], facts["sample_size"]

    @property
    def widths(self) -> dict[str, int]:
        """Of a token's embedding and of the pooled one, by their entries' names."""
        facts = self.config["trunk"]
        return dict(zip(ENTRIES, (facts["joint_attention_dim"], facts["pooled_projection_dim"]), strict=True))

    def tokens(self, x: Tensor, sigma: Tensor, prompt_embeds: Tensor, pooled: Tensor) -> Tensor:
        """[B, N, D] normalised image tokens after the last block; `forward` says of what."""
        found, temb = self.pos_embed(x).contiguous(), self.time_text_embed(1000 * sigma, pooled)
        text = self.context_embedder(prompt_embeds)
        for block in self.transformer_blocks:
            text, found = block(hidden_states=found, encoder_hidden_states=text, temb=temb)
        return self.norm(found)

    def logits(self, tokens: Tensor) -> Tensor:
        """[B] of image tokens [B, N, D]."""
        return self.head(torch.cat([tokens.mean(dim=1), tokens.amax(dim=1)], dim=-1))[:, 0]

    def forward(self, x: Tensor, sigma: Tensor, prompt_embeds: Tensor, pooled: Tensor) -> Tensor:
        """Logits [B] of latents [B, C, H, W] at noise levels [B] in [0, 1], of embeddings [B, L, E] and [B, P]."""
        return self.logits(self.tokens(x, sigma, prompt_embeds, pooled))


def from_transformer(transformer: nn.Module, hidden: int = 128) -> Judge:
    """A judge with the weights of a diffusers SD3Transformer2DModel, its head drawn at random."""
    facts: Any = transformer.config
    judge = Judge({k: v for k, v in dict(facts).items() if not k.startswith("_")}, hidden)
    own = judge.state_dict()
    judge.load_state_dict(own | {k: v for k, v in transformer.state_dict().items() if k in own})
    return judge


def save(judge: Judge, folder: Path) -> None:
    """Write config.json and the weights, in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"kind": KIND} | judge.config, indent=1) + "\n", encoding="utf-8")
    save_file({k: v.half().contiguous() for k, v in judge.state_dict().items()}, folder / WEIGHTS)


def load(folder: Path, who: str) -> Judge:
    """A judge in float32, frozen.

    Args:
        folder: with config.json and model.safetensors.
        who: whom messages name.

    Raises:
        RewardError: the folder holds something else, or weights that do not fit.
    """
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if facts.get("kind") != KIND:
            raise ValueError(f"{CONFIG} says kind={facts.get('kind')!r}, not {KIND!r}")
        with torch.random.fork_rng(devices=[]):  # weights are drawn before they are loaded
            judge = Judge(facts["trunk"], facts["hidden"])
        judge.load_state_dict({k: v.float() for k, v in load_file(folder / WEIGHTS).items()})
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise RewardError(f"{who}: the folder {folder} holds no judge of latents: {error}") from error
    return judge.eval().requires_grad_(False)
