"""The strength dial, and mixes of runs of one model, at sampling time.

    v = v_base + s (v_run - v_base) + sum_j w_j (v_j - v_base)

s is the strength of a run, w_j the weights of others. The coefficients of all networks, that of the base included, sum
to 1, so the formula is the same in noise, velocity and x0_hat. A network whose coefficient is 0 is not asked: s = 0 is
the base and s = 1 the run, bit for bit. `lora_scale` multiplies the run's LoRA instead, in one network.

Source: arXiv 2508.21016 (guidance by a reference), arXiv 2510.01068 (composition).
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.core.errors import ConfigError, Remedy
from flowrl.models.base import ModelAdapter, ModelConfig, torch_dtype
from flowrl.models.weights.roles import component_names, lora_file
from flowrl.run.foreign_lora import LoraFile, attach
from flowrl.run.origin import weights_hash
from flowrl.run.trained import add_lora, learned_noise, load_run_model, model_of, trained_folder, whole_network

Call = Callable[..., Any]
BASE, RUN = "base", "run"
_ALIKE = ("path", "revision", "variant", "lora")


@dataclass(frozen=True, slots=True)
class Dial:
    """How strong a run's update is, and which others are added."""

    run: Path
    flags: str
    """The words of the command line that ask for it."""
    strength: float = 1.0
    lora_scale: float = 1.0
    mix: tuple[tuple[Path, float], ...] = ()
    """(run folder, weight), each weight other than 0."""

    @property
    def parts(self) -> list[tuple[float, str, Path | None]]:
        """(coefficient, name, run folder or None for the base) of each network of a step; the coefficients sum to 1."""
        others = [(weight, f"mix_{number}", run) for number, (run, weight) in enumerate(self.mix)]
        rest = 1 - self.strength - sum(weight for _, weight in self.mix)
        every = [(rest, BASE, None), (self.strength, RUN, self.run), *others]
        return [part for part in every if abs(part[0]) > 1e-9]  # 1 - 0.7 - 0.3 is not 0 in float64

    @property
    def facts(self) -> dict[str, Any]:
        """Plain data of what differs from the run itself, which belongs to the identity of whatever is made."""
        scales = {"strength": self.strength, "lora_scale": self.lora_scale}
        mix = [{"run": str(r), "weight": w, "adapter": weights_hash(r / "adapter")} for r, w in self.mix]
        return {name: value for name, value in scales.items() if value != 1} | ({"mix": mix} if mix else {})

    @property
    def tag(self) -> str:
        """End of the names of its results: another dial has another."""
        text = json.dumps(self.facts["mix"]) if self.mix else ""
        mix = f"-mix-{hashlib.sha256(text.encode()).hexdigest()[:8]}" if text else ""
        return "".join(f"-{name}-{value}" for name, value in self.facts.items() if name != "mix") + mix

    def require(self, adapter: ModelAdapter) -> None:
        """Raise ConfigError where networks of a model that was distilled to few steps would be added."""
        if adapter.distilled is not None and len(self.parts) > 1:
            raise ConfigError(
                f"{self.flags}: the model of {self.run} is distilled to few steps: its outputs are samples, not "
                "the velocities of one flow, so no sum of them means anything",
                Remedy(without=self.flags),
            )


def dial_of(target: str, strength: float | None, lora_scale: float | None, mix: Sequence[str]) -> Dial | None:
    """The dial of a command line; None: it asks for none, or for the run as it is. Nothing is loaded.

    `mix` are RUN:WEIGHT.

    Raises ConfigError: no run with trained weights, no finite number, or runs that do not mix.
    """
    numbers = {"--strength": strength, "--lora-scale": lora_scale}
    given = [flag for flag, value in numbers.items() if value is not None] + (["--mix"] if mix else [])
    if not given:
        return None
    flags, run = " ".join(given), Path(target)
    for flag, value in numbers.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{flag} {value}: must be a finite number")
    if lora_scale is not None and len(given) > 1:
        raise ConfigError(f"{flags}: --lora-scale is one network in place of several", Remedy(without="--lora-scale"))
    if not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{flags}: {target!r} is no run folder, so there is no base that it began with", Remedy(without=flags)
        )
    if learned_noise(run) is not None:
        raise ConfigError(
            f"{flags}: {target} learned its initial noise, and its network is the base", Remedy(without=flags)
        )
    own = model_of(run).config
    if lora_scale is not None and (own.lora is None or own.lora.kind == "dora"):
        what = "full weights" if own.lora is None else "a DoRA, whose norms are trained too"
        raise ConfigError(
            f"--lora-scale: {target} trained {what}, so there is no LoRA to scale; --strength takes every run",
            Remedy(without="--lora-scale"),
        )
    parsed = sorted(_mixed_in(word, target, own) for word in mix)
    scales = {"strength": strength, "lora_scale": lora_scale}
    dial = Dial(
        run,
        flags,
        **{name: value for name, value in scales.items() if value is not None},
        mix=tuple((other, weight) for other, weight in parsed if weight),
    )
    return dial if dial.facts else None


