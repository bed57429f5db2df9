"""Options of earlier versions, in the configuration that a run folder keeps.

A run folder's config.yaml holds every option of the version that started the run. When it is read, a renamed option
has its value under the new name, a later option has the value that the run was made with, and a removed option is
dropped if it had its default, which changed nothing. A user's own configuration is not translated: an old name in it
is refused with the new one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.core.errors import ConfigError
from flowrl.core.strict import Options, load_tree

READER = "flowrl 0.1.0 at commit 8210558"
"""The last version with the options of `RETIRED`."""

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
class Renamed:
    """An option with a new name."""

    old: Place
    new: str
    """Dotted path inside the component. The value is dropped if the mapping of the new name is null."""

    @property
    def nests(self) -> bool:
        """Whether the old option is now the mapping that holds the new one."""
        return self.new.startswith(f"{self.old.key}.")

    def is_in(self, mapping: Options, key: str) -> bool:
        """Whether `mapping` has `key` in its old meaning."""
        return key in mapping and not (self.nests and (mapping[key] is None or isinstance(mapping[key], dict)))


@dataclass(frozen=True, slots=True)
class Retired:
    """A removed option."""

    old: Place
    default: Any
    remedy: str = ""
    """The option to set instead, for the message; empty: the message lists the valid keys."""


@dataclass(frozen=True, slots=True)
class Added:
    """A later option, with the value that earlier runs were made with."""

    new: Place
    value: Any


FLAT_PAIRS = {
    "pairs": "path",  # first: it makes the mapping of the others
    "eval_pairs": "eval",
    "pair_options": "records",
    "pairs_per_iteration": "per_iteration",
    "max_eval_pairs": "max_eval",
    "caption_dropout": "caption_dropout",
    "crop": "crop",
    "posterior": "posterior",
    "flip": "flip",
}
"""Keys next to `data.pairs` until 0.1.0 -> keys inside it."""
RENAMED: tuple[Renamed, ...] = tuple(
    Renamed(Place("run", "*", f"data.{old}"), f"data.pairs.{new}") for old, new in FLAT_PAIRS.items()
)
_RULE = {
    **{"name": "group", "std": "global", "eps": 1e-4, "clip": 5.0, "ddof": 0, "trimmed_ratio": 0.0},
    **{"min_deviation": 0.1, "select": None, "history": None},
}
_WINDOWED = ("flow_grpo_fast", "mix_grpo", "mix_grpo_flash")
_BY_NODES = ("branch_grpo", "tempflow_grpo", "g2rpo", "tp_grpo")
_TREES = (*_BY_NODES, "tree_grpo", "dynamic_tree_rpo")


def _gone(methods: Sequence[str], defaults: dict[str, Any], remedy: str = "") -> list[Retired]:
    """Options that several methods had in order to refuse them, with their old defaults."""
    return [
        Retired(Place("algorithms", name, key), value, remedy) for name in methods for key, value in defaults.items()
    ]


RETIRED: tuple[Retired, ...] = (
    Retired(
        Place("algorithms", "ram", "kl"),
        {"coef": 0.0, "weight": "uniform"},
        "the target of RAM is anchored already, lower algorithm.strength instead",
    ),
    Retired(Place("algorithms", "rwr", "advantages"), _RULE, "RWR weighs raw rewards, leave it out"),
    Retired(Place("algorithms", "raft", "advantages"), _RULE, "RAFT ranks raw rewards, leave it out"),
    *_gone(("online_dpo",), {"advantages.select": None}, "it keeps the best and the worst sample, leave it out"),
    *_gone(("online_dpo",), {"advantages.clip": 5.0}, "advantages only rank the samples of a prompt, leave it out"),
    *_gone((*_WINDOWED, *_TREES), {"sde_steps": None}, "the method chooses its steps by itself, leave it out"),
    *_gone(
        (*_TREES, "ddpo", "dpok", "flow_dppo", "grpo_guard", "sage_grpo"),
        {"spatial": None},
        "its loss takes no advantages by position, leave it out or use flow_grpo, flow_grpo_fast, mix_grpo, "
        "mix_grpo_flash or dance_grpo",
    ),
    *_gone(_TREES, {"advantages.select": None}, "it picks samples, and the edges of a tree belong to several"),
    *_gone(
        _BY_NODES,
        {f"advantages.{key}": _RULE[key] for key in ("std", "eps", "ddof")},
        "the method compares nodes by its scale, set algorithm.scale",
    ),
    *_gone(_BY_NODES, {f"advantages.{key}": _RULE[key] for key in ("trimmed_ratio", "min_deviation", "history")}),
    *_gone(_BY_NODES[1:], {"path_weight": 0.0}, "no stochastic step follows the branch, leave it out"),
    *_gone(("dpok",), {"advantages": _RULE}, "its value network is what rewards are compared with, leave it out"),
    *_gone(
        ("dpok",),
        {"old_log_prob": "rollout"},
        "transitions are mixed anew for every update, so no batch of the rollout is repeated; leave it out",
    ),
    *_gone(("dpok",), {"kl.divisor": None}, "algorithm.kl.form says which KL there is"),
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
)


def as_it_was(tree: Options, source: Path) -> Options:
    """A run folder's configuration, whatever version wrote it, with the options of today.

    Args:
        tree: plain data of `source`.
        source: file, for messages.

    Raises:
        ConfigError: a removed option had another value than its default.
    """
    tree = copy.deepcopy(tree)
    for one in RENAMED:
        for _, part in _parts(tree, one.old):
            mapping, key = _reached(part, one.old.key)
            if mapping is not None and one.is_in(mapping, key):
                value = mapping.pop(key)
                if one.nests:
                    mapping[key] = {}
                target, last = _reached(part, one.new)
                if target is not None:
                    target[last] = value
    for gone in RETIRED:
        for where, part in _parts(tree, gone.old):
            mapping, key = _reached(part, gone.old.key)
            value = gone.default if mapping is None else mapping.pop(key, gone.default)
            if value != gone.default:
                raise ConfigError(
                    f"{source}: {where}{gone.old.key}={value!r}: this version has no such option, and the run was made "
                    f"with it; {READER} reads the run"
                )
    for later in ADDED:
        for _, part in _parts(tree, later.new):
            mapping, key = _reached(part, later.new.key)
            if mapping is not None:
                mapping.setdefault(key, later.value)
    return tree


def refuse_old_names(tree: Options) -> None:
    """Refuse options of earlier versions that have a new name or a substitute.

    Raises:
        ConfigError: with the option and what to set instead.
    """
    lines = []
    for one in RENAMED:
        for where, part in _parts(tree, one.old):
            mapping, key = _reached(part, one.old.key)
            if mapping is not None and one.is_in(mapping, key):
                lines.append(f"{where}{one.old.key}={mapping[key]!r}: this option is {where}{one.new} now")
    for gone in (gone for gone in RETIRED if gone.remedy):
        for where, part in _parts(tree, gone.old):
            mapping, key = _reached(part, gone.old.key)
            if mapping is not None and key in mapping:
                lines.append(f"{where}{gone.old.key}={mapping[key]!r}: there is no such option any more; {gone.remedy}")
    if lines:
        raise ConfigError("\n".join(lines))


def run_tree(folder: Path, *places: str) -> Options:
    """Plain data of a run folder's configuration, which has `model.path` and the keys `places`.

    Raises:
        ConfigError: it is not a run folder, the file is damaged, or this version cannot read it.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{str(folder)!r} is not a run folder: there is no {file}")
    tree = as_it_was(load_tree(file), file)
    for place in ("model.path", *places):
        mapping, key = _reached(tree, place)
        if mapping is None or key not in mapping:
            raise ConfigError(f"{file} is damaged: it has no {place}; restore the file that flowrl train wrote")
    return tree


def _parts(tree: Options, place: Place) -> Iterator[tuple[str, Options]]:
    """(prefix of its keys, mapping) of the run, or of each component that a place may mean."""
    listed = [(f"{key}.", _at(tree, key)) for key in ("rewards", "eval.rewards")]
    entries: dict[Kind, list[tuple[str, Any]]] = {
        "run": [("", tree)],
        "models": [("model.", tree.get("model"))],
        "samplers": [("rollout.sampler.", _at(tree, "rollout.sampler"))],
        "algorithms": [("algorithm.", tree.get("algorithm"))],
        "rewards": [(f"{key}{i}.", v) for key, each in listed if isinstance(each, list) for i, v in enumerate(each)],
    }
    for where, part in entries[place.kind]:
        if isinstance(part, dict) and place.name in ("*", part.get("name")):
            yield where, part


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
