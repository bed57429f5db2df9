"""A LoRA file as its program wrote it: the tensors, and the factor s of each module's update s * B @ A.

s is alpha / rank, or alpha / sqrt(rank) of a rank-stabilised LoRA. Programs write alpha to different places:

    <module>.alpha, a tensor                      kohya, OneTrainer; flowrl's kohya and comfyui
    adapter_config.json next to the file          PEFT, so flow_grpo and Flow-Factory
    lora_adapter_metadata in the header           diffusers, SimpleTuner; flowrl's diffusers
    lora_alpha, ss_network_alpha... in the header notes of some programs

Without any of them s is 1, as every reader takes it. Places that disagree are refused: no reader can know which is
right.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flowrl.core.assets import table
from flowrl.core.errors import ModelError
from flowrl.core.files import loads

KNOWN = table(Path(__file__).with_name("known.yaml"))
"""What files of LoRAs are told by."""
PEFT_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
HALF = re.compile(
    r"^(?P<module>.+?)[._]lora(?:_linear_layer)?[._](?:(?P<first>A|down)|(?P<second>B|up))(?P<default>\.default)?"
    r"\.(?P<kind>weight|bias)$"
)
"""A half of a plain LoRA's module, in any layout; `default` is PEFT's name of an adapter."""

_ALPHAS = ("lora_alpha", "network_alpha", "alpha", "ss_network_alpha")
_RANKS = ("lora_rank", "network_dim", "rank", "r", "ss_network_dim")
_OWN_DIMS = re.compile(r"dim|alpha", re.IGNORECASE)
"""In kohya's `ss_network_args`: some modules have a rank or an alpha of their own."""
_TOLERANCE = 1e-5

# Settings of PEFT that do not change the function of the saved tensors, or that are read here.
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"}
_CHANGES_BASE = re.compile(r"pissa|olora|loftq|corda|lora_ga", re.IGNORECASE)
"""Ways to begin a LoRA that take its first product out of the frozen weights, so that the file is for other weights."""


@dataclass(slots=True)
class LoraContents:
    """What a file holds."""

    tensors: dict[str, Tensor]
    """By the names of the file, without PEFT's prefix and without the name of its adapter."""
    scales: dict[str, float] = field(default_factory=dict[str, float])
    """Module -> s."""
    ranks: dict[str, int] = field(default_factory=dict[str, int])
    """Module -> rows of its A."""
    stabilised: bool = False
    """Whether it says that it is a rank-stabilised LoRA."""
    source: str = "no alpha in the file means alpha = rank"
    """Where s comes from, in words."""

    def folded(self) -> dict[str, Tensor]:
        """The tensors with s in each B, so that s is 1 for every reader; float32 where that changes a value.

        `.alpha` of kohya's names becomes the rank, and is left out of others, which importers read without one.
        """
        result: dict[str, Tensor] = {}
        for key, value in self.tensors.items():
            match = HALF.match(key)
            if match is not None and match["second"] and self.scales[match["module"]] != 1:
                value = value.float() * self.scales[match["module"]]
            elif (name := key.removesuffix(".alpha")) in self.ranks:
                if not key.startswith("lora_"):
                    continue
                value = torch.tensor(float(self.ranks[name]))
            result[key] = value
        return result


@dataclass(frozen=True, slots=True)
class _Told:
    """What one place says of rank and alpha."""

    where: str
    alpha: float | None
    rank: float | None = None
    stabilised: bool = False
    ranks: Mapping[str, float] = field(default_factory=dict[str, float])
    alphas: Mapping[str, float] = field(default_factory=dict[str, float])
    of_all: bool = True
    """Whether no module may have an alpha of its own in the tensors that differs."""

    def of(self, module: str) -> tuple[float | None, float | None]:
        """(rank, alpha) of a module; patterns are matched as PEFT does."""
        from peft.utils.other import get_pattern_key

        rank = self.ranks.get(get_pattern_key(list(self.ranks), module), self.rank)
        return rank, self.alphas.get(get_pattern_key(list(self.alphas), module), self.alpha)

    def scale(self, alpha: float, rank: float) -> float:
        return alpha / (math.sqrt(rank) if self.stabilised else rank)


