"""Any diffusers pipeline whose loop ends in `scheduler.step`, by entering its own call again at one timestep.

Process: read off the scheduler, a flow or VP. Timesteps are the scheduler's own. `guidance_scale` is in the
pipeline's units (models/_families.py): its CFG scale, its true_cfg_scale, or an input of the network. What the
pipeline does between the latents and `scheduler.step` (packing, guidance, renormalisation, sign) is its own code,
with gradients; see models/_reentry.py for how it is entered, and models/_pictures.py for reference pictures and first
frames.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowrl.models._encoding import SHORT, Template, learn
from flowrl.models._experts import Experts
from flowrl.models._families import FAMILIES, dead_modules, family_of, guidance_of
from flowrl.models._grids import path_of, plain, rising, schedule_of
from flowrl.models._native import NO_ENCODERS
from flowrl.models._options import Call, Size, check_components, find_networks
from flowrl.models._pictures import Pictures, blank
from flowrl.models._reentry import Reentry, Visit
from flowrl.models.base import ModelConfig, ModelError, autocast, load_pipeline, require_folder, torch_dtype
from flowrl.process import PredictionType, Process
from flowrl.schedules import Schedule
from flowrl.types import Condition

if TYPE_CHECKING:
    from PIL.Image import Image

LEVEL = "tested"
PROBE_STEPS = 4  # Mochi's grid needs an even number; nothing else depends on it
PROBE_GUIDANCE = 4.0  # above every pipeline's threshold, so that both prompts are encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(ModelConfig):
    call: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's own call, such as num_frames or max_sequence_length."""


