"""Whether a model's weights are whole: no tensor is missing, of another shape or cut off, and none holds NaN or inf.

diffusers leaves a missing tensor without memory and transformers draws it at random, both with a warning alone. NaN is
looked for only where an image was not finite: a pass over all weights takes seconds.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.models.lora_formats.reading import not_finite
from flowrl.models.weights.roles import full_tensor

_AGAIN = "copy or download the model again"


@contextmanager
def whole_weights() -> Iterator[None]:
    """Let `from_pretrained` of diffusers' and transformers' networks refuse weights that are not whole.

    Raises ModelError: with the file and the tensor.
    """
    from diffusers.models.modeling_utils import ModelMixin
    from transformers import PreTrainedModel

    with ExitStack() as stack:
        for kind, options in ((ModelMixin, {}), (PreTrainedModel, {"ignore_mismatched_sizes": True})):
            stack.enter_context(_asking(kind, options))
        yield


@contextmanager
def _asking(kind: Any, options: dict[str, Any]) -> Iterator[None]:
    """Let `kind.from_pretrained` look at what it has loaded, and with what it has failed."""
    own = kind.__dict__["from_pretrained"]

    def checked(cls: Any, *args: Any, output_loading_info: bool = False, **given: Any) -> Any:
        place = args[0] if args else given.get("pretrained_model_name_or_path")
        where = Path(str(place)) / (given.get("subfolder") or "")
        try:
            model, info = own.__func__(cls, *args, output_loading_info=True, **{**options, **given})
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            if where.is_dir():
                _explain(where, error)
            raise
        _require_whole(where, model, info)
        return (model, info) if output_loading_info else model

    kind.from_pretrained = classmethod(checked)
    try:
        yield
    finally:
        kind.from_pretrained = own


def _explain(folder: Path, error: Exception) -> None:
    """Raise ModelError where weights of a folder are the reason of an error."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as reason:
            raise ModelError(f"{file} is damaged ({str(reason).splitlines()[0]}); {_AGAIN}") from error
    # diffusers: "Cannot load  because NAME expected shape torch.Size([..]), but got torch.Size([..])."
    match = re.search(r"because (\S+) expected shape \S*?(\[.*?\])\S*, but got \S*?(\[.*?\])", str(error))
    if match is not None:
        raise ModelError(_other_shape(folder, *match.groups())) from error


def _other_shape(folder: Path, name: str, here: object, there: object) -> str:
    return (
        f"{_file_of(folder, name)}: the tensor {name} is {there}, and the configuration next to it asks for {here}; "
        f"{_AGAIN}"
    )


def _require_whole(folder: Path, model: nn.Module, info: dict[str, Any]) -> None:
    for name, there, here in sorted(info.get("mismatched_keys") or []):
        raise ModelError(_other_shape(folder, name, list(here), list(there)))
    # Buffers, such as tables of positions, are computed where a file has none.
    own = {name for name, _ in model.named_parameters()} | {
        name for name, part in model.named_buffers() if part.is_meta
    }
    missing = sorted(own & set(info.get("missing_keys") or []))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{_file_of(folder, '')} lacks the tensor {missing[0]}{more} of {type(model).__name__}; {_AGAIN}"
        )


def _file_of(folder: Path, name: str) -> str:
    """The file of a folder that holds a tensor; the folder's only or first file where none does."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="pt") as source:
                if name in source.keys():  # noqa: SIM118, it is no dict
                    return str(file)
        except (OSError, SafetensorError):
            continue
    return str(files[0] if len(files) == 1 else folder)


def spoiled_weights(parts: Iterable[tuple[str, Any]]) -> str | None:
    """The first tensor of (component, network) that holds NaN or inf, as a sentence; None where all are finite.

    What is no network is passed over.
    """
    for component, network in parts:
        if not isinstance(network, nn.Module):
            continue
        for given, value in network.state_dict().items():
            local = full_tensor(value) if isinstance(value, Tensor) else torch.empty(0)
            if not local.is_meta and (count := not_finite(local)):
                name, home = given.replace(".base_layer.", "."), _home(network)
                held = f" ({_file_of(home, name)})" if home is not None else ""
                return (
                    f"the weights themselves are not finite: {count} of the {local.numel()} values of "
                    f"{component}.{name}{held}; {_AGAIN}, or take an earlier state of what was trained"
                )
    return None


def _home(network: Any) -> Path | None:
    """The folder that a network was loaded from; None where it is not known."""
    from diffusers.models.modeling_utils import ModelMixin
    from transformers import PreTrainedModel

    name = network.name_or_path if isinstance(network, PreTrainedModel) else ""
    if isinstance(network, ModelMixin):
        name = network.config.get("_name_or_path")
    return Path(name) if name and Path(name).is_dir() else None


def require_finite(pipeline: Any, images: Tensor, texts: Sequence[str]) -> None:
    """Raise ModelError for an image of B, one a prompt, that is not finite, with the weights that are to blame."""
    for text, image in zip(texts, images, strict=True):
        if not bool(image.isfinite().all()):
            why = spoiled_weights(pipeline.components.items()) or (
                "its weights are finite; give it another dtype (float32 or bfloat16 instead of float16), or a smaller "
                "guidance scale"
            )
            raise ModelError(f"the model made an image with NaN for the prompt {text[:60]!r}: {why}")