def read_contents(file: Path, label: str, component: str) -> LoraContents:
    """Read a .safetensors file of any layout; PEFT's `adapter_config.json` is read from its folder. `label`: option and
    value, which begin a message; `component`: name of the denoiser in diffusers' layout, for settings and names that do
    not say it.

    Raises ModelError: a damaged file, NaN, half of a pair, ranks that do not fit together, settings that are not read,
    or two places that disagree, with both numbers.
    """
    tensors, about = read_finite(file, label)
    is_peft = any(key.startswith(_PEFT_PREFIX) for key in tensors)
    result = LoraContents({_bare(key): value for key, value in tensors.items()})
    if len(result.tensors) < len(tensors):
        raise ModelError(f"{label} holds two tensors of one module, under two names")
    result.ranks = _ranks(result.tensors, label)
    config = file.parent / PEFT_CONFIG
    settings: dict[str, dict[str, Any]] = {}
    if is_peft or (config.is_file() and file.stem.startswith("adapter_model")):
        where = f"its {PEFT_CONFIG}"
        try:
            text = config.read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise ModelError(
                f"{label} has PEFT's names, whose alpha is in {PEFT_CONFIG}, and there is none that can be read in "
                f"{config.parent}: copy the whole folder that PEFT wrote"
            ) from None
        settings = {"": _json(text, label, where)}
    else:
        settings = _by_component(_json(about.get("lora_adapter_metadata", "{}"), label, "lora_adapter_metadata"))
        where = "the header's lora_adapter_metadata"
    told = {name: _of_config(part, where, label, result.tensors) for name, part in settings.items()}
    notes = _of_notes(about, label)
    for module, rank in sorted(result.ranks.items()):
        first, _, rest = module.partition(".")
        known = told.get("", told.get(first if first in told else component))
        bare = rest if first in (*told, component) else module
        result.scales[module] = _scale(result, module, rank, [(known, bare), (notes, bare)], label)
    return result


def names_and_header(file: Path, label: str) -> tuple[list[str], dict[str, str]]:
    """(names of the tensors, header) of a file; ModelError for a damaged one."""
    with _opened(file, label) as source:
        return list(source.keys()), source.metadata() or {}


