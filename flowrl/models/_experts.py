"""Several trained networks as one: what `Weights` asks of a network, for families with two experts."""

from __future__ import annotations

from typing import Any

from torch import nn


class Experts(nn.ModuleDict):
    """Denoisers by component name; adapters are added to and switched in all of them."""

    @property
    def config(self) -> Any:
        return next(iter(self.values())).config

    @property
    def peft_config(self) -> dict[str, Any]:
        return next(iter(self.values())).peft_config

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        for network in self.values():
            network.add_adapter(*args, **kwargs)

    def disable_adapters(self) -> None:
        for network in self.values():
            network.disable_adapters()

    def enable_adapters(self) -> None:
        for network in self.values():
            network.enable_adapters()
