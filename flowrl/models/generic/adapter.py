"""The adapter around any pipeline: shapes, conditions, predictions and images by entering the pipeline's own call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from PIL.Image import Image
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.media.mp4 import require_rate
from flowrl.models._native import NO_ENCODERS
from flowrl.models._schedulers import FinalAlpha, rising, schedule_of
from flowrl.models._vae import arithmetic, vae_dtype
from flowrl.models.base import ModelAdapter, ModelConfig, autocast, network_config, opaque, torch_dtype
from flowrl.models.generic.encoding import SHORT, Calls, Template, learn, one_by_one, without_warnings
from flowrl.models.generic.entrance import PROBE_STEPS, Entrance
from flowrl.models.generic.families import FAMILIES
from flowrl.models.generic.images import blank
from flowrl.models.generic.options import RATES
from flowrl.models.generic.packing import Packing, read
from flowrl.models.generic.reentry import Visit
from flowrl.models.memory.options import require_own_call
from flowrl.models.memory.savings import give_memory_back, place

PROBE_GUIDANCE = 4.0  # above every pipeline's threshold, so that both prompts are encoded


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    call: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's own call, such as num_frames or max_sequence_length."""
    fps: float | None = None
    """Frames a second of the videos that are saved and shown; null: that of the pipeline's call
    (`call.frame_rate`, `call.fps` or its default), else 16."""
    pipeline: str | None = None
    """Class of diffusers to load the checkpoint with, such as WanImageToVideoPipeline for Wan 2.2 TI2V-5B, whose folder
    names the class of text to video; null: the one that it names. With it `model.name` is generic."""
    first_frame: Literal["crop", "exact"] = "crop"
    """How an image becomes a frame of the video: `crop` scales it (Lanczos) until it just covers the size and cuts out
    the middle; `exact` refuses an image of another aspect ratio. Neither enlarges one more than twice."""
    final_alpha: FinalAlpha = "model"
    """End of the last step of a noise-prediction model: the scheduler's, or the `first` training step, DDPO's rule, so
    that the last step keeps noise and can be trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_own_call(self.shard, self.guidance_gradient, self.vae_precision)
        rates = {"fps": self.fps} | {f"call.{name}": self.call.get(name) for name in RATES}
        for name, rate in rates.items():
            if rate is not None:
                require_rate(rate, f"model.{name}")

    @property
    def frames(self) -> int:
        return self.call.get("num_frames", self.call.get("frames", 1))


class Generic(ModelAdapter):
    """The adapter of any pipeline."""

    own_network = False

    def __init__(self, pipeline: Any, config: Config) -> None:
        self.pipeline, self.config = pipeline, config
        self.entrance = door = Entrance(pipeline, config)
        self.family, self.networks, self.network = door.family, door.networks, door.network
        self.reentry, self.guidance, self.call, self.images = door.reentry, door.guidance, door.call, door.images
        self.path, self.process, self.prediction_type = door.path, door.path.process, door.path.prediction_type
        self.size, self.height, self.width = door.size, door.size.height, door.size.width
        self.distilled, self.num_frames, self.lora_targets = door.distilled, door.num_frames, door.lora_targets()
        self.fps = door.fps
        self.channel_axis, self.unguided = self.family.channel_axis, self.family.free_at
        self.image_limits, self.frame_images = door.images.limits, self.family.frames
        self.decodes_with_cond = door.images.holds
        if self.path.is_flow and config.final_alpha != "model":
            words = f"model.final_alpha={config.final_alpha}: a flow ends at sigma 0"
            raise ModelError(words, {"model.final_alpha": "model"})
        self.device, self.dtype = torch.device("cpu"), torch_dtype(config.dtype)
        self.autocasts = config.precision == "autocast"
        self._template: Template | None = None
        self._packing: Packing | None = None
        self._freed = False

    # ---- facts that the pipeline shows when it is entered

    @torch.no_grad()
    def _learned(self) -> Template:
        """The encoding of prompts, the shape of the latents and the kind of timesteps: probed once, at first use."""
        if self._template is not None:
            return self._template
        if self._freed:
            raise ModelError(NO_ENCODERS)
        with self.entrance.explained(), without_warnings():
            template = learn(one_by_one(self._probe_calls) if self.family.singly else self._probe_calls)
            self._template = template
            self._probe = self._encode([SHORT], [self._probe_images(SHORT)])
            visit = self.entrance.enter(1, PROBE_GUIDANCE, **self._answers(self._probe), stop_at_network=True)
        if visit.latents is None or visit.timesteps is None or len(visit.latents) != 1:
            raise ModelError(f"{self.kind}: its loop does not start from the latents of prepare_latents()")
        self._shape, self._loop_dtype = tuple(visit.latents.shape[1:]), visit.latents.dtype
        self._grid_dtype = visit.timesteps.dtype
        if self.family.sized_by_image:
            self.size.require(visit.latents, self.pipeline)
        if self.images.mask is not None:
            assert visit.prepared is not None
            self._shape = self.images.mark_free(visit.prepared)
        elif self.images.holds:
            time = float(visit.timesteps[1])
            self._shape = self.images.find_free(visit.latents, lambda places: self._stepped(places, time))
        self.sign = -1 if self.path.is_flow and visit.sigmas is not None and rising(visit.sigmas) else 1
        self._times: dict[float, tuple[str, Tensor]] = {}
        self._entered = False
        self._mixable = not self.family.per_step
        if self.kind not in FAMILIES:
            self._mixable = self._mixing_is_exact()
        return template

    def _stepped(self, latents: Tensor, timestep: float) -> Tensor:
        """The latents that reach the scheduler when the loop is entered with these [1, ...] of the probe."""
        options = {"timesteps": self._pin([timestep]), "latents": latents, "keep_dtype": True}
        with autocast(self.device, self.dtype, self.autocasts):
            stepped = self.entrance.enter(1, PROBE_GUIDANCE, **self._answers(self._probe), **options).latents
        assert stepped is not None
        return stepped

    def _answers(self, cond: Condition) -> dict[str, Any]:
        """Options of an entry that hand back encoded rows; they may share a forward."""
        options = self.images.rebuild(cond)
        answers = {"encode_prompt": self._learned().rebuild(cond), **options.pop("answers", {})}
        return {"answers": answers, **options}

    def _probe_images(self, prompt: str) -> list[Image]:
        """Images of two colours for the two probing prompts, so that encodings of an image differ between them."""
        grey = 64 if prompt == SHORT else 192
        return [blank((self.width, self.height), grey)] * self.image_limits[0]

    def _probe_calls(self, prompts: list[str]) -> Calls:
        arguments = self.call.arguments(len(prompts), PROBE_GUIDANCE, prompts, PROBE_STEPS, "latent")
        arguments |= self.images.arguments([self._probe_images(prompt) for prompt in prompts])
        return tuple(self.reentry.enter(arguments, stop_at_network=True).returned["encode_prompt"])

    def dead_lora_modules(self) -> tuple[str, ...]:
        return self.entrance.dead_lora_modules()

    def own_call(self, steps: int, guidance_scale: float) -> dict[str, Any]:
        return self.call.own(steps, guidance_scale)

    def latent_shape(self) -> tuple[int, ...]:
        self._learned()
        return self._shape

    def grid(self) -> tuple[int, ...] | None:
        shape = self.latent_shape()
        return self.size.places(shape[0], self.num_frames) if len(shape) == 2 and self.channel_axis == 2 else None

    def schedule(self, num_inference_steps: int) -> Schedule:
        self._learned()
        answers = self._answers(self._probe)
        with torch.no_grad(), self.entrance.explained():
            visit = self.entrance.enter(1, PROBE_GUIDANCE, steps=num_inference_steps, **answers, stop_at_network=True)
        assert visit.timesteps is not None
        grid, clean = (visit.timesteps, visit.sigmas), self.distilled is not None
        return schedule_of(self.path, self.pipeline.scheduler, *grid, self.config.final_alpha, to_clean=clean)

    # ---- prompts

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], images: Sequence[Sequence[Image]] | None = None) -> Condition:
        """Conditions of P prompts, each with its own RGB images."""
        if self._freed:
            raise ModelError(NO_ENCODERS)
        sources: list[Sequence[Image]] = []
        for prompt, own in zip(prompts, images or [()] * len(prompts), strict=True):
            with self.entrance.explained(_with_images(prompt, own)):
                self.images.require(own)
                sources.append(self.images.fitted(own))
        alone = self.family.singly or self._learned().ragged
        order: list[int] = []
        parts: list[Condition] = []
        while len(order) < len(prompts):
            rows = self.images.together(sources, order)[: 1 if alone else None]
            order += rows
            with self.entrance.explained(_with_images(prompts[rows[0]], sources[rows[0]])):
                parts.append(self._encode([prompts[k] for k in rows], [sources[k] for k in rows]))
        return Condition.collate(parts).index(torch.tensor(order).argsort())

    def _encode(self, prompts: list[str], images: Sequence[Sequence[Image]]) -> Condition:
        """Rows of prompts that may be encoded together, each with its images, if any."""

        def enter(texts: list[str], own: Sequence[Sequence[Image]]) -> Visit:
            return self.entrance.enter(len(texts), PROBE_GUIDANCE, prompts=texts, images=own, stop_at_network=True)

        with arithmetic(self.config.vae_precision):  # of reference images
            visit = enter(prompts, images)
        cond = self._learned().condition(visit.returned["encode_prompt"], len(prompts))
        if not images[0]:
            return cond
        self.images.learn(lambda batch: enter(prompts[:1] * batch, [images[0]] * batch))
        return Condition(cond.tensors | self.images.entries(visit, images))

    def require_frame(self, size: tuple[int, int]) -> None:
        self.images.require_frame(size)

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of a short prompt, where lengths differ."""
        self._learned()
        return {name: tuple(value[0].shape) for name, value in self._probe.tensors.items()}

    def free_text_encoders(self) -> None:
        self._learned()
        for name, part in self.pipeline.components.items():
            if name.startswith("text_encoder") and part is not None:
                setattr(self.pipeline, name, None)
        self._freed = True
        give_memory_back()

    def take_text_encoders(self, encoders: Mapping[str, nn.Module]) -> None:
        ModelAdapter.take_text_encoders(self, encoders)
        self._freed = False

    # ---- the network

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        self._learned()
        values = timestep.tolist()
        if len(cond) != len(x) or len(values) != len(x):
            raise ValueError(f"{len(x)} latents need as many timesteps and conditions: {len(values)}, {len(cond)}")
        groups = self._groups(values, cond)
        if len(groups) == 1:
            return self._forward(x, values, cond, guidance_scale)
        parts = [torch.tensor(group) for group in groups]
        outputs = [
            self._forward(x[rows.to(x.device)], [values[row] for row in rows], cond.index(rows), guidance_scale)
            for rows in parts
        ]
        return torch.cat(outputs)[torch.cat(parts).argsort().to(x.device)]

    def _groups(self, values: list[float], cond: Condition) -> list[list[int]]:
        """Rows that may share a forward: of one expert, and of one length if padding would be seen."""
        assert self._template is not None
        if self.family.singly:
            return [[row] for row in range(len(values))]
        result: dict[Any, list[int]] = {}
        for row, value in enumerate(values):
            expert = self._time(value)[0] if len(self.networks) > 1 else None
            text, seen = self._template.key(cond, row), self.images.key(cond, row)
            key = (expert, None if self._mixable else value, text, seen)
            result.setdefault(key, []).append(row)
        return list(result.values())

    def _forward(self, x: Tensor, values: list[float], cond: Condition, guidance_scale: float) -> Tensor:
        """One entry, pinned at the first timestep; the network gets the others by its own argument."""
        times = None
        if any(value != values[0] for value in values):
            times = torch.stack([self._time(value)[1] for value in values])
        given = {**self._answers(cond), "latents": x, "timesteps": self._pin([values[0]]), "times": times}
        with autocast(self.device, self.dtype, self.autocasts):
            visit = self.entrance.enter(len(x), guidance_scale, first=not self._entered, **given)
        prediction = None if visit.prediction is None else self.images.stepped(visit.prediction, self._shape)
        if prediction is None or prediction.shape != x.shape:
            raise ModelError(f"{self.kind}: its loop did not end in scheduler.step() with a prediction of {x.shape}")
        if not self._entered:
            latents = None if visit.latents is None else self.images.stepped(visit.latents, self._shape)
            if latents is None or not torch.equal(latents.to(self._loop_dtype), x.to(self._loop_dtype)):
                raise ModelError(f"{self.kind} changes the latents between prepare_latents() and scheduler.step()")
            self._entered = True
        return prediction if self.sign == 1 else -prediction

    def _pin(self, values: list[float]) -> Tensor:
        """Timesteps in the scheduler's type: whole numbers stay whole."""
        whole = not self._grid_dtype.is_floating_point and all(value.is_integer() for value in values)
        return torch.tensor(values, dtype=self._grid_dtype if whole else torch.float32, device=self.device)

    @torch.no_grad()
    def _time(self, value: float) -> tuple[str, Tensor]:
        """(component, its timestep input) at a timestep of the scheduler: read in the pipeline, rounding included."""
        if value not in self._times:
            x = torch.zeros(1, *self._shape, device=self.device)
            options = {"timesteps": self._pin([value]), "latents": x, "stop_at_network": True}
            visit = self.entrance.enter(1, PROBE_GUIDANCE, **self._answers(self._probe), **options)
            given = visit.inputs[self.reentry.time_arguments[visit.network]]
            fed = torch.as_tensor(given, device=self.device).flatten()
            if self.images.holds:
                fed = fed[fed != 0]  # the held part is clean
            if not bool((fed == fed[0]).all()):
                raise ModelError(f"{self.kind} feeds its network different timesteps within one sample")
            self._times[value] = (visit.network, fed[0])
        return self._times[value]

    @torch.no_grad()
    def _mixing_is_exact(self) -> bool:
        """Whether two samples at different timesteps give the same in one forward as alone; three forwards."""
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
        return bool(error <= (1e-4 if self.dtype == torch.float32 else 3e-2) * together.abs().max())

    def time_map(self) -> tuple[float, float]:
        """(slope, offset) of the network's timestep over the scheduler's, for the report."""
        self._learned()
        (_, low), (_, high) = self._time(200.0), self._time(700.0)
        slope = (float(high) - float(low)) / 500.0
        return slope, float(low) - 200.0 * slope

    def branches(self, guidance_scale: float) -> int:
        config = network_config(next(iter(self.networks.values())))
        if self.guidance in ("embedded", "none") or config.get("time_cond_proj_dim") is not None:
            return 1 + (self.call.fixed.get("true_cfg_scale", 1) > 1)
        return 1 + (guidance_scale > self.unguided)

    @property
    def takes_guidance(self) -> bool:
        embeds = network_config(next(iter(self.networks.values()))).get("guidance_embeds", True)
        given = self.guidance != "none" and (self.guidance != "embedded" or embeds)
        return given and super().takes_guidance

    def batch_key(self, step_index: int) -> int:
        self._learned()
        return 0 if self._mixable and len(self.networks) == 1 else step_index

    def text_lengths(self, cond: Condition) -> Tensor | None:
        rows = next((value for value in cond.tensors.values() if isinstance(value, list)), None)
        return None if rows is None else torch.tensor([len(row) for row in rows], dtype=torch.int64)

    # ---- images

    def decode_with_grad(self, latents: Tensor, cond: Condition | None = None) -> Tensor:
        """Images or videos by the pipeline's call without its loop; `cond` [B] where it holds a part of the video."""
        self._learned()
        if self.images.holds and cond is None:
            raise ValueError(f"{self.kind} holds a part of the video: decode(latents, cond) needs its conditions")
        alone = self.images.holds or self.family.singly or self.family.decode_singly
        rows = torch.arange(len(latents)).split(1 if alone else len(latents))
        blank_rows = self._probe.index(torch.zeros(len(latents), dtype=torch.int64))
        cond = cond if self.images.holds and cond is not None else blank_rows
        latents = latents.to(vae_dtype(self.config.vae_precision))
        return torch.cat([self._decode(latents[part.to(latents.device)], cond.index(part)) for part in rows])

    def _decode(self, latents: Tensor, cond: Condition) -> Tensor:
        options = {**self._answers(cond), "timesteps": self._pin([]), "output_type": "pt"}
        with arithmetic(self.config.vae_precision):
            visit = self.entrance.enter(len(latents), PROBE_GUIDANCE, latents=latents, keep_dtype=True, **options)
        output = visit.output[0] if isinstance(visit.output, tuple) else visit.output
        if not torch.is_tensor(output) or len(output) != len(latents):
            raise ModelError(f"{self.kind} decodes to {type(output).__name__}, not to one image or video per sample")
        images = opaque(output.float().clamp(0, 1))
        images = images[:, 0] if images.ndim == 5 and self.num_frames == 1 else images
        return images.contiguous() if self.config.memory.vae_channels_last else images

    def _read_packing(self) -> Packing:
        zero = torch.zeros(1, *self.latent_shape(), device=self.device)
        return read(self.pipeline, lambda x: self._decode(x, self._probe), zero, (self.height, self.width))

    @torch.no_grad()
    def encode_images(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        if self.num_frames > 1 or self.images.holds:
            return super().encode_images(images, noise)
        with self.entrance.explained("for given images"):
            if self._packing is None:
                self._packing = self._read_packing().checked(self.kind)
            return self._packing.encode(self.pipeline.vae, images, self.config.vae_precision, noise)

    @torch.no_grad()
    def source_of(self, image: Image) -> Tensor | None:
        options = {"answers": {"encode_prompt": self._learned().rebuild(self._probe)}, "stop_at_network": True}
        with self.entrance.explained("for an image that is edited"), arithmetic(self.config.vae_precision):
            enter = partial(self.entrance.enter, 1, PROBE_GUIDANCE, images=[[image]], **options)
            return self.images.source(enter, self.config.vae_precision)

    def to(self, device: torch.device) -> None:
        place(self.pipeline, self.config, device, autocasts=self.autocasts)
        self.device, self._packing = device, None
        self.reentry.forget()
        self.images.to(device)
        if self._template is not None:
            self._template.to(device)
            self._probe = self._probe.to(device)
            self._times.clear()


def _with_images(prompt: str, images: Sequence[Image]) -> str:
    """The prompt of an error about its images."""
    sizes = ", ".join(f"{image.width} x {image.height} px" for image in images)
    return f"with the {len(images)} image(s){sizes and f' ({sizes})'} of the prompt {prompt[:60]!r}"