@contextmanager
def _opened(file: Path, label: str) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as source:
            yield source
    except (OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{label} is damaged ({file.name}: {reason}); copy or download it again") from error


def read_finite(file: Path, label: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, header) of a file of any kind of adapter; errors as of `read_contents`."""
    with _opened(file, label) as source:
        tensors = {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118, it is no dict
        about = source.metadata() or {}
    for key, value in tensors.items():
        if count := not_finite(value):
            raise ModelError(
                f"{label}: {count} of the {value.numel()} values of {key} in {file.name} are NaN or inf: the training "
                "that wrote it had diverged; take an earlier file"
            )
    return tensors, about


def not_finite(value: Tensor) -> int:
    """Values of a tensor that are NaN or inf."""
    if not value.is_floating_point():
        return 0
    return int((~(value if value.element_size() > 1 else value.float()).isfinite()).sum())


def _bare(key: str) -> str:
    """A name without PEFT's prefix and without its adapter's name."""
    key, match = key.removeprefix(_PEFT_PREFIX), HALF.match(key)
    return key.replace(".default.", ".") if match is not None and match["default"] else key


def _ranks(tensors: dict[str, Tensor], label: str) -> dict[str, int]:
    """Module -> rank of a plain LoRA; modules of other kinds are left out."""
    halves: dict[str, dict[bool, Tensor]] = {}
    for key, value in tensors.items():
        match = HALF.match(key)
        if match is not None and match["kind"] == "weight":
            halves.setdefault(match["module"], {})[match["first"] is not None] = value
    result: dict[str, int] = {}
    for module, pair in sorted(halves.items()):
        if len(pair) < 2:
            raise ModelError(
                f"{label} has half of a pair: {module} lacks its {'B (up)' if True in pair else 'A (down)'}"
            )
        result[module], other = len(pair[True]), pair[False].shape[1] if pair[False].ndim > 1 else 0
        if other != result[module] or not other:
            raise ModelError(
                f"{label} does not fit together: A of {module} is {list(pair[True].shape)}, of rank {result[module]}, "
                f"and B {list(pair[False].shape)}, of rank {other}; copy or convert it again"
            )
    return result


def _json(text: str, label: str, where: str) -> dict[str, Any]:
    try:
        result = loads(text)
    except ValueError as error:
        raise ModelError(f"{label}: {where} cannot be read: {error}; copy it again") from None
    if not isinstance(result, dict):
        raise ModelError(f"{label}: {where} is no mapping: {text[:60]!r}")
    return result


def _by_component(packed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by component; one key without a component: they are of all."""
    if "r" in packed or "lora_alpha" in packed:
        return {"": packed}
    result: dict[str, dict[str, Any]] = {}
    for key, value in packed.items():
        component, _, name = key.partition(".")
        result.setdefault(component, {})[name] = value
    return result


def _of_config(settings: dict[str, Any], where: str, label: str, tensors: dict[str, Tensor]) -> _Told:
    """Rank and alpha of PEFT's settings; ModelError for one that makes it another function."""
    kind = settings.get("peft_type") or "LORA"
    if kind != "LORA":
        raise ModelError(f"{label} is a {kind} by {where}, and plain LoRA are read; merge it into the model")
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and _CHANGES_BASE.match(begun):
        raise ModelError(
            f"{label} began as init_lora_weights={begun!r} ({where}), which changes the frozen weights, so it does not "
            "fit the model as it is published; let PEFT convert it (save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    if settings.get("use_dora") and not any("lora_magnitude_vector" in key for key in tensors):
        raise ModelError(f"{label} is a DoRA by {where} (use_dora), and holds no magnitudes; merge it into the model")
    for key, value in settings.items():
        if key in _READ or key in KNOWN["neutral"] or key in ("peft_type", "init_lora_weights"):
            continue
        if value and not (key == "bias" and value == "none"):
            raise ModelError(
                f"{label} has {key}={value!r} ({where}), which is not read and changes what it does; merge it into the "
                "model with the program that trained it"
            )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if (alpha is None) != (rank is None) and where.startswith("its "):
        raise ModelError(f"{label}: {where} has r={rank} and lora_alpha={alpha}; it needs both")
    return _Told(
        where,
        alpha,
        rank,
        bool(settings.get("use_rslora")),
        settings.get("rank_pattern") or {},
        settings.get("alpha_pattern") or {},
    )


def _of_notes(about: dict[str, str], label: str) -> _Told | None:
    """Rank and alpha of a header's plain keys; None without an alpha."""
    found: dict[str, float] = {}
    for name, keys in (("alpha", _ALPHAS), ("rank", _RANKS)):
        given = {key: value for key in keys if (value := _number(about.get(key))) is not None}
        if given and not math.isclose(min(given.values()), max(given.values()), rel_tol=_TOLERANCE):
            both = " and ".join(f"{key}={value:g}" for key, value in given.items())
            raise ModelError(f"{label}: its header says {both}; correct it, or export it again")
        if given:
            found[name] = next(iter(given.values()))
    if "alpha" not in found:
        return None
    stabilised = str(about.get("use_rslora")).lower() == "true"
    of_all = _OWN_DIMS.search(about.get("ss_network_args") or "") is None
    return _Told("the header", found["alpha"], found.get("rank"), stabilised, of_all=of_all)


def _number(text: str | None) -> float | None:
    """A number of a header; None for none, such as kohya's `Dynamic`."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _scale(contents: LoraContents, module: str, rank: int, told: list[tuple[_Told | None, str]], label: str) -> float:
    """The factor of a module, which all places that speak of it agree on."""
    known = [(each, name) for each, name in told if each is not None]
    contents.stabilised |= any(each.stabilised for each, _ in known)
    own = contents.tensors.get(f"{module}.alpha")
    found: list[tuple[str, float, str]] = []
    tolerance = _TOLERANCE
    if own is not None:
        # Trainers write it in the type of their weights.
        tolerance = max(tolerance, torch.finfo(own.dtype).eps) if own.is_floating_point() else tolerance
        found.append((f"alpha {float(own):g} in its tensors", float(own) / rank, "the alphas in its tensors"))
    for each, name in known:
        said, alpha = each.of(name)
        if alpha is None or (own is not None and not each.of_all):
            continue
        if said is not None and said != rank and own is None:
            raise ModelError(
                f"{label}: {each.where} says rank {said:g}, and {module} has rank {rank}; take the file and its "
                "settings from one training"
            )
        at = rank if said is None else said
        found.append((f"alpha {alpha:g} at rank {at:g} in {each.where}", each.scale(alpha, at), each.where))
    if not found:
        return 1.0
    contents.source = found[0][2]
    for words, scale, _ in found[1:]:
        if not math.isclose(scale, found[0][1], rel_tol=tolerance):
            raise ModelError(
                f"{label} contradicts itself about {module}: {found[0][0]} (scale {found[0][1]:g}), and {words} (scale "
                f"{scale:g}); take the right one out of the file"
            )
    if not math.isfinite(found[0][1]):
        raise ModelError(f"{label}: {found[0][0]} is no finite scale ({module})")
    return found[0][1]


# ---- what is not read


def refuse_keys(keys: list[str]) -> str | None:
    """Why a file with these tensors is not read; None where nothing speaks against it."""
    return _first(KNOWN["updates"] + KNOWN["others"], keys)


def other_update(keys: list[str]) -> str | None:
    """What a file is that is no product of two matrices; None for a LoRA."""
    return _first(KNOWN["updates"], keys)


def _first(kinds: Sequence[Sequence[str]], keys: list[str]) -> str | None:
    for pattern, reason in kinds:
        found = next((key for key in sorted(keys) if re.search(pattern, key)), None)
        if found is not None:
            return f"{reason} ({found})"
    return None


def refuse_header(about: dict[str, str]) -> str | None:
    """Why a file with this header is not read."""
    if re.search(r"split_qkv\W+true", about.get("ss_network_args", ""), re.IGNORECASE):
        return (
            "was trained with split_qkv=True, whose alpha is written for one part and read for the fused rank "
            "(sd-scripts#2204): train with split_qkv=False, or merge it with sd-scripts"
        )
    return None
