"""A tree of rollouts as inline SVG: root at the left, a column for each step, leaves with images at the right.

Coordinates are user units (px at the natural size). The style sheet has the colours: `m4` .. `m1`, `z`, `p1` .. `p4`
for an edge's advantage, `r0` .. `r5` for a node's reward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from flowrl.apps.gallery.rendering import rendered
from flowrl.apps.gallery.results import DASH, MINUS
from flowrl.apps.gallery.trees import Edge, Tree

WIDTH, LEFT, TOP, BOTTOM = 1100, 30, 48, 14
DOT, TEXT = 12, 44
"""Width of a leaf's dot and of its reward."""
PITCHES = ((65, 16.0, 4), (33, 24.0, 3), (17, 28.0, 2), (9, 36.0, 2), (1, 60.0, 1))
"""(least number of leaves, distance of leaves, number of alternating columns of their images)."""
LEVELS, SHADES = 4, 6
"""Number of colours for each sign of the advantage, and for rewards."""
LABEL_PX, COLUMN_PX = 48, 6
"""Width of the column of a step with splits, for its name, and the least width of the others."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of the colours, common to several drawings."""

    advantage: float
    """Largest absolute advantage; 0: there is none."""
    reward: tuple[float, float]
    """Least and largest reward of the nodes."""

    @staticmethod
    def of(trees: Sequence[Tree]) -> "Ranges":
        """Ranges of several trees."""
        advantages = [abs(edge.advantage) for tree in trees for edge in tree.edges if edge.advantage is not None]
        rewards = [value for tree in trees for value in tree.reward if value is not None]
        return Ranges(max(advantages, default=0.0), (min(rewards, default=0.0), max(rewards, default=0.0)))

    def tone(self, advantage: float | None) -> str:
        """Class of an edge's colour, which shows the sign of any advantage.

        >>> [Ranges(2.0, (0, 1)).tone(a) for a in (-2.0, -0.001, 0.0, 1.0, None)]
        ['m4', 'm1', 'z', 'p2', 'none']
        """
        if advantage is None:
            return "none"
        if not advantage or not self.advantage:
            return "z"
        level = min(LEVELS, 1 + int(LEVELS * abs(advantage) / self.advantage * (1 - 1e-9)))
        return f"{'p' if advantage > 0 else 'm'}{level}"

    def shade(self, reward: float | None) -> str:
        """Class of a node's colour.

        >>> [Ranges(0, (0.0, 6.0)).shade(r) for r in (0.0, 2.5, 6.0, None)]
        ['r0', 'r2', 'r5', 'none']
        """
        low, high = self.reward
        if reward is None:
            return "none"
        share = (reward - low) / (high - low) if high > low else 0.5
        return f"r{min(SHADES - 1, max(0, int(SHADES * share)))}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions in user units."""

    x: tuple[float, ...]
    """x of each place of the grid, [K + 1]."""
    nodes: tuple[tuple[float, float], ...]
    """(x, y) of each node."""
    images: tuple[tuple[float, float], ...]
    """(x, y) of the upper left corner of each leaf's image."""
    size: tuple[float, float]
    """(width, height) of an image."""
    height: float

    @staticmethod
    def of(tree: Tree) -> "Layout":
        """Layout of a tree: a column for each step, leaves at equal distances, nodes in the middle of their leaves."""
        count = len(tree.leaves)
        pitch, lanes = next((pitch, lanes) for least, pitch, lanes in PITCHES if count >= least)
        high = min(pitch * lanes - 4, 2 * pitch * lanes * tree.size[1] / tree.size[0])
        wide = high * tree.size[0] / tree.size[1]
        right = WIDTH - DOT - TEXT - lanes * (wide + 4)
        x, top = _places(tree, right), TOP + pitch * lanes / 2
        nodes = tuple(
            (x[at], top + pitch * (first + last) / 2)
            for at, (first, last) in zip(tree.place, tree.below(), strict=True)
        )
        images = tuple(
            (right + DOT + TEXT + (number % lanes) * (wide + 4), top + pitch * number - high / 2)
            for number in range(count)
        )
        return Layout(x, nodes, images, (wide, high), top + pitch * (count - 1 + lanes / 2) + BOTTOM)


def _places(tree: Tree, right: float) -> tuple[float, ...]:
    """x of each place: equal columns, or wider ones for steps with splits if their names need it."""
    room, several = right - LEFT, len(tree.splits)
    plain, wide = tree.steps - several, room / tree.steps
    if several and plain and wide < LABEL_PX:
        wide = max(wide, min(LABEL_PX, (room - COLUMN_PX * plain) / several))
    narrow = (room - wide * several) / plain if plain else wide
    return tuple(
        LEFT + wide * passed + narrow * (k - passed)
        for k, passed in ((k, sum(step < k for step in tree.splits)) for k in range(tree.steps + 1))
    )


