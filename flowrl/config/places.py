"""Places of an unknown key: a message names the options of that name in the whole configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from flowrl.core import registry
from flowrl.core.strict import Options, UnknownKey, dotted
from flowrl.models.base import ModelConfig
from flowrl.scoring.entries import RewardEntry

_Made = TypeVar("_Made")


def placed(root: type, tree: Options, make: Callable[[], _Made]) -> _Made:
    """The result of `make`; its error about an unknown key names the places of options of that name.

    Args:
        root: dataclass of a whole configuration.
        tree: plain data of the configuration, for the names of its components.
        make: validates the configuration or a component of it.

    Raises:
        UnknownKey: with those places.
    """
    try:
        return make()
    except UnknownKey as error:
        meant = _meant(error, list(_places(root, tree)))
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


def _places(root: type, tree: Options) -> Iterator[str]:
    """Dotted paths of all options of a configuration and of its components."""
    yield from dotted(root)
    model, method = _config("models", tree.get("model")), _config("algorithms", tree.get("algorithm"), "flow_grpo")
    yield from dotted(model or ModelConfig, "model.")
    if method is not None:
        yield from dotted(method, "algorithm.")
    rollout = tree.get("rollout")
    named = rollout.get("sampler") if isinstance(rollout, dict) else None
    sampler = _config("samplers", named, "flow_sde" if method is None else method.default_sampler)
    if sampler is not None:
        yield from dotted(sampler, "rollout.sampler.")
    yield from dotted(RewardEntry, "rewards.0.")


def _config(kind: str, options: Any, default: str | None = None) -> type | None:
    """Config of the named built-in component; None for others, whose code is not run for a message."""
    given = options if isinstance(options, dict) else {}
    name = "" if kind in registry.BASES and given.get("path") else given.get("name") or default
    return registry.load(kind, name).Config if name in registry.names(kind) else None
