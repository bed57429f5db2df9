"""The only denoising loop, and the policy it shares with training.

Rollout and training go through the same `Policy.predict` and `Policy.distribution`, and latents are kept
exactly as they were fed onward, so the first ratio is 1 by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.models.base import ModelAdapter, channel_axis
from flowrl.plan import StepPlan
from flowrl.rng import normal
from flowrl.sa_solver import sa_step
from flowrl.samplers.base import LogProbForm, Sampler, StepDistribution
from flowrl.solvers import History, solve
from flowrl.types import Condition, Edges, Gaussians, Prediction, SampleId, Samples, Step


@dataclass(frozen=True, slots=True)
class Policy:
    """Adapter, sampler and guidance bound together."""

    adapter: ModelAdapter
    sampler: Sampler
    guidance_scale: float

    def transition(self, x: Tensor, step: Step, cond: Condition) -> StepDistribution:
        """Distribution of the next latents from x [B, ...]; one network forward (two halves under CFG)."""
        return self.distribution(self.predict(x, step, cond), x, step)

    def predict(self, x: Tensor, step: Step, cond: Condition) -> Prediction:
        """The network's belief at x [B, ...]; the one forward of a step."""
        raw = self.adapter.predict(x, step.timestep, cond, self.guidance_scale)
        return self.adapter.process.predict(raw, x, step.sigma, self.adapter.prediction_type, step.alpha)

    def distribution(self, prediction: Prediction, x: Tensor, step: Step) -> StepDistribution:
        """The sampler's law on that belief."""
        law = self.sampler.transition(self.adapter.process, prediction, x, step)
        return replace(law, channel_axis=channel_axis(self.adapter))


