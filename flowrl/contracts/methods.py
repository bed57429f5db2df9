"""The contract of a method, tried on a tiny model of `assets/`: a rollout, its credit, its loss and one update."""

import dataclasses
import json
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod, Method, NoiseMethod
from flowrl.config.checks import check
from flowrl.config.components import Component, component
from flowrl.config.load import resolve
from flowrl.config.schema import RunConfig
from flowrl.contracts.laws import Law, law, require
from flowrl.core.strict import validate
from flowrl.core.types import Edges
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.process import Process
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import InitialBatch, Microbatch
from flowrl.media import media
from flowrl.rollout.trajectories import Rollout
from flowrl.run.session import Session
from flowrl.samplers.base import Sampler, step_std
from flowrl.training.replay_gate import tolerance
from flowrl.training.world import World

STEPS, PROMPTS, GROUP = 8, 2, 4
ITERATIONS = (1, 2, 60)
MODELS = {
    "flow": {"name": "sd3", "path": "tiny-sd3", "max_sequence_length": 9},
    "vp": {"name": "sd", "path": "tiny-sd"},
}
SAMPLERS = {"flow": None, "vp": {"name": "ddim", "eta": 1.0}}
JUDGE = {"name": "latent_judge", "model": "tiny-judge"}
BATCH = 4096
"""More rows than there are: every share is one forward."""


class MethodTrial:
    """A method with a session on a tiny model of the path "flow" or "vp", which it trains."""

    def __init__(self, part: Component, path: str = "flow") -> None:
        self.part, self.path = part, path
        self.edges = isinstance(self.build(), EdgeMethod)

    def __str__(self) -> str:
        return self.part.name

    def build(self) -> Method:
        """The method, made anew."""
        return self.part.build()

    @cached_property
    def folder(self) -> tempfile.TemporaryDirectory[str]:
        """A folder for given images; gone with the trial."""
        return tempfile.TemporaryDirectory(prefix="flowrl-contract-")

    def open(self) -> Session:
        """A session of the method, before its first iteration."""
        method = self.build()
        leaves = method.config.leaves(STEPS)
        tree = {
            "name": "contract",
            "iterations": max(ITERATIONS),
            "deterministic": False,  # it would outlive the trial
            "model": MODELS[self.path],
            "data": {"prompts": "shapes:train", "max_prompts": 2 * PROMPTS, "eval_share": 0.0},
            "rollout": {"num_inference_steps": STEPS, "prompts_per_iteration": PROMPTS, "batch_size": 64}
            | {"group_size": max(GROUP, method.config.least_trees * leaves)},
            "rewards": [JUDGE if method.config.judged_noisy else {"name": "flowrl.contracts.brightness"}],
            "optim": {"learning_rate": 1e-4, "weight_decay": 0.0, "batch_size": BATCH, "updates_per_iteration": 1},
        }
        if method.members:
            tree |= {"data": {"pairs": {"path": given(Path(self.folder.name)), "per_iteration": 4}}, "rewards": []}
            tree |= {
                "algorithm": {"name": "diffusion_dpo"},
                "rollout": {"num_inference_steps": STEPS, "batch_size": 64},
            }
        run = resolve(validate(RunConfig, tree, ""))
        sampler = component("samplers", SAMPLERS[self.path] or {}, "rollout.sampler", method.config.default_sampler)
        resolved = dataclasses.replace(run, algorithm=self.part, sampler=sampler)
        check(resolved)
        return Session(resolved, world=World(0, 1, torch.device("cpu")))

    @cached_property
    def session(self) -> Session:
        return self.open()

    @cached_property
    def rollout(self) -> Rollout:
        return self.session.roll_out(1)

    @cached_property
    def credit(self) -> Advantages:
        return self.session.credit(self.rollout)

    @cached_property
    def batches(self) -> list[Any]:
        """Every training forward of the iteration."""
        return list(self.session.batches(self.rollout, self.credit))

    @property
    def weights(self) -> Tensor:
        """Weights of the rewards, [R]."""
        return torch.ones(len(self.rollout.rewards))

    def gradient(self, batches: list[Any]) -> dict[str, Tensor]:
        """The gradient of the summed loss by the name of the weight; those without one are left out."""
        parameters = self.session.weights.parameters
        for batch in batches:
            self.session.method.loss(batch, self.session.networks).loss.backward()
        result = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        for p in parameters.values():
            p.grad = None
        return result


