"""Trees of evaluations in the files of `evaluation/evaluation_tree.py`, and their lines on a drawing."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.apps.gallery.tags import Tagged
from flowrl.core.errors import ConfigError
from flowrl.core.files import loads
from flowrl.media import media

PREFIX = "tree-"
"""Prefix of the files in `eval/`, before the tag of the evaluation."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A step from one node to another."""

    parent: int
    child: int
    noisy: bool
    advantage: float | None
    pruned: bool

    def looks_like(self, other: "Edge") -> bool:
        return (self.noisy, self.advantage, self.pruned) == (other.noisy, other.advantage, other.pruned)


@dataclass(frozen=True, slots=True)
class Tree(Tagged):
    """One `eval/tree-<tag>.json`: N nodes, the root first, joined by N - 1 edges."""

    method: str
    prompt: str
    sigmas: tuple[float, ...]
    splits: tuple[int, ...]
    place: tuple[int, ...]
    """Place of each node on the grid, [N]."""
    reward: tuple[float | None, ...]
    """Reward of each node, fused from its leaves, [N]."""
    edges: tuple[Edge, ...]
    """Edges; each comes after its predecessor."""
    leaves: tuple[int, ...]
    """Nodes at the end of the grid, top to bottom."""
    leaf_reward: tuple[float | None, ...]
    raw: dict[str, tuple[float | None, ...]]
    """Output of a reward -> its values on the leaves."""
    columns: int
    """Columns of the contact sheet."""
    size: tuple[int, int]
    """(width, height) of an image in the sheet, in pixels."""
    sheet: Path | None
    note: str | None

    @property
    def rows(self) -> int:
        """Rows of the contact sheet."""
        return -(-len(self.leaves) // self.columns)

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def forwards(self) -> int:
        """Network evaluations: one for each node that is not a leaf."""
        return len(self.place) - len(self.leaves)

    @property
    def chain_forwards(self) -> int:
        """Network evaluations of as many chains: one for each step of each leaf's path."""
        below = self.below()
        return sum(1 + below[edge.child][1] - below[edge.child][0] for edge in self.edges)

    def below(self) -> list[tuple[int, int]]:
        """(first, last) leaf below each node, [N]."""
        result = [(len(self.leaves), -1)] * len(self.place)
        for number, node in enumerate(self.leaves):
            result[node] = (number, number)
        for edge in reversed(self.edges):
            (low, high), (first, last) = result[edge.parent], result[edge.child]
            result[edge.parent] = (min(low, first), max(high, last))
        return result

    def ways(self) -> list[list[Edge]]:
        """Chains of edges that look alike, without a split between them; each is one line on a drawing."""
        out: dict[int, list[Edge]] = {}
        for edge in self.edges:
            out.setdefault(edge.parent, []).append(edge)
        ends: dict[int, list[Edge]] = {}
        result = []
        for edge in self.edges:
            way = ends.get(edge.parent)
            if way is not None and len(out[edge.parent]) == 1 and way[-1].looks_like(edge):
                way.append(edge)
            else:
                way = [edge]
                result.append(way)
            ends[edge.child] = way
        return result


def read(path: Path) -> Tree:
    """The tree of a file, with the contact sheet next to it. Raises ConfigError: it is damaged; with the remedy."""
    try:
        return _tree(loads(path.read_text(encoding="utf-8")), path)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path} is not a tree ({type(error).__name__}: {error}); delete it") from error


def _tree(document: dict[str, Any], path: Path) -> Tree:
    nodes, table, leaves, sheet = (document[name] for name in ("nodes", "edges", "leaves", "sheet"))
    place = tuple(map(int, nodes["place"]))
    sigmas = tuple(map(float, document["sigmas"]))
    rows = zip(*(table[name] for name in ("parent", "child", "noisy", "advantage", "pruned")), strict=True)
    edges = [Edge(int(a), int(b), bool(noisy), _number(adv), bool(cut)) for a, b, noisy, adv, cut in rows]
    _require_tree(place, edges, len(sigmas) - 1)
    edges.sort(key=lambda edge: place[edge.parent])
    ends = sorted((leaf, node) for node, leaf in enumerate(map(int, nodes["leaf"])) if place[node] == len(sigmas) - 1)
    tree = Tree(
        tag=path.stem.removeprefix(PREFIX),
        iteration=int(document.get("iteration") or 0),
        method=str(document["method"]),
        prompt=str(document["prompt"]),
        sigmas=sigmas,
        splits=tuple(k for k in map(int, document["splits"]) if 0 <= k < len(sigmas)),
        place=place,
        reward=tuple(map(_number, nodes["reward"])),
        edges=tuple(edges),
        leaves=tuple(node for _, node in ends),
        leaf_reward=tuple(map(_number, leaves["reward"])),
        raw={str(name): tuple(map(_number, values)) for name, values in leaves["raw"].items()},
        columns=int(sheet["columns"]),
        size=(int(sheet["width"]), int(sheet["height"])),
        sheet=media.find(path.with_suffix("")),
        note=None if document.get("note") is None else str(document["note"]),
    )
    per_leaf = [tree.leaf_reward, *tree.raw.values()]
    if any(len(values) != len(ends) for values in per_leaf) or len(tree.reward) != len(place):
        raise ValueError(f"{len(ends)} leaves and {len(place)} nodes need as many numbers")
    if min(tree.columns, *tree.size) < 1:
        raise ValueError(f"a sheet of {tree.columns} columns of {tree.size} pixels")
    return tree


def _require_tree(place: tuple[int, ...], edges: list[Edge], steps: int) -> None:
    """Raise ValueError unless every node is connected to the root and the leaves are at the end of the grid."""
    if steps < 1 or not place or place[0] != 0:
        raise ValueError("it has no root or no step")
    if sorted(edge.child for edge in edges) != list(range(1, len(place))):
        raise ValueError("every node but the root needs one edge that leads to it")
    parents = {edge.parent for edge in edges}
    if not parents <= set(range(len(place))):
        raise ValueError("an edge starts at a node that does not exist")
    if any(place[edge.child] <= place[edge.parent] for edge in edges):
        raise ValueError("an edge leads backwards")
    if any((at == steps) == (node in parents) or not 0 <= at <= steps for node, at in enumerate(place)):
        raise ValueError(f"the leaves, and no other nodes, must be at place {steps}")


def _number(value: Any) -> float | None:
    """`value` as a float; None for null, NaN and text."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
