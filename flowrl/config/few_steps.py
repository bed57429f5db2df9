"""A run on a model that is distilled to few steps: its guidance, its numbers of steps, its grid, its training times."""

from dataclasses import replace

from flowrl.config.components import Component
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.strict import Options
from flowrl.core.tensors import floats
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.training_times import GRID
from flowrl.models.base import ModelAdapter, ModelConfig
from flowrl.models.pipelines.declared import declared


def on_its_nodes(algorithm: Component, model: Component, given: Options) -> Component:
    """A method on finished samples with its training times and its solver on the nodes that the model lists; `given`
    are the user's options, which stay."""
    config = model.config
    if not isinstance(config, ModelConfig):
        return algorithm
    known = declared(config.path, config.revision, config.distilled)
    if known is None or known.nodes is None:
        return algorithm
    stay = {name for name, value in given.items() if value is not None}
    return replace(algorithm, config=algorithm.config.on_nodes(len(known.nodes), stay))


def check(resolved: Resolved, adapter: ModelAdapter, scales: list[tuple[str, float | None]]) -> list[str]:
    """Check guidance scales, by their keys, and numbers of steps against a distilled model.

    Returns:
        Notes about the model.

    Raises ConfigError: with the key, the value and the remedy.
    """
    known, run = adapter.distilled, resolved.run
    if known is None:
        return []
    looked = None if run.rollout.exploration is None else run.rollout.exploration.num_inference_steps
    steps = {"rollout": run.rollout.num_inference_steps, "eval": run.eval.num_inference_steps}
    steps |= {} if looked is None else {"rollout.exploration": looked}
    try:
        for key, scale in scales:
            if scale is not None:
                adapter.check_guidance(scale, key)
        for place, count in steps.items():
            if count is not None:
                adapter.check_steps(count, f"{place}.num_inference_steps")
    except ValueError as error:
        raise ConfigError.about(error) from None
    listed = "made for 1 to 8 steps" if known.nodes is None else f"it takes these {len(known.nodes)} steps"
    open_ended = known.kind == "nodes" and known.nodes is None
    note = f"the model is distilled {known}: {listed}{', which are not listed' if open_ended else ''}"
    notes = [f"{note}; evaluations take its deterministic steps"]
    if not known.declared:
        notes[0] += "; if it is not, set model.distilled=none"
    solver = vars(resolved.algorithm.config).get("solver")
    if known.nodes is not None and solver in ("dpm2_midpoint", "dpm2_heun", "sa"):
        notes.append(
            f"algorithm.solver={solver} leaves the path that the model was distilled on: its states between the noise "
            "levels are others; ode keeps to it"
        )
    if resolved.training.renoises:
        notes.append(_renoised(resolved, adapter))
    return notes


def _renoised(resolved: Resolved, adapter: ModelAdapter) -> str:
    """A note on a method that fits the network to re-noised samples."""
    known, name = adapter.distilled, resolved.algorithm.name
    assert known is not None
    text = f"{name} fits the network to re-noised samples, which pulls a distilled one towards blurred means; "
    if known.nodes is None:
        return text + "methods with log-probs (flow_grpo with rollout.sampler ddim or cps) do not"
    times = resolved.algorithm.config.times_on(adapter.schedule(len(known.nodes)))
    if times.name in GRID:
        return text + "its training times are the noise levels of the model's steps"
    return text + f"algorithm.times.name={times.name} draws times between the model's own; subset keeps to them"


def check_plan(resolved: Resolved, plan: StepPlan, adapter: ModelAdapter) -> None:
    """Raise ConfigError for an iteration whose steps are not those of a model that lists its own."""
    known = adapter.distilled
    if known is None or known.nodes is None:
        return
    taken = floats(plan.schedule.sigmas[:-1])
    if len(taken) != len(known.nodes) or max(abs(a - b) for a, b in zip(taken, known.nodes, strict=True)) > 1e-3:
        shift = vars(resolved.model.config).get("shift")
        raise ConfigError(
            f"the rollout's steps begin at the noise levels {', '.join(f'{s:g}' for s in taken)}, and the model is "
            f"distilled {known}: neither its scheduler nor {resolved.algorithm.name} may lead to others",
            Remedy({"model.distilled": "none"}) if shift is None else Remedy({"model.shift": None}),
        )
    if plan.tree is not None and bool((plan.tree.node < 0).any()):
        raise ConfigError(
            f"algorithm: {resolved.algorithm.name} takes steps of the rollout that span several of the grid's, and the "
            f"model is distilled {known}: it knows no longer ones",
            {"model.distilled": "none"},
        )