def given(folder: Path) -> str:
    """A preference set of four pairs in the folder."""
    lines = []
    for k, colour in enumerate(("red", "blue", "green", "yellow")):
        generator = torch.Generator().manual_seed(k)
        names = {side: f"{side}-{k}.png" for side in ("chosen", "rejected")}
        for name in names.values():
            media.write(torch.rand(3, 32, 32, generator=generator), folder / Path(name).stem)
        lines.append(json.dumps({"prompt": f"a small {colour} circle"} | names))
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "pairs.jsonl")


# ---- before anything is drawn


def require_plan(method: Method, sampler: Sampler, grid: Schedule, process: Process) -> None:
    """The law of a plan on one grid: raise Broken where it does not hold."""
    trains = isinstance(method, EdgeMethod)
    for iteration in ITERATIONS:
        plan, again = (method.plan(grid, sampler, iteration, 3) for _ in range(2))
        where = f"iteration {iteration} on {len(grid)} steps"
        require(bool(plan.train) == trains, f"{where}: the trained steps are {plan.train}")
        same = (again.train, again.noise_level, again.solver) == (plan.train, plan.noise_level, plan.solver)
        require(same, f"{where}: another plan in a second call")
        if trains:
            std = step_std(sampler, process, plan.steps(torch.tensor(plan.train), process))
            require(bool((std > 0).all()), f"{where}: the trained steps {plan.train} have std {std.tolist()}")


@law("plan", "the same whenever it is asked for; an EdgeMethod trains noisy steps, another method none")
def plan(trial: MethodTrial) -> str:
    sampling, method, grids = trial.session.parts.sampling, trial.build(), []
    for steps in (4, STEPS, 10, 25):
        try:
            method.config.check(sampling.sampler, steps)
        except ValueError:
            continue  # it refuses so few steps, in words
        require_plan(method, sampling.sampler, sampling.adapter.schedule(steps), sampling.adapter.process)
        grids.append(steps)
    require(bool(grids), "its options refuse every grid of 4 to 25 steps")
    return f"valid on grids of {', '.join(map(str, grids))} steps"


# ---- credit


@law("credit", "advantages are [P, G, ...] and finite, the same twice; valid and kept are [P, G], dead is [P]")
def credit(trial: MethodTrial) -> str:
    rewards, prompts = trial.rollout.rewards, trial.rollout.identities
    result, again = (trial.build().advantages(rewards, trial.weights, prompts) for _ in range(2))
    shape = tuple(rewards.shape[1:])
    require(tuple(result.values.shape[:2]) == shape, f"values {tuple(result.values.shape)} for {shape} samples")
    shapes = tuple(map(tuple, (result.valid.shape, result.kept.shape, result.dead.shape)))
    require(shapes == (shape, shape, shape[:1]), f"valid, kept and dead are {shapes} for {shape} samples")
    require(bool(result.values.isfinite().all()), "not finite")
    require(torch.equal(result.values, again.values), "another one in a second call")
    return f"{tuple(result.values.shape)}, from {float(result.values.min()):.3g} to {float(result.values.max()):.3g}"


@law("failed rewards", "a sample whose reward is NaN is not kept, and the advantages of all others are finite")
def failed_rewards(trial: MethodTrial) -> str:
    if trial.build().members or not trial.build().credits:
        return "its samples are given, or no reward credits them: none can fail"
    rewards = trial.rollout.rewards.clone()
    rewards[:, 0, 0] = torch.nan
    result = trial.build().advantages(rewards, trial.weights, trial.rollout.identities)
    require(not bool(result.valid[0, 0]) and not bool(result.kept[0, 0]), "the failed sample is valid or kept")
    require(bool(result.values[result.valid].isfinite().all()), "the advantages of other samples are not finite")
    return "masked"


@law("retired", "retired says of each prompt whether it is no longer sampled, [P] bool")
def retired(trial: MethodTrial) -> str:
    result = trial.build().retired(trial.rollout.rewards, trial.weights)
    shape = tuple(result.shape), result.dtype
    require(shape == ((trial.rollout.rewards.shape[1],), torch.bool), f"{shape}")
    return f"{int(result.sum())} of {len(result)} prompts"


# ---- the loss


