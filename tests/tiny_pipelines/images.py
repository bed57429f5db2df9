"""Image pipelines by name: U-Nets, transformers on plain latents [B, C, H, W], and on packed ones [B, tokens, C]."""

from __future__ import annotations

from typing import Any

from tests.tiny_pipelines.stubs import (
    Looking,
    Normed,
    Reading,
    Recipe,
    Seeing,
    clip,
    ddim,
    flow,
    language,
    of,
    t5,
    texts,
    vae_of_four,
)

_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}
_SIZES: dict[str, Any] = {
    "cross_attention_dim": 64,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 1),
    "projection_class_embeddings_input_dim": 80,
}
_HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
_FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
    **_HEADS,
}
_SAFETY = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


def _dc() -> Any:
    blocks = ("ResBlock", "EfficientViTBlock")
    return of(
        "AutoencoderDC",
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
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


def _euler_dpm() -> Any:
    # Order 1 is the Euler step, so that the pipeline's own call can be compared.
    options = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return of("DPMSolverMultistepScheduler", **options, solver_order=1)


def _dynamic(**options: Any) -> Any:
    return flow(use_dynamic_shifting=True, **options)


def _flux(pipeline: str) -> Recipe:
    options = {"pooled_projection_dim": 32, "guidance_embeds": True}
    return Recipe(pipeline, lambda: texts(clip(), t5()), "FluxTransformer2DModel", _FLUX | options, scheduler=_dynamic)


def _qwen_vae() -> Any:
    return of(
        "AutoencoderKLQwenImage",
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4,
    )


def _qwen(pipeline: str, encoder: Any = None, parts: Any = dict) -> Recipe:
    options = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16}
    return Recipe(
        pipeline,
        lambda: texts(language(16, encoder) if encoder else language(16)),
        "QwenImageTransformer2DModel",
        {**options, **_HEADS, "axes_dims_rope": (8, 4, 4)},
        vae=_qwen_vae,
        scheduler=lambda: _dynamic(shift_terminal=0.02, time_shift_type="exponential"),
        parts=parts,
        order="parts vae text network",
        attributes={"prompt_template_encode": "a {}", "prompt_template_encode_start_idx": 1},
    )


def _small(ratio: float) -> tuple[int, int]:
    """(width, height) about 16 x 16; the pipelines' own give an image up to a megapixel."""
    return max(round(4 * ratio**0.5), 1) * 4, max(round(4 / ratio**0.5), 1) * 4


def _one_image() -> dict[str, Any]:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

    pipeline_qwenimage_edit.calculate_dimensions = lambda area, ratio: (*_small(ratio), None)
    return {"processor": Looking()}


def _several_images() -> dict[str, Any]:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

    pipeline_qwenimage_edit_plus.calculate_dimensions = lambda area, ratio: _small(ratio)
    return {"processor": Looking()}


def _flux2(pipeline: str) -> Recipe:
    own = {"joint_attention_dim": 16, "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4)}
    shared = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, **_HEADS}
    return Recipe(
        pipeline,
        lambda: texts(language(8)),
        "Flux2Transformer2DModel",
        {**shared, **own, "guidance_embeds": "Klein" not in pipeline},
        vae=lambda: of(
            "AutoencoderKLFlux2",
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=16,
        ),
        scheduler=_dynamic,
        order="vae text network",
        attributes={"system_message": "a"},
    )


