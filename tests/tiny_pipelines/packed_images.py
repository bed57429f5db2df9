"""Image pipelines whose loop works on packed latents [B, tokens, C]."""

from __future__ import annotations

from typing import Any

from tests.tiny_pipelines.stubs import Encoder, Looking, Seeing, clip, flow, t5, vae, words


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


def _flux(kind: Any) -> Any:
    from diffusers import FluxTransformer2DModel

    (first, tokenizer), (second, tokenizer_2) = clip(), t5()
    return kind(
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=first,
        tokenizer=tokenizer,
        text_encoder_2=second,
        tokenizer_2=tokenizer_2,
        transformer=_flux_network(FluxTransformer2DModel, pooled_projection_dim=32, guidance_embeds=True),
    )


def flux() -> Any:
    from diffusers import FluxPipeline

    return _flux(FluxPipeline)


def flux_kontext() -> Any:
    from diffusers import FluxKontextPipeline

    return _flux(FluxKontextPipeline)


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


def _qwen(kind: Any, encoder: type, **parts: Any) -> Any:
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    made = kind(
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
        text_encoder=encoder(16),
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
        **parts,
    )
    made.prompt_template_encode, made.prompt_template_encode_start_idx = "a {}", 1
    return made


def qwen_image() -> Any:
    from diffusers import QwenImagePipeline

    return _qwen(QwenImagePipeline, Encoder)


def qwen_image_edit() -> Any:
    from diffusers import QwenImageEditPipeline
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

    pipeline_qwenimage_edit.calculate_dimensions = lambda area, ratio: (*_small(ratio), None)
    return _qwen(QwenImageEditPipeline, Seeing, processor=Looking())


def qwen_image_edit_plus() -> Any:
    from diffusers import QwenImageEditPlusPipeline
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

    pipeline_qwenimage_edit_plus.calculate_dimensions = lambda area, ratio: _small(ratio)
    return _qwen(QwenImageEditPlusPipeline, Seeing, processor=Looking())


def _small(ratio: float) -> tuple[int, int]:
    """(width, height) about 16 x 16; the pipelines' own give a picture up to a megapixel."""
    return max(round(4 * ratio**0.5), 1) * 4, max(round(4 / ratio**0.5), 1) * 4


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
