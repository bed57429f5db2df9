"""Options that came later than the configuration that a run folder keeps, and values that mean something else since.

A run folder's config.yaml holds every option of the version that started the run, so a changed default moves nothing in
it, and an option that it lacks came later. When it is read, a later option has the value that the run was made with
(`ADDED`), and a value with a new meaning is replaced by today's value of the old meaning (`CHANGED`). A resumed run so
keeps what it was made with, or is refused by the key in which a recipe now differs. What this version does not know is
refused by key, as in any configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.core.errors import ConfigError
from flowrl.core.strict import Options, load_tree

Kind = Literal["run", "models", "samplers", "algorithms", "rewards"]


@dataclass(frozen=True, slots=True)
class Place:
    """An option of the run, or of a component."""

    kind: Kind
    name: str
    """Name of the component; `*`: the run, or all components of the kind."""
    key: str
    """Dotted path inside the component."""


@dataclass(frozen=True, slots=True)
class Added:
    """A later option, with the value that earlier runs were made with."""

    new: Place
    value: Any


@dataclass(frozen=True, slots=True)
class Changed:
    """A value of an option that means something else since a later option came."""

    place: Place
    value: Any
    """As older files have it."""
    kept: Any
    """Today's value with the older meaning."""
    since: Place
    """An option that came with the change, also one of another place: a file without it is older. Of a mapping that
    every file has."""
    where: Callable[[Options], bool] = lambda tree: True
    """Of the whole configuration: whether the meaning changed for it."""


def _older_kl(tree: Options) -> bool:
    """Whether a KL had Flow-GRPO's divisor where it was left out, and has the sampler's now."""
    kl, sampler = _at(tree, "algorithm.kl"), _at(tree, "rollout.sampler.name")
    # cps alone takes noise-prediction models too, where nothing has changed.
    flow = _at(tree, "model.name") not in ("sd", "sdxl")
    return flow and sampler in ("cps", "wan_sde", "sage") and bool(kl and kl.get("coef"))


CHANGED: tuple[Changed, ...] = (
    Changed(Place("algorithms", "*", "kl.divisor"), None, "flow_grpo", Place("run", "*", "eval.tie"), _older_kl),
)
ADDED = (
    Added(Place("run", "*", "data.eval_share"), 0.0),
    Added(Place("models", "*", "vae_precision"), "tf32"),
    Added(Place("models", "*", "memory.vae_channels_last"), False),
    Added(Place("models", "*", "guidance_gradient"), "both"),
    Added(Place("models", "*", "lora.kind"), "lora"),
    Added(Place("models", "wan", "fps"), 16.0),
    Added(Place("models", "generic", "first_frame"), "crop"),
    Added(Place("run", "*", "optim.name"), "adamw"),
    Added(Place("run", "*", "data.pairs.frames"), "exact"),
    Added(Place("run", "*", "eval.videos"), "webp"),
    Added(Place("run", "*", "optim.ema.repeats"), 1),
    Added(Place("run", "*", "optim.ema.warmup_terms"), [1.0, 10.0]),
    Added(Place("run", "*", "eval.tie"), 0.0),
)


def as_it_was(tree: Options) -> Options:
    """A run folder's configuration, whatever version wrote it, in today's options with their meaning of then."""
    tree = copy.deepcopy(tree)
    for one in CHANGED:  # first: the options that came later date the file
        if not one.where(tree) or any(_has(part, one.since.key) for part in _parts(tree, one.since)):
            continue
        for part in _parts(tree, one.place):
            mapping, key = _reached(part, one.place.key)
            if mapping is not None and key in mapping and mapping[key] == one.value:
                mapping[key] = one.kept
    for later in ADDED:
        for part in _parts(tree, later.new):
            mapping, key = _reached(part, later.new.key)
            if mapping is not None:
                mapping.setdefault(key, later.value)
    return tree


def run_tree(folder: Path, *places: str) -> Options:
    """Plain data of a run folder's configuration, which has `model.path` and the keys `places`.

    Raises:
        ConfigError: it is not a run folder, the file is damaged, or this version cannot read it.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{str(folder)!r} is not a run folder: there is no {file}")
    tree = as_it_was(load_tree(file))
    for place in ("model.path", *places):
        mapping, key = _reached(tree, place)
        if mapping is None or key not in mapping:
            raise ConfigError(f"{file} is damaged: it has no {place}; restore the file that flowrl train wrote")
    return tree


def _parts(tree: Options, place: Place) -> Iterator[Options]:
    """The run, or each component that a place may mean."""
    entries: dict[Kind, list[Any]] = {
        "run": [tree],
        "models": [tree.get("model")],
        "samplers": [_at(tree, "rollout.sampler")],
        "algorithms": [tree.get("algorithm")],
        "rewards": [one for key in ("rewards", "eval.rewards") for one in _at(tree, key) or []],
    }
    for part in entries[place.kind]:
        if isinstance(part, dict) and place.name in ("*", part.get("name")):
            yield part


def _has(part: Options, dotted: str) -> bool:
    mapping, key = _reached(part, dotted)
    return mapping is not None and key in mapping


def _reached(part: Options, dotted: str) -> tuple[Options | None, str]:
    """(mapping that may hold a dotted key, last part of the key); None: there is no such mapping."""
    way, _, last = dotted.rpartition(".")
    result = _at(part, way) if way else part
    return (result if isinstance(result, dict) else None), last


def _at(part: Any, dotted: str) -> Any:
    """The value at a dotted key; None if there is none."""
    for key in dotted.split("."):
        part = part.get(key) if isinstance(part, dict) else None
    return part
