"""Video pipelines."""

from __future__ import annotations

from typing import Any

from tests.tiny_pipelines.stubs import TOKENS, Encoder, Seeing, clip, flow, t5, words


def _wan_network(**options: Any) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        **({"in_channels": 16} | options),
    )


def _wan_vae() -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def wan(*, experts: bool = False, scheduler: Any = None) -> Any:
    from diffusers import UniPCMultistepScheduler, WanPipeline

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
        vae=_wan_vae(),
        scheduler=scheduler,
        transformer=_wan_network(),
        transformer_2=_wan_network() if experts else None,
        boundary_ratio=0.8 if experts else None,
    )


def wan_2_2() -> Any:
    return wan(experts=True, scheduler=flow())


_VISION = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _small_pictures() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})


def _wan_image(**parts: Any) -> Any:
    from diffusers import WanImageToVideoPipeline

    encoder, tokenizer = t5()
    return WanImageToVideoPipeline(tokenizer=tokenizer, text_encoder=encoder, vae=_wan_vae(), scheduler=flow(), **parts)


def wan_image() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return _wan_image(
        image_encoder=CLIPVisionModel(CLIPVisionConfig(**_VISION)),
        image_processor=_small_pictures(),
        # 16 channels of latents, 16 of the first frame's, 4 of the mask.
        transformer=_wan_network(in_channels=36, image_dim=16, added_kv_proj_dim=24),
    )


def wan_2_2_image() -> Any:
    return _wan_image(
        transformer=_wan_network(in_channels=36), transformer_2=_wan_network(in_channels=36), boundary_ratio=0.8
    )


def ltx() -> Any:
    from diffusers import LTXPipeline

    return _ltx(LTXPipeline)


def ltx_image() -> Any:
    from diffusers import LTXImageToVideoPipeline

    return _ltx(LTXImageToVideoPipeline)


def _ltx(kind: Any) -> Any:
    from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel

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
    return kind(
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
    from diffusers import HunyuanVideoPipeline

    return _hunyuan_video(HunyuanVideoPipeline, {"in_channels": 4}, text_encoder=Encoder(16), tokenizer=words())


def hunyuan_video_image() -> Any:
    from diffusers import HunyuanVideoImageToVideoPipeline

    tokenizer = words(special=("<image>", "<|end_header_id|>"))
    encoder = Seeing(16)
    encoder.config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
    encoder.config.pad_token_id = tokenizer.pad_token_id
    # 4 channels of latents, 4 of the first frame's, 1 of the mask.
    network = {"in_channels": 9, "image_condition_type": "latent_concat", "guidance_embeds": False}
    return _hunyuan_video(
        HunyuanVideoImageToVideoPipeline,
        network,
        text_encoder=encoder,
        tokenizer=tokenizer,
        image_processor=_small_pictures(),
    )


def _hunyuan_video(kind: Any, network: dict[str, Any], **parts: Any) -> Any:
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel

    second, tokenizer_2 = clip(positions=77)
    return kind(
        **parts,
        text_encoder_2=second,
        tokenizer_2=tokenizer_2,
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
        ),
        scheduler=flow(shift=7.0),
        transformer=HunyuanVideoTransformer3DModel(
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
            **network,
        ),
    )


def hunyuan_video_1_5() -> Any:
    from diffusers import HunyuanVideo15Pipeline

    return _hunyuan_video_1_5(HunyuanVideo15Pipeline, {"task_type": "t2v", "image_embed_dim": 12})


def hunyuan_video_1_5_image() -> Any:
    from diffusers import HunyuanVideo15ImageToVideoPipeline
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    return _hunyuan_video_1_5(
        HunyuanVideo15ImageToVideoPipeline,
        {"task_type": "i2v", "image_embed_dim": 16},
        image_encoder=SiglipVisionModel(SiglipVisionConfig(**_VISION)),
        feature_extractor=SiglipImageProcessor(size={"height": 8, "width": 8}),
    )


def _hunyuan_video_1_5(kind: Any, network: dict[str, Any], **parts: Any) -> Any:
    from diffusers import AutoencoderKLHunyuanVideo15, ClassifierFreeGuidance, HunyuanVideo15Transformer3DModel

    second, tokenizer_2 = t5()
    made = kind(
        **parts,
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
            rope_axes_dim=(4, 6, 6),
            target_size=16,
            **network,
        ),
    )
    made.tokenizer_max_length = made.tokenizer_2_max_length = made.vision_num_semantic_tokens = TOKENS
    made.prompt_template_encode_start_idx, made.system_message = 1, "a"
    return made


def cogvideox() -> Any:
    from diffusers import CogVideoXPipeline

    return _cogvideox(CogVideoXPipeline, in_channels=4)


def cogvideox_image() -> Any:
    from diffusers import CogVideoXImageToVideoPipeline

    return _cogvideox(CogVideoXImageToVideoPipeline, in_channels=8)


def _cogvideox(kind: Any, in_channels: int) -> Any:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXTransformer3DModel

    encoder, tokenizer = t5()
    return kind(
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
            in_channels=in_channels,
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


def sana_video() -> Any:
    from diffusers import SanaVideoPipeline

    return _sana_video(SanaVideoPipeline)


def sana_video_image() -> Any:
    from diffusers import SanaImageToVideoPipeline

    return _sana_video(SanaImageToVideoPipeline)


def _sana_video(kind: Any) -> Any:
    from diffusers import SanaVideoTransformer3DModel

    return kind(
        tokenizer=words(),
        text_encoder=Encoder(8),
        vae=_wan_vae(),
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
