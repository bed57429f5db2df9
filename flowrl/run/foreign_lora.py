"""A LoRA file from elsewhere on a pipeline: the layouts that diffusers converts, and kohya's of SD3.

It is loaded by the pipeline's own `load_lora_weights`. Afterwards the adapted modules are counted: a file that binds to
none is refused, one that binds to a part is reported with what was left out.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flowrl.core.console import log
from flowrl.core.errors import ConfigError, ModelError
from flowrl.models.lora_formats.refused import other_update
from flowrl.models.weights import lora_file
from flowrl.run.kohya import PREFIX, from_kohya
from flowrl.run.origin import content

# The first tensor of each adapted module, in the forms that diffusers' own converters leave.
_FIRST = re.compile(r"(?:[._]lora[._](?:A|down)|\.lokr_w1(?:_a)?)(?:\.weight)?$")
# A LoKr as flowrl saves it.
_OWN_LOKR = re.compile(r"(?:unet|transformer(?:_2)?)\..+\.lokr_\w+$")
# In the name of a file of two experts: nothing inside says which of them it is for.
_EXPERT = re.compile(r"(high|low)[_-]?noise", re.IGNORECASE)
_PICKLES = {".bin", ".ckpt", ".pt", ".pth"}


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA on the disk and the factor of its update; 1 is the update as it was trained."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, word: str) -> LoraFile:
        """From FILE or FILE:SCALE, where FILE is a .safetensors or a folder that holds one.

        Raises:
            ConfigError: there is no such file, it is a pickle or a run folder, a folder holds none or several, or the
                scale is no finite number.
        """
        name, scale = word, 1.0
        if not Path(word).expanduser().exists() and ":" in word:
            name, _, factor = word.rpartition(":")
            try:
                scale = float(factor)
            except ValueError:
                name = word
        if not math.isfinite(scale):
            raise ConfigError(f"--lora {word}: the scale must be a finite number")
        return cls(_file(Path(name).expanduser(), word), scale)


def _file(path: Path, word: str) -> Path:
    """The .safetensors at a path; errors as of `LoraFile.parse`."""
    if (path / "config.yaml").is_file():
        raise ConfigError(f"--lora {word}: it is a run folder; give its LoRA, --lora {path / 'adapter'}")
    if path.suffix in _PICKLES:
        raise ConfigError(f"--lora {word}: pickles are not read; convert it to .safetensors")
    file = lora_file(path)
    if path.is_dir() and not file.is_file():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            found = "no .safetensors" if not files else f"{len(files)} of them: {', '.join(f.name for f in files[:3])}"
            raise ConfigError(f"--lora {word}: a folder with one LoRA file is needed, and this has {found}")
        file = files[0]
    if not file.is_file():
        remedy = "a hub id is not downloaded here: hf download OWNER/NAME --local-dir DIR, then --lora DIR"
        raise ConfigError(f"--lora {word}: there is no such file or folder; {remedy}")
    return file


def attach(pipeline: Any, lora: LoraFile, name: str) -> dict[str, Any]:
    """Load a LoRA into a pipeline next to the adapters that it has, all of them active; returns its plain facts.

    The facts: path, sha256, scale, `modules` of the file, `bound` of them on this model.

    Args:
        pipeline: a diffusers pipeline; changed in place.
        lora: file and scale.
        name: of the adapter in the pipeline; a new one for each file.

    Raises:
        ModelError: a damaged file, one without a LoRA, or one that binds to no module of this pipeline.
    """
    kind, file = type(pipeline).__name__, lora.path
    keys = _keys(file)
    before = {adapter for _, layer in _layers(pipeline) for adapter in layer.scaling}
    with _using(file, kind, keys):
        stems = _load(pipeline, file, keys, name)
    bound = {place for place, layer in _layers(pipeline) if name in layer.scaling}
    if not bound:
        raise ModelError(
            f"--lora {file}: it binds to none of the modules of {kind}; its tensors are for {_parts(keys)}. Give the "
            "base model that it was trained on"
        )
    for _, layer in _layers(pipeline):
        layer.set_adapter([each for each in (*sorted(before), name) if each in layer.scaling])
        if name in layer.scaling:
            layer.set_scale(name, lora.scale)
    if len(bound) < len(stems):
        left = sorted(stems - bound)
        shown = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        log.warning("--lora %s: only %d of its %d modules are bound: not %s", file, len(bound), len(stems), shown)
    facts: dict[str, Any] = {"path": str(file), "sha256": content(file).hexdigest(), "scale": lora.scale}
    return facts | {"modules": len(stems), "bound": len(bound)}


def _keys(file: Path) -> list[str]:
    """Names of a file's tensors; errors as of `attach`."""
    try:
        with safe_open(file, framework="pt") as source:
            keys = list(source.keys())
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"--lora {file} is damaged ({reason}); copy or download it again") from error
    if not any("lora" in key or "lokr" in key for key in keys):
        raise ModelError(
            f"--lora {file} holds no LoRA: {len(keys)} tensors, such as {(keys or ['none'])[0]}; a whole model is the "
            "MODEL itself"
        )
    return keys


