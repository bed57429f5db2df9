"""A pipeline that can be entered: its parts, options and images, and one call at chosen timesteps."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from flowrl.core.errors import ModelError
from flowrl.models._schedulers import path_of, plain
from flowrl.models.base import network_config, unused_modules
from flowrl.models.generic.families import family_of, guidance_of, holds_image
from flowrl.models.generic.images import ReferenceImages, image_methods
from flowrl.models.generic.options import Call, Size, check_components, check_fit, find_networks, frames_of, rate_of
from flowrl.models.generic.reentry import Reentry, Visit
from flowrl.models.memory.savings import switch_on
from flowrl.models.pipelines.declared import of_pipeline

PROBE_STEPS = 4  # Mochi's grid needs an even number; nothing else depends on it
_UNKNOWN = (ValueError, TypeError, AttributeError, RuntimeError, LookupError, ArithmeticError, StopIteration)
"""What a pipeline raises for what it does not take."""


class Entrance:
    """A pipeline with the facts that are read from it, and the way into its call. The pipeline is any of diffusers; its
    scheduler is replaced by a plain one, its parts are frozen.

    Raises ModelError: the pipeline cannot be entered, or not as configured.
    """

    def __init__(self, pipeline: Any, config: Any) -> None:
        self.pipeline, self.kind = pipeline, type(pipeline).__name__
        self.family, self.networks = family_of(pipeline), find_networks(pipeline)
        check_components(pipeline)
        check_fit(pipeline, self.family, self.networks)
        self.path, first = path_of(pipeline.scheduler), next(iter(self.networks.values()))
        self.distilled = of_pipeline(pipeline, config.distilled, config.revision)
        pipeline.scheduler = plain(pipeline.scheduler, self.path)
        self.network: nn.Module = first if len(self.networks) == 1 else nn.ModuleDict(self.networks)
        holds = holds_image(self.family, pipeline)
        self.reentry = Reentry(pipeline, self.networks, image_methods(self.family), holds=holds)
        self.guidance = guidance_of(self.family, pipeline, self.reentry.parameters, first)
        asked = (config.height, config.width)
        self.size = Size.of(pipeline, asked, self.family, self.reentry.parameters, first)
        crop = config.first_frame == "crop"
        self.images = ReferenceImages(self.family, pipeline, network_config(first), self.size, crop)
        self.call = Call(pipeline, config, self.family, self.guidance, self.size, self.reentry.parameters)
        self.num_frames = frames_of(pipeline, self.call.fixed, self.reentry.parameters, first)
        told = rate_of(self.call.fixed, self.reentry.parameters, "model.call.")
        self.fps = told if config.fps is None else float(config.fps)
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                part.eval()
                if part not in self.networks.values():
                    part.requires_grad_(False)
        if pipeline.components.get("safety_checker") is not None:
            # It would blacken images before they are scored.
            pipeline.safety_checker = None
        switch_on(pipeline, self.networks.values(), config)

    def lora_targets(self) -> tuple[str, ...]:
        """The family's module suffixes that the network has."""
        names = [name for name, part in self.network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
        return tuple(t for t in self.family.lora_targets if any(name.endswith(f".{t}") for name in names))

    def dead_lora_modules(self) -> tuple[str, ...]:
        """Adapted modules whose output is never used, of every network."""
        return tuple(
            f"{name}.{module}" if len(self.networks) > 1 else module
            for name, network in self.networks.items()
            for module in unused_modules(self.family.dead, network)
        )

    @contextmanager
    def explained(self, where: str = "as configured") -> Iterator[None]:
        """Turn the errors of an unknown pipeline into one ModelError with the reason."""
        try:
            yield
        except (ModelError, torch.OutOfMemoryError):
            raise
        except (
            ValueError,
            TypeError,
            AttributeError,
            RuntimeError,
            LookupError,
            ArithmeticError,
            StopIteration,
        ) as error:
            reason = (str(error).splitlines() or [""])[0]
            text = f"{self.kind} cannot be used {where}: {type(error).__name__}: {reason}"
            if not self.path.is_flow and "sigmas" in reason:
                text += " (it is a pipeline of a flow: load it with FlowMatchEulerDiscreteScheduler)"
            if self.images.limits[1] and "bias type" in reason:
                text += " (it hands images to its VAE in model.dtype: set model.vae_precision to that type)"
            raise ModelError(text) from error

    def enter(
        self, batch: int, guidance_scale: float, *, steps: int = PROBE_STEPS, first: bool = False, **options: Any
    ) -> Visit:
        """One call of the pipeline for `batch` samples; other options are those of `Reentry.enter`.

        `first`: of the network, which may show that it has no positions for this size.
        """
        output_type = options.pop("output_type", "latent")
        arguments = self.call.arguments(batch, guidance_scale, options.pop("prompts", None), steps, output_type)
        arguments |= self.images.arguments(options.pop("images", ()))
        with self.explained(f"at {self.size.width} x {self.size.height} px") if first else nullcontext():
            return self.reentry.enter(arguments, **options)
