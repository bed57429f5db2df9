"""`flowrl plan`: the work, memory and compute of a run, before anything is downloaded."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import ConfigError
from flowrl.core.startup import imports
from flowrl.display.units import operations, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flowrl.commands._plan_data import Data
    from flowrl.config.resolved import Resolved
    from flowrl.diffusion.plan import StepPlan
    from flowrl.planning.memory import Estimate

PROCESSES = (1, 2, 8)
"""Numbers of processes that the geometry is shown for."""


def command(config: str, overrides: list[str] | None = None, measure: bool = False) -> None:
    """Show whether a run fits, and its hours. Then options, batch geometry, steps, memory, compute; no network is used.

    `--measure` trains two iterations on this machine, for which a model is downloaded if it is not here.
    """
    import yaml

    with imports():
        from flowrl.config.load import load_config, resolve

        run = load_config(config, overrides)  # its faults are told before the libraries are imported
        from rich.console import Console

        from flowrl.commands._plan_answer import answers, measured
        from flowrl.commands._plan_data import data_here, evaluations
        from flowrl.config.checks import check_model

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    took = measured(resolve(run)) if measure else "flowrl plan --measure times two iterations on this machine"
    resolved = resolve(run, offline=True)
    data = data_here(resolved)
    adapter, reason = outline(resolved)
    notes = check_model(resolved, adapter)
    plan = step_plan(resolved, adapter)
    steps = reason if adapter is None else _steps_table(resolved, adapter, plan)
    own, result = ({}, None) if adapter is None else estimated(resolved, adapter, plan, data)
    _heading(console, "Answer, for one process")
    lines = [f"memory and time: {reason}"] if result is None else answers(resolved, adapter, result, own)
    for line in (*lines, took):
        console.print(line, markup=False, highlight=False)
    _heading(console, "Configuration, every default written out")
    console.print(yaml.safe_dump(resolved.tree(), sort_keys=False, allow_unicode=True), markup=False, highlight=False)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    _heading(console, "Batch geometry")
    for line in data.lines:
        console.print(line, markup=False)
    console.print(_geometry_table(resolved, plan, adapter))
    console.print(evaluations(resolved, data), markup=False)
    _heading(console, f"Steps: {len(plan)} in all, {_trained_steps(resolved, plan)} trained")
    console.print(steps)
    if result is not None:
        _heading(console, "Memory and compute, estimated for one process")
        if data.unknown and resolved.run.data.caches_text:
            console.print("embeddings are counted for the texts that are known, at least for those of an iteration")
        _memory(console, resolved, result, data)


def estimated(resolved: Resolved, adapter: Any, plan: StepPlan, data: Data) -> tuple[dict[str, Any], Estimate]:
    """(what the run's time depends on, its estimate); the adapter, a fresh one, is changed."""
    from flowrl.commands._plan_hours import setting
    from flowrl.planning.memory import estimate

    own = setting(resolved, adapter)
    return own, estimate(resolved, adapter, plan, prompts=data.counted(resolved.slots))


def _memory(console: Console, resolved: Resolved, result: Estimate, data: Data) -> None:
    """Print memory and compute of the run."""
    from flowrl.data.text_files import text_folder
    from flowrl.planning.memory import climbed_at_once

    texts, run = data.counted(resolved.slots), resolved.run
    folder = text_folder(run.data, run.output, result.embeddings, images=data.images)
    held = "host, in every process" if folder is None else f"files in {folder}"
    console.print(_memory_table(resolved, result, texts, held if result.embeddings else "made when needed"))
    phases = _table("phase", "resident", "transient", "peak on the device")
    for phase in result.phases:
        phases.add_row(phase.name, *(size(value) for value in (phase.resident, phase.transient, phase.peak)))
    console.print(phases)
    if climbed_at_once(resolved):
        console.print(_climbed(resolved), markup=False)
    largest = "largest: not known"
    if result.peak is not None:
        largest = f"largest: {result.peak.name}, {size(result.peak.peak)}"
    for what, reason in result.unknown.items():
        console.print(f"{what} cannot be measured without weights: {reason}", markup=False)
    console.print(
        f"{largest}. Not included: reward models, the backbone of saliency maps, the CUDA context, library workspaces, "
        "fragmentation; add 10 to 20 %. Formulas: flowrl/planning/memory.py."
    )
    if resolved.model.config.shard:
        ways = " / ".join(map(str, PROCESSES[1:]))
        spared = [size(result.spared(n, full=resolved.model.config.lora is None)) for n in PROCESSES[1:]]
        console.print(
            f"model.shard: each of {ways} processes has {' / '.join(spared)} less resident, "
            "apart from the blocks that are gathered at the time"
        )
    console.print(
        f"network per iteration: {operations(result.rollout_flop)} in the rollout, {operations(result.update_flop)} in "
        "the updates; divide by the processes and by what your device sustains."
    )


def _climbed(resolved: Resolved) -> str:
    """What the phase `gradient` counts."""
    from flowrl.planning.memory import climbed_cards

    counted = {card.outputs[0]: card.image_network for card in climbed_cards(resolved)}
    networks = [f"{name} ({network})" for name, network in counted.items() if network]
    unknown = [name for name, network in counted.items() if not network]
    return (
        f"gradient: {', '.join(['the decoder', *networks])}, forward and backward, and the trained weights' gradients"
        + (f"; not what {', '.join(unknown)} holds for its gradient, which its card does not tell" if unknown else "")
    )


def _heading(console: Console, text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def outline(resolved: Resolved) -> tuple[Any, str]:
    """(adapter without weights, "") or (None, reason)."""
    from flowrl.models.pipelines.skeletons import UnknownModel
    from flowrl.planning.memory import skeleton

    try:
        return skeleton(resolved), ""
    except UnknownModel as error:
        return None, str(error)


def step_plan(resolved: Resolved, adapter: Any) -> StepPlan:
    """Plan of the first iteration; without a model its sigmas are placeholders, and only its counts are right."""
    import torch

    from flowrl.config.checks import check_trained
    from flowrl.diffusion.schedules import Schedule, shift_sigmas

    steps, training = resolved.run.rollout.num_inference_steps, resolved.training
    end = 0.03 if getattr(resolved.model.config, "final_alpha", "model") == "first" else 0.0
    sigmas = shift_sigmas(torch.linspace(1, end, steps + 1), resolved.method.shift)
    schedule = adapter.schedule(steps) if adapter else Schedule(sigmas, 1000 * sigmas[:-1])
    try:
        plan = resolved.method.plan(schedule, resolved.sampler.build(), 1, resolved.run.seed)
        if adapter is not None:
            check_trained(resolved, plan, adapter)
            training.check_grid(schedule, resolved.run.seed)
        training.demand(plan, resolved.setting)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError.about(error, "the first iteration's steps: ", place="algorithm") from None
    return plan


@dataclass(frozen=True, slots=True)
class Geometry:
    """Work of the busiest process in one iteration; a forward under CFG counts once and is twice as large."""

    processes: int
    """Number of processes."""
    samples: int
    """Samples of the busiest process."""
    rollout_forwards: int
    update_forwards: int
    """Forwards with gradient, if no group is dead."""
    frozen_forwards: int
    """Forwards of the reference, and of recomputed log-probs."""


def geometry(
    resolved: Resolved,
    plan: StepPlan,
    processes: int,
    extra: int = 0,
    share: float = 1.0,
    terms: int | None = None,
    passes: int = 1,
) -> Geometry:
    """Upper bounds of an iteration's work: samples of one start (`rollout.shared_noise`) share forwards.

    Trees are counted exactly, without `share`, that of the edges or terms that are trained, and `terms`, those of a
    sample (None: the trained steps of the plan). `extra`: frozen forwards with each forward of the update; `passes`:
    passes over the samples.
    """
    from flowrl.planning.tree_work import tree_work
    from flowrl.training.world import largest_shard

    run = resolved.run
    samples = largest_shard(resolved.slots, resolved.group_size, processes, plan.leaves)
    if plan.tree is not None:
        work = tree_work(resolved, plan)
        forwards = passes * work.update_forwards(samples, run.optim.batch_size, run.optim.updates_per_iteration)
        rollout = work.rollout_forwards(samples, run.rollout.batch_size)
        return Geometry(processes, samples, rollout, forwards, extra * forwards)
    drawn, updates = samples * resolved.drawn // resolved.group_size, run.optim.updates_per_iteration
    edges = math.ceil(samples * (plan.trained if terms is None else terms) * share / updates)
    forwards = passes * updates * math.ceil(edges / run.optim.batch_size)
    rollout = len(plan) * math.ceil(drawn / run.rollout.batch_size)
    return Geometry(processes, samples, rollout, forwards, extra * forwards)


def _geometry_table(resolved: Resolved, plan: StepPlan, adapter: Any) -> Table:
    from flowrl.commands._plan_hours import frozen_forwards
    from flowrl.planning.memory import anchor_rows

    run, method = resolved.run, resolved.method
    extra = frozen_forwards(method)
    demand = resolved.training.demand(plan, resolved.setting)
    share, trained = demand.share, demand.rows
    rows = [geometry(resolved, plan, processes, extra, share, trained, method.passes) for processes in PROCESSES]
    table = _table("", *(f"{g.processes} process{'es' if g.processes > 1 else ''}" for g in rows))
    updates = run.optim.updates_per_iteration
    table.title = (
        f"{_samples_text(resolved, plan, share, trained)}; {run.iterations} iterations = "
        f"{run.iterations * updates * method.passes} updates"
    )
    twice = adapter is not None and adapter.branches(run.rollout.guidance_scale) > 1
    guided = " (CFG: each sample twice)" if twice else ""
    if run.rollout.shared_noise and plan.tree is None:
        guided += ", at most (one start, one forward)"
    table.add_row("samples per process", *(f"{g.samples:,}" for g in rows))
    table.add_row(f"rollout forwards of {run.rollout.batch_size}{guided}", *(f"{g.rollout_forwards:,}" for g in rows))
    table.add_row(f"update forwards of {run.optim.batch_size}{guided}", *(f"{g.update_forwards:,}" for g in rows))
    if resolved.fitting is not None:
        each = [math.ceil(anchor_rows(resolved, plan, n) / run.optim.batch_size) for n in PROCESSES]
        counts = [f"{updates * method.passes * count:,}" for count in each]
        table.add_row(f"update forwards of {run.optim.batch_size}, images of data.anchor", *counts)
    table.add_row("frozen forwards in updates", *(f"{g.frozen_forwards:,}" for g in rows))
    return table


def _samples_text(resolved: Resolved, plan: StepPlan, share: float, trained: int) -> str:
    """Samples and updates of an iteration, in words."""
    run, method = resolved.run, resolved.method
    count, updates = resolved.slots * resolved.group_size, run.optim.updates_per_iteration
    text = (
        f"{count} samples per iteration = {resolved.slots} {'pairs' if resolved.members else 'prompts'} x "
        f"{resolved.group_size}"
    )
    if plan.tree is not None:
        from flowrl.planning.tree_work import tree_work

        work = tree_work(resolved, plan)
        return (
            f"{text} = {count // work.leaves} trees of {work.leaves} leaves, each {sum(work.nodes)} evaluations in the "
            f"rollout (chains: {plan.tree.chain_forwards}) and, for {sum(work.edges):g} trained edges, "
            f"{sum(work.parents):g} in the updates; {updates} updates of {count // plan.leaves // updates} trees"
        )
    what = resolved.training.rows_are + (f" in {method.passes} passes" if method.passes > 1 else "")
    each = "" if resolved.training.frozen else f" x {trained} {what}"
    selected = "" if share == 1 else f", {share:.0%} of them trained"
    return f"{text}; {updates} updates of {count // updates} samples{each}{selected}"


def _trained_steps(resolved: Resolved, plan: StepPlan) -> int:
    from flowrl.planning.tree_work import tree_work

    return len(plan.train) if plan.tree is None else sum(edges > 0 for edges in tree_work(resolved, plan).edges)


def _steps_table(resolved: Resolved, adapter: Any, plan: StepPlan) -> Table:
    """The steps; of a tree its nodes, the splits, and the number of trained edges."""
    from flowrl.planning.tree_work import tree_work

    sigmas, times = plan.schedule.sigmas.tolist(), plan.schedule.timesteps.tolist()
    work = None if plan.tree is None else tree_work(resolved, plan)
    experts = [[part] if work is None and (part := adapter.part_at(time)) else [] for time in times[: len(plan)]]
    counts = ["nodes", "edges trained"] if work else []
    last = ["expert"] if any(experts) else []
    table = _table("step", "sigma", "next sigma", "timestep", "kind", *counts, "std", *last)
    for k, std in enumerate(transition_std(resolved, adapter, plan)):
        kind = ["sde, trained" if k in plan.train else "sde" if plan.stochastic[k] else plan.solver[k]]
        if work is not None:
            kind = [tree_step(plan, k), str(work.nodes[k]), f"{work.edges[k]:g}"]
        place = f"{sigmas[k]:.5f}", f"{sigmas[plan.end(k)]:.5f}", f"{times[k]:.2f}"
        table.add_row(str(k), *place, *kind, f"{std:.5f}", *experts[k])
    return table


def tree_step(plan: StepPlan, k: int) -> str:
    """Kind of step k of a tree.

    >>> from flowrl.diffusion.tree_shapes import offshoots
    >>> from flowrl.diffusion.plan import StepPlan
    >>> from flowrl.diffusion.schedules import Schedule
    >>> import torch
    >>> grid = Schedule(torch.linspace(1, 0, 6), torch.arange(5.0))
    >>> plan = StepPlan(grid, (0.5, 0.5, 0, 0, 0), (0, 1), tree=offshoots(5, [0, 1], 3, merge=2))
    >>> [tree_step(plan, k) for k in range(4)]
    ['sde to step 2, 3 children each; ode', 'sde to step 3, 3 children each', 'ode', 'ode']
    """
    tree = plan.tree
    assert tree is not None
    noisy, every = tree.noisy_children(k), tree.children(k)
    parts = []
    if len(noisy):
        each = len(noisy) // len(tree.node[k, noisy].unique())
        to = f" to step {tree.end(k)}" if tree.end(k) != k + 1 else ""
        parts.append(f"sde{to}{f', {each} children each' if each > 1 else ''}")
    if len(every) > len(noisy):
        parts.append("ode")
    return "; ".join(parts) or "passed by"


def transition_std(resolved: Resolved, adapter: Any, plan: StepPlan) -> list[float]:
    """std of every step's transition; 0 for deterministic steps."""
    import torch

    from flowrl.samplers.base import step_std

    if not any(plan.stochastic):
        return [0.0] * len(plan)  # a method without log-probs has no sampler of its own
    step = plan.steps(torch.arange(len(plan)), adapter.process)
    try:
        stds = step_std(resolved.sampler.build(), adapter.process, step)
    except ValueError as error:
        raise ConfigError.about(error, "the first iteration's steps: ", place="algorithm") from None
    if step.std_scale is not None:
        stds = stds * step.std_scale
    return [float(s) if noisy else 0.0 for s, noisy in zip(stds, plan.stochastic, strict=True)]


def _memory_table(resolved: Resolved, result: Estimate, texts: int, cached: str) -> Table:
    from flowrl.models.weights.lora_kinds import LABELS

    lora = resolved.model.config.lora
    what = "full weights"
    if lora is not None:
        what = f"{LABELS[lora.kind]} rank {lora.rank}, alpha {lora.alpha:g}, {result.lora_modules} modules"
    table = _table("part", "values", "size", "where")
    if resolved.training.frozen:
        what = f"initial noise of {texts} prompts"
    cached_texts = resolved.run.data.caches_text
    for name, count in result.parameters.items():
        held = "device, until texts are encoded" if name.startswith("text_encoder") and cached_texts else "device"
        where = "host, leaf by leaf on the device" if name in result.offloaded else held
        table.add_row(name, f"{count:,}", size(result.stored[name]), where)
    table.add_row(f"trained: {what}", f"{result.trained:,}", size(result.saved), "saved file")
    paged = f"device, {size(result.paged)} of it paged" if result.paged else "device"
    table.add_row(f"moments ({resolved.run.optim.name})", "", size(result.moments), paged)
    for name, held in (("EMA", result.ema), ("snapshots", result.snapshots)):
        if held:
            table.add_row(name, f"{held // 4:,}", size(held), "device")
    table.add_row(f"embeddings of {texts} texts, {size(result.prompt)} each", "", size(result.embeddings), cached)
    table.add_row("latents of a rollout", "", size(result.latents), "host")
    table.add_row("images of a rollout", "", size(result.images), "host")
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left", title_style="")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right")
    return table
