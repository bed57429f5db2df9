"""Tiny random pipelines of the very classes, one builder a class, made in memory in a fraction of a second.

Denoisers and VAEs are diffusers' own at toy sizes. CLIP and T5 encoders are transformers' own; larger language
models are stood in for by `Encoder`, with a word tokenizer that pads and truncates as theirs do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests import tiny_sd3

TOKENS = 8
PROMPTS = ["a red circle", "two blue squares on the left"]


class Output(dict):
    """Keys as attributes, and entries by position, as transformers' outputs have them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class Encoder(nn.Module):
    """A language model's hidden states [B, L, width] from token ids; masked tokens reach no other."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(512, width)
        self.mix = nn.Linear(width, width)
        self.layers, self.config = layers, SimpleNamespace(hidden_size=width, d_model=width, use_attention_mask=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.table.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.table.weight.device

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Output:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.table(input_ids % 512) * mask[..., None]
        # The running mean over tokens so far: a causal model, so padding on the right changes nothing.
        x = x + self.mix(x.cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None])
        states = tuple(x * (1 + k) for k in range(self.layers + 1))
        return Output(last_hidden_state=x, hidden_states=states, pooler_output=x.mean(1), text_embeds=x.mean(1))


@cache
def words(side: str = "right") -> Any:
    """Word tokenizer with a chat template that adds a full stop."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "</s>", "<unk>", *tiny_sd3.script("_tiny_sd3").words(), "left", "right", "on", "the", "of"]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(known))}
    made = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", vocab["</s>"])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )
    tokenizer.padding_side = side
    text = "{{ m['content'] if m['content'] is string else m['content'][0]['text'] }}"
    tokenizer.chat_template = "{% for m in messages %}" + text + " .{% endfor %}"
    return tokenizer


def t5(width: int = 32) -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel

    tokenizer = tiny_sd3.script("_tiny_sd3").t5_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    return T5EncoderModel(config), tokenizer


def clip(*, projection: bool = False, positions: int = 12) -> tuple[Any, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = tiny_sd3.script("_tiny_sd3").clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        projection_dim=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config), tokenizer


def vae(channels: int = 4, blocks: int = 2, **options: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8,) * blocks,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        mid_block_add_attention=False,
        scaling_factor=0.7,
        **({"shift_factor": 0.1} | options),
    )


def flow(**options: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**({"shift": 3.0} | options))


def ddim(**options: Any) -> Any:
    from diffusers import DDIMScheduler

    sd = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    return DDIMScheduler(**(sd | {"clip_sample": False, "set_alpha_to_one": False} | options))


def stable_diffusion() -> Any:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    encoder, tokenizer = clip()
    return StableDiffusionPipeline(
        vae=vae(),
        text_encoder=encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=ddim(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=80,
    )
    (first, tokenizer), (second, tokenizer_2) = clip(), clip(projection=True)
    return StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=first,
        text_encoder_2=second,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        unet=unet,
        scheduler=ddim(),
        add_watermarker=False,
    )


def stable_diffusion_3() -> Any:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    (first, tokenizer), (second, tokenizer_2) = clip(projection=True), clip(projection=True)
    third, tokenizer_3 = t5(64)
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            pos_embed_max_size=8,
        ),
        scheduler=flow(),
        vae=vae(),
        text_encoder=first,
        tokenizer=tokenizer,
        text_encoder_2=second,
        tokenizer_2=tokenizer_2,
        text_encoder_3=third,
        tokenizer_3=tokenizer_3,
    )


def _flux_network(kind: Any, **options: Any) -> Any:
    return kind(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        **options,
    )


def flux() -> Any:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    (first, tokenizer), (second, tokenizer_2) = clip(), t5()
    return FluxPipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=first,
        tokenizer=tokenizer,
        text_encoder_2=second,
        tokenizer_2=tokenizer_2,
        transformer=_flux_network(FluxTransformer2DModel, pooled_projection_dim=32, guidance_embeds=True),
    )


def chroma() -> Any:
    from diffusers import ChromaPipeline, ChromaTransformer2DModel

    encoder, tokenizer = t5()
    network = _flux_network(
        ChromaTransformer2DModel, approximator_num_channels=64, approximator_hidden_dim=32, approximator_layers=1
    )
    return ChromaPipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=network,
    )


def qwen_image() -> Any:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

    made = QwenImagePipeline(
        scheduler=flow(use_dynamic_shifting=True, shift_terminal=0.02, time_shift_type="exponential"),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.1] * 4,
            latents_std=[1.5] * 4,
        ),
        text_encoder=Encoder(16),
        tokenizer=words(),
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
    )
    made.prompt_template_encode, made.prompt_template_encode_start_idx = "a {}", 1
    return made


def _wan_network() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )


