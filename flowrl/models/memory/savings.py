"""`model.memory` and `model.attention` applied to a pipeline, the same for every adapter: the libraries' own switches.

before loading      check_available, quantization
in the adapter      switch_on: checkpointing, attention, the VAE (_vae.py)
with its LoRA       cast_frozen
on its device       place: group offload; one small attention, a test of the backend and its gradient
"""

import gc
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flowrl.core.errors import ModelError, Remedy
from flowrl.models._vae import set_up_vae
from flowrl.models.base import ModelConfig, autocast, torch_dtype
from flowrl.models.memory.blocks import checkpoint_blocks
from flowrl.models.memory.compiled import require_compiler

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
"""Options of `memory.layerwise_casting` -> the type of the stored weights."""
_PLAIN_ATTENTION = ("AttnProcessor", "AttnProcessor2_0", "JointAttnProcessor2_0")
_INSTALL = {"flash": "flash-attn --no-build-isolation", "xformers": "'flowrl[xformers]'"}
"""First word of a backend's name -> what pip installs."""


def check_available(config: ModelConfig) -> None:
    """Raise ModelError where an option needs a package, a compiler or a device that this machine lacks."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    require_types(config, device)
    if config.compile is not None:
        require_compiler(device)
    if config.memory.quantize is not None:
        package = "torchao" if config.memory.quantize == "int8" else "bitsandbytes"
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"model.memory.quantize={config.memory.quantize} needs {package}",
                Remedy(command="pip install 'flowrl[quant]'"),
            )
        if package == "bitsandbytes" and not torch.accelerator.is_available():
            raise ModelError(
                "model.memory.quantize=nf4 needs a GPU: diffusers loads bitsandbytes weights onto one; int8 also works "
                "on the CPU",
                {"model.memory.quantize": "int8"},
            )
    if config.attention is not None:
        _check_backend(config.attention)


def require_types(config: ModelConfig, device: torch.device) -> None:
    """Raise ModelError unless the device computes in the network's type, and holds the type that stores its weights."""
    if config.dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        raise ModelError(
            f"model.dtype=bfloat16: {torch.cuda.get_device_name(device)} has no bfloat16 (compute capability 8.0 or "
            "later has)",
            {"model.dtype": "float16"},
        )
    options = {"dtype": torch_dtype(config.dtype)}
    if config.memory.layerwise_casting is not None:
        options["memory.layerwise_casting"] = FLOAT8[config.memory.layerwise_casting]
    for option, dtype in options.items():
        try:
            with torch.enable_grad():
                given = torch.ones(16, 16).to(device, dtype).to(torch_dtype(config.dtype)).requires_grad_()
                (given @ given).float().sum().backward()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise ModelError(
                f"model.{option}={str(dtype).removeprefix('torch.')} does not work on {device} "
                f"({(str(error).splitlines() or [type(error).__name__])[0]})",
                {f"model.{option}": "float32" if option == "dtype" else None},
            ) from error


def _check_backend(name: str) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    require_known(name)
    try:
        with attention_backend(name):
            pass  # entering checks the packages
    except RuntimeError as error:
        package = _INSTALL.get(name.split("_")[0])
        remedy = f"; pip install {package}" if package else ""
        raise ModelError(f"model.attention={name!r} cannot be used: {error}{remedy}") from error


def require_known(name: str) -> None:
    """Raise ModelError unless diffusers has a backend of that name that can train and is installed."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    known = [backend.value for backend in AttentionBackendName]
    offered = [n for n in known if not (n.endswith("_hub") or "sage" in n)]
    if name not in known:
        raise ModelError(f"model.attention={name!r} is not a backend of diffusers; there are: {', '.join(offered)}")
    if name.endswith("_hub"):
        raise ModelError(
            f"model.attention={name!r} would download and run a compiled kernel from the hub; there are: "
            f"{', '.join(offered)}",
            {"model.attention": None},
        )
    if "sage" in name:
        raise ModelError(
            f"model.attention={name!r}: SageAttention has no backward pass, so nothing could be trained; there are: "
            f"{', '.join(offered)}",
            {"model.attention": None},
        )


def quantization(pipeline_class: Any, path: str, config: ModelConfig) -> dict[str, Any]:
    """Options of `from_pretrained` that load the denoisers' linear weights in few bits; none by default."""
    if config.memory.quantize is None:
        return {}
    from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
    from diffusers.quantizers.quantization_config import BitsAndBytesConfig, TorchAoConfig

    if path.endswith(".safetensors"):
        raise ModelError(
            f"model.memory.quantize={config.memory.quantize} needs a pipeline folder or a hub id, not the single file "
            f"{config.path!r}: diffusers quantises while it reads a folder"
        )
    index = pipeline_class.load_config(path, revision=config.revision)
    if config.memory.quantize == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        kind = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        dtype = torch_dtype(config.dtype)
        kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    names = [name for name in ("transformer", "transformer_2", "unet") if (index.get(name) or [None])[0]]
    return {"quantization_config": PipelineQuantizationConfig(quant_mapping=dict.fromkeys(names, kind))}


def switch_on(pipeline: Any, networks: Iterable[nn.Module], config: ModelConfig) -> None:
    """Set the denoisers' checkpointing and attention, and the VAE's slicing, tiling and memory format.

    Raises ModelError: a part lacks the switch.
    """
    for network in networks:
        checkpoint_blocks(network, config.gradient_checkpointing)
        if config.attention is not None:
            _set_attention(network, config.attention)
    set_up_vae(pipeline, config)


