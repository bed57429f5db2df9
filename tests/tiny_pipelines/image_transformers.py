"""Image pipelines with a transformer on plain latents [B, C, H, W]."""

from __future__ import annotations

from typing import Any

from tests.tiny_pipelines.stubs import Encoder, clip, ddim, flow, t5, vae, words


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