def _parts(keys: list[str]) -> str:
    """The first parts of tensor names, which say what a LoRA is for."""
    return ", ".join(sorted({re.split(r"[._]", key, maxsplit=1)[0] for key in keys})[:4])


def _load(pipeline: Any, file: Path, keys: list[str], name: str) -> set[str]:
    """Load it; the modules that it names, as `component.module`."""
    from diffusers.loaders.lora_base import LoraBaseMixin

    # diffusers' pipelines ask for 'lora' in every name, which its networks' own loader does not.
    if not isinstance(pipeline, LoraBaseMixin) or all(_OWN_LOKR.match(key) for key in keys):
        return _load_into_denoisers(pipeline, file, keys, name)
    source: Any = pipeline
    where: dict[str, Any] = {"weight_name": file.name, "local_files_only": True}
    if any(key.startswith(PREFIX) for key in keys):
        with safe_open(file, framework="pt") as tensors:
            given: Any = _from_kohya(file, {key: tensors.get_tensor(key) for key in keys})
        where, converted = {}, given
    else:
        given = str(file.parent)
        converted = source.lora_state_dict(given, **where)
    two, mark = source.components.get("transformer_2") is not None, _EXPERT.search(file.stem)
    low = two and mark is not None and mark[1].lower() == "low"
    source.load_lora_weights(given, adapter_name=name, **where, **({"load_into_transformer_2": True} if low else {}))
    state: dict[str, Tensor] = converted[0] if isinstance(converted, tuple) else converted
    modules = _modules(state)
    if low:
        return _of_second(modules)
    if two and mark is None:
        modules |= _load_second(source, file, name)
    return modules


def _load_second(source: Any, file: Path, name: str) -> set[str]:
    """Load the second expert's file, which diffusers' layout has in a folder of its own; its modules."""
    expert = file.parent / "transformer_2" / file.name
    if not expert.is_file():
        log.warning(
            "--lora %s: the expert of high noise alone has it now; give the other one's file too, NAME_low_noise", file
        )
        return set()
    source.load_lora_weights(
        str(expert.parent),
        weight_name=file.name,
        local_files_only=True,
        adapter_name=name,
        load_into_transformer_2=True,
    )
    return _of_second(_modules(dict.fromkeys(_keys(expert))))


def _of_second(modules: set[str]) -> set[str]:
    """Modules of the second expert, whose file has them under the first one's name."""
    return {f"transformer_2.{place.partition('.')[2]}" for place in modules}


def _from_kohya(file: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        return from_kohya(tensors)
    except ModelError as error:
        raise ModelError(f"--lora {file} {other_update(list(tensors)) or f'does not fit: {error}'}") from error


def _load_into_denoisers(pipeline: Any, file: Path, keys: list[str], name: str) -> set[str]:
    """For a pipeline without `load_lora_weights`, and a LoKr: diffusers' layout, `component.module.lora_A.weight`."""
    from diffusers.loaders.peft import PeftAdapterMixin

    for component, network in pipeline.components.items():
        if isinstance(network, PeftAdapterMixin) and any(key.startswith(f"{component}.") for key in keys):
            network.load_lora_adapter(str(file.parent), prefix=component, weight_name=file.name, adapter_name=name)
    modules = _modules(dict.fromkeys(keys))
    second, expert = pipeline.components.get("transformer_2"), file.parent / "transformer_2" / file.name
    if isinstance(second, PeftAdapterMixin) and expert.is_file():
        second.load_lora_adapter(str(expert.parent), prefix="transformer", weight_name=file.name, adapter_name=name)
        modules |= _of_second(_modules(dict.fromkeys(_keys(expert))))
    return modules


def _modules(state: dict[str, Any]) -> set[str]:
    """Adapted modules of a converted LoRA, as `component.module`."""
    firsts = (key for key in state if _FIRST.search(key))
    return {_FIRST.sub("", key).replace(".processor", "") for key in firsts}


def _layers(pipeline: Any) -> Iterator[tuple[str, Any]]:
    """(`component.module`, layer) of all adapted modules of a pipeline."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for component, network in pipeline.components.items():
        if isinstance(network, nn.Module):
            for place, module in network.named_modules():
                if isinstance(module, BaseTunerLayer):
                    yield f"{component}.{place}", module


@contextmanager
def _using(file: Path, kind: str, keys: list[str]) -> Iterator[None]:
    """One ModelError for all that a file which does not fit may raise, and no messages of the library beside it."""
    from diffusers.utils import logging as messages

    before = messages.get_verbosity()
    messages.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of a second adapter, which is what was asked for
            yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    # Each family's converter of foreign layouts fails in its own way on a file of another family or another kind.
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        if (known := other_update(keys)) is not None:
            raise ModelError(f"--lora {file} {known}; {kind} has no loader for it in this layout") from error
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
        raise ModelError(
            f"--lora {file} does not fit {kind} ({type(error).__name__}: {reason[:300]}); give the base model that it "
            "was trained on, or the file in diffusers' or kohya's layout"
        ) from error
    finally:
        messages.set_verbosity(before)
