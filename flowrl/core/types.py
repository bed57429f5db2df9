"""The values that all rooms share, and the letters that shapes are written in.

B samples in a batch, P prompts, G samples per prompt (group), K denoising steps, N nodes or parents,
E edges, R rewards, F frames, C/H/W channels and pixels (latents: [B, C, h, w] or [B, C, F, h, w]).
`*pos` is empty unless a method scores positions separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

Member = Literal["chosen", "rejected", "labelled", "drawn"]
"""Where a sample of a slot comes from: a picture of the data, or the network."""
Unit = Literal["term", "sample", "group", "prompt"]
"""What a forward must hold whole: a term, all terms of a sample, a prompt's samples at one time, or all its terms."""


@dataclass(frozen=True)
class Step:
    """One transition per sample: where it starts, where it ends, what the network is fed.

    All are [B]: alpha, sigma and their `_next` float32 (x = alpha * x0 + sigma * eps), `timestep` in the
    network's own units, `index` the step's number in the plan, `noise_level` the sampler's own knob
    (0 is deterministic), `sigma_ceiling` the bound some noise laws need on sigma at the first step. `std_scale`
    multiplies the law's std, without its mean; None is 1.
    """

    alpha: Tensor
    sigma: Tensor
    alpha_next: Tensor
    sigma_next: Tensor
    timestep: Tensor
    index: Tensor
    noise_level: Tensor
    sigma_ceiling: Tensor
    std_scale: Tensor | None = None

    def at(self, rows: Tensor) -> Step:
        """The steps of `rows` [n]."""
        return Step(**{name: value[rows] for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True, slots=True)
class Prediction:
    """The network's belief at x, all [B, ...] float32: x = alpha * x0_hat + sigma * eps_hat."""

    x0_hat: Tensor
    eps_hat: Tensor
    velocity: Tensor


class Condition:
    """Network inputs that come from the prompt: named entries with one row per prompt.

    An entry is a tensor whose first dimension is the prompt, or a list of tensors, one per prompt, where
    lengths differ from prompt to prompt.

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
        """Where the entries lie."""
        first = next(iter(self.tensors.values()))
        return first[0].device if isinstance(first, list) else first.device

    def index(self, rows: Tensor) -> Condition:
        """The conditions of `rows` [B]."""
        chosen = rows.tolist() if any(isinstance(v, list) for v in self.tensors.values()) else []
        return Condition(
            {
                name: [value[row] for row in chosen] if isinstance(value, list) else value[rows.to(value.device)]
                for name, value in self.tensors.items()
            }
        )

    def to(self, *args: Any, **kwargs: Any) -> Condition:
        return Condition(
            {
                name: [v.to(*args, **kwargs) for v in value] if isinstance(value, list) else value.to(*args, **kwargs)
                for name, value in self.tensors.items()
            }
        )

    @staticmethod
    def collate(items: Sequence[Condition]) -> Condition:
        """One Condition of all rows. Entries that are tensors must agree in their other dimensions."""
        joined: dict[str, Tensor | list[Tensor]] = {}
        for name, first in items[0].tensors.items():
            if isinstance(first, list):
                joined[name] = [row for item in items for row in item[name]]
            else:
                joined[name] = torch.cat([item[name] for item in items])
        return Condition(joined)


@dataclass(frozen=True, slots=True)
class SampleId:
    """Who a sample is, whichever rank draws it: `slot` in the iteration's prompt list, `sample` in its group."""

    slot: int
    sample: int


Identity = tuple[str, tuple[str, ...]]
"""Who a prompt is: its whole text, and its pictures. Prompts that are alike share what is learned of one."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Finished generations of this rank."""

    x0: Tensor
    """Clean latents, [B, ...] float32."""
    ids: tuple[SampleId, ...]
    """B identities."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Stochastic transitions worth training on. Latents are stored once, as nodes; a chain is a tree of branch 1."""

    nodes: Tensor
    """Latents, [N, ...], in the dtype in which they were scored."""
    parent: Tensor
    """Row of `nodes` each edge starts from, [E] int64."""
    child: Tensor
    """Row of `nodes` each edge ends at, [E] int64."""
    step: Tensor
    """Index into the plan, [E] int64."""
    sample: Tensor
    """Row of `Samples` the edge leads to, [E] int64."""
    old_log_prob: Tensor
    """[E, *pos] float32, under the policy that drew the edge."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Named extras per edge that an algorithm asked for, such as `mean_old` [E, ...]."""

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
    """The edges of samples that no trained step led to."""
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
        """Those of `rows` [M]."""
        return Gaussians(self.mean[rows], self.std[rows])

    def sample(self, eps: Tensor) -> Tensor:
        """mean + std eps, one draw of each, [P, ...]; eps itself, bitwise, where mean is 0 and std 1."""
        return self.mean + self.std * eps
