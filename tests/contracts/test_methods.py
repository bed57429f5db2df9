"""The laws of methods, over every file in flowrl/algorithms/; and that each law can fail."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flowrl
from flowrl.config.components import component
from flowrl.contracts.checking import component_of
from flowrl.contracts.laws import ContractError, Law
from flowrl.contracts.methods import LAWS, MethodTrial
from flowrl.core import registry
from flowrl.diffusion.plan import StepPlan
from flowrl.losses.batches import LossOutput
from tests.toys import algorithms

NAMES = registry.names("algorithms")
CHAINS = [n for n in algorithms(flowrl.EdgeMethod) if not registry.load("algorithms", n).Config().tree(10, 1, 0)]
FAST = ("flow_grpo", "diffusion_nft", "diffusion_dpo", "find", "opd")
"""One for each kind of training data."""
OWN: dict[str, dict[str, Any]] = {
    "mix_grpo_flash": {"shift": 1.0},
    "prfl": {"anchored": False},
    "opd": {"teacher_guidance": 3.0},
}
"""Options that the tiny model asks for: the shift of its grid; a teacher that differs from the student."""


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "adjoint_matching+efficient": ("adjoint_matching", {"form": "efficient"}),
    "flow_dppo+project": ("flow_dppo", {"outside": "project"}),
    "flow_grpo+none": ("flow_grpo", {"surrogate": "none"}),
    "flow_grpo+preserve": ("flow_grpo", {"surrogate": "preserve", "clip_range": [1e-6, 2e-6]}),
    "flow_grpo+quadratic": ("flow_grpo", {"surrogate": "quadratic", "eta": 1e-3}),
}
"""Options that change a method enough to be tried by themselves: its name, and they."""


VP: dict[str, dict[str, Any] | None] = {
    "dynamic_tree_rpo": {"growth": 0.0},
    "grpo_guard": {"ratio_norm": False},
    "mix_grpo_flash": None,
    "opd": {"teacher_guidance": 3.0},
    "prfl": None,
}
"""Options on noise-prediction models, where DDIM has eta 1 and a ratio of its own; None: the method needs a flow, or a
judge of the model's noisy latents, which is at hand for a flow alone."""


@functools.lru_cache(maxsize=1)
def trial(name: str, path: str) -> MethodTrial:
    base, own = VARIANTS.get(name, (name, OWN.get(name, {}) if path == "flow" else VP.get(name) or {}))
    return MethodTrial(component("algorithms", {"name": base} | own, "algorithm"), path)


ON_VP = [name for name in NAMES if VP.get(name, {}) is not None]
CASES = [
    (name, path, law)
    for path, names in (("flow", [*NAMES, *VARIANTS]), ("vp", ON_VP))
    for name in names
    for law in LAWS
]


def quick(name: str, path: str, law: Law[MethodTrial]) -> bool:
    if path == "vp":
        trained = name in ("ddpo", "diffusion_nft") and law.name in ("loss", "gradient", "update")
        return trained or (law.name == "ratio" and name in CHAINS)
    return name in FAST or law.name == "state" or (name in VARIANTS and law.name == "sum")


@pytest.mark.parametrize(
    ("name", "path", "law"),
    [
        pytest.param(*case, marks=() if quick(*case) else pytest.mark.slow, id="-".join(map(str, case)))
        for case in CASES
    ],
)
def test_a_method_keeps_the_law(name: str, path: str, law: Law[MethodTrial]):
    law.hold(trial(name, path))


# ---- each law can fail


class Sound(flowrl.EdgeMethod):
    """REINFORCE; what breaks a law is one of its parts."""

    def loss(self, batch, networks):
        log_ratio = self.log_ratio(networks.transition(batch), batch, networks.policy.sampler)
        loss = -(batch.advantage[:, 0] * log_ratio).sum()
        return LossOutput(loss, {"policy/loss": loss.detach()})


class Restless(Sound):
    calls = 0

    def plan(self, schedule, sampler, iteration, seed):
        Restless.calls += 1
        return StepPlan(schedule, (0.1 * Restless.calls,) * len(schedule), (0,))


class Lopsided(Sound):
    def advantages(self, rewards, weights, prompts=()):
        return super().advantages(rewards[:, :1], weights, prompts[:1])


class Trusting(Sound):
    def advantages(self, rewards, weights, prompts=()):
        return super().advantages(rewards.nan_to_num(), weights, prompts)


class Retiring(Sound):
    def retired(self, rewards, weights):
        return torch.zeros(1)


class Drifting(Sound):
    def log_ratio(self, policy, batch, sampler):
        return super().log_ratio(policy, batch, sampler) + 0.1


def losing(change: Callable[[torch.Tensor, Any, Any], torch.Tensor]) -> type[Sound]:
    """A sound method but for `change(loss, batch, networks)`."""

    class Losing(Sound):
        def loss(self, batch, networks):
            found = super().loss(batch, networks)
            return LossOutput(change(found.loss, batch, networks), found.metrics)

    return Losing


class Careless(Sound):
    def advantages(self, rewards, weights, prompts=()):
        found = super().advantages(rewards.clone(), weights, prompts)
        rewards.mul_(2)
        return found


class Forgetful(Sound):
    def load_state_dict(self, state):
        """Take anything, and keep nothing."""


BREAKS: dict[str, type[flowrl.Method]] = {
    "plan": Restless,
    "credit": Lopsided,
    "failed rewards": Trusting,
    "retired": Retiring,
    "ratio": Drifting,
    "loss": losing(lambda loss, *_: loss.expand(2)),
    "sum": losing(lambda loss, batch, _: loss / len(batch)),
    "gradient": losing(lambda loss, _, net: loss.detach() + next(iter(net.weights.parameters.values())).sum()),
    "inputs": Careless,
    "update": losing(lambda loss, *_: 0 * loss),
    "state": Forgetful,
}


def own(kind: type[flowrl.Method]) -> flowrl.Method:
    return kind(flowrl.Method.Config())


def test_a_method_that_is_given_as_an_object_is_tried():
    found = flowrl.check(own(Sound))
    assert {finding.law for finding in found} == {law.name for law in LAWS}


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_each_law_finds_the_method_that_breaks_it(law):
    with pytest.raises(ContractError, match=f"FAIL  {law.name}: "):
        law.hold(MethodTrial(component_of("mine", own(BREAKS[law.name]))))
