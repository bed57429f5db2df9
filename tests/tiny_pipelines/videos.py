"""Video pipelines by name."""

from __future__ import annotations

from typing import Any

from tests.tiny_pipelines.stubs import TOKENS, Encoder, Recipe, Seeing, clip, flow, language, of, t5, texts, words

_VISION: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
    "in_channels": 16,
}


def _wan_vae() -> Any:
    sizes = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return of("AutoencoderKLWan", **sizes, temperal_downsample=[False, True, True])


def _euler_unipc() -> Any:
    # Order 1 without corrector is the Euler step, so that the pipeline's own call can be compared.
    options = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return of("UniPCMultistepScheduler", **options, solver_order=1, disable_corrector=list(range(100)))


def _wan(pipeline: str, **options: Any) -> Recipe:
    network = _WAN | options.pop("network", {})
    return Recipe(pipeline, lambda: texts(t5()), "WanTransformer3DModel", network, vae=_wan_vae, **options)


def _small_images() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})


def _clip_vision() -> dict[str, Any]:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return {"image_encoder": CLIPVisionModel(CLIPVisionConfig(**_VISION)), "image_processor": _small_images()}


def _siglip_vision() -> dict[str, Any]:
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    encoder = SiglipVisionModel(SiglipVisionConfig(**_VISION))
    return {"image_encoder": encoder, "feature_extractor": SiglipImageProcessor(size={"height": 8, "width": 8})}


def _ltx_vae() -> Any:
    made = of(
        "AutoencoderKLLTXVideo",
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
    return made


def _ltx(pipeline: str) -> Recipe:
    return Recipe(
        pipeline,
        lambda: texts(t5()),
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "num_layers": 1,
            "caption_channels": 32,
        },
        vae=_ltx_vae,
        scheduler=lambda: flow(use_dynamic_shifting=True, shift_terminal=0.1, base_shift=0.95, max_shift=2.05),
    )


def _seeing() -> tuple[Any, Any]:
    tokenizer = words(special=("<image>", "<|end_header_id|>"))
    encoder = Seeing(16)
    encoder.config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
    encoder.config.pad_token_id = tokenizer.pad_token_id
    return encoder, tokenizer


def _hunyuan_video(pipeline: str, text: Any, network: dict[str, Any], parts: Any = dict) -> Recipe:
    return Recipe(
        pipeline,
        lambda: texts(text(), clip(positions=77)),
        "HunyuanVideoTransformer3DModel",
        {
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "text_embed_dim": 16,
            "pooled_projection_dim": 32,
            "rope_axes_dim": (2, 4, 4),
            **network,
        },
        vae=lambda: of(
            "AutoencoderKLHunyuanVideo",
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        scheduler=lambda: flow(shift=7.0),
        parts=parts,
    )


def _two_languages() -> dict[str, Any]:
    second = t5()
    return texts((Encoder(16), words()), second)


def _hunyuan_video_1_5(pipeline: str, network: dict[str, Any], parts: Any = dict) -> Recipe:
    return Recipe(
        pipeline,
        _two_languages,
        "HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 9,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "text_embed_2_dim": 32,
            "rope_axes_dim": (4, 6, 6),
            "target_size": 16,
            **network,
        },
        vae=lambda: of(
            "AutoencoderKLHunyuanVideo15",
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        scheduler=lambda: flow(shift=7.0),
        parts=lambda: {"guider": of("ClassifierFreeGuidance", guidance_scale=6.0), **parts()},
        attributes={
            **dict.fromkeys(("tokenizer_max_length", "tokenizer_2_max_length", "vision_num_semantic_tokens"), TOKENS),
            "prompt_template_encode_start_idx": 1,
            "system_message": "a",
        },
    )


def _cogvideox(pipeline: str, in_channels: int) -> Recipe:
    return Recipe(
        pipeline,
        lambda: texts(t5()),
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "in_channels": in_channels,
            "out_channels": 4,
            "time_embed_dim": 4,
            "text_embed_dim": 32,
            "num_layers": 2,
            "sample_width": 2,
            "sample_height": 2,
            "sample_frames": 9,
            "max_text_seq_length": TOKENS,
            "use_rotary_positional_embeddings": True,
        },
        vae=lambda: of(
            "AutoencoderKLCogVideoX",
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
        ),
        scheduler=lambda: of(
            "CogVideoXDDIMScheduler",
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            snr_shift_scale=1.0,
            timestep_spacing="trailing",
            clip_sample=False,
        ),
    )