def wan(*, experts: bool = False, scheduler: Any = None) -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    encoder, tokenizer = t5()
    if scheduler is None:
        # Order 1 without corrector is the Euler step, so that the pipeline's own call can be compared.
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=3.0,
            solver_order=1,
            disable_corrector=list(range(100)),
        )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=AutoencoderKLWan(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        scheduler=scheduler,
        transformer=_wan_network(),
        transformer_2=_wan_network() if experts else None,
        boundary_ratio=0.8 if experts else None,
    )


def wan_2_2() -> Any:
    return wan(experts=True, scheduler=flow())


def _dc() -> Any:
    from diffusers import AutoencoderDC

    return AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.4,
    )


def sana() -> Any:
    from diffusers import DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    return SanaPipeline(
        tokenizer=words(),
        text_encoder=Encoder(8),
        vae=_dc(),
        transformer=SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=8,
            sample_size=32,
        ),
        # Order 1 is the Euler step, so that the pipeline's own call can be compared.
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=1
        ),
    )


def z_image() -> Any:
    from diffusers import ZImagePipeline, ZImageTransformer2DModel

    return ZImagePipeline(
        scheduler=flow(),
        vae=vae(),
        text_encoder=Encoder(16),
        tokenizer=words(),
        transformer=ZImageTransformer2DModel(
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
    )


def lumina_2() -> Any:
    from diffusers import Lumina2Pipeline, Lumina2Transformer2DModel

    return Lumina2Pipeline(
        transformer=Lumina2Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=16,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=2,
            multiple_of=16,
            axes_dim_rope=[4, 2, 2],
            axes_lens=[300, 32, 32],
            cap_feat_dim=8,
        ),
        scheduler=flow(use_dynamic_shifting=False, shift=6.0),
        vae=vae(blocks=4),
        text_encoder=Encoder(8),
        tokenizer=words(),
    )


def ltx() -> Any:
    from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel

    encoder, tokenizer = t5()
    made = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    made.use_framewise_encoding = made.use_framewise_decoding = False
    return LTXPipeline(
        scheduler=flow(use_dynamic_shifting=True, shift_terminal=0.1, base_shift=0.95, max_shift=2.05),
        vae=made,
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=1,
            caption_channels=32,
        ),
    )


def mochi() -> Any:
    from diffusers import AutoencoderKLMochi, MochiPipeline, MochiTransformer3DModel

    encoder, tokenizer = t5()
    return MochiPipeline(
        scheduler=flow(invert_sigmas=True, shift=1.0),
        vae=AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=MochiTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            text_embed_dim=32,
            time_embed_dim=4,
            max_sequence_length=16,
        ),
    )


def hunyuan_video() -> Any:
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel

    second, tokenizer_2 = clip(positions=77)
    return HunyuanVideoPipeline(
        text_encoder=Encoder(16),
        tokenizer=words(),
        text_encoder_2=second,
        tokenizer_2=tokenizer_2,
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
        ),
        scheduler=flow(shift=7.0),
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            text_embed_dim=16,
            pooled_projection_dim=32,
            rope_axes_dim=(2, 4, 4),
        ),
    )


def hunyuan_video_1_5() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )

    second, tokenizer_2 = t5()
    made = HunyuanVideo15Pipeline(
        text_encoder=Encoder(16),
        tokenizer=words(),
        text_encoder_2=second,
        tokenizer_2=tokenizer_2,
        vae=AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        scheduler=flow(shift=7.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
        transformer=HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            text_embed_dim=16,
            text_embed_2_dim=32,
            image_embed_dim=12,
            rope_axes_dim=(4, 6, 6),
            target_size=16,
            task_type="t2v",
        ),
    )
    made.tokenizer_max_length = made.tokenizer_2_max_length = made.vision_num_semantic_tokens = TOKENS
    made.prompt_template_encode_start_idx, made.system_message = 1, "a"
    return made


def cogvideox() -> Any:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    encoder, tokenizer = t5()
    return CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2
        ),
        scheduler=CogVideoXDDIMScheduler(
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            snr_shift_scale=1.0,
            timestep_spacing="trailing",
            clip_sample=False,
        ),
        transformer=CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=4,
            text_embed_dim=32,
            num_layers=2,
            sample_width=2,
            sample_height=2,
            sample_frames=9,
            max_text_seq_length=TOKENS,
            use_rotary_positional_embeddings=True,
        ),
    )


def cogview_4() -> Any:
    from diffusers import CogView4Pipeline, CogView4Transformer2DModel

    return CogView4Pipeline(
        tokenizer=words("left"),
        text_encoder=Encoder(32),
        vae=vae(),
        scheduler=flow(shift=1.0, base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"),
        transformer=CogView4Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=32,
            time_embed_dim=8,
            condition_dim=4,
            rope_axes_dim=(32, 32),
        ),
    )


def aura_flow() -> Any:
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel

    encoder, tokenizer = t5()
    return AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=vae(),
        scheduler=flow(shift=1.73),
        transformer=AuraFlowTransformer2DModel(
            sample_size=8,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_projection_dim=16,
            joint_attention_dim=32,
            pos_embed_max_size=64,
        ),
    )