def _mixed_in(word: str, target: str, own: ModelConfig) -> tuple[Path, float]:
    """Run folder and weight of a word of --mix; see `dial_of`."""
    name, _, factor = word.rpartition(":")
    try:
        weight = float(factor)
    except ValueError:
        weight = math.nan
    if not name or not math.isfinite(weight):
        raise ConfigError(f"--mix {word}: it must be RUN:WEIGHT, and the weight a finite number")
    if not (Path(name) / "config.yaml").is_file() or learned_noise(Path(name)) is not None:
        raise ConfigError(f"--mix {word}: {name!r} is no folder of a run that trained weights")
    other = model_of(Path(name)).config
    for key in _ALIKE:
        here, there = getattr(own, key), getattr(other, key)
        if here != there:
            raise ConfigError(
                f"--mix {word}: its model.{key} is {there}, and that of {target} is {here}; runs mix that trained the "
                "same kind of weights of the same model"
            )
    return Path(name), weight


# ---- outputs


def mixed(calls: Sequence[tuple[float, Call]]) -> Call:
    """The sum of networks with coefficients that sum to 1, taken from the first: y_1 + sum_j c_j (y_j - y_1).

    So equal networks give their own output, bit for bit, and a single one is called as it is.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return _sum([each(*args, **kwargs) for _, each in calls], [factor for factor, _ in calls])

    return call


def _sum(outputs: Sequence[Any], factors: Sequence[float]) -> Any:
    """See `mixed`; tensors in float32, wherever they stand in lists, tuples and mappings."""
    first = outputs[0]
    if isinstance(first, Mapping):
        return type(first)(**{key: _sum([each[key] for each in outputs], factors) for key in first})
    if isinstance(first, list | tuple):
        return type(first)(_sum(each, factors) for each in zip(*outputs, strict=True))
    if len(outputs) == 1 or not isinstance(first, Tensor):
        return first
    total = start = first.float()
    for factor, each in zip(factors[1:], outputs[1:], strict=True):
        total = total + factor * (each.float() - start)
    return total.to(first.dtype)


# ---- pipelines


def load_dialled(dial: Dial) -> tuple[ModelAdapter, dict[str, Any]]:
    """(adapter, call options) of the run, as of `load_run_model`, whose pipeline's own call samples under the dial.

    Its networks are added before their guidance, which is the same for all of them.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if dial.lora_scale != 1:
        adapter, call = load_run_model(dial.run)
        layers: list[Any] = [each for each in adapter.network.modules() if isinstance(each, BaseTunerLayer)]
        for layer in layers:
            layer.scale_layer(dial.lora_scale)
        return adapter, call
    adapter, call = load_run_model(dial.run, base=True)
    dial.require(adapter)
    networks = component_names(adapter.network)
    calls: dict[str, list[tuple[float, Call]]] = {component: [] for component in networks}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of a second adapter, which is what was asked for
        for factor, name, run in dial.parts:
            for component, forward in _forwards(dial, adapter, name, run).items():
                calls[component].append((factor, forward))
    for component, network in networks.items():
        network.forward = mixed(calls[component])
    return adapter, call


def _forwards(dial: Dial, adapter: ModelAdapter, name: str, run: Path | None) -> dict[str, Call]:
    """Forward of each component with the weights of a part, which are loaded here."""
    networks, config = component_names(adapter.network), model_of(dial.run).config
    saved = None if run is None else trained_folder(run)
    if saved is not None and not lora_file(saved).is_file():
        for component, network in networks.items():
            # As its child it goes to the device with it.
            network.add_module(name, whole_network(network, saved / component, torch_dtype(config.dtype)))
        return {component: network.get_submodule(name) for component, network in networks.items()}
    if saved is not None:
        add_lora(networks, saved, name)
    elif config.init_lora is not None:
        attach(adapter.pipeline, LoraFile.parse(config.init_lora), name)
    active = None if saved is None and config.init_lora is None else name
    return {component: _under(network, active) for component, network in networks.items()}


def _under(network: Any, active: str | None) -> Call:
    """The network's present forward with one of its LoRAs; None: without any."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    forward, layers = network.forward, list[Any]()

    def call(*args: Any, **kwargs: Any) -> Any:
        layers[:] = layers or (each for each in network.modules() if isinstance(each, BaseTunerLayer))
        for layer in layers:
            layer.enable_adapters(active is not None)
            if active is not None:
                layer.set_adapter(active)
        return forward(*args, **kwargs)

    return call