def draw(tree: Tree, ranges: Ranges, sheet: dict[str, Any] | None, anchor: str) -> Markup:
    """The drawing of a tree. `sheet`: contact sheet of its leaves, of `images.image_values`; None: empty frames.
    `anchor`: prefix of the ids inside, unique on the page.
    """
    layout = Layout.of(tree)
    # Stochastic edges with the largest advantages on top.
    ways = sorted(tree.ways(), key=lambda way: (way[0].noisy, not way[0].pruned, abs(way[0].advantage or 0.0)))
    named, free = [], 0.0
    for k in sorted(tree.splits):
        if layout.x[k] >= free:  # there is space for its name
            named.append(k)
            free = layout.x[k] + LABEL_PX - 1
    radius = 5.0 if len(tree.leaves) <= 32 else 3.5
    given = {"tree": tree, "layout": layout, "ranges": ranges, "sheet": sheet, "anchor": anchor, "text": _text}
    sizes = {"width": WIDTH, "top": TOP - 8, "bottom": layout.height - BOTTOM / 2, "dot": DOT, "radius": radius}
    lines, dots = [Markup(_way(tree, layout, ranges, way)) for way in ways], _dots(tree, layout, radius)
    return rendered("tree.svg.j2", **given, **sizes, ways=lines, named=named, dots=dots, below=tree.below())


def legend(trees: Sequence[Tree], ranges: Ranges) -> Markup:
    """Legend of the colours and dashes."""
    pruned = any(edge.pruned for tree in trees for edge in tree.edges)
    values = {"ranges": ranges, "pruned": pruned, "levels": LEVELS, "shades": SHADES}
    return rendered("tree_legend.html.j2", **values, signed=_signed, text=_text)


def caption(tree: Tree) -> str:
    """Numbers of a tree in words."""
    known = [value for value in tree.leaf_reward if value is not None]
    noisy, pruned = sum(edge.noisy for edge in tree.edges), sum(edge.pruned for edge in tree.edges)
    text = f"{len(tree.leaves)} leaves from {tree.forwards} network evaluations (as chains: {tree.chain_forwards})"
    if known:
        text += f"; rewards {_text(min(known))} to {_text(max(known))}, mean {_text(sum(known) / len(known))}"
    return f"{text}; {pruned} of {noisy} noisy edges pruned."


def _way(tree: Tree, layout: Layout, ranges: Ranges, way: list[Edge]) -> str:
    """A line that reaches the child's height within one column and then runs straight, so that lines do not cross."""
    first, last = way[0], way[-1]
    (x, y), (end, below) = layout.nodes[first.parent], layout.nodes[last.child]
    reach = layout.x[tree.place[first.parent] + 1]
    middle = (x + reach) / 2
    path = f"M{x:.1f} {y:.1f}"
    if abs(below - y) > 1e-6:
        path += f"C{middle:.1f} {y:.1f} {middle:.1f} {below:.1f} {reach:.1f} {below:.1f}"
    if end > reach + 1e-6 or abs(below - y) <= 1e-6:
        path += f"H{end:.1f}"
    start, stop = tree.place[first.parent], tree.place[last.child]
    text = f"step {start}" if stop == start + 1 else f"steps {start} to {stop - 1}"
    if first.noisy:
        text += f": advantage {DASH if first.advantage is None else _signed(first.advantage)}"
    else:
        text += ": deterministic"
    text += f", fused reward {_text(tree.reward[last.child])}{', pruned' if first.pruned else ''}"
    classes = f"edge {ranges.tone(first.advantage)}{'' if first.noisy else ' ode'}{' pruned' if first.pruned else ''}"
    return f'<path class="{classes}" d="{path}"><title>{text}</title></path>'


def _dots(tree: Tree, layout: Layout, radius: float) -> list[int]:
    """Nodes with a dot: the root, those where lines split or change, and the leaves."""
    below, shown = tree.below(), {0, *tree.leaves}
    for way in tree.ways():
        (x, _), (end, _) = layout.nodes[way[0].parent], layout.nodes[way[-1].child]
        if below[way[0].parent] != below[way[-1].child] or end - x >= 4 * radius:  # dots of one line keep a distance
            shown.add(way[0].parent)
    return sorted(shown)


def _text(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}".replace("-", MINUS)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{value:.3g}".replace("-", MINUS)