@law("ratio", "before the first update the policy is the one that drew the samples: |log ratio| within the tolerance")
@torch.no_grad()
def ratio(trial: MethodTrial) -> str:
    method, sampler = trial.session.method, trial.session.parts.sampling.sampler
    if not isinstance(method, EdgeMethod) or method.transitions is not None:
        return "has none"
    networks, worst = trial.session.networks, 0.0
    for batch in trial.batches:
        result = method.log_ratio(networks.transition(batch), batch, sampler)
        require(
            result.shape == batch.old_log_prob.shape, f"{tuple(result.shape)} for {tuple(batch.old_log_prob.shape)}"
        )
        worst = max(worst, float(result.abs().max()))
    most = tolerance(method, sampler, torch.float32)
    require(worst <= most, f"{worst:.2g}, and the tolerance is {most:.2g}")
    return f"{worst:.2g} of {most:.2g}"


@law("loss", "a finite scalar with finite, detached metrics; what is per step is [E]; `feedback` names metrics")
def loss(trial: MethodTrial) -> str:
    method = trial.session.method
    require(bool(trial.batches), "there is nothing to train on: every sample was left out")
    for batch in trial.batches:
        result = method.loss(batch, trial.session.networks)
        require(result.loss.shape == (), f"the loss is {tuple(result.loss.shape)}")
        require(bool(result.loss.isfinite()), f"the loss is {float(result.loss.detach())}")
        for name, value in result.metrics.items():
            require(
                value.shape == () and not value.requires_grad, f"{name} is {tuple(value.shape)}, or carries a graph"
            )
            require(bool(value.isfinite()), f"{name} is {float(value)}")
        for name, value in result.per_step.items():
            good = value.shape == (len(batch),) and not value.requires_grad
            require(good, f"{name} is {tuple(value.shape)} for {len(batch)} edges, or carries a graph")
        missing = set(method.feedback) - set(result.metrics)
        require(not missing, f"feedback names {sorted(missing)}, which the loss does not give")
    return f"{', '.join(sorted(result.metrics))}"


def forwards(batch: Any) -> int:
    """Rows that go through the network: of edges, the places where they start."""
    return len(batch.latents) if isinstance(batch, Microbatch) else len(batch)


def part_of(batch: Microbatch | InitialBatch, rows: Tensor) -> Microbatch | InitialBatch:
    """The edges or samples `rows` [n] of a batch; the latents of edges stay together."""
    if isinstance(batch, InitialBatch):
        return InitialBatch(batch.latents[rows], batch.numbers[rows], batch.advantage[rows], batch.old_log_prob[rows])
    return dataclasses.replace(
        batch,
        parent=batch.parent[rows],
        alone=False,
        next_latents=batch.next_latents[rows],
        step=batch.step.at(rows),
        old_log_prob=batch.old_log_prob[rows],
        advantage=batch.advantage[rows],
        place=batch.place[rows],
        columns={name: column[rows] for name, column in batch.columns.items()},
    )


