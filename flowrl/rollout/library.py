"""A model on its own, for a notebook or another tool's loop: noisy latents and text in, clean latents or images out.

model = flowrl.load_model("tiny-sd3")
x0 = model.denoise(x, 0.7, ["a small red circle"])
images = model.sample(["a small red circle"], seed=0)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.core import registry
from flowrl.core.strict import require_positive, validate
from flowrl.core.types import Condition, Identity, SampleId
from flowrl.data.prompts import Prompt, identity
from flowrl.data.text_cache import Texts
from flowrl.diffusion.plan import solver_plan
from flowrl.models.base import ModelAdapter, decoded
from flowrl.models.pipelines.classes import GENERIC, choose
from flowrl.models.weights.roles import Weights, trainable
from flowrl.rollout.loop import RunOptions, run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers.ode import Ode

_NODES = 10
"""Steps of the grid that maps a sigma to its timestep: any number gives the same."""


@dataclass(frozen=True, slots=True)
class Model:
    """A generator with its trainable weights.

    Latents follow one path, x = alpha x0 + sigma eps, with sigma in (0, 1] the share of noise: alpha = 1 - sigma on a
    flow model, alpha = sqrt(1 - sigma^2) on a noise-prediction (VP) one. `adapter.process` says which.
    k-diffusion's x_k = x0 + sigma_k eps is the same place divided by alpha: x = alpha x_k, sigma = alpha sigma_k, with
    alpha = 1 / (1 + sigma_k) on a flow and 1 / sqrt(1 + sigma_k^2) on VP.
    """

    adapter: ModelAdapter
    """Encodes, predicts and decodes; `adapter.network` is the denoiser."""
    weights: Weights
    """What an optimizer trains (`weights.parameters`), and the snapshots of it."""
    device: torch.device
    texts: Texts
    known: dict[Identity, Condition] = field(default_factory=dict)
    """Embeddings of the prompts used so far, one row each."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents, such as (4, 8, 8)."""
        return self.adapter.latent_shape()

    def condition(self, prompts: str | Prompt | Sequence[str | Prompt], count: int | None = None) -> Condition:
        """The embeddings of the prompts, one row each; each distinct prompt is encoded once.

        Args:
            prompts: texts, or `Prompt`s for a model that takes images. A single one is used for all rows.
            count: number of rows; None: as many as prompts.

        Raises ValueError: another number of prompts.
        """
        wanted = [prompts] * (count or 1) if isinstance(prompts, str | Prompt) else list(prompts)
        if count is not None and len(wanted) != count:
            raise ValueError(f"{len(wanted)} prompts for {count} latents: give one a sample, or one for all")
        fresh = {identity(prompt): prompt for prompt in wanted if identity(prompt) not in self.known}
        if fresh:
            rows = self.texts.lookup(list(fresh.values()))
            self.known.update((key, rows.index(torch.tensor([row]))) for row, key in enumerate(fresh))
        return Condition.collate([self.known[identity(prompt)] for prompt in wanted])

    def _scale(self, guidance_scale: float | None) -> float:
        scale = self.adapter.unguided if guidance_scale is None else guidance_scale
        if not math.isfinite(scale):
            raise ValueError(f"guidance_scale={scale} must be a finite number, or None for no guidance")
        self.adapter.check_guidance(scale)
        return scale

    def denoise(
        self,
        x: Tensor,
        sigma: float | Tensor,
        prompts: str | Prompt | Sequence[str | Prompt],
        guidance_scale: float | None = None,
    ) -> Tensor:
        """The network's estimate of the clean latents, x0_hat [B, ...] float32: one forward, with gradients.

        Args:
            x: noisy latents, [B, *latent_shape].
            sigma: share of noise in x, in (0, 1]: one number, or [B].
            prompts: B prompts, or one for all.
            guidance_scale: of classifier-free guidance, in the pipeline's units; None: none.

        Raises ValueError: sigma is not in (0, 1], another number of prompts than B, or a model whose timesteps are
        known on its own grid alone; ModelError: a guidance scale that the model does not take.
        """
        x, scale = x.to(self.device), self._scale(guidance_scale)
        sigmas = torch.as_tensor(sigma, dtype=torch.float32, device=self.device).expand(len(x))
        if not bool(((sigmas > 0) & (sigmas <= 1)).all()):
            raise ValueError(f"sigma={sigma} must lie in (0, 1]: the share of noise in x = alpha x0 + sigma eps")
        timestep = self.adapter.schedule(_NODES).timestep_at(sigmas.cpu()).to(self.device)
        raw = self.adapter.predict(x, timestep, self.condition(prompts, len(x)), scale)
        return self.adapter.process.predict(raw, x, sigmas, self.adapter.prediction_type).x0_hat

    def sample(
        self,
        prompts: str | Prompt | Sequence[str | Prompt],
        seed: int = 0,
        *,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        batch_size: int = 8,
    ) -> Tensor:
        """Images [B, 3, H, W] or videos [B, F, 3, H, W] of B prompts, in [0, 1] on the CPU, by the deterministic steps.

        The noise of a sample is keyed by the seed and its place, so batches of any size give the same samples.
        `num_inference_steps` None: 20, or those of a distilled model that lists its own.

        Raises ValueError: no prompt, no step, an empty batch, or a guidance scale that is no finite number.
        """
        if num_inference_steps is None:
            nodes = None if self.adapter.distilled is None else self.adapter.distilled.nodes
            num_inference_steps = len(nodes) if nodes else 20
        require_positive(locals(), "num_inference_steps", "batch_size")
        self.adapter.check_steps(num_inference_steps)
        if not isinstance(prompts, str | Prompt) and not len(prompts):
            raise ValueError("prompts is empty: give a text, or a list of one or more")
        cond = self.condition(prompts)
        ids, rows = [SampleId(slot, 0) for slot in range(len(cond))], torch.arange(len(cond))
        policy, plan = (
            Policy(self.adapter, Ode(), self._scale(guidance_scale)),
            solver_plan(self.adapter.schedule(num_inference_steps)),
        )
        noise = Noise(seed, "sample", None, self.latent_shape)
        asked, options = Asked(ids, cond, rows), RunOptions(device=self.device)
        samples, _ = run(policy, plan, noise, asked, batch_size=batch_size, options=options)
        parts = zip(samples.x0.split(batch_size), rows.split(batch_size), strict=True)
        return torch.cat([decoded(self.adapter, x0.to(self.device), cond, own).cpu() for x0, own in parts])


def load_model(path: str, *, device: str | torch.device | None = None, seed: int = 0, **options: Any) -> Model:
    """A model with its weights, ready to denoise.

    Args:
        path: hub id, folder of a diffusers pipeline, or an embedded asset such as tiny-sd3 or tiny-sd.
        device: None takes a GPU if there is one.
        seed: seed of a new LoRA's values.
        options: those of `model` in a configuration: `lora={"rank": 8}`, `dtype="bfloat16"`, `height=512`. Without
            `lora` all weights of the denoiser are trainable, in float32. `name` chooses the adapter; the default is
            the native one of the pipeline's class, else the generic one.

    Raises ModelError: a model that does not exist or cannot be loaded with these options; ConfigError: an unknown
    option or a bad value.
    """
    name = options.pop("name", None)
    if name is None:  # no other adapter takes a class by its name
        name = GENERIC if options.get("pipeline") else choose(path, options.get("revision")).name
    module = registry.load("models", name)
    config = validate(module.Config, {"path": path, **options}, "model")
    adapter: ModelAdapter = module.build(config)
    weights = trainable(adapter, config, seed)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    adapter.to(place)
    return Model(adapter, weights, place, Texts(adapter, (), cache=False))
