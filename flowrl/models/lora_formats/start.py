"""Training that starts from a LoRA file, or has one as its teacher: diffusers' names, kohya's, or the original ones
with dots.

The names are looked up in a table made from the network itself, so every module is counted: a file with one more or one
fewer than the network is refused. No value is changed, for any alpha: the scale of the file must be the network's.
diffusers' own importers multiply the scale into the tensors, which rounds, and leave out names without a word.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from flowrl.core.errors import ModelError, Remedy
from flowrl.models.base import LoraSettings
from flowrl.models.lora_formats.families import family_of
from flowrl.models.lora_formats.files import PICKLES, lora_file, lora_places
from flowrl.models.lora_formats.naming import Members, linear_layers, names_of
from flowrl.models.lora_formats.reading import (
    HALF,
    KNOWN,
    PEFT_CONFIG,
    LoraContents,
    names_and_header,
    read_contents,
    refuse_header,
    refuse_keys,
)
from flowrl.models.weights.precision import ADAPTER

_EXPERTS = ("high_noise", "low_noise")
_KEY = "model.init_lora"
Pair = tuple[Tensor, Tensor]
"""A module of a file: A [r, in] and B [out, r]."""


def start_from(path: str, networks: dict[str, nn.Module], lora: LoraSettings) -> None:
    """Put a LoRA file, or those of two experts, into networks that have an adapter; all or nothing.

    Raises ModelError: files that do not fit, with the reason and the remedy.
    """
    from peft import set_peft_model_state_dict

    found = []
    try:
        for (component, network, _), file in zip(
            lora_places(Path(path), networks), _files(path, networks), strict=True
        ):
            found.append((network, _Reader(_KEY, path, network, component, lora).read(file)))
        for network, tensors in found:
            result: Any = set_peft_model_state_dict(network, tensors, adapter_name=ADAPTER)
            if result.unexpected_keys:
                raise ModelError(f"model.init_lora={path!r} does not fit model.lora: {result.unexpected_keys[0]}")
    except (RuntimeError, OSError, ValueError, SafetensorError) as error:  # another shape; not a safetensors file
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"model.init_lora={path!r} cannot be used: {str(error).splitlines()[0]}") from error


def updates_of(key: str, path: str, networks: dict[str, nn.Module]) -> dict[str, dict[str, Pair]]:
    """The updates of a LoRA of its own rank and targets: network -> module -> A and B, with its factor in B.

    The networks have no adapter yet; `key` is the option that names the path.

    Raises ModelError: a file that does not fit them, or that lacks a tensor of a module that its header names.
    """
    places = zip(lora_places(Path(path), networks), _files(path, networks, key), networks, strict=True)
    return {name: _Reader(key, path, network, part, None).updates(file) for (part, network, _), file, name in places}


def _files(path: str, networks: dict[str, nn.Module], key: str = _KEY) -> list[Path]:
    """One file a network."""
    place, count = Path(path), len(networks)
    if place.suffix in PICKLES or ((place / "adapter_model.bin").is_file() and not lora_file(place).is_file()):
        raise ModelError(f"{key}={path!r}: pickles are not read; convert it to .safetensors")
    if not place.exists():
        raise ModelError(f"{key}={path!r}: there is no {lora_file(place)}")
    parts = [lora_file(place / name) for name in networks]
    if lora_file(place).is_file() and place.is_dir():
        files = [lora_file(p) for _, _, p in lora_places(place, networks)]
    elif all(file.is_file() for file in parts):  # Flow-Factory: a folder of PEFT for each network
        files = parts
    elif inner := next((each for name in ("adapter", "lora") if lora_file(each := place / name).is_file()), None):
        raise ModelError(
            f"{key}={path!r} is a folder of a run, whose LoRA lies in {inner.name}/",
            {key: str(inner)},
        )
    elif place.is_dir():
        given = sorted(place.glob("*.safetensors"))
        files = given if len(given) == count else []
        if count == 2 and files:
            files = [next((f for f in given if name in f.stem), given[0]) for name in _EXPERTS]
        if not files or len(set(files)) < count:
            raise ModelError(
                f"{key}={path!r}: there is no {lora_file(place)}, and "
                f"{len(given)} other .safetensors for {count} denoiser(s); give one file each, those of two experts "
                "as NAME_high_noise and NAME_low_noise"
            )
    elif count == 1:
        files = [place]
    elif _EXPERTS[0] in place.stem:
        files = [place, place.with_stem(place.stem.replace(*_EXPERTS))]
    else:
        raise ModelError(
            f"{key}={path!r} is one expert of two; give NAME_high_noise.safetensors with "
            "NAME_low_noise.safetensors next to it, or the folder of both"
        )
    for file in files:
        if not file.is_file():
            raise ModelError(f"{key}={path!r}: there is no {file}, which the second expert starts from")
    return files


class _Reader:
    """Reads a file for one network. `component` is the network's name in diffusers' layout; `lora` None: the network
    has no adapter that the file must fit; `key`: the option that names the path."""

    def __init__(self, key: str, path: str, network: nn.Module, component: str, lora: LoraSettings | None) -> None:
        from peft import get_peft_model_state_dict

        self.path, self.lora, self.component, self.network = path, lora, component, network
        self.label = f"{key}={path!r}"
        state = {} if lora is None else get_peft_model_state_dict(network, adapter_name=ADAPTER)
        self.modules = {k.removesuffix(".lora_A.weight") for k in state if k.endswith(".lora_A.weight")}
        adapted = {
            name: (state[f"{name}.lora_B.weight"].shape[0], state[f"{name}.lora_A.weight"].shape[1])
            for name in self.modules
        }
        self.shapes = linear_layers(network) | adapted
        self.family = family_of(network)

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.label} {reason}")

    def updates(self, file: Path) -> dict[str, Pair]:
        """The update of each module, with its factor in B."""
        placed = self._placed(self._updates(self._contents(file).folded()))
        targets = self._named(file)
        for name in self.shapes.keys() - placed.keys():
            if any(f".{name}".endswith(f".{target}") for target in targets):
                raise self.refuse(f"was trained at {name}, as it says itself, and has no tensors of it; copy it again")
        return placed

    def _named(self, file: Path) -> list[str]:
        """Suffixes of the modules that a file says it was trained at; [] where it says none."""
        config, packed = file.parent / PEFT_CONFIG, names_and_header(file, self.label)[1].get("lora_adapter_metadata")
        if packed is None and config.is_file() and file.stem.startswith("adapter_model"):
            packed = config.read_text(encoding="utf-8")
        told = json.loads(packed or "{}")
        targets = told.get(f"{self.component}.target_modules", told.get("target_modules"))
        return targets if isinstance(targets, list) else []

    def _contents(self, file: Path) -> LoraContents:
        keys, about = names_and_header(file, self.label)
        reason = refuse_header(about) or refuse_keys(keys)
        if reason is not None:
            raise self.refuse(reason)
        return read_contents(file, self.label, self.component)

    def read(self, file: Path) -> dict[str, Tensor]:
        """The network's tensors by peft's names."""
        contents = self._contents(file)
        placed = self._placed(self._updates(contents.tensors))
        assert self.lora is not None
        self._require_settings(contents, placed, self.lora)
        return {
            f"{name}.lora_{half}.weight": part
            for name, pair in placed.items()
            for half, part in zip("AB", pair, strict=True)
        }

    def _updates(self, tensors: dict[str, Tensor]) -> dict[str, Pair]:
        halves: dict[str, dict[bool, Tensor]] = {}
        for given, value in tensors.items():
            match = HALF.match(_OLDER.sub(lambda m: f".to_{m[1]}{'.0' * (m[1] == 'out')}.lora_{m[2]}.weight", given))
            if match is None and not given.endswith(".alpha"):
                raise self.refuse(f"holds {given}, which is no part of a plain LoRA; convert it, or merge it")
            if match is None:
                continue
            if value.ndim != 2:
                raise self.refuse(f"adapts a convolution ({given} has {value.ndim} axes); train without those modules")
            halves.setdefault(match["module"], {})[match["first"] is not None] = value
        if not halves:
            raise self.refuse("holds no LoRA")
        return {name: (pair[True], pair[False]) for name, pair in halves.items()}

    def _require_settings(self, contents: LoraContents, placed: dict[str, Pair], lora: LoraSettings) -> None:
        """Raise ModelError where model.lora, `lora`, is not that of the file; it has the settings that are."""
        least, most = min(contents.scales.values()), max(contents.scales.values())
        if not math.isclose(least, most, rel_tol=1e-5):
            raise self.refuse(f"has mixed alphas (alpha / rank is {least:g} to {most:g}); merge it into the model")
        ranks = sorted({len(down) for down, _ in placed.values()})
        if len(ranks) > 1:
            raise self.refuse(f"has mixed ranks ({', '.join(map(str, ranks))}); merge it into the model")
        (rank,), changes, reasons = ranks, dict[str, Any](), list[str]()
        kind = "rslora" if contents.stabilised else lora.kind
        if kind != lora.kind:
            changes["model.lora.kind"] = kind
            reasons.append("it is a rank-stabilized LoRA (use_rslora), whose scale is alpha / sqrt(rank)")
        if rank != lora.rank:
            changes["model.lora.rank"] = rank
            reasons.append(f"it has rank {rank}, and model.lora.rank is {lora.rank}")
        alpha = most * (math.sqrt(rank) if kind == "rslora" else rank)
        alpha = round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-5) else alpha
        if not math.isclose(most, lora.scale, rel_tol=1e-5):
            reasons.append(
                f"its updates have the scale {most:g} ({contents.source}), and model.lora has {lora.scale:g} "
                f"(alpha {lora.alpha:g} at rank {lora.rank})"
            )
        if changes or reasons:
            changes |= {} if math.isclose(alpha, lora.alpha, rel_tol=1e-5) else {"model.lora.alpha": alpha}
        if set(placed) != self.modules:
            changes["model.lora.targets"] = self._targets(set(placed))
            extra, missing = sorted(set(placed) - self.modules), sorted(self.modules - set(placed))
            example = f", not {missing[0]}" if missing else f", and {extra[0]} is no target here" if extra else ""
            shared = len(self.modules) - len(missing)
            reasons.append(f"it has {shared} of the {len(self.modules)} modules of model.lora.targets{example}")
        if changes:
            raise ModelError(f"{self.label} does not fit model.lora: {'; '.join(reasons)}", Remedy(changes))

    def _targets(self, placed: set[str]) -> list[str]:
        """Suffixes that bind to these modules and to no other linear layer of the network; the shortest that do."""
        for head in (r"^.*\.\d+\.(?=.)", r"^.*?\.\d+\.(?=.)"):
            tails = sorted({re.sub(head, "", name) for name in placed})
            bound = {name for name in self.shapes if any(f".{name}".endswith(f".{tail}") for tail in tails)}
            if bound == placed:
                return tails
        return sorted(placed)

    def _placed(self, updates: dict[str, Pair]) -> dict[str, Pair]:
        names, result = names_of(self.network, self.component), dict[str, Pair]()
        unknown = sorted(set(updates) - set(names))
        if unknown:  # the key that says most: a block that is not there
            raise self.refuse(self._unknown(next(filter(self._beyond, unknown), unknown[0])))
        for key, update in sorted(updates.items()):
            pairs = self._slots(key, *update, names[key])
            for name, (down, up) in pairs.items():
                (out, into), wanted = (up.shape[0], down.shape[1]), self.shapes[name]
                if (out, into) != wanted:
                    raise self.refuse(
                        f"is for another model, or another size of it: {key} changes a matrix of {out} x {into}, and "
                        f"here it has {wanted[0]} x {wanted[1]}; give the model that it was made for"
                    )
            twice = set(pairs) & set(result)
            if twice:
                raise self.refuse(f"adapts {min(twice)} twice, under two names")
            result |= pairs
        return result

    def _slots(self, key: str, down: Tensor, up: Tensor, members: Members) -> dict[str, Pair]:
        """The parts of one matrix; several slots share a whole A, or have their own rows of it."""
        name, place = next(iter(members.values()))
        widths = (1,) if place is None else place.widths
        if len(widths) == 1:
            return {name: (down, up)}
        into, count = down.shape[1], len(widths)
        if len(up) != sum(widths) * into:
            raise self.refuse(f"has {len(up)} rows in {key}, and {sum(widths) * into} are needed: another model")
        rows = up.split([width * into for width in widths])
        own = len(down) // count
        blocks = [slice(slot * own, (slot + 1) * own) for slot in range(count)]
        # As one rank of each slot only where the rank asked for says so: zeros alone would not tell.
        off = (torch.cat([part[:, : b.start], part[:, b.stop :]], dim=1) for part, b in zip(rows, blocks, strict=True))
        rank = 0 if self.lora is None else self.lora.rank
        apart = len(down) == count * rank and not any(bool(rest.any()) for rest in off)
        result: dict[str, Pair] = {}
        for slot, part in enumerate(rows):
            pair = (down[blocks[slot]], part[:, blocks[slot]]) if apart else (down, part)
            used = bool(pair[1].any()) or (apart and bool(pair[0].any()))
            if slot not in members and used:
                raise self.refuse(
                    f"trains slot {slot} of {key}, which this model has not; give the model it was made for"
                )
            if slot in members and (used or (not apart and members[slot][0] in self.modules)):
                result[members[slot][0]] = pair[0].clone(), pair[1].clone()
        return result

    def _beyond(self, key: str) -> int:
        """Blocks with an adapter, where the key's block lies after the last of its kind; else 0."""
        kinds: dict[str, set[int]] = {}
        for name in self.shapes:
            place = None if self.family is None else self.family.place(name)
            for each in (name, *((place.kohya, place.dotted) if place is not None else ())):
                match = re.match(r"([a-z_]*blocks)\.(\d+)\.", each)
                if match is not None:
                    kinds.setdefault(match[1], set()).add(int(match[2]))
        match = re.match(r"([a-z_]*blocks)[._](\d+)[._]", _PREFIX.sub("", key))
        last = max(kinds.get(match[1], {-1})) if match is not None else -1
        return last + 1 if match is not None and last >= 0 and int(match[2]) > last else 0

    def _unknown(self, key: str) -> str:
        bare = _PREFIX.sub("", key)
        if self.family is not None and re.match(_OUTSIDE, bare):
            return (
                f"adapts {key}, which lies outside the blocks, and no module of {self.family.name} has that name in "
                "diffusers: remove its keys, or merge it into the model"
            )
        for pattern, name in KNOWN["signs"]:
            if re.match(pattern, bare) and (self.family is None or self.family.name not in name):
                known = "another model" if self.family is None else self.family.name
                return f"has the names of {name} ({key}), and this model is {known}; give the model it was made for"
        if blocks := self._beyond(key):
            return (
                f"is for a model with more blocks: it adapts {key}, and this one has {blocks} of them; give the model "
                "it was made for"
            )
        return (
            f"does not fit: {key} is none of the {len(self.shapes)} linear layers of this model; give the model it was "
            "made for"
        )


_OLDER = re.compile(r"(?:\.processor)?\.to_(q|k|v|out)(?:_lora|\.lora)\.(down|up)\.weight$")
"""Names of diffusers before peft, of attentions alone."""

_PREFIX = re.compile(r"^(lora_unet_|lora_transformer_|diffusion_model\.|transformer\.|unet\.)")
_OUTSIDE = r"(img_in|txt_in|time_in|vector_in|guidance_in|final_layer|x_embedder_proj)[._]"
"""Original names of modules outside the blocks; those of diffusers may be targets."""
