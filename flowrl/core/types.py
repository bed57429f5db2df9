"""Values that all rooms share, and the letters of their shapes.

B samples in a batch, P prompts, G samples per prompt (group), K denoising steps, N nodes or parents,
E edges, R rewards, F frames, C/H/W channels and pixels (latents: [B, C, h, w] or [B, C, F, h, w]).
`*pos` is empty unless a method scores positions separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.tensors import ints, sent

Member = Literal["chosen", "rejected", "labelled", "drawn"]
"""Origin of a sample in a slot: an image of the data, or the network ("drawn")."""
Unit = Literal["term", "sample", "group", "prompt"]
"""Rows that a forward must not split: one term, the terms of a sample, of a prompt at one time, or of a prompt."""


@dataclass(frozen=True)
class Step:
    """One transition for each of B samples, from x = alpha x0 + sigma eps; every field is [B]."""

    alpha: Tensor
    """float32, at the start of the step."""
    sigma: Tensor
    """float32, at the start of the step."""
    alpha_next: Tensor
    """float32, at its end."""
    sigma_next: Tensor
    """float32, at its end."""
    timestep: Tensor
    """Time in the network's own units."""
    index: Tensor
    """Number of the step in the plan."""
    noise_level: Tensor
    """The sampler's own noise parameter; 0 is deterministic."""
    sigma_ceiling: Tensor
    """Bound of sigma in the std of some samplers, which diverges at sigma = 1."""
    std_scale: Tensor | None = None
    """Factor of the transition's std, not of its mean; None is 1."""
    host: Step | None = field(default=None, init=False)
    """The same steps on the CPU, where these are on a GPU (`knowing`); None: not kept."""

    @property
    def on_cpu(self) -> Step:
        """The same steps on the CPU, so that a sampler can check them; without `host` the CPU waits for the GPU."""
        if self.sigma.device.type == "cpu":
            return self
        return Step(**{name: value.cpu() for name, value in self.columns().items()}) if self.host is None else self.host

    def columns(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def at(self, rows: Tensor) -> Step:
        """The steps of `rows` [n]; `host` stays if the rows are on the CPU."""
        here = sent(rows, self.sigma.device)
        kept = None if self.host is None or rows.device.type != "cpu" else self.host.at(rows)
        return Step(**{name: value[here] for name, value in self.columns().items()}).knowing(kept)

    def knowing(self, host: Step | None) -> Step:
        """These steps, with the same ones on the CPU as `host`."""
        made = Step(**self.columns())
        object.__setattr__(made, "host", host)
        return made


@dataclass(frozen=True, slots=True)
class Prediction:
    """The network's prediction at x = alpha x0_hat + sigma eps_hat, all [B, ...] float32."""

    x0_hat: Tensor
    eps_hat: Tensor
    velocity: Tensor


class Condition:
    """Network inputs from the prompt: named entries with one row per prompt.

    An entry is a tensor [P, ...], or a list of P tensors if their lengths differ.

    Example: Condition({"prompt_embeds": [P, L, D], "pooled": [P, D]}).
    """

    def __init__(self, tensors: dict[str, Tensor | list[Tensor]]) -> None:
        sizes = {name: len(value) for name, value in tensors.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"a Condition needs one row per prompt in every entry, got {sizes}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    @property
    def device(self) -> torch.device:
        """Device of the entries."""
        first = next(iter(self.tensors.values()))
        return first[0].device if isinstance(first, list) else first.device

    def _mapped(self, tensor: Callable[[Tensor], Tensor], rows: Callable[[list[Tensor]], list[Tensor]]) -> Condition:
        """Every entry through `tensor`, or through `rows` if it is a list."""
        own = self.tensors.items()
        return Condition({name: rows(value) if isinstance(value, list) else tensor(value) for name, value in own})

    def index(self, rows: Tensor) -> Condition:
        """The conditions of `rows` [B], best on the CPU."""
        return self._mapped(lambda t: t[sent(rows, t.device)], lambda listed: [listed[row] for row in ints(rows)])

    def repeated(self, count: int) -> Condition:
        """The one row `count` times; tensors share its memory."""
        return self._mapped(lambda t: t.expand(count, *t.shape[1:]), lambda listed: listed * count)

    def contiguous(self) -> Condition:
        """The same rows, each tensor in memory of its own if its rows share theirs."""
        return self._mapped(Tensor.contiguous, lambda listed: listed)

    def to(self, *args: Any, **kwargs: Any) -> Condition:
        return self._mapped(lambda t: t.to(*args, **kwargs), lambda listed: [t.to(*args, **kwargs) for t in listed])

    @staticmethod
    def collate(items: Sequence[Condition]) -> Condition:
        """One Condition of all rows; tensor entries must agree in their other dimensions."""
        joined: dict[str, Tensor | list[Tensor]] = {}
        for name, first in items[0].tensors.items():
            if isinstance(first, list):
                joined[name] = [row for item in items for row in item[name]]
            else:
                joined[name] = torch.cat([item[name] for item in items])
        return Condition(joined)


@dataclass(frozen=True, slots=True)
class SampleId:
    """Identity of a sample on any rank: `slot` in the iteration's prompt list, number `sample` in its group."""

    slot: int
    sample: int


Identity = tuple[str, tuple[str, ...]]
"""Identity of a prompt: its whole text and its images' paths. Prompts that share it are one prompt."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a step of B samples."""

    x: Tensor
    """Latents before it, [B, ...]."""
    x0_hat: Tensor
    """The network's prediction there, [B, ...] float32."""

    @staticmethod
    def join(parts: Sequence[Mapping[int, Kept]]) -> dict[int, Kept]:
        """By step, the samples of all parts in their order."""
        steps = parts[0] if parts else ()
        return {k: Kept(torch.cat([p[k].x for p in parts]), torch.cat([p[k].x0_hat for p in parts])) for k in steps}


@dataclass(frozen=True, slots=True)
class Samples:
    """Finished samples of this rank."""

    x0: Tensor
    """Clean latents, [B, ...] float32."""
    ids: tuple[SampleId, ...]
    """B identities."""
    kept: Mapping[int, Kept] = field(default_factory=dict[int, Kept])
    """What the plan keeps, by step."""
    initial: Tensor | None = None
    """Initial noise that given samples were drawn from, [B, ...] float32; None: not asked for, or drawn here."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Stochastic transitions to train on. Latents are stored once, as nodes; a chain is a tree of branch 1."""

    nodes: Tensor
    """Latents, [N, ...], in the dtype of their log-probs."""
    parent: Tensor
    """Row of `nodes` each edge starts from, [E] int64."""
    child: Tensor
    """Row of `nodes` each edge ends at, [E] int64."""
    step: Tensor
    """Index into the plan, [E] int64."""
    sample: Tensor
    """Row of `Samples` the edge leads to, [E] int64."""
    old_log_prob: Tensor
    """Log-prob under the policy that drew the edge, [E, *pos] float32."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Named values per edge that the method wants, such as `mean_old` [E, ...]."""

    def __len__(self) -> int:
        return len(self.step)

    def select(self, rows: Tensor) -> Edges:
        """The edges of `rows` [n]; nodes are shared, not copied."""
        return replace(
            self,
            parent=self.parent[rows],
            child=self.child[rows],
            step=self.step[rows],
            sample=self.sample[rows],
            old_log_prob=self.old_log_prob[rows],
            columns={name: value[rows] for name, value in self.columns.items()},
        )


def no_edges(samples: Samples) -> Edges:
    """Zero edges, for samples without trained steps."""
    none = torch.zeros(0, dtype=torch.int64)
    return Edges(samples.x0[:0], parent=none, child=none, step=none, sample=none, old_log_prob=torch.zeros(0))


@dataclass(frozen=True, slots=True)
class Gaussians:
    """A Gaussian over the initial latents for each of P prompts, independent in every value."""

    mean: Tensor
    """[P, ...] float32."""
    std: Tensor
    """[P, ...] float32, positive."""

    def at(self, rows: Tensor) -> Gaussians:
        """The Gaussians of `rows` [M]."""
        return Gaussians(self.mean[rows], self.std[rows])

    def sample(self, eps: Tensor) -> Tensor:
        """mean + std eps, one draw of each, [P, ...]; bitwise eps if mean is 0 and std 1."""
        return self.mean + self.std * eps