IMAGES: dict[str, Recipe] = {
    "sd": Recipe(
        "StableDiffusionPipeline",
        lambda: texts(clip()),
        "UNet2DConditionModel",
        _UNET,
        scheduler=ddim,
        parts=lambda: _SAFETY,
        order="parts network text vae",
    ),
    "sdxl": Recipe(
        "StableDiffusionXLPipeline",
        lambda: texts(clip(), clip(projection=True)),
        "UNet2DConditionModel",
        _UNET | _SIZES,
        scheduler=ddim,
        parts=lambda: {"add_watermarker": False},
        order="parts network text vae",
    ),
    "sd3": Recipe(
        "StableDiffusion3Pipeline",
        lambda: texts(clip(projection=True), clip(projection=True), t5(64)),
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": 64,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 64,
            "pos_embed_max_size": 8,
            **_HEADS,
        },
        order="text network vae",
    ),
    "sana": Recipe(
        "SanaPipeline",
        lambda: texts(language(8)),
        "SanaTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 4,
            "cross_attention_dim": 8,
            "caption_channels": 8,
            "sample_size": 32,
        },
        vae=_dc,
        scheduler=_euler_dpm,
    ),
    "z_image": Recipe(
        "ZImagePipeline",
        lambda: texts(language(16)),
        "ZImageTransformer2DModel",
        {
            "all_patch_size": (2,),
            "all_f_patch_size": (1,),
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [8, 4, 4],
            "axes_lens": [256, 32, 32],
        },
        order="vae text network",
    ),
    "lumina_2": Recipe(
        "Lumina2Pipeline",
        lambda: texts(language(8)),
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 16,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "axes_dim_rope": [4, 2, 2],
            "axes_lens": [300, 32, 32],
            "cap_feat_dim": 8,
        },
        vae=vae_of_four,
        scheduler=lambda: flow(use_dynamic_shifting=False, shift=6.0),
        order="network vae text",
    ),
    "cogview_4": Recipe(
        "CogView4Pipeline",
        lambda: texts(language(32, side="left")),
        "CogView4Transformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "text_embed_dim": 32,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "rope_axes_dim": (32, 32),
        },
        scheduler=lambda: _dynamic(shift=1.0, base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
    ),
    "aura_flow": Recipe(
        "AuraFlowPipeline",
        lambda: texts(t5()),
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_projection_dim": 16,
            "joint_attention_dim": 32,
            "pos_embed_max_size": 64,
        },
        scheduler=lambda: flow(shift=1.73),
    ),
    "pixart_sigma": Recipe(
        "PixArtSigmaPipeline",
        lambda: texts(t5()),
        "PixArtTransformer2DModel",
        {
            "sample_size": 8,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 3,
            "caption_channels": 32,
            "cross_attention_dim": 24,
        },
        scheduler=ddim,
    ),
    "flux": _flux("FluxPipeline"),
    "flux_kontext": _flux("FluxKontextPipeline"),
    "chroma": Recipe(
        "ChromaPipeline",
        lambda: texts(t5()),
        "ChromaTransformer2DModel",
        _FLUX | {"approximator_num_channels": 64, "approximator_hidden_dim": 32, "approximator_layers": 1},
        scheduler=_dynamic,
        order="text network vae",
    ),
    "qwen_image": _qwen("QwenImagePipeline"),
    "qwen_image_edit": _qwen("QwenImageEditPipeline", Seeing, _one_image),
    "qwen_image_edit_plus": _qwen("QwenImageEditPlusPipeline", Seeing, _several_images),
    "qwen_image_2_1": Recipe(
        "QwenImage21Pipeline",
        lambda: {"text_encoder": Normed(16), "processor": Reading()},
        "QwenImage21Transformer2DModel",
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "context_in_dim": 16,
            "mlp_ratio": 2,
            "axes_dims_rope": (4, 6, 6),
        },
        vae=lambda: of(
            "AutoencoderKLQwenImage21",
            base_dim=4,
            decoder_base_dim=4,
            z_dim=8,
            dim_mult=[1] * 5,
            num_res_blocks=1,
            latents_mean=[0.1] * 8,
            latents_std=[1.5] * 8,
        ),
        scheduler=_dynamic,
        attributes={"prompt_template_t2i": "a {}"},
    ),
    "krea_2": Recipe(
        "Krea2Pipeline",
        lambda: texts(language(16)),
        "Krea2Transformer2DModel",
        {
            "in_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "timestep_embed_dim": 8,
            "text_hidden_dim": 16,
            "num_text_layers": 2,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 1,
            "text_intermediate_size": 16,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        vae=_qwen_vae,
        scheduler=lambda: _dynamic(max_shift=1.15, max_image_seq_len=6400),
        parts=lambda: {"text_encoder_select_layers": (0, 2)},
        attributes={
            "prompt_template_encode_prefix": "a ",
            "prompt_template_encode_start_idx": 1,
            "prompt_template_encode_suffix": "right",
            "prompt_template_encode_num_suffix_tokens": 2,
        },
    ),
    "ovis_image": Recipe(
        "OvisImagePipeline",
        lambda: texts(language(32)),
        "OvisImageTransformer2DModel",
        _FLUX | {"out_channels": 16},
        scheduler=_dynamic,
        attributes={"system_prompt": "a ", "user_prompt_begin_id": 1},
    ),
    "flux_2": _flux2("Flux2Pipeline"),
    "flux_2_klein": _flux2("Flux2KleinPipeline"),
}
