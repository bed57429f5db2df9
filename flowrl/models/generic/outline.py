"""The generic adapter without weights: shapes, steps and memory from a pipeline's JSON files and its own code.

The pipeline's call is entered as with weights (models/generic/reentry.py), up to the first call of its network. The
text encoders are replaced by stand-ins, whose outputs have the right shapes and depend on the tokens, and so are
tokenizers that are not in the folder. The network and the VAE are on the meta device and take fake tensors only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.models._loading import meta_pipeline
from flowrl.models.generic.adapter import Config, Generic
from flowrl.models.generic.encoding import LONG
from flowrl.models.generic.entrance import PROBE_STEPS
from flowrl.models.generic.full_masks import FullMasks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LONGEST = 256
"""Tokens of a prompt if the pipeline sets no length."""


class Unmeasurable(Exception):
    """Work that fake tensors cannot do, with the reason."""


class Outline(Generic):
    """Shapes, schedule, LoRA targets and, on fake tensors, `predict` and `decode`; it encodes no prompt.

    Raises:
        ModelError: the pipeline's own code needs more than its configuration.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        pipeline = meta_pipeline(folder, config, kind=config.pipeline or "")
        self.text_tokens: dict[str, int] = {}
        self._folder = folder
        with self._standing_in(pipeline):
            Generic.__init__(self, pipeline, config)
            try:
                self._learned()
                # If prompts have their own lengths, a plan assumes long ones.
                self._encoded = self._encode([LONG], self._probe_images([LONG]))
                self._middle = float(Generic.schedule(self, PROBE_STEPS).timesteps[1])
            except NotImplementedError as error:
                raise ModelError(f"{self.kind}: {str(error).splitlines()[0]}") from error
            except ModelError as error:
                if not self.image_limits[0]:
                    raise
                raise ModelError(
                    f"{self.kind} computes with the image of a prompt before its first step, which a plan, without "
                    f"weights, cannot ({error}); plan the text-to-video or text-to-image model of its family instead"
                ) from error

    @contextmanager
    def _standing_in(self, pipeline: Any) -> Iterator[None]:
        """The pipeline with stand-ins for text encoders and tokenizers; past its own record of its components."""
        from transformers import PreTrainedModel

        before = {name: part for name, part in vars(pipeline).items() if name.startswith(("text_encoder", "tokenizer"))}
        encoders = {name: part for name, part in before.items() if isinstance(part, PreTrainedModel)}
        made: dict[str, Any] = {name: StandIn(part, name, self.text_tokens) for name, part in encoders.items()}
        for name in before.keys() - encoders.keys():
            encoder = encoders.get(name.replace("tokenizer", "text_encoder"))
            if name.startswith("tokenizer") and encoder is not None:
                made[name] = tokenizer(self._folder / name, encoder.config)
        pipeline.__dict__.update(made)
        if "tokenizer_max_length" in vars(pipeline) and "tokenizer" in made:
            pipeline.tokenizer_max_length = made["tokenizer"].model_max_length
        try:
            yield
        finally:
            pipeline.__dict__.update(before)

    def schedule(self, num_inference_steps: int) -> Schedule:
        with self._standing_in(self.pipeline):
            return Generic.schedule(self, num_inference_steps)

    def _mixing_is_exact(self) -> bool:
        return True  # not measurable without weights; a plan counts forwards of whole batches

    def blank_condition(self, batch: int) -> Condition:
        """Embeddings of `batch` prompts without values."""
        return Condition(
            {
                name: [torch.empty_like(value[0]) for _ in range(batch)]
                if isinstance(value, list)
                else value.new_empty(batch, *value.shape[1:])
                for name, value in self._encoded.tensors.items()
            }
        )

    def encoder_tokens(self, name: str, encoder: nn.Module) -> int:
        return self.text_tokens[name]

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value[0].shape) for name, value in self._encoded.tensors.items()}

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        """The prediction at a timestep in the middle of the grid, since fake tensors have no values."""
        self._entered = True
        with self._measurable():
            return self._forward(x, [self._middle] * len(x), cond, guidance_scale)

    def decode(self, latents: Tensor, cond: Condition | None = None) -> Tensor:
        held = self.blank_condition(len(latents)) if self.decodes_with_cond else None
        with self._measurable():
            return Generic.decode(self, latents, held)

    @contextmanager
    def _measurable(self) -> Iterator[None]:
        self.reentry.forget()
        try:
            with FullMasks():
                yield
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise Unmeasurable(f"{self.kind} on tensors without values: {type(error).__name__}: {reason}") from error


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
    """A text encoder's outputs by shape, from its configuration; equal tokens give equal rows.

    Args:
        encoder: on the meta device.
        name: of the component.
        seen: component -> the most tokens of one prompt; filled in.
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
