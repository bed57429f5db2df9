"""The shared part of SD and SDXL: a UNet on a variance-preserving process, its grids, guidance, distilled checkpoints.

Process: VP; the scheduler decides whether the network predicts eps, v or x0. timestep = index of the training step, a
whole number on the grids, any number between. The grid is DDIM's with the scheduler's betas and spacing, for every
scheduler: `ddim` with eta 1 is DDPM's step and Euler-ancestral's.

Distilled checkpoints (models/pipelines/distilled.py) take no CFG, and their x0_hat is a sample, not a posterior mean.
Of a consistency model guidance may be an input of the network, an embedding of w - 1 (time_cond_proj_dim), and
f = c_skip x + c_out x0_hat serves as the network's x0, so its own step, alpha' f + sigma' z, is the sampler `cps` with
noise_level 1; that of the others is `ddim` with eta 1. All end at alpha = 1 whatever set_alpha_to_one is, as in their
own schedulers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.tensors import sent
from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.diffusion.vp_schedules import Spacing, alphas_cumprod, betas, level_at, spaced
from flowrl.models._guidance import classifier_free, guided
from flowrl.models._native import Native, Part
from flowrl.models._schedulers import FinalAlpha, grid_end, path_of, plain, vp_grid
from flowrl.models.base import ModelConfig, autocast

# huggingface/trl:trl/trainer/ddpo_trainer.py: attention of every block, self- and cross-attention
LORA_TARGETS = ("to_k", "to_out.0", "to_q", "to_v")
SIGMA_DATA = 0.5  # of c_skip and c_out: diffusers' LCMScheduler


@dataclass(frozen=True, kw_only=True)
class UNetConfig(ModelConfig):
    negative_prompt: str | None = None
    """Prompt that guidance leads away from; null: the pipeline's default."""
    guidance_rescale: float = 0.0
    """Share by which a guided prediction is rescaled to the std of the conditional one, in [0, 1]; 0: not at all."""
    timestep_spacing: Spacing | None = None
    """Spacing of the grid by DDIM's rule; null takes the scheduler's own, for a consistency model `lcm`."""
    final_alpha: FinalAlpha = "model"
    """End of the last step: the scheduler's (set_alpha_to_one), or the `first` training step, DDPO's rule, so that the
    last step keeps noise and can be trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.guidance_rescale <= 1:
            raise ValueError(f"guidance_rescale={self.guidance_rescale} must lie in [0, 1]")


class Clip:
    """The text encoder of a pipeline with one."""

    pooled: int | None = None
    """Width of a prompt's pooled embedding; None: there is none."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline, encoder = pipeline, pipeline.text_encoder
        self.tokens = 0 if encoder is None else encoder.config.max_position_embeddings
        """Tokens of one prompt's embedding."""

    def encode(
        self, prompts: list[str], negative: list[str] | None, device: torch.device
    ) -> tuple[Condition, Condition]:
        """Embeddings of the prompts and of the negative prompts, one row each."""
        embeds, away = self.pipeline.encode_prompt(prompts, device, 1, True, negative_prompt=negative)
        return Condition({"prompt_embeds": embeds}), Condition({"prompt_embeds": away})

    def added(self, cond: Condition, sizes: Tensor) -> dict[str, Tensor] | None:
        """Further inputs of the network; `sizes` is `UNet.sizes`."""
        return None


