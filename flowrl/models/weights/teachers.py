"""Teachers: frozen roles of the weights from files, another LoRA or the weights of another run.

Beside a trained LoRA a LoRA is one more adapter of the network, of its own rank and targets, and costs nothing else.
Full weights, or any teacher of weights that are all trained, are a frozen copy of the network's weights. Everything of
a file must be there and be none of zeros: peft would begin what is missing at 0, and the teacher would be the base.
"""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.models.base import ModelAdapter, ModelConfig
from flowrl.models.lora_formats.start import Pair, updates_of
from flowrl.models.weights.precision import join_products
from flowrl.models.weights.roles import Weights, component_names, trainable
from flowrl.models.weights.whole import whole_weights


@dataclass(slots=True)
class Teaching:
    """The teachers of a run."""

    domains: dict[str, str] = field(default_factory=dict[str, str])
    """Domain of the prompts -> the role that teaches it."""
    paths: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Role that comes from files -> the option that names their path, and the path."""
    guidance: float | None = None
    """Guidance scale of the teachers; None: that of the rollout."""
    compared: int = 0
    """Evaluated prompts of each domain on which they are compared with the base before the first iteration."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Of the files, once they are read."""

    @classmethod
    def of(cls, key: str, paths: Mapping[str, str | None], guidance: float | None, compared: int) -> "Teaching":
        """From the option `key`, domain -> path, None for the untouched network; empty: all prompts are its."""
        result = cls(guidance=guidance, compared=compared)
        for number, (name, path) in enumerate((paths or {"all": None}).items()):
            result.domains[name] = "reference" if path is None else f"teacher{number}"
            if path is not None:
                result.paths[result.domains[name]] = f"{key}.{name}", path
        return result

    def number(self, metadata: Mapping[str, Any]) -> int:
        """Number of the domain of a prompt: where there are several, that of its record.

        Raises ValueError: its record has none of them.
        """
        names = list(self.domains)
        if len(names) == 1:
            return 0
        if metadata.get("domain") not in names:
            said = f"domain {metadata['domain']!r}" if "domain" in metadata else "no 'domain'"
            raise ValueError(f"has {said}, and a prompt has its teacher by that: {', '.join(names)}")
        return names.index(metadata["domain"])

    def require_same(self, digests: Mapping[str, str]) -> None:
        """Raise ValueError where the files that were read are not those of a checkpoint."""
        for role, digest in self.digests.items():
            if digests.get(role) != digest:
                key, path = self.paths[role]
                raise ValueError(f"{key}={path!r} holds other weights than those that the run has learned from")


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the files of a teacher hold, by the names of the plain network."""

    label: str
    """Option and value, which begin a message."""
    pairs: dict[str, dict[str, Pair]] = field(default_factory=dict[str, dict[str, Pair]])
    """Of a LoRA: network -> module -> A and B, with its factor in B."""
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Of full weights: name of the parameter -> tensor."""

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        table = dict(self.values)
        for network, modules in self.pairs.items():
            table |= {f"{network}.{name}.{k}": part for name, pair in modules.items() for k, part in enumerate(pair)}
        result = hashlib.sha256()
        for name, value in sorted(table.items()):
            result.update(name.encode() + value.detach().float().contiguous().numpy().tobytes())
        return result.hexdigest()


def with_teachers(
    adapter: ModelAdapter, options: ModelConfig, seed: int, paths: Mapping[str, tuple[str, str]]
) -> tuple[Weights, dict[str, str]]:
    """(trained weights with a frozen role for each teacher, role -> digest of its files), before the adapter moves.

    `paths`: role -> option and path: a LoRA, or a folder of a run.

    Raises ModelError: a LoRA of the run or of a teacher that does not fit, naming the tensor.
    """
    found = {role: read_teacher(key, path, adapter) for role, (key, path) in paths.items()}
    copied = [each for each in found.values() if each.values or options.lora is None]
    if copied and options.shard:
        raise ModelError(
            f"{copied[0].label} with model.shard=true: processes that share the weights keep no whole copy of others; "
            "a LoRA can teach a LoRA there"
        )
    weights = trainable(adapter, options, seed)
    for role, teacher in found.items():
        if teacher in copied:
            weights.teachers[role] = _copy(weights, teacher)
        else:
            _attach(weights, role, teacher, adapter)
    return weights, {role: teacher.digest for role, teacher in found.items()}