def _flux2(klein: bool) -> Any:
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel

    made = (Flux2KleinPipeline if klein else Flux2Pipeline)(
        scheduler=flow(use_dynamic_shifting=True),
        vae=AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=16,
        ),
        text_encoder=Encoder(8),
        tokenizer=words(),
        transformer=Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=not klein,
        ),
    )
    made.system_message = "a"
    return made


def flux_2() -> Any:
    return _flux2(klein=False)


def flux_2_klein() -> Any:
    return _flux2(klein=True)


def pixart_sigma() -> Any:
    from diffusers import PixArtSigmaPipeline, PixArtTransformer2DModel

    encoder, tokenizer = t5()
    return PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=vae(),
        scheduler=ddim(),
        transformer=PixArtTransformer2DModel(
            sample_size=8,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            cross_attention_dim=24,
        ),
    )


def sana_video() -> Any:
    from diffusers import AutoencoderKLWan, SanaVideoPipeline, SanaVideoTransformer3DModel

    return SanaVideoPipeline(
        tokenizer=words(),
        text_encoder=Encoder(8),
        vae=AutoencoderKLWan(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        scheduler=flow(shift=8.0),
        transformer=SanaVideoTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=8,
            sample_size=8,
            rope_max_seq_len=32,
        ),
    )


@dataclass(frozen=True)
class Case:
    """A pipeline and how it is called."""

    build: Callable[[], Any]
    call: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((16, 16), (24, 16))
    fast: bool = False
    """Stands for a code path in the default suite."""
    free: float = 1.0
    """Guidance scale without guidance."""
    batches: tuple[int, ...] = (1, 2)


_TOKENS = {"max_sequence_length": TOKENS}
_CLIP = {"num_frames": 9, **_TOKENS}
CASES: dict[str, Case] = {
    "sd": Case(stable_diffusion, fast=True),
    "sdxl": Case(stable_diffusion_xl),
    "sd3": Case(stable_diffusion_3, _TOKENS, fast=True),
    "flux": Case(flux, _TOKENS, fast=True),
    "flux_true_cfg": Case(flux, {**_TOKENS, "true_cfg_scale": 3.0, "negative_prompt": "blue"}),
    "chroma": Case(chroma, _TOKENS),
    "qwen_image": Case(qwen_image, _TOKENS, fast=True),
    "wan": Case(wan, _CLIP, ((16, 16), (32, 16)), fast=True),
    "wan_2_2": Case(wan_2_2, _CLIP, ((16, 16), (32, 16))),
    "sana": Case(sana, {**_TOKENS, "complex_human_instruction": []}, ((32, 32), (64, 32)), fast=True),
    "z_image": Case(z_image, _TOKENS, fast=True, free=0.0),
    "lumina_2": Case(lumina_2, {**_TOKENS, "system_prompt": "a"}, ((32, 32), (48, 32))),
    "ltx": Case(ltx, {"num_frames": 9, **_TOKENS}, ((32, 32), (64, 32)), fast=True),
    "mochi": Case(mochi, {"num_frames": 7, "max_sequence_length": 16}, ((16, 16), (32, 16))),
    "hunyuan_video": Case(
        hunyuan_video,
        {"num_frames": 9, "prompt_template": {"template": "a {}", "crop_start": 1}, **_TOKENS},
        ((16, 16), (32, 16)),
    ),
    "hunyuan_video_1_5": Case(hunyuan_video_1_5, {"num_frames": 5}, ((16, 16), (32, 16)), batches=(1,)),
    "cogvideox": Case(cogvideox, _CLIP, ((16, 16), (32, 16))),
    "cogview_4": Case(cogview_4, {"max_sequence_length": 16}, ((16, 16), (32, 16))),
    "aura_flow": Case(aura_flow, _TOKENS, ((16, 16), (24, 16))),
    "flux_2": Case(flux_2, {**_TOKENS, "text_encoder_out_layers": [1, 2]}),
    "flux_2_klein": Case(flux_2_klein, {**_TOKENS, "text_encoder_out_layers": [1, 2]}),
    "pixart_sigma": Case(pixart_sigma, _TOKENS),
    "sana_video": Case(
        sana_video, {"frames": 9, "complex_human_instruction": [], "max_sequence_length": 16}, ((32, 32), (64, 32))
    ),
}


def make(name: str, seed: int = 0) -> Any:
    """The pipeline of a case: random weights, none of them zero."""
    torch.manual_seed(seed)
    made = CASES[name].build()
    for part in made.components.values():
        if isinstance(part, nn.Module):
            part.eval()
            for p in part.parameters():
                if not bool(p.any()):
                    # Gates and last layers that start at zero would hide everything before them.
                    nn.init.normal_(p, std=0.1)
    made.set_progress_bar_config(disable=True)
    return made