def _sana_video(pipeline: str) -> Recipe:
    return Recipe(
        pipeline,
        lambda: texts(language(8)),
        "SanaVideoTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": 8,
            "sample_size": 8,
            "rope_max_seq_len": 32,
        },
        vae=_wan_vae,
        scheduler=lambda: flow(shift=8.0),
    )


def _sounds() -> dict[str, Any]:
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
    sizes["num_learnable_registers"] = None
    each = {f"{kind}_connector_{name}": size for name, size in sizes.items() for kind in ("video", "audio")}
    sound = {"base_channels": 4, "latent_channels": 2, "ch_mult": (1,), "num_res_blocks": 1, "mel_bins": 8}
    return {
        "audio_vae": of("AutoencoderKLLTX2Audio", **sound, norm_type="pixel", causality_axis="height"),
        "vocoder": LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            upsample_kernel_sizes=[4],
            upsample_factors=[2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1]],
        ),
        "connectors": LTX2TextConnectors(caption_channels=16, text_proj_in_factor=4, rope_type="split", **each),
    }


def _ltx2_vae() -> Any:
    made = of(
        "AutoencoderKLLTX2Video",
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=1,
    )
    made.use_framewise_encoding = made.use_framewise_decoding = False
    return made


VIDEOS: dict[str, Recipe] = {
    "ltx_2": Recipe(
        "LTX2Pipeline",
        lambda: texts(language(16)),
        "LTX2VideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 8,
            "num_layers": 1,
            "caption_channels": 16,
            "rope_type": "split",
        },
        vae=_ltx2_vae,
        parts=_sounds,
    ),
    "wan": _wan("WanPipeline", scheduler=_euler_unipc),
    "wan_2_2": _wan("WanPipeline", experts=2, parts=lambda: {"boundary_ratio": 0.8}),
    "wan_image": _wan(
        "WanImageToVideoPipeline",
        # 16 channels of latents, 16 of the first frame's, 4 of the mask.
        network={"in_channels": 36, "image_dim": 16, "added_kv_proj_dim": 24},
        parts=_clip_vision,
        order="parts network text vae",
    ),
    "wan_2_2_image": _wan(
        "WanImageToVideoPipeline",
        network={"in_channels": 36},
        experts=2,
        parts=lambda: {"boundary_ratio": 0.8},
        order="parts network text vae",
    ),
    # Wan 2.2 TI2V-5B: the latents' first frame is the image, and each token has a timestep of its own.
    "wan_2_2_frame": _wan(
        "WanImageToVideoPipeline",
        parts=lambda: {"expand_timesteps": True},
        scheduler=_euler_unipc,
        order="parts network text vae",
    ),
    "ltx": _ltx("LTXPipeline"),
    "ltx_image": _ltx("LTXImageToVideoPipeline"),
    "mochi": Recipe(
        "MochiPipeline",
        lambda: texts(t5()),
        "MochiTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "text_embed_dim": 32,
            "time_embed_dim": 4,
            "max_sequence_length": 16,
        },
        vae=lambda: of(
            "AutoencoderKLMochi",
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        scheduler=lambda: flow(invert_sigmas=True, shift=1.0),
    ),
    "hunyuan_video": _hunyuan_video("HunyuanVideoPipeline", lambda: language(16), {"in_channels": 4}),
    "hunyuan_video_image": _hunyuan_video(
        "HunyuanVideoImageToVideoPipeline",
        _seeing,
        # 4 channels of latents, 4 of the first frame's, 1 of the mask.
        {"in_channels": 9, "image_condition_type": "latent_concat", "guidance_embeds": False},
        lambda: {"image_processor": _small_images()},
    ),
    "hunyuan_video_1_5": _hunyuan_video_1_5("HunyuanVideo15Pipeline", {"task_type": "t2v", "image_embed_dim": 12}),
    "hunyuan_video_1_5_image": _hunyuan_video_1_5(
        "HunyuanVideo15ImageToVideoPipeline", {"task_type": "i2v", "image_embed_dim": 16}, _siglip_vision
    ),
    "cogvideox": _cogvideox("CogVideoXPipeline", 4),
    "cogvideox_image": _cogvideox("CogVideoXImageToVideoPipeline", 8),
    "sana_video": _sana_video("SanaVideoPipeline"),
    "sana_video_image": _sana_video("SanaImageToVideoPipeline"),
}
