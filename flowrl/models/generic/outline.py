"""The generic adapter without weights: shapes, steps and memory from a pipeline's JSON files and its own code.

The pipeline's call is entered as with weights (models/generic/reentry.py), up to the first call of its network. What
encodes prompts and images is replaced by stand-ins (models/generic/stand_ins.py), and so are tokenizers and processors
that are not in the folder. The network and the VAE are on the meta device and take fake tensors only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # there is no public name
from torch.overrides import TorchFunctionMode

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition
from flowrl.diffusion.schedules import Schedule
from flowrl.models.generic.adapter import Config, Generic
from flowrl.models.generic.encoding import LONG
from flowrl.models.generic.entrance import PROBE_STEPS
from flowrl.models.generic.images import CONTENT, LAYOUT
from flowrl.models.generic.reentry import replaced
from flowrl.models.generic.stand_ins import LONGEST, Encoded, Pixels, Reader, Seen, StandIn, tokenizer
from flowrl.models.pipelines.loading import meta_pipeline

_INVERSIONS = (torch.Tensor.__invert__, torch.Tensor.bitwise_not, torch.bitwise_not)
_GATHERS = (torch.Tensor.__getitem__,)
_TESTS = (torch.all, torch.Tensor.all)


class FullMasks(TorchFunctionMode):
    """Inside, a mask of fake tensors picks everything, its inverse nothing, and `torch.all` of one is true.

    HunyuanVideo 1.5 gathers the valid tokens of its texts before the others. How many are valid is a value, which fake
    tensors have not; all of them together are as many, so shapes, operations and bytes are those of a real forward.
    """

    def __init__(self) -> None:
        super().__init__()
        # By identity, and kept, so that no other tensor takes the place of one.
        self._inverse: dict[int, Tensor] = {}
        self._true: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0] if args else None
        if not isinstance(first, FakeTensor):
            return func(*args, **(kwargs or {}))
        if func in _GATHERS and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            mask = args[1]
            flat = first.flatten(0, mask.ndim - 1)
            return flat[:0] if id(mask) in self._inverse else flat
        if func is torch.Tensor.__bool__ and id(first) in self._true:
            return True
        result = func(*args, **(kwargs or {}))
        if func in _INVERSIONS and first.dtype == torch.bool:
            self._inverse[id(result)] = result
        elif func in _TESTS:
            self._true[id(result)] = result
        return result


_SEEING: dict[str, Any] = {"vae": Encoded, "image_encoder": Seen, "image_processor": lambda _: Pixels()}


class Unmeasurable(Exception):
    """Work that fake tensors cannot do, with the reason."""


class Outline(Generic):
    """Shapes, schedule, LoRA targets and, on fake tensors, `predict` and `decode`; it encodes no prompt.

    Raises ModelError: the pipeline's own code needs more than its configuration.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        pipeline = meta_pipeline(folder, config, kind=config.pipeline or "")
        self.text_tokens: dict[str, int] = {}
        self._folder = folder
        with self._standing_in(pipeline):
            Generic.__init__(self, pipeline, config)
            try:
                with _seeing(pipeline):
                    self._learned()
                    # If prompts have their own lengths, a plan assumes long ones.
                    self._encoded = self._encode([LONG], [self._probe_images(LONG)])
                    self._middle = float(Generic.schedule(self, PROBE_STEPS).timesteps[1])
                kept = self._encoded.tensors
                self._numbers = {name: int(kept[name][0]) for name in (LAYOUT, CONTENT) if name in kept}
            except NotImplementedError as error:
                raise ModelError(f"{self.kind}: {str(error).splitlines()[0]}") from error

    @contextmanager
    def _standing_in(self, pipeline: Any) -> Iterator[None]:
        """The pipeline with stand-ins for text encoders and tokenizers; past its own record of its components."""
        from transformers import PreTrainedModel

        before = {name: part for name, part in vars(pipeline).items() if name.startswith(("text_encoder", "tokenizer"))}
        encoders = {name: part for name, part in before.items() if isinstance(part, PreTrainedModel)}
        made: dict[str, Any] = {name: StandIn(part, name, self.text_tokens) for name, part in encoders.items()}
        for name in before.keys() - encoders.keys():
            encoder = encoders.get(name.replace("tokenizer", "text_encoder"))
            if name.startswith("tokenizer") and encoder is not None:
                made[name] = tokenizer(self._folder / name, encoder.config)
        if vars(pipeline).get("processor", pipeline) is None:  # has no files
            made["processor"] = Reader(LONGEST)
        with replaced(pipeline, made):
            if "tokenizer_max_length" in vars(pipeline) and "tokenizer" in made:
                pipeline.tokenizer_max_length = made["tokenizer"].model_max_length
            yield

    def schedule(self, num_inference_steps: int) -> Schedule:
        with self._standing_in(self.pipeline), _seeing(self.pipeline):
            return Generic.schedule(self, num_inference_steps)

    def _stepped(self, latents: Tensor, timestep: float) -> Tensor:
        with _passed_through(self.networks.values()):  # its prediction does not matter here
            return super()._stepped(latents, timestep)

    def _mixing_is_exact(self) -> bool:
        return True  # not measurable without weights; a plan counts forwards of whole batches

    def blank_condition(self, batch: int) -> Condition:
        """Embeddings of `batch` prompts without values; the numbers of their images have theirs."""
        entries: dict[str, Tensor | list[Tensor]] = {}
        for name, value in self._encoded.tensors.items():
            if isinstance(value, list):
                entries[name] = [torch.empty_like(value[0]) for _ in range(batch)]
            elif name in self._numbers:
                entries[name] = torch.tensor([self._numbers[name]] * batch)
            else:
                entries[name] = value.new_empty(batch, *value.shape[1:])
        return Condition(entries)

    def encoder_tokens(self, name: str, encoder: nn.Module) -> int:
        return self.text_tokens[name]

    def condition_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value[0].shape) for name, value in self._encoded.tensors.items()}

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        """The prediction at a timestep in the middle of the grid, since fake tensors have no values."""
        self._entered = True
        with self._measurable():
            return self._forward(x, [self._middle] * len(x), cond, guidance_scale)

    def decode_with_grad(self, latents: Tensor, cond: Condition | None = None) -> Tensor:
        held = self.blank_condition(len(latents)) if self.decodes_with_cond else None
        with self._measurable():
            return Generic.decode_with_grad(self, latents, held)

    def encode_images(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        with self._measurable():
            return self._read_packing().encode(self.pipeline.vae, images, self.config.vae_precision, noise)

    @contextmanager
    def _measurable(self) -> Iterator[None]:
        self.reentry.forget()
        try:
            with FullMasks():
                yield
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise Unmeasurable(f"{self.kind} on tensors without values: {type(error).__name__}: {reason}") from error


def _seeing(pipeline: Any) -> AbstractContextManager[None]:
    """The pipeline with stand-ins for what encodes images."""
    parts = vars(pipeline)
    names = ("vae",) if parts.get("image_encoder") is None else ("vae", "image_encoder", "image_processor")
    return replaced(pipeline, {name: _SEEING[name](parts[name]) for name in names if name in parts})


@contextmanager
def _passed_through(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Networks that return their first argument."""
    changed = list(networks)
    for network in changed:
        network.forward = lambda *args, **kwargs: (next(iter((*args, *kwargs.values()))),)
    try:
        yield
    finally:
        for network in changed:
            del network.forward
