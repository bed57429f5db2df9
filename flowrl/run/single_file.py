"""A single .safetensors checkpoint as a pipeline, by diffusers' `from_single_file`.

Its family is known by the file's keys, where diffusers knows them. Tokenizers, schedulers and configurations are not in
such a file, and often neither are text encoders and VAE: they come from a folder or hub repository of the same family.
`assets/model_configs` has no tokenizers, so it tells the pipeline's class alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from flowrl.core.errors import ModelError
from flowrl.models.pipelines.classes import pipeline_class
from flowrl.models.pipelines.paths import loading, pipeline_index, resolve_path

_HELD = {
    "vae": ("first_stage_model.", "vae.", "decoder.", "encoder."),
    "CLIP": ("cond_stage_model.", "conditioner.", "text_encoders.clip_"),
    "T5": ("text_encoders.t5xxl.",),
}
"""How the names of a part's tensors begin in a file that holds it."""
_REMEDY = (
    "give --config DIR, a pipeline folder of its family (model_index.json, tokenizers, configurations, and the weights "
    "that the file lacks)"
)


def load(file: Path, config: str | None, dtype: torch.dtype) -> Any:
    """The pipeline of a checkpoint.

    The file has the layout of its authors, or diffusers' keys of one denoiser. `config`: folder, asset or hub id of its
    family; None: what diffusers knows for its keys. `dtype`: of all networks.

    Raises ModelError: a damaged file, a LoRA, an unknown family, or parts that are found nowhere.
    """
    shapes = _shapes(file)
    if any(".lora_" in key or key.startswith("lora_") for key in shapes):
        raise ModelError(f"{str(file)!r} is a LoRA and no model: give its base model, with --lora {file}")
    source = config or _family(file, shapes)
    kind = _kind(file, source)
    with _told(file, kind, source):
        return _load(file, source, kind, shapes, dtype)


def _load(file: Path, source: str, kind: str, shapes: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    import diffusers
    import transformers
    from huggingface_hub.constants import HF_HUB_OFFLINE

    path = Path(resolve_path(source))
    parts: dict[str, Any] = {}
    for name, (library, class_name) in _networks(path).items():
        if library is None:
            parts[name] = None
        elif path.is_dir():
            part = next((part for part in ("CLIP", "T5") if class_name.startswith(part)), name)
            if not any(key.startswith(_HELD.get(part, ())) for key in shapes):  # the file does not hold it
                # diffusers takes few of these from the folder by itself.
                made: Any = getattr(diffusers if library == "diffusers" else transformers, class_name)
                parts[name] = made.from_pretrained(path / name, dtype=dtype)
    pipeline: Any = getattr(diffusers, kind)
    return pipeline.from_single_file(str(file), config=str(path), dtype=dtype, local_files_only=HF_HUB_OFFLINE, **parts)


def _networks(folder: Path) -> dict[str, tuple[str | None, str]]:
    """(library, class) of a pipeline folder's networks except its denoisers; (None, "") of parts that it leaves out."""
    listed = {name: value for name, value in pipeline_index(folder).items() if isinstance(value, list)}
    others = ("Tokenizer", "Processor", "Scheduler", "FeatureExtractor", "SafetyChecker")
    return {
        name: (library, class_name or "")
        for name, (library, class_name) in listed.items()
        if not name.startswith(("transformer", "unet")) and not any(word in (class_name or "") for word in others)
    }


def _shapes(file: Path) -> dict[str, torch.Tensor]:
    """Tensors without storage by name; errors as of `load`."""
    try:
        with safe_open(file, framework="pt") as source:
            names = list(source.keys())
            return {name: torch.empty(source.get_slice(name).get_shape(), device="meta") for name in names}
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{str(file)!r} is damaged ({reason}); copy or download it again") from error


def _family(file: Path, shapes: dict[str, torch.Tensor]) -> str:
    """The repository that diffusers takes for a file with these keys. Raises ModelError: keys of no known family."""
    from diffusers.loaders import single_file_utils as known

    unknown = ModelError(
        f"{str(file)!r}: the family of this checkpoint is not known from its {len(shapes)} keys, such as "
        f"{min(shapes, default='none')!r}; {_REMEDY}"
    )
    try:
        family = known.infer_diffusers_model_type(shapes)
    # It looks into other tensors of the family that the first key belongs to.
    except (KeyError, IndexError, ValueError, UnboundLocalError, NotImplementedError, RuntimeError) as error:
        raise unknown from error
    # What it says of keys that it does not know.
    if family == "v1" and known.CHECKPOINT_KEY_NAMES["v1"] not in shapes:
        raise unknown
    return known.DIFFUSERS_DEFAULT_PIPELINE_PATHS[family]["pretrained_model_name_or_path"]


def _kind(file: Path, source: str) -> str:
    """Name of the pipeline's class of a folder or hub id; errors as of `load`."""
    import diffusers
    from diffusers.loaders.single_file import FromSingleFileMixin

    try:
        kind = pipeline_class(source)
    except ModelError as error:
        raise ModelError(
            f"{str(file)!r}: its family is that of {source}, which is out of reach ({error}); {_REMEDY}"
        ) from error
    if not issubclass(getattr(diffusers, kind, object), FromSingleFileMixin):
        raise ModelError(f"{str(file)!r}: {kind}, the class of {source}, reads no single files; convert it to a folder")
    return kind


@contextmanager
def _told(file: Path, kind: str, source: str) -> Iterator[None]:
    """One ModelError for parts that are missing or do not fit."""
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    try:
        with loading("model", str(file)):
            yield
    except torch.OutOfMemoryError:
        raise
    # Each family's converter fails in its own way on a file of another family.
    except (ModelError, SingleFileComponentError, KeyError, IndexError, TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise ModelError(f"{str(file)!r} as {kind} with the parts of {source}: {reason}; {_REMEDY}") from error
