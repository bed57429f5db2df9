"""Stable Diffusion 3 and 3.5 (MMDiT): StableDiffusion3Pipeline called part by part.

Process: flow, velocity prediction. timestep = 1000 sigma. `guidance_scale` is the pipeline's own CFG
scale (<= 1: none). Text: two CLIP encoders and T5; without T5 the pipeline pads with zero tokens, and
so does this adapter, since it calls the pipeline's own `encode_prompt`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from flowrl.core.types import Condition
from flowrl.models._guidance import guided
from flowrl.models._native import JOINT_ATTENTION, Family, Native
from flowrl.models.base import ModelConfig, autocast

# yifan123/flow_grpo:scripts/train_sd3.py
LORA_TARGETS = JOINT_ATTENTION

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    max_sequence_length: int = 256
    """T5 tokens per prompt; SD3 has no text mask, so the padding is part of the input."""
    load_t5: bool = True
    """False replaces T5 by zero tokens, as SD3 allows: 9 GB less in bf16."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length={self.max_sequence_length} must be in 1..512")


class Sd3(Native):
    lora_targets = LORA_TARGETS
    pooled_width = "pooled_projection_dim"
    encoding: ClassVar[Mapping[str, Any]] = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
    embeddings = ("prompt_embeds", "", "pooled")
    even_sigmas = False
    max_shift = 1.16
    # The last block drops its text tokens, and so the result of their queries.
    unused = ("transformer_blocks.{last}.attn.add_q_proj",)

    def __init__(self, pipeline: Any, config: Config) -> None:
        Native.__init__(self, pipeline, config)
        clip = pipeline.text_encoder
        self._clip_tokens = 0 if clip is None else clip.config.max_position_embeddings

    def sides(self) -> tuple[tuple[int, int], int, int | None]:
        # Whole patches, and no longer than the table of position embeddings.
        default, scale, _ = super().sides()
        unit = scale * self.pipeline.patch_size
        return default, unit, self.settings["pos_embed_max_size"] * unit

    def negative(self) -> Condition:
        return self.texts([""])

    @property
    def text_tokens(self) -> int:
        return self._clip_tokens + self.config.max_sequence_length

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        return guided(self._forward, x, timestep, cond, self.unconditional, guidance_scale, forwards=self.forwards())

    def _forward(self, x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
        with autocast(self.device, self.dtype, self.autocasts):
            return self.network(
                hidden_states=x.to(self.dtype),
                timestep=timestep,
                encoder_hidden_states=cond["prompt_embeds"].to(self.dtype),
                pooled_projections=cond["pooled"].to(self.dtype),
                return_dict=False,
            )[0]


FAMILY = Family(
    adapter=Sd3,
    pipeline="StableDiffusion3Pipeline",
    channels=(16, 4),
    left_out=lambda config: {} if config.load_t5 else {"text_encoder_3": None, "tokenizer_3": None},
)
PIPELINE, build, skeleton, takes = FAMILY.pipeline, FAMILY.build, FAMILY.skeleton, FAMILY.takes