class Generic:
    """Adapter around a pipeline; `pipeline` holds every part, `network` what is trained."""

    def __init__(self, pipeline: Any, config: Config) -> None:
        self.pipeline, self.config = pipeline, config
        self.family, self.networks = family_of(pipeline), find_networks(pipeline)
        check_components(pipeline)
        self.path = path_of(pipeline.scheduler)
        pipeline.scheduler = plain(pipeline.scheduler, self.path)
        self.process: Process = self.path.process
        self.prediction_type: PredictionType = self.path.prediction_type
        parts = list(self.networks.values())
        self.network: nn.Module = parts[0] if len(parts) == 1 else Experts(self.networks)
        self.reentry = Reentry(pipeline, self.networks)
        self.guidance = guidance_of(self.family, pipeline, self.reentry.parameters, parts[0])
        self.size = Size.of(pipeline, config, self.family, self.reentry.parameters, parts[0])
        self.height, self.width = self.size.height, self.size.width
        self.call = Call(pipeline, config, self.family, self.guidance, self.size, self.reentry.parameters)
        self.pictures = Pictures(self.family, self.name, parts[0].config)
        self.lora_targets = self._lora_targets()
        self.device, self._dtype = torch.device("cpu"), torch_dtype(config.dtype)
        self._template: Template | None = None
        self._freed = False
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
        if self.config.gradient_checkpointing:
            for network in networks:
                network.enable_gradient_checkpointing()

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

    # ---- what the pipeline shows when it is entered

    @torch.no_grad()
    def _learned(self) -> Template:
        """How prompts are encoded, the shape of the latents and the kind of timesteps: found once, at first use."""
        if self._template is not None:
            return self._template
        if self._freed:
            raise ModelError(NO_ENCODERS)
        with self._explained(), _hushed():
            template = learn(self._probe_calls)
            self._template = template
            self._probe = self._encode([SHORT], self._probe_pictures([SHORT]))
            visit = self._enter(1, PROBE_GUIDANCE, **self._answers(self._probe), stop_at_network=True)
        if visit.latents is None or visit.timesteps is None or len(visit.latents) != 1:
            raise ModelError(f"{self.name}: its loop does not start from the latents of prepare_latents()")
        self._shape, self._loop_dtype = tuple(visit.latents.shape[1:]), visit.latents.dtype
        if self.family.pictures:
            # Its decoding would need the picture too.
            self._require_one_time(visit)
        self._grid_dtype = visit.timesteps.dtype
        self._sign = -1 if self.path.is_flow and visit.sigmas is not None and rising(visit.sigmas) else 1
        self._times: dict[float, tuple[str, Tensor]] = {}
        self._entered = False
        self._mixable = not self.family.per_step
        if self.name not in FAMILIES:
            self._mixable = self._mixing_is_exact()
        return template

    @property
    def name(self) -> str:
        """Of the pipeline's class."""
        return type(self.pipeline).__name__

    @contextmanager
    def _explained(self):
        """Turn what an unknown pipeline can raise into the reason why it is refused."""
        try:
            yield
        except (ModelError, torch.OutOfMemoryError):
            raise
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, IndexError, StopIteration) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ModelError(f"{self.name} cannot be used as configured: {type(error).__name__}: {reason}") from error

    def _enter(self, batch: int, guidance_scale: float, *, steps: int = PROBE_STEPS, **options: Any) -> Visit:
        output_type = options.pop("output_type", "latent")
        arguments = self.call.arguments(batch, guidance_scale, options.pop("prompts", None), steps, output_type)
        arguments |= self.pictures.arguments(options.pop("pictures", ()), batch)
        return self.reentry.enter(arguments, **options)

    def _answers(self, cond: Condition) -> dict[str, Any]:
        """Options of `_enter` that hand back what was encoded, for rows that may share a forward."""
        assert self._template is not None
        return {"encoded": self._template.rebuild(cond), **self.pictures.rebuild(cond)}

    def _probe_pictures(self, prompts: Sequence[str]) -> list[Image]:
        """Of two colours for the two probing prompts: what depends on the picture must differ between them."""
        grey = 64 if prompts[0] == SHORT else 192
        return [blank((self.width, self.height), grey)] * self.picture_limits[0]

    def _probe_calls(self, prompts: list[str]) -> tuple[Any, ...]:
        pictures: Any = self._probe_pictures(prompts)
        options = {}
        if pictures and self.family.picture_each and len(prompts) > 1:
            # A batch is of both colours, as it is of both prompts.
            options = {self.family.pictures[0]: [self._probe_pictures([prompt])[0] for prompt in prompts]}
        arguments = self.call.arguments(len(prompts), PROBE_GUIDANCE, prompts, PROBE_STEPS, "latent")
        arguments |= options or self.pictures.arguments(pictures, len(prompts))
        return tuple(self.reentry.enter(arguments, stop_at_network=True).encoded)

    def latent_shape(self) -> tuple[int, ...]:
        self._learned()
        return self._shape

    def schedule(self, num_inference_steps: int) -> Schedule:
        self._learned()
        answers = self._answers(self._probe)
        with torch.no_grad(), self._explained():
            visit = self._enter(1, PROBE_GUIDANCE, steps=num_inference_steps, **answers, stop_at_network=True)
        assert visit.timesteps is not None
        return schedule_of(self.path, self.pipeline.scheduler, visit.timesteps, visit.sigmas)

    # ---- prompts

    @property
    def picture_limits(self) -> tuple[int, int]:
        """Least and most pictures that a prompt must and may have."""
        return self.pictures.limits

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], pictures: Sequence[Sequence[Image]] | None = None) -> Condition:
        """Conditions of P prompts, each with its own RGB pictures."""
        if self._freed:
            raise ModelError(NO_ENCODERS)
        for one in pictures or [()] * len(prompts):
            self.pictures.require(len(one))
        template = self._learned()
        with self._explained():
            if pictures is None:
                return Condition.collate([self._encode(batch, ()) for batch in template.batches(list(prompts))])
            # One by one: a pipeline looks at the size of the first picture of a batch only, or takes one for all.
            both = zip(prompts, pictures, strict=True)
            return Condition.collate([self._encode([prompt], own) for prompt, own in both])

    def _encode(self, prompts: list[str], pictures: Sequence[Image]) -> Condition:
        """Rows of prompts that may be encoded together; with pictures it is one prompt."""
        assert self._template is not None

        def enter(batch: int) -> Visit:
            texts = prompts if batch == len(prompts) else prompts * batch
            return self._enter(batch, PROBE_GUIDANCE, prompts=texts, pictures=pictures, stop_at_network=True)

        visit = enter(len(prompts))
        cond = self._template.condition(visit.encoded, len(prompts))
        if not pictures:
            return cond
        self.pictures.learn(enter)
        return Condition(cond.tensors | self.pictures.entries(visit, pictures))

    def free_text_encoders(self) -> None:
        self._learned()
        for name, part in self.pipeline.components.items():
            if name.startswith("text_encoder") and part is not None:
                setattr(self.pipeline, name, None)
        self._freed = True
        gc.collect()

    # ---- the network

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        self._learned()
        values = timestep.tolist()
        if len(cond) != len(x) or len(values) != len(x):
            raise ValueError(f"{len(x)} latents need as many timesteps and conditions: {len(values)}, {len(cond)}")
        groups = self._groups(values, cond)
        if len(groups) == 1:
            return self._forward(x, values, cond, guidance_scale)
        order = torch.tensor([row for group in groups for row in group])
        outputs = []
        for group in groups:
            rows = torch.tensor(group)
            part = x[rows.to(x.device)]
            outputs.append(self._forward(part, [values[row] for row in group], cond.index(rows), guidance_scale))
        return torch.cat(outputs)[order.argsort().to(x.device)]

    def _groups(self, values: list[float], cond: Condition) -> list[list[int]]:
        """Rows that may share a forward: of one expert, of one length where padding would be seen."""
        assert self._template is not None
        found: dict[Any, list[int]] = {}
        for row, value in enumerate(values):
            expert = self._time(value)[0] if len(self.networks) > 1 else None
            text, seen = self._template.key(cond, row), self.pictures.key(cond, row)
            key = (expert, None if self._mixable else value, text, seen)
            found.setdefault(key, []).append(row)
        return list(found.values())

    def _forward(self, x: Tensor, values: list[float], cond: Condition, guidance_scale: float) -> Tensor:
        """One entry, pinned at the first timestep; the network gets the others through its own argument."""
        times = None
        if any(value != values[0] for value in values):
            times = torch.stack([self._time(value)[1] for value in values])
        with autocast(self.device, self._dtype):
            visit = self._enter(
                len(x),
                guidance_scale,
                **self._answers(cond),
                latents=x,
                timesteps=self._pin([values[0]]),
                times=times,
            )
        if visit.prediction is None or visit.prediction.shape != x.shape:
            raise ModelError(f"{self.name}: its loop did not end in scheduler.step() with a prediction of {x.shape}")
        if not self._entered:
            self._require_own_latents(visit, x)
        return visit.prediction if self._sign == 1 else -visit.prediction

    def _require_own_latents(self, visit: Visit, x: Tensor) -> None:
        """The loop must work on what prepare_latents() returned, unchanged."""
        if visit.latents is None or not torch.equal(visit.latents.to(self._loop_dtype), x.to(self._loop_dtype)):
            raise ModelError(f"{self.name} changes the latents between prepare_latents() and scheduler.step()")
        self._entered = True

    def _pin(self, values: list[float]) -> Tensor:
        """Timesteps as the scheduler gives them: whole numbers stay whole."""
        whole = not self._grid_dtype.is_floating_point and all(value.is_integer() for value in values)
        return torch.tensor(values, dtype=self._grid_dtype if whole else torch.float32, device=self.device)

    @torch.no_grad()
    def _time(self, value: float) -> tuple[str, Tensor]:
        """(network, what it is fed) at a timestep of the scheduler: looked up in the pipeline, rounding included."""
        if value not in self._times:
            x = torch.zeros(1, *self._shape, device=self.device)
            options = {"timesteps": self._pin([value]), "latents": x, "stop_at_network": True}
            visit = self._enter(1, PROBE_GUIDANCE, **self._answers(self._probe), **options)
            self._times[value] = (visit.network, self._require_one_time(visit))
        return self._times[value]

    def _require_one_time(self, visit: Visit) -> Tensor:
        """What the network was fed as its timestep."""
        fed = torch.as_tensor(visit.inputs[self.reentry.time_argument(visit.network)], device=self.device).flatten()
        if not bool((fed == fed[0]).all()):
            raise ModelError(f"{self.name} feeds its network different timesteps within one sample")
        return fed[0]

    @torch.no_grad()
    def _mixing_is_exact(self) -> bool:
        """Two samples at different timesteps in one forward give what they give alone; on noise, in three forwards."""
        self._mixable = True
        x = torch.randn(2, *self._shape, generator=torch.Generator().manual_seed(0)).to(self.device)
        grid = self.schedule(PROBE_STEPS).timesteps
        both, values = self._probe.index(torch.tensor([0, 0])), [float(grid[1]), float(grid[-1])]
        try:
            together = self._forward(x, values, both, PROBE_GUIDANCE)
        except (ModelError, ValueError, RuntimeError):
            return False
        alone = [self._forward(x[k : k + 1], [values[k]], self._probe, PROBE_GUIDANCE) for k in (0, 1)]
        error = (together - torch.cat(alone)).abs().max()
        return bool(error <= (1e-4 if self._dtype == torch.float32 else 3e-2) * together.abs().max())

    def time_map(self) -> tuple[float, float]:
        """(slope, offset) of the network's timestep over the scheduler's, for the report."""
        self._learned()
        (_, low), (_, high) = self._time(200.0), self._time(700.0)
        slope = (float(high) - float(low)) / 500.0
        return slope, float(low) - 200.0 * slope

    def batch_key(self, step_index: int) -> int:
        self._learned()
        return 0 if self._mixable and len(self.networks) == 1 else step_index

    # ---- pictures

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, H, W] or videos [B, F, 3, H, W], float32 in [0, 1]: the pipeline's call without its loop."""
        self._learned()
        parts = latents.split(1 if self.family.decode_singly else len(latents))
        return torch.cat([self._decode(part) for part in parts])

    def _decode(self, latents: Tensor) -> Tensor:
        cond = self._probe.index(torch.zeros(len(latents), dtype=torch.int64))
        options = {**self._answers(cond), "timesteps": self._pin([]), "output_type": "pt"}
        visit = self._enter(len(latents), PROBE_GUIDANCE, latents=latents.float(), keep_dtype=True, **options)
        output = visit.output[0] if isinstance(visit.output, tuple) else visit.output
        if not torch.is_tensor(output) or len(output) != len(latents):
            raise ModelError(f"{self.name} decodes to {type(output).__name__}, not to one picture or clip per sample")
        return output.float().clamp(0, 1)

    def to(self, device: torch.device) -> None:
        self.pipeline.to(device)
        self.device = device
        self.reentry.forget()
        self.pictures.to(device)
        if self._template is not None:
            self._template.to(device)
            self._probe = self._probe.to(device)
            self._times.clear()


def build(config: Config) -> Generic:
    from diffusers import AutoModel, DiffusionPipeline

    require_folder(config.path)
    return Generic(load_pipeline(DiffusionPipeline, AutoModel, config), config)


@contextmanager
def _hushed():
    """The probing prompts are made to be cut off; nobody needs to be warned of it."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
