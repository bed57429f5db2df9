"""Pipelines as recipes.yaml has them, made when they are called."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.tiny_pipelines import stubs

Maker = Callable[[], Any]


class _Loader(yaml.SafeLoader):
    """Reads `!Name {options}` as what makes an object of that name with these options."""


def _maker(loader: _Loader, name: str, node: Any) -> Maker:
    options: dict[str, Any] = {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}
    own = getattr(stubs, name, None)
    # Copies, as networks keep and change the lists that they are given.
    return lambda: own(**copy.deepcopy(options)) if own else stubs.of(name, **copy.deepcopy(options))


_Loader.add_multi_constructor("!", _maker)


@dataclass(frozen=True)
class Recipe:
    """A pipeline by the name of its class in diffusers and what makes its parts."""

    pipeline: str
    network: Maker
    """The denoiser."""
    text: Sequence[Maker] = ()
    """Text encoders with their tokenizers."""
    last_text_first: bool = False
    """In the order in which the random weights are drawn."""
    vae: Maker = stubs.vae
    scheduler: Maker = stubs.flow
    parts: dict[str, Any] = field(default_factory=dict)
    """Further components and arguments, values or what makes them."""
    experts: int = 1
    """Number of denoisers."""
    order: str = "parts text vae network"
    """Order in which the random weights are drawn."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Attributes of the finished pipeline."""

    def __call__(self) -> Any:
        made: dict[str, Any] = {}
        for kind in self.order.split():
            made |= getattr(self, f"_{kind}")()
        result = stubs.of(self.pipeline, scheduler=self.scheduler(), **made)
        for name, value in self.attributes.items():
            setattr(result, name, value)
        return result

    def _parts(self) -> dict[str, Any]:
        return {name: part() if callable(part) else part for name, part in self.parts.items()}

    def _vae(self) -> dict[str, Any]:
        return {"vae": self.vae()}

    def _network(self) -> dict[str, Any]:
        made = [self.network() for _ in range(self.experts)]
        kind = "unet" if "UNet" in type(made[0]).__name__ else "transformer"
        return dict(zip((kind, f"{kind}_2"), made, strict=False))

    def _text(self) -> dict[str, Any]:
        """Components numbered as pipelines number them."""
        numbered = list(enumerate(self.text, start=1))
        made: dict[str, Any] = {}
        for number, pair in reversed(numbered) if self.last_text_first else numbered:
            end = f"_{number}" if number > 1 else ""
            made |= dict(zip((f"text_encoder{end}", f"tokenizer{end}"), pair(), strict=True))
        return made


def _read() -> dict[str, Recipe]:
    text = (Path(__file__).parent / "recipes.yaml").read_text(encoding="utf-8")
    table = yaml.load(text, _Loader)
    return {name: Recipe(**recipe) for name, recipe in table.items() if name != "bases"}


RECIPES = _read()
