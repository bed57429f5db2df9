"""Places of an unknown key: a message names the options of that name in the whole configuration.

Those of components are stored ones, so that a fault is told before their modules, and torch, are imported.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from flowrl.config.schema import RunConfig
from flowrl.core import registry
from flowrl.core.strict import Options, UnknownKey, dotted
from flowrl.scoring.options import RewardEntry

_Made = TypeVar("_Made")


def placed(tree: Options, make: Callable[[], _Made]) -> _Made:
    """The result of `make`; its error about an unknown key names the places of options of that name.

    Args:
        tree: plain data of the configuration, for the names of its components.
        make: validates the configuration or a component of it.

    Raises UnknownKey: with those places.
    """
    try:
        return make()
    except UnknownKey as error:
        meant = _meant(error, list(_places(tree)))
        raise (error.explained(meant=meant) if meant else error) from None


def _meant(error: UnknownKey, places: list[str]) -> tuple[str, ...]:
    """Options that may be meant, the likeliest first; () if only the key's own mapping has one."""
    last = {place: place.rpartition(".")[2] for place in places}
    local = registry.close_to(error.key, error.valid)
    elsewhere = [place for place, name in last.items() if name == error.key]
    if not elsewhere and local is None:
        alike = registry.close_to(error.key, list(last.values()), cutoff=0.8)
        elsewhere = [place for place, name in last.items() if name == alike]
    # Next to an option of exactly this name, one here must be like it, and not only share some letters.
    near = registry.close_to(error.key, error.valid, cutoff=0.55) if elsewhere else None
    return (*elsewhere[:4], *((near,) if near else ()))


def _places(tree: Options) -> Iterator[str]:
    """Dotted paths of all options of a configuration and of its built-in components."""
    yield from dotted(RunConfig)
    method, rollout = _name("algorithms", tree.get("algorithm"), "flow_grpo"), tree.get("rollout")
    sampler = rollout.get("sampler") if isinstance(rollout, dict) else None
    default = registry.stored("algorithms").get(method, {}).get("default_sampler", "flow_sde")
    for kind, name, prefix in (
        ("models", _name("models", tree.get("model")), "model."),
        ("algorithms", method, "algorithm."),
        ("samplers", _name("samplers", sampler, default), "rollout.sampler."),
    ):
        known = registry.stored(kind)
        yield from (prefix + each for each in known.get(name, known.get("", {})).get("options", ()))
    yield from dotted(RewardEntry, "rewards.0.")


def _name(kind: str, options: Any, default: str = "") -> str:
    """Name of a component; "" for a user's own file, whose code is not run for a message."""
    given = options if isinstance(options, dict) else {}
    return "" if kind in registry.BASES and given.get("path") else str(given.get("name") or default)
