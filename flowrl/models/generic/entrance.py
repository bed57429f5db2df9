"""A pipeline that can be entered: its parts, options and pictures found out, one call at the chosen timesteps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flowrl.core.errors import ModelError
from flowrl.diffusion.process import PredictionType, Process
from flowrl.models._experts import Experts
from flowrl.models._schedulers import distilled, path_of, plain
from flowrl.models.generic.families import dead_modules, family_of, guidance_of
from flowrl.models.generic.images import Pictures, picture_methods
from flowrl.models.generic.options import Call, Size, check_components, check_fit, find_networks, frames_of
from flowrl.models.generic.reentry import Reentry, Visit
from flowrl.models.savings import switch_on

PROBE_STEPS = 4  # Mochi's grid needs an even number; nothing else depends on it


class Entrance:
    """A pipeline with all that is read off it before it is entered, and the way in."""

    def __init__(self, pipeline: Any, config: Any) -> None:
        self.pipeline, self.config = pipeline, config
        self.family, self.networks = family_of(pipeline), find_networks(pipeline)
        check_components(pipeline)
        check_fit(pipeline, self.family, self.networks)
        self.path = path_of(pipeline.scheduler)
        self.distilled = distilled(pipeline.scheduler, next(iter(self.networks.values())).config, config.distilled)
        pipeline.scheduler = plain(pipeline.scheduler, self.path)
        self.process: Process = self.path.process
        self.prediction_type: PredictionType = self.path.prediction_type
        parts = list(self.networks.values())
        self.network: nn.Module = parts[0] if len(parts) == 1 else Experts(self.networks)
        answered = picture_methods(self.family)
        self.reentry = Reentry(pipeline, self.networks, answered, holds=self.family.holds)
        self.guidance = guidance_of(self.family, pipeline, self.reentry.parameters, parts[0])
        self.size = Size.of(pipeline, config, self.family, self.reentry.parameters, parts[0])
        self.pictures = Pictures(self.family, pipeline, parts[0].config, self.size)
        self.height, self.width = self.size.height, self.size.width
        self.call = Call(pipeline, config, self.family, self.guidance, self.size, self.reentry.parameters)
        self.num_frames = frames_of(pipeline, self.call.fixed, self.reentry.parameters, parts[0])
        self.lora_targets = self._lora_targets()
        self._freeze(parts)

    def _freeze(self, networks: list[nn.Module]) -> None:
        for part in self.pipeline.components.values():
            if isinstance(part, nn.Module):
                part.eval()
                if not any(part is network for network in networks):
                    part.requires_grad_(False)
        if getattr(self.pipeline, "safety_checker", None) is not None:
            # It would blacken what the rewards are to see.
            self.pipeline.safety_checker = None
        switch_on(self.pipeline, networks, self.config)

    def _lora_targets(self) -> tuple[str, ...]:
        names = [name for name, part in self.network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
        return tuple(t for t in self.family.lora_targets if any(name.endswith(f".{t}") for name in names))

    def dead_lora_modules(self) -> tuple[str, ...]:
        prefixes = {name: f"{name}." if len(self.networks) > 1 else "" for name in self.networks}
        return tuple(
            module
            for name, network in self.networks.items()
            for module in dead_modules(self.family, network, prefixes[name])
        )

    @property
    def name(self) -> str:
        """Of the pipeline's class."""
        return type(self.pipeline).__name__

    @contextmanager
    def _explained(self, where: str = "as configured") -> Iterator[None]:
        """Turn what an unknown pipeline can raise into the reason why it is refused."""
        try:
            yield
        except (ModelError, torch.OutOfMemoryError):
            raise
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, IndexError, StopIteration) as error:
            reason = (str(error).splitlines() or [""])[0]
            text = f"{self.name} cannot be used {where}: {type(error).__name__}: {reason}"
            if not self.path.is_flow and "sigmas" in reason:
                text += " (it is a pipeline of a flow: load it with FlowMatchEulerDiscreteScheduler)"
            raise ModelError(text) from error

    def _enter(self, batch: int, guidance_scale: float, *, steps: int = PROBE_STEPS, **options: Any) -> Visit:
        output_type = options.pop("output_type", "latent")
        arguments = self.call.arguments(batch, guidance_scale, options.pop("prompts", None), steps, output_type)
        arguments |= self.pictures.arguments(options.pop("pictures", ()), batch)
        return self.reentry.enter(arguments, **options)

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        """Arguments with which the pipeline's own call draws one prompt as configured."""
        return self.call.own(steps, guidance_scale)
