"""Credit on trees: leaf rewards fused upward, normalised by depth or propagated from the leaves, and pruning.

Everything is [P, G, K]: for each leaf the edge that its path takes at step k, float64. Leaves below one node share the
edge, so they share its number. NaN is an edge that is not trained: nothing valid lies behind it, it has nothing to be
compared with, or the path passes step k by. The G samples of a prompt are G / L trees of L leaves.

Source: arXiv 2509.06040 (BranchGRPO), 2512.08153 (TreeGRPO), 2508.04324 (TempFlow-GRPO), 2510.01982 (G2RPO),
2602.06422 (TP-GRPO).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.types import Edges, SampleId
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.tree_shapes import Branching

Gain = Literal["whole", "long_term", "step"]

_LEAST_STD = 1e-6
"""Below it nodes count as equal, as in the released BranchGRPO."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How the nodes of a step are compared."""

    pool: Literal["tree", "prompt"] = "tree"
    """With those of the same tree, or of all trees of the prompt."""
    floor: float = 0.0
    """Divide by at least this share of the leaves' std: two nodes alone are else always at +-0.707."""
    eps: float = 1e-8
    """Added to the std."""
    ddof: Literal[0, 1] = 1

    def __post_init__(self) -> None:
        if not (self.floor >= 0 and self.eps >= 0):
            raise ValueError(f"floor={self.floor} and eps={self.eps} must not be negative")


# ---- fusion


def fuse(total: Tensor, tree: Branching, path_weights: Tensor | None = None) -> Tensor:
    """Mean reward of the leaves behind each edge, [P, G, K].

    Args:
        total: rewards of the leaves, [P, G]; NaN masks.
        tree: of L leaves.
        path_weights: of each leaf behind each edge, [P, G, K] (`by_path`); None: all alike.
    """
    leaves = total.double().unflatten(1, (-1, tree.leaves))
    result = torch.full((*leaves.shape, tree.num_steps), torch.nan, dtype=torch.float64)
    for k in range(tree.num_steps):
        below = _below(tree, k)  # [L, L]: leaf, and leaves behind the same edge
        weights = leaves.isfinite().double()
        if path_weights is not None:
            weights = weights * path_weights[:, :, k].unflatten(1, (-1, tree.leaves))
        summed, share = (leaves.nan_to_num() * weights) @ below, weights @ below
        result[..., k] = torch.where(share > 0, summed / share, torch.nan)
    return result.flatten(1, 2)


def _below(tree: Branching, k: int) -> Tensor:
    """Which leaves share the edge of step k, [L, L] float64; none where the path passes by."""
    child = tree.child(k)
    return ((child[:, None] == child) & (child >= 0)).double()


def by_path(log_probs: Tensor, tree: Branching, beta: float) -> Tensor:
    """Weights of leaves by how likely the way to them was, [P, G, K]: exp(beta z) over its mean behind the same edge.

    z is the log-prob of the way from the edge's end to the leaf, standardised over the leaves behind the edge: of the
    plain sum one leaf would take all, and the mean over dims knows no difference.

    Args:
        log_probs: of the edges, [P, G, K]; NaN where there is none.
        tree: of L leaves.
        beta: 0 gives 1 everywhere.
    """
    steps = log_probs.double().nan_to_num().unflatten(1, (-1, tree.leaves))
    behind = steps.flip(-1).cumsum(-1).flip(-1) - steps  # of the steps after k
    result = torch.ones_like(behind)
    for k in range(tree.num_steps):
        below = _below(tree, k)
        count = below.sum(0).clamp(min=1)
        centred = behind[..., k] - behind[..., k] @ below / count
        std = (centred.square() @ below / count).sqrt()
        weights = (beta * torch.where(std > 0, centred / std.clamp(min=1e-300), 0.0)).exp()
        result[..., k] = weights / (weights @ below / count).clamp(min=1e-300)
    return result.flatten(1, 2)


# ---- credit


def depthwise(values: Tensor, total: Tensor, tree: Branching, scale: Scale) -> Tensor:
    """(value - mean) / std over the nodes that the noisy edges of a step lead to, [P, G, K]; 0 where all are equal, NaN
    where there is one alone.

    Args:
        values: of the edges, [P, G, K] (`fuse`).
        total: rewards of the leaves, [P, G].
        tree: of L leaves.
        scale: what is compared, and what divides.
    """
    edges = values.unflatten(1, (-1, tree.leaves))
    leaf_std = _group_moments(total.double().unflatten(1, (-1, tree.leaves)), scale)[1]
    result = torch.full_like(edges, torch.nan)
    for k in range(tree.num_steps):
        nodes = tree.noisy_children(k)
        if not len(nodes):
            continue
        credit = _normalised(edges[..., k], edges[:, :, nodes, k], leaf_std, scale)
        result[..., k] = torch.where(tree.noisy[k], credit, torch.nan)
    return result.flatten(1, 2)


