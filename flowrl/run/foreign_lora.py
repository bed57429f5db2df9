"""A LoRA file from elsewhere on a pipeline: names of linear layers in any layout, and whatever diffusers converts.

The factor of each module, from wherever its program wrote it, goes into its B; then the pipeline's own
`load_lora_weights` takes it. Afterwards the adapted modules are counted: a file that binds to none is refused, one that
binds to a part is reported with what was left out.
"""

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
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.files import file_sha256
from flowrl.display.console import log
from flowrl.models.lora_formats.files import PICKLES, lora_file
from flowrl.models.lora_formats.naming import to_diffusers
from flowrl.models.lora_formats.reading import names_and_header, other_update, read_contents, read_finite, refuse_header

# The first tensor of each adapted module, in the forms that diffusers' own converters leave.
_FIRST = re.compile(r"(?:[._]lora[._](?:A|down)|\.lokr_w1(?:_a)?)(?:\.weight)?$")
# A LoKr as flowrl saves it.
_OWN_LOKR = re.compile(r"(?:unet|transformer(?:_2)?)\..+\.lokr_\w+$")
# In the name of a file of two experts: nothing inside says which of them it is for.
_EXPERT = re.compile(r"(high|low)[_-]?noise", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA on the disk and the factor of its update; 1 is the update as it was trained."""

    path: Path
    scale: float = 1.0

    @classmethod
    def parse(cls, word: str) -> "LoraFile":
        """From FILE or FILE:SCALE, where FILE is a .safetensors or a folder that holds one.

        Raises ConfigError: there is no such file, it is a pickle or a run folder, a folder holds none or several, or
        the scale is no finite number.
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
    if path.suffix in PICKLES:
        raise ConfigError(f"--lora {word}: pickles are not read; convert it to .safetensors")
    file = lora_file(path)
    for part in ("transformer", "unet"):  # Flow-Factory: a folder of PEFT for each network
        if not file.is_file() and lora_file(path / part).is_file():
            file = lora_file(path / part)
    if (path / "adapter_model.bin").is_file() and not file.is_file():
        raise ConfigError(
            f"--lora {word}: adapter_model.bin is a pickle, which is not read; convert it to .safetensors"
        )
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

    The facts: path, sha256, scale, `modules` of the file, `bound` of them on this model. The diffusers pipeline is
    changed in place; `name` is that of the adapter in it, a new one for each file.

    Raises ModelError: a damaged file, one without a LoRA, or one that binds to no module of this pipeline.
    """
    kind, file = type(pipeline).__name__, lora.path
    keys = _keys(file)
    before = {adapter for _, layer in _layers(pipeline) for adapter in layer.scaling}
    with _using(file, kind, keys):
        stems = _load(pipeline, file, name)
    bound = {place for place, layer in _layers(pipeline) if name in layer.scaling}
    if not bound:
        bare = [key.removeprefix("base_model.model.") for key in keys]
        parts = ", ".join(sorted({re.split(r"[._]", key, maxsplit=1)[0] for key in bare})[:4])
        raise ModelError(
            f"--lora {file}: it binds to none of the modules of {kind}; its tensors are for {parts}. Give the base "
            "model that it was trained on"
        )
    for _, layer in _layers(pipeline):
        layer.set_adapter([each for each in (*sorted(before), name) if each in layer.scaling])
        if name in layer.scaling:
            # Of a LoRA the file's own factor is in B: diffusers' alphas of several ranks do not reach every layer.
            layer.set_scale(name, lora.scale) if _is_lokr(keys) else layer.scaling.update({name: lora.scale})
    if len(bound) < len(stems):
        left = sorted(stems - bound)
        shown = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        log.warning("--lora %s: only %d of its %d modules are bound: not %s", file, len(bound), len(stems), shown)
    facts: dict[str, Any] = {"path": str(file), "sha256": file_sha256(file), "scale": lora.scale}
    return facts | {"modules": len(stems), "bound": len(bound)}


def _keys(file: Path) -> list[str]:
    """Names of a file's tensors; errors as of `attach`."""
    keys, _ = names_and_header(file, f"--lora {file}")
    if not any("lora" in key or "lokr" in key for key in keys):
        raise ModelError(
            f"--lora {file} holds no LoRA: {len(keys)} tensors, such as {(keys or ['none'])[0]}; a whole model is the "
            "MODEL itself"
        )
    return keys


def _is_lokr(keys: list[str]) -> bool:
    return any(".lokr_" in key for key in keys)


def _load(pipeline: Any, file: Path, name: str) -> set[str]:
    """Load a file, with that of the second expert beside it; the modules that they name, as `component.module`."""
    two, mark = pipeline.components.get("transformer_2") is not None, _EXPERT.search(file.stem)
    low = two and (file.parent.name == "transformer_2" if mark is None else mark[1].lower() == "low")
    modules = _load_one(pipeline, file, name, second=low)
    if not two or low or mark is not None:
        return modules
    # diffusers and Flow-Factory have the second expert's file in a folder of its own.
    beside = file.parent.parent if file.parent.name == "transformer" else file.parent
    expert = beside / "transformer_2" / file.name
    if expert.is_file():
        return modules | _load_one(pipeline, expert, name, second=True)
    log.warning(
        "--lora %s: the expert of high noise alone has it now; give the other one's file too, NAME_low_noise", file
    )
    return modules


def _load_one(pipeline: Any, file: Path, name: str, *, second: bool) -> set[str]:
    """Load one file, into the second expert, or by the names in it; the modules that it names."""
    from diffusers.loaders.lora_base import LoraBaseMixin
    from diffusers.loaders.peft import PeftAdapterMixin

    loader: Any = pipeline
    keys, where, parts = _keys(file), dict[str, Any](), loader.components
    if lokr := _is_lokr(keys):  # diffusers reads it with its header, so from the disk
        read_finite(file, f"--lora {file}")
        tensors, where = dict.fromkeys(keys), {"weight_name": file.name, "local_files_only": True}
    else:
        tensors = _tensors(pipeline, file)

    def given() -> Any:  # a dict anew, since diffusers empties it
        return str(file.parent) if lokr else dict(tensors)

    # diffusers' pipelines ask for 'lora' in every name, which its networks' own loader does not.
    if isinstance(pipeline, LoraBaseMixin) and not (lokr and all(_OWN_LOKR.match(key) for key in keys)):
        converted: Any = loader.lora_state_dict(given(), **where)
        loader.load_lora_weights(
            given(), adapter_name=name, **where, **({"load_into_transformer_2": True} if second else {})
        )
        modules = _modules(converted[0] if isinstance(converted, tuple) else converted)
    else:
        networks = {"transformer": parts["transformer_2"]} if second else parts
        for prefix, network in networks.items():
            if isinstance(network, PeftAdapterMixin) and any(key.startswith(f"{prefix}.") for key in tensors):
                network.load_lora_adapter(given(), prefix=prefix, adapter_name=name, **where)
        modules = _modules(tensors)
    # The second expert's file has its modules under the first one's name.
    return {f"transformer_2.{place.partition('.')[2]}" for place in modules} if second else modules


def _tensors(pipeline: Any, file: Path) -> dict[str, Tensor]:
    """The tensors of a file as diffusers' loader takes them, whose scale is 1; errors as of `attach`."""
    component = "unet" if "unet" in pipeline.components else "transformer"
    contents = read_contents(file, f"--lora {file}", component)
    reason = refuse_header(names_and_header(file, f"--lora {file}")[1])
    if reason is None and any("dora_scale" in key for key in contents.tensors):
        reason = other_update(list(contents.tensors))  # diffusers leaves the norms out
    if reason is not None:
        raise ModelError(f"--lora {file} {reason}")
    network = pipeline.components.get(component)
    own = to_diffusers(contents, network, component) if isinstance(network, nn.Module) else None
    return contents.folded() if own is None else own


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
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = next((line for line in lines if line.startswith("size mismatch")), lines[0])
        raise ModelError(
            f"--lora {file} does not fit {kind} ({type(error).__name__}: {reason[:300]}); give the base model that it "
            "was trained on, or the file in diffusers' or kohya's layout"
        ) from error
    finally:
        messages.set_verbosity(before)
