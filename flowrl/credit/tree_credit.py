"""Credit on trees: leaf rewards fused upward, normalised by depth or propagated from the leaves, and pruning.

Everything is [P, G, K]: for each leaf the edge that its path takes at step k, float64. Leaves below one node share the
edge, so they share its number. NaN is an edge that is not trained: no valid leaf follows it, it has nothing to be
compared with, or the path has no step at k. The G samples of a prompt are G / L trees of L leaves.

Source: arXiv 2509.06040 (BranchGRPO), 2512.08153 (TreeGRPO), 2508.04324 (TempFlow-GRPO), 2510.01982 (G2RPO),
2602.06422 (TP-GRPO).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.core.types import Edges, SampleId
from flowrl.credit.advantages import aggregate
from flowrl.diffusion.plan import StepPlan
from flowrl.diffusion.tree_shapes import Branching

Gain = Literal["whole", "long_term", "step"]

_LEAST_STD = 1e-6
"""Std below which nodes count as equal, as in the released BranchGRPO."""


@dataclass(frozen=True, slots=True)
class LeafRewards:
    """The rewards of an iteration's leaves, and what is known of the paths to them."""

    tree: Branching
    rewards: Tensor
    """Training values, [R, P, G]; NaN masks."""
    weights: Tensor
    """[R]; a reward of weight 0 is only logged."""
    log_probs: Tensor | None = None
    """Old log-probs of the edges, [P, G, K], NaN where there is none; None: all leaves count alike."""

    def path_weights(self, beta: float) -> Tensor | None:
        """Weights of the leaves after each edge by the paths to them, [P, G, K] (`by_path`); None: all alike."""
        return None if self.log_probs is None else by_path(self.log_probs, self.tree, beta)

    def totals(self, valid: Tensor) -> Tensor:
        """Weighted sums of the rewards, [P, G] float64; NaN where not `valid` [P, G]."""
        return torch.where(valid, aggregate(self.rewards, self.weights), torch.nan)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How the nodes of a step are compared."""

    pool: Literal["tree", "prompt"] = "tree"
    """Nodes of a step that are compared: those of a tree, or of all trees of the prompt."""
    floor: float = 0.0
    """Least divisor, as a share of the leaves' std: two nodes alone are else always at +-0.707, or +-1
    with ddof 0."""
    eps: float = 1e-8
    """Added to the std."""
    ddof: Literal[0, 1] = 1
    """Delta degrees of freedom of the std: 0 divides by n, 1 by n - 1."""

    def __post_init__(self) -> None:
        if not (self.floor >= 0 and self.eps >= 0):
            raise ValueError(f"floor={self.floor} and eps={self.eps} must not be negative")


# ---- fusion


def fuse(total: Tensor, tree: Branching, path_weights: Tensor | None = None) -> Tensor:
    """Mean reward of the leaves after each edge, [P, G, K]. `total` are rewards of the leaves, [P, G], NaN where
    masked. `path_weights`: of each leaf after each edge, [P, G, K] (`by_path`); None: all alike.
    """
    leaves = _by_tree(total.double(), tree)
    result = torch.full((*leaves.shape, tree.num_steps), torch.nan, dtype=torch.float64)
    for k in range(tree.num_steps):
        below = _below(tree, k)
        weights = leaves.isfinite().double()
        if path_weights is not None:
            weights = weights * _by_tree(path_weights[:, :, k], tree)
        summed, share = (leaves.nan_to_num() * weights) @ below, weights @ below
        result[..., k] = torch.where(share > 0, summed / share, torch.nan)
    return result.flatten(1, 2)


def _by_tree(values: Tensor, tree: Branching) -> Tensor:
    """[P, G, ...] as [P, T, L, ...], T trees of a prompt."""
    prompts, samples, *rest = values.shape
    return values.reshape(prompts, samples // tree.leaves, tree.leaves, *rest)


def _below(tree: Branching, k: int) -> Tensor:
    """Leaves that share the edge of step k, [L, L] float64 of 0 and 1; none where the path has no step there."""
    child = tree.child(k)
    return ((child[:, None] == child) & (child >= 0)).double()


def by_path(log_probs: Tensor, tree: Branching, beta: float) -> Tensor:
    """Weights of leaves by how likely the path to them was, [P, G, K]: exp(beta z) over its mean after the same edge.

    z is the log-prob of the path from the edge's end to the leaf, standardised over the leaves after the edge: with the
    plain sum one leaf would have all the weight, and with the mean over dims all would be alike. `log_probs` are those
    of the edges, [P, G, K], NaN where there is none; a `beta` of 0 gives 1 everywhere.
    """
    steps = _by_tree(log_probs.double().nan_to_num(), tree)
    after = steps.flip(-1).cumsum(-1).flip(-1) - steps  # of the steps after k
    result = torch.ones_like(after)
    for k in range(tree.num_steps):
        below = _below(tree, k)
        count = below.sum(0).clamp(min=1)
        centred = after[..., k] - after[..., k] @ below / count
        std = (centred.square() @ below / count).sqrt()
        weights = (beta * torch.where(std > 0, centred / std.clamp(min=1e-300), 0.0)).exp()
        result[..., k] = weights / (weights @ below / count).clamp(min=1e-300)
    return result.flatten(1, 2)


# ---- credit


def depthwise(values: Tensor, total: Tensor, tree: Branching, scale: Scale) -> Tensor:
    """(value - mean) / std over the nodes that the noisy edges of a step lead to, [P, G, K]; 0 where all are equal, NaN
    where there is one alone. Values are those of the edges, [P, G, K] (`fuse`), `total` the rewards of the leaves,
    [P, G]; `scale` says what is compared, and what divides.
    """
    edges = _by_tree(values, tree)
    leaf_std = _group_moments(_by_tree(total.double(), tree), scale)[1]
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
    """Mean, std and count of values [P, T, N] over a tree or a prompt, [P, T or 1, 1]; NaN is left out."""
    dims = (2,) if scale.pool == "tree" else (1, 2)
    count = values.isfinite().sum(dim=dims, keepdim=True)
    mean = values.nan_to_num().sum(dim=dims, keepdim=True) / count.clamp(min=1)
    square = (values - mean).nan_to_num().square().sum(dim=dims, keepdim=True)
    return mean, (square / (count - scale.ddof).clamp(min=1)).sqrt(), count


def propagated(leaf: Tensor, tree: Branching, path_weights: Tensor | None = None) -> Tensor:
    """Advantages of the leaves [P, G], NaN where masked, as those of the edges: means over the leaves after them."""
    credit = fuse(leaf, tree, path_weights)
    return torch.where(tree.noisy.T.repeat(leaf.shape[1] // tree.leaves, 1), credit, torch.nan)


def by_grain(total: Tensor, tree: Branching, grains: int, scale: Scale) -> Tensor:
    """Sum of `depthwise` over several kinds of leaves, each by itself: leaf l is of kind l % grains.

    NaN where an edge has no leaf of one kind: with a part of the sum it could not be compared with the others.
    """
    kind = torch.arange(total.shape[1]) % grains
    parts = [torch.where(kind == grain, total, torch.nan) for grain in range(grains)]
    credit = torch.stack([depthwise(fuse(part, tree), part, tree, scale) for part in parts])
    return torch.where(credit.isnan().any(dim=0), torch.nan, credit.sum(dim=0))


def increments(
    total: Tensor, tree: Branching, *, gain: Gain, turning: float, scale: Scale, joint: bool = False
) -> Tensor:
    """Gain of each noisy step of a trunk (`tree_shapes.completions`), compared over a prompt's trees, [P, G, K]: with
    those of the same step, or with all (`joint`).

    With R_t the reward of leaf t, d_t = R_t - R_{t-1} and D = R_n - R_0, a turning point is where the sign of d_t
    begins to agree with that of D. Step t is credited, by `gain`:

        whole      D, plus `turning` d_t at a turning point
        long_term  d_t; R_n - R_{t-1} at a turning point from which the rewards go on in the direction of d_t
        step       d_t
    """
    leaves = _by_tree(total.double(), tree)
    gains = leaves.diff(dim=2)
    if gain != "step":
        gains = _at_turning_points(leaves, gains, gain, turning)
    leaf_std = _group_moments(leaves, scale)[1]
    result = torch.full((*leaves.shape, tree.num_steps), torch.nan, dtype=torch.float64)
    steps = [k for k in range(tree.num_steps) if tree.noisy[k].any()]
    for t, k in enumerate(steps):
        own = gains[..., t : t + 1]
        result[..., k] = torch.where(
            tree.noisy[k], _normalised(own, gains if joint else own, leaf_std, scale), torch.nan
        )
    return result.flatten(1, 2)


def _at_turning_points(leaves: Tensor, d: Tensor, gain: Gain, turning: float) -> Tensor:
    """Gains [P, T, n] of chains with rewards `leaves` [P, T, n + 1] and increments d [P, T, n].

    NaN where masked rewards leave open whether a step is a turning point.
    """
    whole = (leaves[..., -1:] - leaves[..., :1]).expand_as(d)
    sign = _sign(d) * _sign(whole)
    before = torch.cat([-torch.ones_like(sign[..., :1]), sign[..., :-1]], dim=2)
    signs = [-before, sign]
    if gain == "long_term":
        signs.append(_sign(d) * _sign(leaves[..., -1:] - leaves[..., 1:]))
    conditions = torch.stack(signs)  # a turning point has all of them above 0; one at or below 0 rules it out
    turns = (conditions > 0).all(dim=0)
    if gain == "long_term":
        gains, matters = torch.where(turns, leaves[..., -1:] - leaves[..., :-1], d), True
    else:
        gains, matters = whole + turning * torch.where(turns, d, 0.0), turning != 0
    open_ = conditions.isnan().any(dim=0) & ~(conditions <= 0).any(dim=0)
    return torch.where(open_ & matters, torch.nan, gains)


def _sign(values: Tensor) -> Tensor:
    """Sign of values, NaN where they are NaN (torch gives 0)."""
    return torch.where(values.isnan(), torch.nan, values.sign())


# ---- pruning: edges that are left out of the updates; rewards and the other edges' credit stay as they are


def beyond_last_split(tree: Branching) -> Tensor:
    """Steps after the last split, [K] bool."""
    last = max((k for k, splits in enumerate(tree.splits) if splits), default=tree.num_steps)
    return torch.arange(tree.num_steps) > last


def parent_top1(values: Tensor, tree: Branching) -> Tensor:
    """Edges left out so that after the last split each parent keeps its best child alone, [P, G, K] bool."""
    after = beyond_last_split(tree)
    last = int(after.int().argmax()) - 1
    if not after.any():
        return torch.zeros_like(values, dtype=torch.bool)
    worth = _by_tree(values[..., last], tree).nan_to_num(nan=-torch.inf)
    worse = torch.zeros_like(worth, dtype=torch.bool)
    for parent in tree.at(last):
        family = (tree.node[last] == parent).nonzero().squeeze(1)
        best = family[worth[..., family].argmax(dim=-1)]  # the first of equals
        child = tree.child(last)
        worse[..., family] = child[family] != child[best][..., None]
    return worse.flatten(1)[..., None] & after


def extremes(total: Tensor, tree: Branching, keep: int) -> Tensor:
    """Edges left out so that after the last split each tree keeps its `keep` best and worst leaves, [P, G, K] bool.

    Equal leaves are taken in their order, so that best and worst are never the same ones.

    Raises ValueError: a tree has fewer leaves than that.
    """
    if not 1 <= 2 * keep <= tree.leaves:
        raise ValueError(f"{keep} best and {keep} worst leaves do not fit a tree of {tree.leaves}")
    worth = _by_tree(total.double(), tree)
    order = worth.nan_to_num(nan=-torch.inf).argsort(dim=2, descending=True, stable=True)
    place = order.argsort(dim=2)  # of each leaf, masked ones last
    count = worth.isfinite().sum(dim=2, keepdim=True)
    kept = (place < count) & ((place < keep) | (place >= count - keep))
    return ~kept.flatten(1)[..., None] & beyond_last_split(tree)


@dataclass(frozen=True, kw_only=True)
class DepthWindow:
    """A window of neighbouring steps that are not trained; it moves with the iterations."""

    size: int = 4
    """Steps that are not trained."""
    start: int | None = None
    """First of them in the first iteration; null: the last split."""
    direction: Literal["later", "earlier"] = "later"
    """Direction of its moves: `later` to cleaner steps (published), `earlier` to noisier ones (released code)."""
    interval: int = 30
    """Iterations at one place."""
    stop: int | None = None
    """Last step that it reaches, with its first step moving earlier, with its last moving later; null: the last split,
    or the last trained step."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.interval < 1:
            raise ValueError(f"size={self.size} and interval={self.interval} must be at least 1")

    def check(self, tree: Branching) -> None:
        """Refuse steps that the tree does not train, and a window that cannot move."""
        last = tree.num_steps - 2
        for name, step in (("start", self.start), ("stop", self.stop)):
            if step is not None and not 0 <= step <= last:
                raise ValueError(f"depth.{name}={step}: of {tree.num_steps} steps 0..{last} are trained")
        start, stop = self._ends(tree)
        where = f"depth: direction={self.direction} from step {start} to step {stop}"
        if self.direction == "earlier" and stop >= start:
            raise ValueError(f"{where} does not move: give depth.stop below that, or depth.start above it")
        if self.direction == "later" and stop < start:
            raise ValueError(f"{where} ends before it begins: give depth.stop at least {start}")

    def _ends(self, tree: Branching) -> tuple[int, int]:
        """(start, stop); where they are null, those of the tree."""
        split = max((k for k, splits in enumerate(tree.splits) if splits), default=0)
        stop = split if self.direction == "earlier" else tree.num_steps - 2
        return split if self.start is None else self.start, stop if self.stop is None else self.stop

    def steps(self, tree: Branching, iteration: int) -> range:
        """The steps of an iteration, counted from 1.

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


def log_probs_on_paths(edges: Edges, ids: Sequence[SampleId], plan: StepPlan, scale: Tensor) -> Tensor:
    """Old log-probs of the steps on the path to each of B leaves of whole trees, [K, B]; NaN where none is kept.

    `scale` [K] makes them comparable between steps (`flowrl.samplers.base.density_scale`): a path's is their sum.
    """
    tree, leaf = plan.tree, torch.tensor([i.sample % plan.leaves for i in ids])
    assert tree is not None
    result, first = torch.full((len(plan), len(leaf)), torch.nan), torch.arange(len(leaf)) - leaf
    result[edges.step, edges.sample] = edges.old_log_prob * scale[edges.step]
    for k in range(len(plan)):
        child = tree.child(k)[leaf]
        result[k] = torch.where(child >= 0, result[k, first + child.clamp(min=0)], torch.nan)
    return result