def _set_attention(network: Any, name: str) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    # diffusers sets the backend of one network for all; a VAE in float32 could not take it.
    with attention_backend("native"):
        network.set_attention_backend(name)
    processors = [p for m in network.modules() if (p := getattr(m, "processor", None)) is not None]
    # The only mark of a processor that uses diffusers' backends.
    if any(hasattr(p, "_attention_backend") for p in processors):
        return
    kinds = {type(p).__name__ for p in processors}
    if name != "xformers" or not kinds or not kinds <= set(_PLAIN_ATTENTION):
        raise ModelError(
            f"model.attention={name!r}: the attention of {type(network).__name__} does not go through diffusers' "
            f"backends, so this would change nothing",
            {"model.attention": None},
        )
    try:
        network.enable_xformers_memory_efficient_attention()
    except (ValueError, RuntimeError, NotImplementedError, ModuleNotFoundError) as error:
        raise ModelError(f"model.attention='xformers' cannot be used: {str(error).splitlines()[0]}") from error


def cast_frozen(networks: Iterable[Any], config: ModelConfig) -> None:
    """Store frozen linear weights in 8 bits; called after the adapters are attached, which keep their type like norms.

    Convolutions keep theirs too: their backward pass holds the weight itself, which has another type by then.
    """
    if config.memory.layerwise_casting is None:
        return
    for network in networks:
        network.enable_layerwise_casting(
            storage_dtype=FLOAT8[config.memory.layerwise_casting],
            compute_dtype=torch_dtype(config.dtype),
            skip_modules_classes=CONVOLUTIONS,
        )


def offloaded(pipeline: Any, config: ModelConfig) -> list[str]:
    """Components that `memory.group_offload` keeps in host memory."""
    wanted = config.memory.group_offload
    parts = [name for name, part in pipeline.components.items() if isinstance(part, nn.Module)]
    encoders = [name for name in parts if name.startswith("text_encoder")] if "text_encoders" in wanted else []
    return encoders + [name for name in parts if name == "vae" and "vae" in wanted]


def place(pipeline: Any, config: ModelConfig, device: torch.device, *, autocasts: bool = False) -> None:
    """Move the pipeline to its device, except the parts that are offloaded, and choose one attention there.

    `autocasts`: `ModelAdapter.autocasts`.

    Raises ModelError: there is no device to offload from, or the attention backend does not work on it.
    """
    if device.type == "cuda" and not same_with_gradients(device, torch_dtype(config.dtype)):
        torch.backends.cuda.enable_cudnn_sdp(False)
    visiting = offloaded(pipeline, config)
    if visiting and device.type == "cpu":
        raise ModelError(
            f"model.memory.group_offload={config.memory.group_offload} moves weights between host memory and a GPU, "
            "and this run is on the CPU",
            {"model.memory.group_offload": []},
        )
    for name in visiting:
        offload(pipeline.components[name], device)
    if visiting:
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module) and name not in visiting:
                part.to(device)
    else:
        pipeline.to(device)
    if config.attention is not None:
        probe_attention(config.attention, device, torch_dtype(config.dtype), autocasts=autocasts)


def same_with_gradients(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's attention gives the same bits with gradients as without, for heads of the models' widths.

    On some cards it takes cuDNN's, the fastest, which may have a kernel of its own for each: then the log-probs of
    training would not be those of the rollout.
    """
    attend, generator = nn.functional.scaled_dot_product_attention, torch.Generator(device).manual_seed(0)
    for width in (64, 128):
        q, k, v = torch.randn(3, 1, 4, 1229, width, device=device, dtype=dtype, generator=generator)
        with torch.no_grad():
            plain = attend(q, k, v)
        with torch.enable_grad():
            trained = attend(q.requires_grad_(), k, v)
        if not torch.equal(plain, trained):
            return False
    return True


def give_memory_back() -> None:
    """Return the device memory of parts that were dropped, so that other allocators (NCCL, a reward server) get it.

    torch keeps freed blocks, and those of an encoder's weights are too small for activations.
    """
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def offload(part: nn.Module, device: torch.device) -> None:
    """Keep a frozen part in host memory; each leaf moves to `device` for its own forward.

    By leaf, since the hooks follow forward(): larger groups of a VAE, which is called by decode(), would not move.
    """
    from diffusers.hooks.group_offloading import apply_group_offloading

    apply_group_offloading(part, onload_device=device, offload_device=torch.device("cpu"), offload_type="leaf_level")


def probe_attention(name: str, device: torch.device, dtype: torch.dtype, *, autocasts: bool = False) -> None:
    """Raise ModelError unless the backend works here, has a gradient and agrees with torch's own attention.

    Under torch.autocast where the network runs under it. Queries, keys and values are of one type in both.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    drawn = torch.randn(3, 1, 16, 2, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    results, mode = [], " under autocast" if autocasts else ""
    for backend in (AttentionBackendName(name), AttentionBackendName.NATIVE):
        given = drawn.clone().requires_grad_()
        try:
            with autocast(device, dtype, autocasts):
                output = dispatch_attention_fn(given[0], given[1], given[2], backend=backend)
            (gradient,) = torch.autograd.grad(output.float().square().sum(), given)
        except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ModelError(
                f"model.attention={name!r} does not work on {device} in {dtype} with gradients{mode} "
                f"({type(error).__name__}: {reason})",
                {"model.attention": None},
            ) from error
        results.append((output.detach().float(), gradient.float()))
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for mine, reference in zip(*results, strict=True):
        error = float((mine - reference).abs().max() / reference.abs().max())
        if not error <= limit:
            raise ModelError(
                f"model.attention={name!r} differs from torch's own attention by {error:.1e} on {device} "
                f"(limit {limit:.0e}): it is approximate or broken",
                {"model.attention": None},
            )