def _normalised(values: Tensor, nodes: Tensor, leaf_std: Tensor, scale: Scale) -> Tensor:
    """(value - mean) / std of values [P, T, L or 1], mean and std over the nodes [P, T, N] they are among."""
    mean, std, count = _group_moments(nodes, scale)
    divisor = torch.maximum(std, scale.floor * leaf_std) + scale.eps
    credit = torch.where(std >= _LEAST_STD, (values - mean) / divisor, 0.0)
    return torch.where(values.isnan() | (count < 2), torch.nan, credit)


def _group_moments(values: Tensor, scale: Scale) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std and count of values [P, T, N] over a tree or a prompt, [P, T or 1, 1]; NaN counts for nothing."""
    dims = (2,) if scale.pool == "tree" else (1, 2)
    count = values.isfinite().sum(dim=dims, keepdim=True)
    mean = values.nan_to_num().sum(dim=dims, keepdim=True) / count.clamp(min=1)
    square = (values - mean).nan_to_num().square().sum(dim=dims, keepdim=True)
    return mean, (square / (count - scale.ddof).clamp(min=1)).sqrt(), count


def propagated(leaf: Tensor, tree: Branching, path_weights: Tensor | None = None) -> Tensor:
    """Advantages of the leaves [P, G], NaN where masked, as those of the edges: the mean of what lies behind."""
    credit = fuse(leaf, tree, path_weights)
    return torch.where(tree.noisy.T.repeat(leaf.shape[1] // tree.leaves, 1), credit, torch.nan)


def by_grain(total: Tensor, tree: Branching, grains: int, scale: Scale) -> Tensor:
    """`depthwise` for each of several kinds of leaves by itself, summed: leaf l is of kind l % grains.

    NaN where an edge has none of one kind: with a part of the sum it could not be compared with the others.
    """
    kind = torch.arange(total.shape[1]) % grains
    parts = [torch.where(kind == grain, total, torch.nan) for grain in range(grains)]
    credit = torch.stack([depthwise(fuse(part, tree), part, tree, scale) for part in parts])
    return torch.where(credit.isnan().any(dim=0), torch.nan, credit.sum(dim=0))


def increments(total: Tensor, tree: Branching, *, gain: Gain, turning: float, scale: Scale) -> Tensor:
    """What each noisy step of a trunk added (`tree_shapes.completions`), compared over a prompt's trees, [P, G, K].

    With R_t the reward of leaf t, d_t = R_t - R_{t-1} and D = R_n - R_0, a turning point is where the sign of d_t
    begins to agree with that of D. Step t is credited, by `gain`:

        whole      D, plus `turning` d_t at a turning point
        long_term  d_t; R_n - R_{t-1} at a turning point from which the rewards go on in the direction of d_t
        step       d_t
    """
    leaves = total.double().unflatten(1, (-1, tree.leaves))
    gains = leaves.diff(dim=2)
    if gain != "step":
        gains = _at_turning_points(leaves, gains, gain, turning)
    leaf_std = _group_moments(leaves, scale)[1]
    result = torch.full((*leaves.shape, tree.num_steps), torch.nan, dtype=torch.float64)
    steps = [k for k in range(tree.num_steps) if tree.noisy[k].any()]
    for t, k in enumerate(steps):
        own = gains[..., t : t + 1]
        result[..., k] = torch.where(tree.noisy[k], _normalised(own, own, leaf_std, scale), torch.nan)
    return result.flatten(1, 2)


def _at_turning_points(leaves: Tensor, d: Tensor, gain: Gain, turning: float) -> Tensor:
    """Gains [P, T, n] of chains with rewards `leaves` [P, T, n + 1] and increments d [P, T, n]; NaN where masked
    rewards leave open whether a step is a turning point."""
    whole = (leaves[..., -1:] - leaves[..., :1]).expand_as(d)
    sign = _sign(d) * _sign(whole)
    before = torch.cat([-torch.ones_like(sign[..., :1]), sign[..., :-1]], dim=2)
    signs = [-before, sign]
    if gain == "long_term":
        signs.append(_sign(d) * _sign(leaves[..., -1:] - leaves[..., 1:]))
    asked = torch.stack(signs)  # a turning point has all of them above 0, and one that is not tells that it is none
    turns = (asked > 0).all(dim=0)
    if gain == "long_term":
        gains, matters = torch.where(turns, leaves[..., -1:] - leaves[..., :-1], d), True
    else:
        gains, matters = whole + turning * torch.where(turns, d, 0.0), turning != 0
    open_ = asked.isnan().any(dim=0) & ~(asked <= 0).any(dim=0)
    return torch.where(open_ & matters, torch.nan, gains)


def _sign(values: Tensor) -> Tensor:
    """NaN where values are, whose sign torch has as 0."""
    return torch.where(values.isnan(), torch.nan, values.sign())


# ---- pruning: edges that are left out of the updates; rewards and the other edges' credit stay as they are


def beyond_last_split(tree: Branching) -> Tensor:
    """Steps behind the last split, [K] bool."""
    last = max((k for k, splits in enumerate(tree.splits) if splits), default=tree.num_steps)
    return torch.arange(tree.num_steps) > last


def parent_top1(values: Tensor, tree: Branching) -> Tensor:
    """Behind the last split only the way of the best child of each parent is kept, [P, G, K] bool of those left out."""
    behind = beyond_last_split(tree)
    last = int(behind.int().argmax()) - 1
    if not behind.any():
        return torch.zeros_like(values, dtype=torch.bool)
    worth = values[..., last].unflatten(1, (-1, tree.leaves)).nan_to_num(nan=-torch.inf)
    worse = torch.zeros_like(worth, dtype=torch.bool)
    for parent in tree.at(last):
        family = (tree.node[last] == parent).nonzero().squeeze(1)
        best = family[worth[..., family].argmax(dim=-1)]  # the first of equals
        child = tree.child(last)
        worse[..., family] = child[family] != child[best][..., None]
    return worse.flatten(1)[..., None] & behind


def extremes(total: Tensor, tree: Branching, keep: int) -> Tensor:
    """Behind the last split only the `keep` best and worst leaves of a tree stay, [P, G, K] bool of the rest.

    Equals stand in the order of the leaves, so that best and worst never are the same ones.

    Raises:
        ValueError: a tree has fewer leaves than that.
    """
    if not 1 <= 2 * keep <= tree.leaves:
        raise ValueError(f"{keep} best and {keep} worst leaves do not fit a tree of {tree.leaves}")
    worth = total.double().unflatten(1, (-1, tree.leaves))
    order = worth.nan_to_num(nan=-torch.inf).argsort(dim=2, descending=True, stable=True)
    place = order.argsort(dim=2)  # of each leaf, masked ones last
    count = worth.isfinite().sum(dim=2, keepdim=True)
    kept = (place < count) & ((place < keep) | (place >= count - keep))
    return ~kept.flatten(1)[..., None] & beyond_last_split(tree)


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthWindow:
    """Neighbouring steps that are not trained for a while, and then others."""

    size: int = 4
    start: int | None = None
    """First of them in the first iteration; null: the last split."""
    direction: Literal["later", "earlier"] = "later"
    """Where it moves: `later` to cleaner steps (published), `earlier` to noisier ones (released code)."""
    interval: int = 30
    """Iterations at one place."""
    stop: int | None = None
    """Beyond this step it does not go: its first, moving earlier, or its last, moving later; null: the last split, or
    the last trained step."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.interval < 1:
            raise ValueError(f"size={self.size} and interval={self.interval} must be at least 1")

    def check(self, tree: Branching) -> None:
        """Refuse places that the tree does not train, and a way that leads nowhere.

        Raises:
            ValueError: naming the key.
        """
        last = tree.num_steps - 2
        for name, step in (("start", self.start), ("stop", self.stop)):
            if step is not None and not 0 <= step <= last:
                raise ValueError(f"depth.{name}={step}: of {tree.num_steps} steps 0..{last} are trained")
        start, stop = self._ends(tree)
        told = f"depth: direction={self.direction} from step {start} to step {stop}"
        if self.direction == "earlier" and stop >= start:
            raise ValueError(f"{told} does not move: give depth.stop below that, or depth.start above it")
        if self.direction == "later" and stop < start:
            raise ValueError(f"{told} ends before it begins: give depth.stop at least {start}")

    def _ends(self, tree: Branching) -> tuple[int, int]:
        """(start, stop), where they are null of the tree."""
        split = max((k for k, splits in enumerate(tree.splits) if splits), default=0)
        stop = split if self.direction == "earlier" else tree.num_steps - 2
        return split if self.start is None else self.start, stop if self.stop is None else self.stop

    def steps(self, tree: Branching, iteration: int) -> range:
        """Those of an iteration, counted from 1.

        >>> from flowrl.diffusion.tree_shapes import splits
        >>> tree, window = splits(20, {0: 2, 3: 2, 6: 2, 9: 2}, range(19)), DepthWindow()
        >>> [window.steps(tree, iteration) for iteration in (1, 31, 1000)]
        [range(9, 13), range(10, 14), range(15, 19)]
        """
        (start, stop), moved, last = self._ends(tree), (iteration - 1) // self.interval, tree.num_steps - 2
        if self.direction == "later":
            start, last = max(start, min(start + moved, stop - self.size + 1)), stop
        else:
            start = max(start - moved, stop)
        return range(start, min(start + self.size, last + 1))


def log_probs_on_ways(edges: Edges, ids: Sequence[SampleId], plan: StepPlan) -> Tensor:
    """Old log-probs of the steps on the way to each of B leaves of whole trees, [K, B]; NaN where none is kept."""
    tree, leaf = plan.tree, torch.tensor([i.sample % plan.leaves for i in ids])
    assert tree is not None
    result, first = torch.full((len(plan), len(leaf)), torch.nan), torch.arange(len(leaf)) - leaf
    result[edges.step, edges.sample] = edges.old_log_prob
    for k in range(len(plan)):
        child = tree.child(k)[leaf]
        result[k] = torch.where(child >= 0, result[k, first + child.clamp(min=0)], torch.nan)
    return result
