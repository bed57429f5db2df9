"""Stand-ins for what encodes prompts and images in a pipeline without weights: outputs of the right shapes.

A text encoder's depend on the tokens and an image encoder's on the pixels, so that rows of a batch can be told apart.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LONGEST = 256
"""Tokens of a prompt if the pipeline sets no length."""


# ---- prompts


def text_entries(config: PretrainedConfig) -> dict[str, Any]:
    """Entries of an encoder's configuration; of its part for text if it has several."""
    entries = config.to_dict()
    return entries.get("text_config") or entries


class Answer(dict):
    """Entries by name, attribute and position, as in transformers' outputs."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)

    def to(self, *_: Any, **__: Any) -> Answer:
        return self


class StandIn(nn.Module):
    """A text encoder's outputs by shape, from its configuration; equal tokens give equal rows. The encoder is on the
    meta device. `seen`: component -> the most tokens of one prompt; filled in.
    """

    def __init__(self, encoder: PreTrainedModel, name: str, seen: dict[str, int]) -> None:
        super().__init__()
        self.config, self.dtype, self.device = encoder.config, encoder.dtype, torch.device("cpu")
        self._kind, self._name, self._seen = type(encoder).__name__, name, seen
        text = text_entries(encoder.config)
        self._width = next(text[key] for key in ("hidden_size", "d_model") if key in text)
        self._layers = next(text[key] for key in ("num_hidden_layers", "num_layers") if key in text)
        self._pooled = text.get("projection_dim") or self._width

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Answer:
        batch, tokens = input_ids.shape
        self._seen[self._name] = max(self._seen.get(self._name, 0), tokens)
        values = (input_ids.to(self.dtype) + 1)[..., None] / 512
        state = values.expand(batch, tokens, self._width)
        pooled = values.mean(1).expand(batch, self._pooled)
        states = {"last_hidden_state": state, "pooler_output": pooled, "hidden_states": (state,) * (self._layers + 1)}
        if self._kind.endswith("WithProjection"):
            return Answer({"text_embeds": pooled} | states)
        return Answer(states)


def tokenizer(folder: Path, encoder: PretrainedConfig) -> Any:
    """The folder's own tokenizer, or a stand-in without one; `encoder` is its encoder's configuration."""
    if folder.is_dir():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)
    positions = text_entries(encoder).get("max_position_embeddings") or LONGEST
    return Tokens(positions if positions < 1000 else LONGEST)


class Tokens:
    """A tokenizer with one token per four letters of a word; pads and truncates like the libraries' own."""

    padding_side, bos_token_id, eos_token_id, pad_token_id = "right", 1, 2, 0
    pad_token, eos_token = "<pad>", "</s>"

    def __init__(self, model_max_length: int) -> None:
        self.model_max_length = model_max_length
        self.added_tokens_encoder: dict[str, int] = {}

    def __call__(self, text: Any, *_: Any, padding: Any = False, max_length: int | None = None, **rest: Any) -> Answer:
        texts = [text] if isinstance(text, str) else list(text)
        rows = [[3 + sum(map(ord, piece)) % 500 for piece in self.tokenize(one)] + [2] for one in texts]
        limit = max_length or self.model_max_length
        rows = [row[:limit] for row in rows] if rest.get("truncation") else rows
        length = limit if padding == "max_length" else max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        return Answer(input_ids=ids, attention_mask=(ids != 0).long())

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"\S{1,4}", text)

    def apply_chat_template(self, messages: Any, *, return_dict: bool = False, **rest: Any) -> Any:
        """The text of one conversation; with `return_dict` the tokens of several."""
        return self([str(one) for one in messages], **rest) if return_dict else str(messages)

    def batch_decode(self, ids: Tensor, **_: Any) -> list[str]:
        return [""] * len(ids)

    def decode(self, ids: Any, **_: Any) -> str:
        return ""


class Reader(Tokens):
    """A processor of Qwen-VL's kind for texts with PIL images, which are tokens of 28 x 28 pixels."""

    def __call__(self, text: Any, images: Any = None, **rest: Any) -> Answer:
        each = images if isinstance(images, list | tuple) else [] if images is None else [images]
        shown = sum(image.width * image.height // 28**2 for image in each)
        ids = super().__call__(text, **rest)["input_ids"]
        ids = torch.cat([ids.new_ones(len(ids), shown), ids], dim=1)
        return Answer(input_ids=ids, attention_mask=(ids != 0).long())


# ---- images


class Encoded:
    """A VAE without values: its encoding has the right shape and is 0, its tables are 1; all else is the VAE's own."""

    def __init__(self, vae: nn.Module) -> None:
        self._vae = vae

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._vae, name)
        return torch.ones(value.shape, dtype=value.dtype) if isinstance(value, Tensor) and value.is_meta else value

    def encode(self, images: Tensor, *_: Any, **__: Any) -> Answer:
        """Latents of images [B, 3, ...], whose shape is that of the VAE's own code on the meta device."""
        encode: Any = self._vae.encode
        found = encode(images.to("meta"))
        if "latent_dist" not in found:
            return Answer(latent=torch.zeros(found[0].shape, dtype=images.dtype))
        return Answer(latent_dist=Latents(torch.zeros(found.latent_dist.mode().shape, dtype=images.dtype)))


class Latents:
    """A distribution over latents [B, ...] without spread."""

    def __init__(self, latents: Tensor) -> None:
        self.mean = latents

    def mode(self) -> Tensor:
        return self.mean

    def sample(self, generator: Any = None) -> Tensor:
        return self.mean


class Seen(nn.Module):
    """An image encoder's states by shape, [B, patches + 1, width], of one value: the mean of the pixels."""

    def __init__(self, encoder: PreTrainedModel) -> None:
        super().__init__()
        self.config, self.dtype, self.device = encoder.config, encoder.dtype, torch.device("cpu")

    def forward(self, pixel_values: Tensor, **_: Any) -> Answer:
        config, values = self.config, pixel_values.flatten(1).mean(1).to(self.dtype)
        tokens = (config.image_size // config.patch_size) ** 2 + 1
        state = values[:, None, None].expand(-1, tokens, config.hidden_size)
        states = (state,) * (config.num_hidden_layers + 1)
        return Answer(last_hidden_state=state, pooler_output=state[:, 0], hidden_states=states)


class Pixels:
    """An image processor: the mean colours of RGB images, `pixel_values` [B, 3, 1, 1] in [0, 1]."""

    def __call__(self, images: Any, **_: Any) -> Answer:
        each = list(images) if isinstance(images, list | tuple) else [images]
        colours = [np.asarray(image, dtype=np.float32).reshape(-1, 3).mean(0) / 255 for image in each]
        return Answer(pixel_values=torch.from_numpy(np.stack(colours))[..., None, None])