class Evaluations:
    """Counts the samples that go through a network: `rows` grows by the batch of every forward, doubled by CFG.

    A hook on the network itself, of several experts on each, so that every adapter is counted as it works: one doubled
    batch, two calls, or none where guidance is embedded. A forward that gradient checkpointing repeats block by block
    counts once.
    """

    def __init__(self, network: nn.Module) -> None:
        self.rows = 0
        self.watch(network)

    def watch(self, network: nn.Module) -> None:
        """Count this network's samples too."""
        for part in network.values() if isinstance(network, nn.ModuleDict) else (network,):
            part.register_forward_pre_hook(self._count, with_kwargs=True)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Forwards inside the block are made for nothing."""
        before = self.rows
        try:
            yield
        finally:
            self.rows = before

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first argument of a denoiser is its latents: a tensor, or a list of samples.
        self.rows += len(args[0] if args else next(iter(kwargs.values())))


@dataclass(frozen=True, slots=True)
class Noise:
    """Keyed noise of one rollout: the same whatever the batch, the order or the number of processes.

    `iteration` None is evaluation. `shared_start` gives all samples of a prompt one initial noise. `chosen` [P, G] says
    which of a pool's candidates each sample is, and so whose noise it has; None: sample k is candidate k. `laws` has a
    Gaussian for each slot, which the initial noise of its samples is drawn from; None: the standard one.
    """

    seed: int
    purpose: str
    iteration: int | None
    shape: tuple[int, ...]
    shared_start: bool = False
    chosen: Tensor | None = None
    laws: Gaussians | None = None

    def _key(self, sample: SampleId) -> tuple[int, ...]:
        head = () if self.iteration is None else (self.iteration,)
        candidate = sample.sample if self.chosen is None else int(self.chosen[sample.slot, sample.sample])
        return (*head, sample.slot, candidate)

    def initial(self, ids: Sequence[SampleId]) -> Tensor:
        """Starting noise, [B, ...] float32."""
        keys = [self._key(SampleId(i.slot, 0) if self.shared_start else i) for i in ids]
        eps = normal(self.shape, self.seed, f"{self.purpose}/initial", keys)
        return eps if self.laws is None else self.laws.at(torch.tensor([i.slot for i in ids])).sample(eps)

    def starts(self, ids: Sequence[SampleId]) -> tuple[Tensor, Tensor]:
        """Samples with distinct initial noise [N], and for each sample the one of them it starts with [B]."""
        slots = [i.slot for i in ids] if self.shared_start else list(range(len(ids)))
        distinct = list(dict.fromkeys(slots))
        return torch.tensor([slots.index(s) for s in distinct]), torch.tensor([distinct.index(s) for s in slots])

    def step(self, ids: Sequence[SampleId], index: int) -> Tensor:
        """Noise of step `index`, [B, ...] float32; chains have branch 0."""
        return normal(self.shape, self.seed, f"{self.purpose}/step", [(*self._key(i), index, 0) for i in ids])


@torch.no_grad()
def run(
    policy: Policy,
    plan: StepPlan,
    noise: Noise,
    ids: Sequence[SampleId],
    cond: Condition,
    rows: Tensor,
    *,
    batch_size: int,
    form: LogProbForm = "mean",
    columns: Sequence[str] = (),
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] = lambda count: None,
    finished: Callable[[int, Tensor], None] = lambda start, x0: None,
) -> tuple[Samples, Edges]:
    """Denoise B samples along the plan.

    Args:
        policy: adapter, sampler and guidance.
        plan: the denoising steps.
        noise: keyed noise.
        ids: B identities; they key the noise.
        cond: conditions of the prompts.
        rows: row of `cond` of each sample, [B].
        batch_size: samples per network forward.
        form: of the stored log-probs.
        columns: extras per trained edge; `mean_old` [E, ...] is the one there is.
        device: where the forward runs.
        progress: called with the number of samples just finished.
        finished: called before that with the place of the first of them and their latents [b, ...], on the CPU.

    Returns:
        Samples in the order of `ids`, and the trained edges ordered by (sample, step), on the CPU.
    """
    unknown = sorted(set(columns) - {"mean_old"})
    if unknown:
        raise ValueError(f"rollout column {unknown[0]!r} is unknown; there is: mean_old")
    latents, parts, nodes_before = [], [], 0
    for start in range(0, len(ids), batch_size):
        part = list(ids[start : start + batch_size])
        picked = cond.index(rows[start : start + batch_size])
        x0, edges = _chains(policy, plan, noise, part, picked, form, columns, device)
        parts.append((edges, nodes_before, start))
        nodes_before += len(edges.nodes)
        latents.append(x0)
        finished(start, x0)
        progress(len(part))
    return Samples(x0=torch.cat(latents), ids=tuple(ids)), _join(parts)


def _chains(
    policy: Policy,
    plan: StepPlan,
    noise: Noise,
    ids: list[SampleId],
    cond: Condition,
    form: LogProbForm,
    columns: Sequence[str],
    device: torch.device | str,
) -> tuple[Tensor, Edges]:
    """One batch through all steps.

    Samples that start from one noise are one row of the frontier x until the first stochastic step parts them.
    """
    process, recorder, history = policy.adapter.process, _Recorder(form, columns, channel_axis(policy.adapter)), None
    leads, owner = noise.starts(ids)
    at, alone, trail = cond.index(leads), [ids[j] for j in leads.tolist()], None
    # Unscaled also where sigmas[0] < 1 (VP, sigma_max < 1): so do the pipelines, and so they were trained.
    x = noise.initial(alone).to(device)
    for k in range(len(plan)):
        step = plan.steps(torch.full((len(x),), k), process, device)
        prediction = policy.predict(x, step, at)
        # Stochastic steps leave their x0_hat too: a solver that follows a window goes on from them.
        before, history = history, History.of(prediction, step)
        if not plan.stochastic[k]:
            last = k == len(plan) - 1
            if plan.solver[k] == "sa":
                xi = noise.step(alone, k).to(device) if plan.noise_level[k] > 0 else torch.zeros_like(x)
                x, trail = sa_step(prediction, x, step, trail, xi, last=last)
            else:
                x = solve(plan.solver[k], process, prediction, x, step, None if last else before)
            recorder.skip()
            continue
        distribution = policy.distribution(prediction, x, step).at(owner)
        x_next = distribution.sample(noise.step(ids, k).to(device))
        if k in plan.train:
            recorder.add(k, x, owner, x_next, distribution)
        else:
            recorder.skip()
        x, history, owner, at = x_next, history.at(owner), torch.arange(len(ids)), cond
    return x[owner].float().cpu(), recorder.edges(x)


class _Recorder:
    """The trained steps of one batch: every latent once, as a node, and the edges between them."""

    def __init__(self, form: LogProbForm, columns: Sequence[str], axis: int) -> None:
        self.form, self.columns, self.axis = form, columns, axis
        self.nodes: list[Tensor] = []
        self.records: list[dict[str, Tensor]] = []
        self.place: Tensor | None = None  # node that holds each sample's present latents, [B]

    def skip(self) -> None:
        """A step that is not trained: the latents behind it are not a node."""
        self.place = None

    def add(self, k: int, x: Tensor, owner: Tensor, x_next: Tensor, distribution: StepDistribution) -> None:
        """The step from x [N, ...] to x_next [B, ...]; sample b came from row owner[b]."""
        parent = self._store(x)[owner] if self.place is None else self.place
        self.place = self._store(x_next)
        extras = {"mean_old": distribution.mean.cpu()} if "mean_old" in self.columns else {}
        self.records.append(
            {
                "parent": parent,
                "child": self.place,
                "step": torch.full((len(x_next),), k),
                "sample": torch.arange(len(x_next)),
                "old_log_prob": distribution.log_prob(x_next, self.form).cpu(),
            }
            | extras
        )

    def _store(self, x: Tensor) -> Tensor:
        """Keep latents [n, ...] as nodes; their numbers [n]."""
        before = sum(len(part) for part in self.nodes)
        self.nodes.append(x.cpu())
        return before + torch.arange(len(x))

    def edges(self, x: Tensor) -> Edges:
        """Ordered by (sample, step); `x` gives the shape where there are none."""
        if not self.records:
            none = torch.zeros(0, dtype=torch.int64)
            position = x.shape[1 : self.axis] + x.shape[self.axis + 1 :]
            return Edges(
                nodes=x.new_zeros((0, *x.shape[1:])).cpu(),
                parent=none,
                child=none,
                step=none,
                sample=none,
                old_log_prob=torch.zeros(0, *(position if self.form == "position" else ())),
            )
        table = {name: torch.stack([r[name] for r in self.records], dim=1).flatten(0, 1) for name in self.records[0]}
        fixed = {name: table.pop(name) for name in ("parent", "child", "step", "sample", "old_log_prob")}
        return Edges(nodes=torch.cat(self.nodes), columns=table, **fixed)


def _join(parts: list[tuple[Edges, int, int]]) -> Edges:
    """Edges of several batches as one table; rows of nodes and samples are moved along."""
    names = parts[0][0].columns
    return Edges(
        nodes=torch.cat([e.nodes for e, _, _ in parts]),
        parent=torch.cat([e.parent + before for e, before, _ in parts]),
        child=torch.cat([e.child + before for e, before, _ in parts]),
        step=torch.cat([e.step for e, _, _ in parts]),
        sample=torch.cat([e.sample + start for e, _, start in parts]),
        old_log_prob=torch.cat([e.old_log_prob for e, _, _ in parts]),
        columns={name: torch.cat([e.columns[name] for e, _, _ in parts]) for name in names},
    )