def read_teacher(key: str, path: str, adapter: ModelAdapter) -> Teacher:
    """The teacher at `path`, which the option `key` names, for a network without adapters. Raises ModelError."""
    networks, saved, label = component_names(adapter.network), Path(path), f"{key}={path!r}"
    if (saved / "config.yaml").is_file():
        saved = saved / "adapter"
        if not saved.is_dir():
            raise ModelError(f"{label} is a run without trained weights: there is no {saved}; train it first")
    if all((saved / name / "config.json").is_file() for name in networks):
        return Teacher(label, values=_full(label, saved, networks))
    result = Teacher(label, pairs=updates_of(key, str(saved), networks))
    prefixes, dead = _prefixes(networks), adapter.dead_lora_modules()
    for network, modules in result.pairs.items():
        for name, pair in modules.items():
            for half, part in zip("AB", pair, strict=True):
                if not part.any() and f"{prefixes[network]}{name}" not in dead:
                    raise ModelError(
                        f"{label}: {half} of {name} is 0 everywhere, so that nothing is taught there; take a file that "
                        "was trained at all of its modules, or train it at fewer targets"
                    )
    return result


def _prefixes(networks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Component -> what its parameters' names begin with in the whole network."""
    return {name: "" if len(networks) == 1 else f"{name}." for name in networks}


def _full(label: str, saved: Path, networks: Mapping[str, Any]) -> dict[str, Tensor]:
    values, prefixes = dict[str, Tensor](), _prefixes(networks)
    for name, network in networks.items():
        with whole_weights():
            loaded = type(network).from_pretrained(saved / name, torch_dtype=torch.float32)
        theirs, own = dict(loaded.named_parameters()), dict(network.named_parameters())
        for each in sorted(theirs.keys() ^ own.keys()) + [k for k in theirs if theirs[k].shape != own[k].shape]:
            raise ModelError(f"{label} is of another model: {each} differs; give a run of this one")
        values |= {f"{prefixes[name]}{each}": value.detach() for each, value in theirs.items()}
    return values


@torch.no_grad()
def _copy(weights: Weights, teacher: Teacher) -> dict[str, Tensor]:
    """The values of the whole network under the teacher."""
    result, prefixes = dict[str, Tensor](), _prefixes(weights.components)
    for name, own in weights.network.named_parameters():
        plain = name.replace(".base_layer.", ".")
        if plain in teacher.values:
            if own.dtype.itemsize < 2 or own.shape != teacher.values[plain].shape:
                raise ModelError(
                    f"{teacher.label}: weights that model.memory stores in few bits cannot be exchanged for whole "
                    "ones; give a LoRA"
                )
            result[name] = teacher.values[plain].to(own.dtype)
        elif weights.lora is None:
            result[name] = own.detach().clone()
    for network, modules in teacher.pairs.items():
        for name, (down, up) in modules.items():
            result[f"{prefixes[network]}{name}.weight"] += up.float() @ down.float()
    return result


def _attach(weights: Weights, role: str, teacher: Teacher, adapter: ModelAdapter) -> None:
    """Add a frozen adapter of the role's name, and see that the network has every tensor of it."""
    from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

    assert weights.lora is not None
    if weights.lora.kind == "lokr":
        raise ModelError(
            f"{teacher.label} is a LoRA, and the network has adapters of model.lora.kind=lokr: train another kind"
        )
    for name, network in weights.components.items():
        modules = teacher.pairs[name]
        ranks = {module: len(down) for module, (down, _) in modules.items()}
        most = max(ranks.values())
        patterns: dict[str, Any] = {"rank_pattern": ranks, "alpha_pattern": ranks}
        network_: Any = network
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of a second adapter, which is what is wanted
            network_.add_adapter(LoraConfig(r=most, lora_alpha=most, target_modules=list(modules), **patterns), role)
        tensors = {
            f"{module}.lora_{half}.weight": part.float()
            for module, pair in modules.items()
            for half, part in zip("AB", pair, strict=True)
        }
        set_peft_model_state_dict(network_, dict(tensors), adapter_name=role)
        there = get_peft_model_state_dict(network_, adapter_name=role)
        for each in sorted(tensors.keys() | there.keys()):
            if each not in there or each not in tensors or not torch.equal(there[each].cpu().float(), tensors[each]):
                raise ModelError(
                    f"{teacher.label}: the network did not take {each}; give its LoRA in diffusers' layout"
                )
    weights.adopt()
    for parameter in weights.adapters():
        parameter.data = parameter.data.float()
    weights.teachers[role] = {}
    if not adapter.autocasts:
        join_products(weights.layers)
