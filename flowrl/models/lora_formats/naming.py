"""The names that a LoRA file may use for the modules of a network, and what lies under each."""

from torch import Tensor, nn

from flowrl.models.lora_formats.families import Place, family_of
from flowrl.models.lora_formats.reading import HALF, LoraContents

Members = dict[int, tuple[str, Place | None]]
"""Slot of a matrix of the original network -> (module of diffusers, its place); one slot: the module itself."""


def linear_layers(network: nn.Module) -> dict[str, tuple[int, int]]:
    """Linear layers of a network, adapted or not -> (outputs, inputs)."""
    return {
        name.removesuffix(".base_layer"): (part.out_features, part.in_features)
        for name, part in network.named_modules()
        if isinstance(part, nn.Linear) and ".lora_" not in name
    }


def names_of(network: nn.Module, component: str) -> dict[str, Members]:
    """Each name that a file may use for a linear layer -> what lies under it."""
    result: dict[str, Members] = {}
    family = family_of(network)
    for name in linear_layers(network):
        place = None if family is None else family.place(name)
        # Bare names: Qwen-Image-Lightning and others (musubi-tuner#709).
        for key in (name, f"{component}.{name}", f"lora_transformer_{name.replace('.', '_')}"):
            result[key] = {0: (name, None)}
        result["lora_unet_" + name.replace(".", "_")] = {0: (name, None)}
        if place is not None:
            for key in {place.underscored, "lora_unet_" + place.dotted.replace(".", "_")}:
                result.setdefault(key, {})[place.slot] = (name, place)
            result.setdefault(f"diffusion_model.{place.dotted}", {})[place.slot] = (name, place)
    return result


def to_diffusers(contents: LoraContents, network: nn.Module, component: str) -> dict[str, Tensor] | None:
    """The tensors by diffusers' names, with each factor in B; None where a name is of no linear layer of this network.

    Modules that share a matrix of the original network have the whole A each, and their rows of B.
    """
    names = names_of(network, component)
    if not contents.ranks or not set(contents.ranks) <= set(names):
        return None
    result: dict[str, Tensor] = {}
    for key, value in contents.folded().items():
        match = HALF.match(key)
        module, _, end = key.rpartition(".")
        if match is not None:
            module, end = match["module"], f"lora_{'A' if match['first'] else 'B'}.{match['kind']}"
        for slot, (name, place) in names.get(module, {}).items():
            widths = (1,) if place is None or not end.startswith("lora_B") else place.widths
            if end != "alpha":  # the rank by now
                rows = value.split([len(value) * width // sum(widths) for width in widths])
                result[f"{component}.{name}.{end}"] = rows[slot if len(widths) > 1 else 0].clone()
    return result
