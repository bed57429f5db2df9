"""A pipeline by its path: with its weights, or on the meta device from its JSON files alone."""

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.core.errors import ModelError
from flowrl.core.registry import suggest
from flowrl.core.startup import imports
from flowrl.models._vae import cast_vae, vae_dtype
from flowrl.models.base import ModelConfig, torch_dtype
from flowrl.models.memory.savings import check_available, quantization
from flowrl.models.pipelines.paths import lacks, loading, null_components, pipeline_index, require_folder, resolve_path


def without_bars() -> None:
    """Leave out the libraries' own bars, which would drown the messages of flowrl."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


@imports()
def quiet_diffusers(name: str) -> Any:
    """A class of diffusers; loading takes seconds, and shows no bars."""
    import diffusers

    without_bars()
    return _class(diffusers, name)


def require_pipeline_class(name: str) -> None:
    """Raise ModelError unless model.pipeline is a class of diffusers."""
    import diffusers

    known = [kind for kind in dir(diffusers) if kind.endswith("Pipeline")]
    if name not in known:
        raise ModelError(
            f"model.pipeline={name!r} is no pipeline of diffusers; {suggest(name, known)}null takes the class that the "
            "checkpoint names"
        )


def load_pipeline(
    pipeline_name: str, vae_name: str, config: ModelConfig, *, named: bool = True, **components: object
) -> Any:
    """The configured pipeline of a class of diffusers, by `from_pretrained` or `from_single_file`, with its VAE.

    A folder has to name that class if it is `named`. Null components of it are passed as None. The VAE has the type of
    `model.vae_precision`, not of `model.dtype`: half precision shifts scores.
    """
    require_folder(config.path, pipeline_name if named else None)
    pipeline_class = quiet_diffusers(pipeline_name)
    check_available(config)
    path, dtype = resolve_path(config.path), torch_dtype(config.dtype)
    options: dict[str, object] = {"dtype": dtype, **null_components(path), **components}
    if config.vae is not None:
        with loading("model.vae", config.vae):
            options["vae"] = quiet_diffusers(vae_name).from_pretrained(config.vae, dtype=dtype)
    with loading("model.path", config.path):
        options |= quantization(pipeline_class, path, config)
        if path.endswith(".safetensors"):
            if config.revision or config.variant:
                raise ModelError("model.revision and model.variant belong to a hub id, not to a single file")
            pipeline = pipeline_class.from_single_file(path, **options)
        else:
            pipeline = pipeline_class.from_pretrained(path, revision=config.revision, variant=config.variant, **options)
    for name in ("vae", "scheduler"):
        if name in pipeline.components and pipeline.components[name] is None:
            raise ModelError(lacks(type(pipeline).__name__, name))
    pipeline.set_progress_bar_config(disable=True)
    cast_vae(pipeline, config.vae_precision)
    return pipeline


@imports()
def meta_pipeline(
    folder: Path,
    config: ModelConfig,
    *,
    kind: str = "",
    absent: Collection[str] = (),
    device: torch.device | str = "meta",
) -> Any:
    """A folder's pipeline on the meta device: every network by its configuration, no weights, no tokenizers.

    The folder has model_index.json and the components' JSON files; `config` gives the types of the VAE and of all other
    networks, and its path is not read. `kind`: name of the pipeline's class; empty: the one that the folder names.
    `absent` components are left out. `device`: of the denoisers and the VAE; on any but meta they have the values that
    their classes begin with.

    Raises ModelError: a class of neither diffusers nor transformers.
    """
    import diffusers
    import transformers

    index, dtypes = pipeline_index(folder), {"vae": vae_dtype(config.vae_precision)}
    pipeline_class = _class(diffusers, kind or index["_class_name"])
    accepted = inspect.signature(pipeline_class.__init__).parameters
    parts: dict[str, Any] = {}
    for name, value in index.items():
        if name not in accepted:
            continue
        if not isinstance(value, list):
            parts[name] = value  # an option of the pipeline, such as boundary_ratio
            continue
        library, class_name = value
        # The safety checker is in neither library's own list, and never run.
        if library is None or name in (*absent, "safety_checker"):
            parts[name] = None
            continue
        part_class = _class(diffusers if library == "diffusers" else transformers, class_name)
        parts[name] = _part(part_class, folder / name, dtypes.get(name, torch_dtype(config.dtype)), device)
    pipeline = pipeline_class(**parts)
    pipeline.register_to_config(_name_or_path=str(folder))  # as from_pretrained does
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _class(library: Any, name: str) -> Any:
    result = getattr(library, name, None)
    if result is None:
        raise ModelError(f"{library.__name__} has no class {name!r}: this pipeline brings its own code")
    return result


def _part(kind: Any, folder: Path, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A component without weights; None for a tokenizer or processor."""
    from diffusers.guiders.guider_utils import BaseGuidance
    from diffusers.models.modeling_utils import ModelMixin
    from diffusers.schedulers.scheduling_utils import SchedulerMixin
    from transformers import PreTrainedModel

    classes = inspect.getmro(kind)
    if SchedulerMixin in classes or BaseGuidance in classes:
        return kind.from_pretrained(folder)
    if ModelMixin in classes and torch.device(device).type != "meta":
        # With all its buffers, as `from_pretrained` makes it before it reads the weights.
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return kind.from_config(kind.load_config(folder))
        finally:
            torch.set_default_dtype(before)
    with torch.device("meta"):
        if ModelMixin in classes:
            network = kind.from_config(kind.load_config(folder))
        elif PreTrainedModel in classes:
            network = kind(kind.config_class.from_pretrained(folder))
        else:
            return None
    # Past ModelMixin.to, which warns of parts that stay in float32.
    return nn.Module.to(network, dtype)