class UNet(Native):
    """The adapter of a UNet family: its diffusers pipeline and Config; `texts` makes a pipeline's text encoders."""

    lora_targets = LORA_TARGETS
    text_width = "cross_attention_dim"
    latent_shift = 0.0  # these pipelines ignore the VAE's

    def __init__(self, pipeline: Any, config: UNetConfig, texts: Callable[[Any], Clip] = Clip) -> None:
        self.encoders = texts(pipeline)
        Native.__init__(self, pipeline, config, pipeline.unet)
        if pipeline.vae.config.get("latents_mean") is not None:
            raise ModelError(
                "model.vae: its latents have a mean of their own (latents_mean)", {"model.name": "generic"}
            )
        own = pipeline.scheduler
        self.path = path_of(own)
        if self.path.is_flow:
            raise ModelError(f"model.path: {type(own).__name__} is a flow's", {"model.name": "generic"})
        self.consistent = self.distilled is not None and self.distilled.kind == "consistency"
        self._ddim = plain(own, self.path)
        self.process = self.path.process
        self.prediction_type = self.path.prediction_type
        values = self._ddim.config
        noise = values.trained_betas
        if noise is None:
            noise = betas(values.beta_schedule, values.beta_start, values.beta_end, values.num_train_timesteps)
        self.table = alphas_cumprod(torch.as_tensor(noise), zero_snr=values.rescale_betas_zero_snr)
        self.spacing: Spacing = config.timestep_spacing or values.timestep_spacing
        if self.distilled is not None:
            self._as_distilled(own.config)
        if self.spacing == "lcm" and not self.consistent:
            raise ModelError(
                "model.timestep_spacing=lcm: a consistency model was distilled on those timesteps, and this checkpoint "
                "is not one",
                [{"model.timestep_spacing": None}, {"model.distilled": "consistency"}],
            )
        # Original height and width, crop's top and left, target height and width.
        self.sizes = torch.tensor([[self.height, self.width, 0, 0, self.height, self.width]], dtype=torch.float32)

    def sides(self) -> tuple[tuple[int, int], int, int | None]:
        side, unit = self.settings["sample_size"], self.pipeline.vae_scale_factor
        height, width = (side, side) if isinstance(side, int) else side
        return (height * unit, width * unit), unit, None

    def _as_distilled(self, values: Any) -> None:
        if self.config.guidance_rescale or self.config.negative_prompt is not None:
            raise ModelError(
                f"model.guidance_rescale and model.negative_prompt belong to CFG, which a checkpoint distilled "
                f"{self.distilled} does not take",
                [{"model.guidance_rescale": 0.0, "model.negative_prompt": None}, {"model.distilled": "none"}],
            )
        if self.consistent:
            self.prediction_type = "x0"
            self.spacing = self.config.timestep_spacing or "lcm"
            self._distilled_steps = values.get("original_inference_steps", 50)
            self._scaling = values.get("timestep_scaling", 10.0)

    # ---- prompts

    @property
    def text_tokens(self) -> int:
        return self.encoders.tokens

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().condition_shapes()
        return shapes if self.encoders.pooled is None else shapes | {"pooled": (self.encoders.pooled,)}

    def texts(self, prompts: list[str]) -> Condition:
        return self._both(prompts)[0]

    def negative(self) -> Condition:
        return self._both([""])[1]

    def text_options(self) -> dict[str, Any]:
        return {}

    def _both(self, prompts: list[str]) -> tuple[Condition, Condition]:
        away = self.config.negative_prompt
        return self.encoders.encode(prompts, None if away is None else [away] * len(prompts), self.device)

    # ---- steps

    def schedule(self, num_inference_steps: int) -> Schedule:
        values = self._ddim.config
        options = {"steps_offset": values.steps_offset, "count": len(self.table)}
        if self.consistent:
            options["distilled"] = self._distilled_steps
        try:
            timesteps = spaced(num_inference_steps, self.spacing, **options)
        except ValueError as error:
            raise ModelError.about(error, "model.timestep_spacing: ", place="model") from None
        own = 1.0 if values.set_alpha_to_one else float(self.table[0])
        end = grid_end(self.table, timesteps, own, self.config.final_alpha, self.distilled is not None)
        return vp_grid(self.path, self.table, timesteps, end)

    # ---- the network

    @property
    def embeds_guidance(self) -> bool:
        """Guidance is an input of the network."""
        return self.settings.get("time_cond_proj_dim") is not None

    def branches(self, guidance_scale: float) -> int:
        return 1 if self.embeds_guidance else 1 + (guidance_scale > 1)

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        self.check_guidance(guidance_scale)
        if not self.embeds_guidance:
            share = self.config.guidance_rescale

            def rescaled(negative: Tensor, positive: Tensor, scale: float) -> Tensor:
                """CFG rescaled in part to the std of the conditional prediction (arXiv 2305.08891, section 3.4)."""
                result = classifier_free(negative, positive, scale)
                dims = tuple(range(1, result.ndim))
                return result * (share * positive.std(dims, keepdim=True) / result.std(dims, keepdim=True) + 1 - share)

            options = {"combine": rescaled if share else classifier_free, "forwards": self.forwards()}
            raw = guided(self._forward, x, timestep, cond, self.unconditional, guidance_scale, **options)
        else:
            scales = torch.full((len(x),), guidance_scale - 1)
            size = self.settings["time_cond_proj_dim"]
            embedded = self.pipeline.get_guidance_scale_embedding(scales, embedding_dim=size)
            raw = self._forward(x, timestep, cond, sent(embedded.to(self.dtype), self.device))
        if not self.consistent:
            return raw
        # f = c_skip x + c_out x0_hat in float32 (arXiv 2310.04378, with the constants of LCMScheduler).
        alpha, sigma = level_at(self.table, timestep)
        prediction = self.process.predict(raw, x, sigma, self.path.prediction_type, alpha)
        scaled = (self._scaling * timestep.double()).square()
        skip, out = SIGMA_DATA**2 / (scaled + SIGMA_DATA**2), (scaled / (scaled + SIGMA_DATA**2)).sqrt()
        shape = (-1, *[1] * (x.ndim - 1))
        return skip.float().reshape(shape) * x.float() + out.float().reshape(shape) * prediction.x0_hat

    def _forward(self, x: Tensor, timestep: Tensor, cond: Condition, guidance: Tensor | None = None) -> Tensor:
        with autocast(self.device, self.dtype, self.autocasts):
            return self.network(
                x.to(self.dtype),
                timestep,
                encoder_hidden_states=cond["prompt_embeds"].to(self.dtype),
                timestep_cond=guidance,
                added_cond_kwargs=self.encoders.added(cond, self.sizes),
                return_dict=False,
            )[0]

    def scheduler(self) -> Any:
        """DDIM with the configured grid; a distilled checkpoint keeps the pipeline's own."""
        if self.distilled is not None:
            return self.pipeline.scheduler
        options: dict[str, Any] = {"timestep_spacing": self.spacing}
        if self.config.final_alpha == "first":
            options["set_alpha_to_one"] = False
        return type(self._ddim).from_config(self._ddim.config, **options)

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        call = super().own_call(steps, guidance_scale)
        if self.config.guidance_rescale:
            call["guidance_rescale"] = self.config.guidance_rescale
        if self.config.negative_prompt is not None:
            call["negative_prompt"] = self.config.negative_prompt
        return call


def on_noise(part: Part) -> bool:
    """Whether a checkpoint is on a plain VP process."""
    scheduler = part("scheduler")
    if part("vae").get("latents_mean") is not None:
        return False
    kind = scheduler.get("_class_name", "")
    other = kind.startswith(("FlowMatch", "EDM")) or scheduler.get("use_flow_sigmas")
    return not other and scheduler.get("prediction_type", "epsilon") in ("epsilon", "v_prediction", "sample")
