"""The only denoising loop, and the policy it shares with training.

Rollout and training call the same `Policy.transition`, and latents are kept exactly as they were fed
onward, so the first ratio is 1 by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.models.base import ModelAdapter
from flowrl.plan import StepPlan
from flowrl.rng import normal
from flowrl.samplers.base import LogProbForm, Sampler, StepDistribution
from flowrl.samplers.ode import Ode
from flowrl.types import Condition, Edges, SampleId, Samples, Step


@dataclass(frozen=True, slots=True)
class Policy:
    """Adapter, sampler and guidance bound together."""

    adapter: ModelAdapter
    sampler: Sampler
    guidance_scale: float

    def transition(self, x: Tensor, step: Step, cond: Condition) -> StepDistribution:
        """Distribution of the next latents from x [B, ...]; one network forward (two halves under CFG)."""
        return self._transition(self.sampler, x, step, cond)

    def deterministic(self, x: Tensor, step: Step, cond: Condition) -> Tensor:
        """Next latents of the plain ODE step, [B, ...]."""
        return self._transition(Ode(), x, step, cond).mean

    def _transition(self, sampler: Sampler, x: Tensor, step: Step, cond: Condition) -> StepDistribution:
        process = self.adapter.process
        raw = self.adapter.predict(x, step.timestep, cond, self.guidance_scale)
        prediction = process.predict(raw, x, step.sigma, self.adapter.prediction_type)
        return sampler.transition(process, prediction, x, step)


@dataclass(frozen=True, slots=True)
class Noise:
    """Keyed noise of one rollout: the same whatever the batch, the order or the number of processes.

    `iteration` None is evaluation. `shared_start` gives all samples of a prompt one initial noise.
    """

    seed: int
    purpose: str
    iteration: int | None
    shape: tuple[int, ...]
    shared_start: bool = False

    def _key(self, sample: SampleId) -> tuple[int, ...]:
        head = () if self.iteration is None else (self.iteration,)
        return (*head, sample.slot, sample.sample)

    def initial(self, ids: Sequence[SampleId]) -> Tensor:
        """Starting noise, [B, ...] float32."""
        keys = [self._key(SampleId(i.slot, 0) if self.shared_start else i) for i in ids]
        return normal(self.shape, self.seed, f"{self.purpose}/initial", keys)

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

    Returns:
        Samples in the order of `ids`, and the trained edges ordered by (sample, step), on the CPU.
    """
    unknown = sorted(set(columns) - {"mean_old"})
    if unknown:
        raise ValueError(f"rollout column {unknown[0]!r} is unknown; there is: mean_old")
    finished, parts, nodes_before = [], [], 0
    for start in range(0, len(ids), batch_size):
        part = list(ids[start : start + batch_size])
        picked = cond.index(rows[start : start + batch_size])
        x0, edges = _chains(policy, plan, noise, part, picked, form, columns, device)
        parts.append((edges, nodes_before, start))
        nodes_before += len(edges.nodes)
        finished.append(x0)
        progress(len(part))
    return Samples(x0=torch.cat(finished), ids=tuple(ids)), _join(parts)


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
    """One batch through all steps."""
    process, count = policy.adapter.process, len(ids)
    trained, member = set(plan.train), torch.arange(count)
    # Unscaled also where sigmas[0] < 1 (VP, sigma_max < 1): so do the pipelines, and so they were trained.
    x = noise.initial(ids).to(device)
    nodes: list[Tensor] = []
    records: list[dict[str, Tensor]] = []
    at_node: int | None = None  # number of the node that holds the present x
    for k in range(len(plan)):
        step = plan.steps(torch.full((count,), k), process, device)
        if not plan.stochastic[k]:
            x, at_node = policy.deterministic(x, step, cond), None
            continue
        distribution = policy.transition(x, step, cond)
        x_next = distribution.sample(noise.step(ids, k).to(device))
        if k in trained:
            if at_node is None:
                at_node = len(nodes)
                nodes.append(x.cpu())
            nodes.append(x_next.cpu())
            extras = {"mean_old": distribution.mean.cpu()} if "mean_old" in columns else {}
            records.append(
                {
                    "parent": at_node * count + member,
                    "child": (len(nodes) - 1) * count + member,
                    "step": torch.full((count,), k),
                    "sample": member,
                    "old_log_prob": distribution.log_prob(x_next, form).cpu(),
                }
                | extras
            )
            at_node = len(nodes) - 1
        else:
            at_node = None
        x = x_next
    return x.float().cpu(), _collect(nodes, records, x)


def _collect(nodes: list[Tensor], records: list[dict[str, Tensor]], x: Tensor) -> Edges:
    """Edges of one batch, ordered by (sample, step)."""
    if not records:
        none = torch.zeros(0, dtype=torch.int64)
        return Edges(
            nodes=x.new_zeros((0, *x.shape[1:])).cpu(),
            parent=none,
            child=none,
            step=none,
            sample=none,
            old_log_prob=torch.zeros(0),
        )
    table = {name: torch.stack([r[name] for r in records], dim=1).flatten(0, 1) for name in records[0]}
    fixed = {name: table.pop(name) for name in ("parent", "child", "step", "sample", "old_log_prob")}
    return Edges(nodes=torch.cat(nodes), columns=table, **fixed)


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