@law("sum", "the loss is a sum over its batch, whatever batches it comes in: the gradients of the parts add up")
def summed(trial: MethodTrial) -> str:
    method, whole = trial.session.method, trial.batches
    if isinstance(method, NoiseMethod) or (isinstance(method, EdgeMethod) and method.transitions is not None):
        # It learns while its batches are made, which so differ from call to call: these are cut instead.
        parts = [part_of(batch, rows) for batch in whole for rows in torch.arange(len(batch)).tensor_split(2)]
    else:
        # A prompt is the most that a forward may have to hold whole.
        half = -(-max(map(forwards, whole)) // trial.rollout.rewards.shape[1])
        parts = list(trial.session.batches(trial.rollout, trial.credit, batch_size=half))
    require(len(parts) > len(whole), f"{len(parts)} parts of {len(whole)} batches")
    first, second = trial.gradient(whole), trial.gradient(parts)
    size = float(torch.cat([value.flatten() for value in first.values()]).norm())
    apart = float(torch.cat([(second[name] - value).flatten() for name, value in first.items()]).norm())
    require(apart <= 1e-3 * size, f"{len(parts)} parts instead of {len(whole)} change it by {apart / size:.2g}")
    return f"{len(parts)} parts instead of {len(whole)} change it by {apart / max(size, 1e-30):.2g}"


def reachable(trial: MethodTrial) -> set[str]:
    """Trained weights that the network's output depends on."""
    session, rollout = trial.session, trial.rollout
    if isinstance(session.method, NoiseMethod):
        return set()  # a distribution for each prompt, of which some were drawn
    x, cond = rollout.samples.x0, rollout.cond.index(rollout.rows)
    for timestep in session.parts.sampling.schedule.timesteps[1:]:
        session.model.predict(x, timestep.expand(len(x)), cond, 1.0).square().sum().backward()
    result = {n for n, p in session.weights.parameters.items() if p.grad is not None and float(p.grad.abs().max()) > 0}
    session.model.network.zero_grad()
    return result


@law("gradient", "the loss has a finite gradient to every trained weight that the network's output depends on")
def gradient(trial: MethodTrial) -> str:
    result = trial.gradient(trial.batches)
    bad = [name for name, value in result.items() if not bool(value.isfinite().all())]
    require(not bad, f"not finite at {bad[:3]}")
    reached = {name for name, value in result.items() if float(value.abs().max()) > 0}
    missing = sorted(reachable(trial) - reached)
    require(bool(reached), "it is 0 at every weight")
    require(not missing, f"none at {len(missing)} weights, such as {missing[:3]}")
    return f"reaches {len(reached)} tensors"


def tensors_of(rollout: Rollout) -> dict[str, Tensor]:
    """The tensors of a rollout by name."""
    result = {"rewards": rollout.rewards, "samples.x0": rollout.samples.x0, "rows": rollout.rows}
    edges: Edges = rollout.edges
    result |= {"edges.nodes": edges.nodes, "edges.step": edges.step, "edges.old_log_prob": edges.old_log_prob}
    return result | {f"edges.columns.{name}": value for name, value in edges.columns.items()}


@law("inputs", "credit and loss leave rewards, samples and edges as they were")
def inputs_alone(trial: MethodTrial) -> str:
    before = {name: value.clone() for name, value in tensors_of(trial.rollout).items()}
    trial.build().advantages(trial.rollout.rewards, trial.weights, trial.rollout.identities)
    for batch in trial.batches:
        trial.session.method.loss(batch, trial.session.networks)
    after = tensors_of(trial.rollout)
    changed = [name for name, value in before.items() if not torch.equal(value.nan_to_num(), after[name].nan_to_num())]
    require(not changed, f"changes {', '.join(changed)}")
    return "as they were"


# ---- an update and what is remembered


@law("update", "one update moves the weights, leaves the reference, and reports finite numbers")
def update(trial: MethodTrial) -> str:
    with trial.open() as session:
        weights = session.weights
        before = {name: value.clone() for name, value in weights.values.items()}
        reference = {name: value.clone() for name, value in weights.copies.get("reference", {}).items()}
        row = session.step(1)
        moved = [name for name, value in weights.values.items() if not torch.equal(value, before[name])]
        require(bool(moved), "no weight moved")
        kept = all(torch.equal(weights.copies["reference"][name], value) for name, value in reference.items())
        require(kept, "the reference moved")
        bad = [k for k, v in row.items() if isinstance(v, float) and k.startswith(("grad", "policy")) and v != v]
        require(not bad, f"{', '.join(bad)} is NaN")
        state, other = json.loads(json.dumps(session.method.state_dict())), trial.build()
    require_state(other, state)
    return f"moves {len(moved)} of {len(before)} tensors"


def require_state(method: Method, state: dict[str, Any]) -> None:
    """The law of a state: raise Broken where a new method does not take it as it is, or takes a foreign one."""
    method.load_state_dict(state)
    again = json.loads(json.dumps(method.state_dict()))
    require(again == state, f"a new method that was given {state} has {again}")
    try:
        method.load_state_dict(state | {"foreign": 1})
    except ValueError:
        return
    require(False, "it takes a state with a foreign key")


@law("state", "state_dict survives JSON, a new method takes it over, and a foreign one is refused with ValueError")
def state(trial: MethodTrial) -> str:
    result = json.loads(json.dumps(trial.build().state_dict()))
    require_state(trial.build(), result)
    return f"{sorted(result) or 'none'}"


LAWS: tuple[Law[MethodTrial], ...] = (
    *(plan, credit, failed_rewards, retired, ratio, loss, summed, gradient, inputs_alone, update, state),
)
