"""`model.memory`: savings of device memory by the libraries' own switches. Applied in models/memory/savings.py."""

from dataclasses import dataclass, field
from typing import Literal

from flowrl.core.errors import OptionError

Checkpointing = bool | Literal["auto"] | int
OFFLOADED = ("text_encoders", "vae")
_DENOISER = ("denoiser", "network", "transformer", "transformer_2", "unet")


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Each option alone; none changes a run that leaves it out."""

    vae_slicing: bool = False
    """Decode the images of a batch one by one: the same images."""
    vae_tiling: bool = False
    """Decode a large image in overlapping tiles: nearly the same image, blended where tiles meet."""
    vae_checkpointing: bool = False
    """Where a reward's gradient goes through the decoder: recompute the activations of its units, for less memory."""
    vae_channels_last: bool = False
    """Keep the VAE's weights and activations with the channels last: faster convolutions of images, other rounding."""
    layerwise_casting: Literal["float8_e4m3fn", "float8_e5m2"] | None = None
    """Store the denoiser's frozen linear weights in 8 bits, without scales; each is cast up for its forward."""
    quantize: Literal["int8", "nf4"] | None = None
    """Load the denoiser's frozen linear weights in 8 bits (torchao, a scale per row) or 4 (bitsandbytes, per 64)."""
    group_offload: list[str] = field(default_factory=list)
    """Components kept in host memory, on the device leaf by leaf for their forward: text_encoders, vae."""

    def __post_init__(self) -> None:
        if self.layerwise_casting is not None and self.quantize is not None:
            raise OptionError(
                f"layerwise_casting={self.layerwise_casting} and quantize={self.quantize} both store the same weights",
                [{"layerwise_casting": None}, {"quantize": None}],
            )
        for part in self.group_offload:
            if part in _DENOISER:
                raise OptionError(
                    f"group_offload has {part!r}: its weights would leave the device after each forward, while the "
                    "backward pass and the optimizer still need them there; gradient_checkpointing, layerwise_casting "
                    "and quantize save memory of the denoiser",
                    {"group_offload": [name for name in self.group_offload if name in OFFLOADED]},
                )
            if part not in OFFLOADED:
                raise ValueError(f"group_offload has {part!r}; there are: {', '.join(OFFLOADED)}")

    @property
    def few_bits(self) -> dict[str, str]:
        """The options that store weights in few bits, without those that are null."""
        both = {"layerwise_casting": self.layerwise_casting, "quantize": self.quantize}
        return {name: value for name, value in both.items() if value is not None}


def require_stored(settings: MemorySettings, kind: str | None, *, shard: bool, compiled: bool) -> None:
    """Refuse frozen weights that are stored in another way than the other options read or train them.

    `kind`: of the LoRA; None: all weights are trained.

    Raises OptionError: naming both options.
    """
    for name, value in settings.few_bits.items():
        if kind is None:
            raise OptionError(
                f"memory.{name}={value} needs lora: full fine-tuning trains these weights, and steps smaller than "
                "their spacing would be lost",
                [{"lora": {}}, {f"memory.{name}": None}],
            )
        if shard:
            raise OptionError(
                f"shard=true with memory.{name}={value}: FSDP2 gathers weights as they are stored, and these change "
                "their type in each layer",
                [{"shard": False}, {f"memory.{name}": None}],
            )
    if kind in (None, "lora", "rslora"):
        return
    others = {f"memory.{name}={value}": True for name, value in settings.few_bits.items()}
    for option, on in (others | {"shard=true": shard, "compile=blocks": compiled}).items():
        if on:
            raise OptionError(
                f"lora.kind={kind} with {option}: peft's layer of this kind reads the frozen weight itself, in its own "
                "shape and type",
                [{"lora.kind": "lora"}, {"lora.kind": "rslora"}],
            )


def require_own_call(shard: bool, gradient: str, vae_precision: str) -> None:
    """Raise OptionError for what a pipeline's own call does not do: run in step, detach a branch, report overflow."""
    if shard:
        raise OptionError(
            "shard=true: the pipeline's own call does not run in step on all processes; that of native adapters (sd, "
            "sdxl, sd3, flux, qwen_image, wan) does",
            {"shard": False},
        )
    if gradient != "both":
        raise OptionError(
            f"guidance_gradient={gradient}: guidance is inside the pipeline's own call, which evaluates both branches "
            "as it likes; native adapters (sd, sdxl, sd3, flux, qwen_image, wan) do not",
            {"guidance_gradient": "both"},
        )
    if vae_precision == "float16":
        raise OptionError(
            "vae_precision=float16: the pipeline's own call clamps its images, so a value that overflows would become "
            "white or black in silence; a family's native adapter reports it",
            [{"vae_precision": "bfloat16"}, {"vae_precision": "tf32"}],
        )
