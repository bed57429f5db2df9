"""`flowrl.check`: the laws of a component's kind, tried on it."""

import copy
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl.algorithms.base import Method
from flowrl.config.components import Component, component
from flowrl.contracts import latents, methods, models, rewards, samplers, suites
from flowrl.contracts.laws import ContractError, Finding
from flowrl.contracts.methods import MethodTrial
from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.core.strict import config_class, validate
from flowrl.evaluation.suite import Suite, name_of, suite_of
from flowrl.reward import LatentReward, Reward
from flowrl.rollout.library import Model
from flowrl.samplers.base import Sampler
from flowrl.scoring.entries import imported, reward_plan

WHERE = "flowrl.check"
BASES = {"samplers": Sampler, "algorithms": Method}
KINDS = (*BASES, "rewards", "suites")
"""Of two kinds that have a built-in component of one name the first is meant."""


def check(thing: Any, **options: Any) -> tuple[Finding, ...]:
    """Try a sampler, method, reward, suite or model on every law of its kind.

        flowrl.check("my_method.py", scale=0.5)
        flowrl.check(flowrl.load_model("tiny-sd3"))

    A method makes a rollout, a loss and an update on a model of `assets/`, which takes seconds on a CPU.

    Args:
        thing: a file, a module or the name of a built-in component; or a Sampler, Method, Reward, Suite or Model.
        options: fields of the component's own Config, where it is a file, module or name; of a suite `prompts`.

    Returns:
        The findings, one a law; `print(*flowrl.check(...), sep="\\n")` shows them.

    Raises ContractError: laws that do not hold, each with what it expects and what was measured; ConfigError: there is
    no such component, or an unknown option.
    """
    if isinstance(thing, str | Path | ModuleType):
        name, thing = _made(thing, options)
    else:
        name = type(thing).__name__
        if options:
            raise ConfigError(
                f"{WHERE}: options {sorted(options)} are for a file or a module, and this is made already"
            )
    result = tuple(_findings(name, thing))
    if any(not finding.good for finding in result):
        raise ContractError(name, result)
    return result


def _findings(name: str, thing: Any) -> Iterable[Finding]:
    """The laws of the kind, tried one after the other."""
    if isinstance(thing, Sampler):
        return (law.find(thing) for law in samplers.LAWS)
    if isinstance(thing, Component):
        trial = MethodTrial(thing)
        return (law.find(trial) for law in methods.LAWS)
    if isinstance(thing, Method):
        return _findings(name, component_of(name, thing))
    judge = thing.on_latents if isinstance(thing, Reward) else thing
    if isinstance(judge, LatentReward):
        return latents.LatentTrial(name, judge).run()
    if isinstance(thing, Reward):
        return rewards.RewardTrial(name, thing, rewards.trial_batch(thing.card)).run()
    if isinstance(thing, Model):
        return (law.find(thing) for law in models.LAWS)
    if isinstance(thing, Suite):
        thing = suites.SuiteTrial(thing)
    if isinstance(thing, suites.SuiteTrial):
        return thing.run()
    raise ConfigError(
        f"{WHERE}: a {type(thing).__name__} is not a flowrl.Sampler, Method, Reward, Suite, Model, file or module"
    )


def _made(place: str | Path | ModuleType, options: dict[str, Any]) -> tuple[str, Any]:
    """(name, component) of a file, a built-in name, a dotted path or a module; of a method its `Component`.

    Raises ConfigError: there is none.
    """
    if isinstance(place, ModuleType):
        module, kind = place, _kind(place)
        if kind == "rewards":
            raise ConfigError(f"{WHERE}: give the reward's file or dotted path, {place.__name__!r}, or what it builds")
        if kind == "suites":
            return _suite(place.__name__, place, options)
        registry.completed(module, kind, module.__name__)
        config = validate(config_class(module, WHERE, module.__name__), options, WHERE)
        part = Component(module.__name__, module, config)
        return part.name, part.build() if kind == "samplers" else part
    text = str(place)
    built_in = [kind for kind in KINDS if text in registry.names(kind)]
    if not built_in and "." not in text:
        known = [name for kind in KINDS for name in registry.names(kind)]
        raise ConfigError(f"{WHERE}: {text!r} is unknown; {registry.suggest(text, known)}give a .py file or a name")
    kind = built_in[0] if built_in else _kind(imported("rewards", text, WHERE))
    named = {"path" if text.endswith(".py") else "name": text} | options
    if kind == "rewards":
        plan = reward_plan(named, WHERE)
        return plan.name, plan.build().reward
    if kind == "suites":
        return _suite(name_of(text), registry.load(kind, text), options)
    part = component(kind, named, WHERE)
    return part.name, part.build() if kind == "samplers" else part


def _suite(name: str, module: ModuleType, options: dict[str, Any]) -> tuple[str, suites.SuiteTrial]:
    if other := sorted(options.keys() - {"prompts"}):
        raise ConfigError(f"{WHERE}.{other[0]}: unknown key; a suite takes prompts=PATH alone")
    return name, suites.SuiteTrial(suite_of(name, module), options.get("prompts"))


def _kind(module: ModuleType) -> str:
    """The kind of component that a module defines: by its class, else by what it builds."""
    defined = vars(module)
    if "FACTS" in defined or {"items", "aggregate"} <= defined.keys():  # before: they may import `score`
        return "suites"
    if "score" in defined:
        return "rewards"
    own = [each for each in defined.values() if isinstance(each, type) and each.__module__ == module.__name__]
    for kind, base in BASES.items():
        if any(issubclass(each, base) for each in own):
            return kind
    if "build" not in defined:
        raise ConfigError(
            f"{WHERE}: {module.__name__} defines no class that extends flowrl.Sampler or flowrl.Method, no "
            "score(images, prompts, metadata), no FACTS of a suite, and no Config and build(config)"
        )
    made = module.build(config_class(module, WHERE, module.__name__)())
    return next((kind for kind, base in BASES.items() if isinstance(made, base)), "rewards")


def component_of(name: str, method: Method) -> Component:
    """A method that is made already as a component: each build is a copy of it."""
    module = ModuleType(name)
    module.__file__ = None  # as of a module without source: no run would record it
    module.build = lambda config: copy.deepcopy(method)  # type: ignore[attr-defined]
    return Component(name, module, method.config)
