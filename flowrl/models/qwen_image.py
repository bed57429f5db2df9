"""Qwen-Image: QwenImagePipeline called part by part, on packed latents [B, tokens, 64].

Process: flow, velocity prediction. timestep = 1000 sigma. `guidance_scale` is the pipeline's true_cfg_scale (<= 1:
none): two forwards, and the guided prediction gets the norm of the conditional one, token by token. Text: the hidden
states of a vision-language model, as long as each prompt. The loop makes forwards of prompts of one length, without
padding; other batches are padded with zeros under a mask, so a prompt does not see its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowrl.core.tensors import sent
from flowrl.core.types import Condition
from flowrl.models._guidance import classifier_free, guided
from flowrl.models._native import JOINT_ATTENTION, Family, FlowConfig, Native, decoded_frames, encoded_frames
from flowrl.models.base import autocast, require_image_size

# yifan123/flow_grpo:scripts/train_qwenimage.py
LORA_TARGETS = (*JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(FlowConfig):
    LONGEST: ClassVar[int] = 1024
    negative_prompt: str = ""
    """Prompt that guidance leads away from."""


def renormalised(negative: Tensor, positive: Tensor, guidance_scale: float) -> Tensor:
    """u + s (c - u) with the norm of c, token by token; all [B, tokens, C], the result float32."""
    negative, positive = negative.float(), positive.float()
    combined = classifier_free(negative, positive, guidance_scale)
    return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


class QwenImage(Native):
    lora_targets = LORA_TARGETS
    channel_axis = 2
    patch = 2
    ragged = True
    # The text encoder makes, and throws away, logits over 152,064 words for every token: 0.16 GB a prompt in bfloat16.
    text_batch = 8
    # The text tokens are dropped after the last block.
    unused = (
        "transformer_blocks.{last}.attn.add_q_proj",
        "transformer_blocks.{last}.attn.to_add_out",
        "transformer_blocks.{last}.txt_mlp.net.0.proj",
        "transformer_blocks.{last}.txt_mlp.net.2",
    )

    def encode(self, prompts: Sequence[str], images: Sequence[Sequence[Any]] | None = None) -> Condition:
        starts = range(0, len(prompts), self.text_batch)
        return Condition.collate([super(QwenImage, self).encode(prompts[k : k + self.text_batch]) for k in starts])

    def texts(self, prompts: list[str]) -> Condition:
        # Cut to the length of the pipeline's own call; the mask is None where nothing is padded.
        embeds, mask = self.pipeline.encode_prompt(
            prompt=prompts, device=self.device, max_sequence_length=self.config.max_sequence_length
        )
        lengths = [embeds.shape[1]] * len(embeds) if mask is None else mask.sum(dim=1).tolist()
        return Condition({"prompt_embeds": [row[:length] for row, length in zip(embeds, lengths, strict=True)]})

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        call = super().own_call(steps, guidance_scale)
        call["true_cfg_scale"] = call.pop("guidance_scale")
        if guidance_scale > 1:
            call["negative_prompt"] = self.config.negative_prompt
        return call

    def text_lengths(self, cond: Condition) -> Tensor:
        return torch.tensor([len(row) for row in cond["prompt_embeds"]], dtype=torch.int64)

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        # Two forwards: on one doubled batch the negative prompt would be padded to the longest of the others.
        options = {"combine": renormalised, "forwards": self.forwards(separate=True)}
        return guided(self._forward, x, timestep, cond, self.unconditional, guidance_scale, **options)

    def _forward(self, x: Tensor, timestep: Tensor, cond: Condition) -> Tensor:
        rows = [row.to(self.dtype) for row in cond["prompt_embeds"]]
        lengths = sent(torch.tensor([len(row) for row in rows]), x.device)
        longest, mask = max(map(len, rows)), None
        if any(len(row) < longest for row in rows):
            mask = torch.arange(longest, device=x.device) < lengths[:, None]
        with autocast(self.device, self.dtype, self.autocasts):
            return self.network(
                hidden_states=x.to(self.dtype),
                timestep=timestep / 1000,
                encoder_hidden_states=nn.utils.rnn.pad_sequence(rows, batch_first=True),
                encoder_hidden_states_mask=mask,
                img_shapes=[[(1, *self.tokens())]] * len(x),
                return_dict=False,
            )[0]

    def decode_with_grad(self, latents: Tensor, cond: Condition | None = None) -> Tensor:
        # The VAE is for videos: an image is a video of one frame.
        return decoded_frames(self.pipeline.vae, self.unpacked(latents), self.config.vae_precision)[:, 0]

    @torch.no_grad()
    def encode_images(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        require_image_size(images, self.height, self.width)
        noise = None if noise is None else self.unpacked(noise)
        frames = images[:, None].to(self.device)
        return self.packed(encoded_frames(self.pipeline.vae, frames, self.config.vae_precision, noise)[:, :, 0])


FAMILY = Family(
    adapter=QwenImage,
    pipeline="QwenImagePipeline",
    vae="AutoencoderKLQwenImage",
    channels=(64, 16),
    patch=QwenImage.patch,
)
PIPELINE, build, skeleton, takes = FAMILY.pipeline, FAMILY.build, FAMILY.skeleton, FAMILY.takes
