"""A tree of rollouts as inline SVG: root at the left, a column for each step, leaves with images at the right.

Coordinates are user units (px at the natural size). The style sheet has the colours: `m4` .. `m1`, `z`, `p1` .. `p4`
for an edge's advantage, `r0` .. `r5` for a node's reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

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
    def of(trees: Sequence[Tree]) -> Ranges:
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
    def of(tree: Tree) -> Layout:
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
    """The drawing of a tree.

    Args:
        tree: the tree.
        ranges: ranges of the colours.
        sheet: contact sheet of its leaves, of `images.image_values`; None: empty frames.
        anchor: prefix of the ids inside, unique on the page.
    """
    layout = Layout.of(tree)
    # Stochastic edges with the largest advantages on top.
    ways = sorted(tree.ways(), key=lambda way: (way[0].noisy, not way[0].pruned, abs(way[0].advantage or 0.0)))
    lines = [_way(tree, layout, ranges, way) for way in ways]
    parts = [*_columns(tree, layout), *lines, *_nodes(tree, layout, ranges)]
    if sheet is not None:
        # In units of an image, so that each is a box of size 1 whatever the sheet's size.
        look = ' class="pixelated"' if sheet["pixelated"] else ""
        parts.append(
            f'<defs><image id="{escape(anchor)}-sheet" href="{escape(sheet["src"])}" width="{tree.columns}" '
            f'height="{tree.rows}" preserveAspectRatio="none"{look}/></defs>'
        )
    for number in range(len(tree.leaves)):
        parts.append(_leaf(tree, layout, number, None if sheet is None else anchor))
    label = escape(f"Tree of {len(tree.leaves)} leaves over {tree.steps} steps, {tree.label}")
    return Markup(
        f'<svg class="tree" viewBox="0 0 {WIDTH} {layout.height:g}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def legend(trees: Sequence[Tree], ranges: Ranges) -> Markup:
    """Legend of the colours and dashes."""
    high, (low_reward, high_reward) = ranges.advantage, ranges.reward
    parts = []
    if high:
        tones = (
            [f"m{level}" for level in range(LEVELS, 0, -1)] + ["z"] + [f"p{level}" for level in range(1, LEVELS + 1)]
        )
        swatches = "".join(f'<i class="tone {tone}"></i>' for tone in tones)
        parts.append(f"advantage {_signed(-high)} {swatches} {_signed(high)}")
    parts.append('<i class="dash"></i> deterministic, no advantage')
    if any(edge.pruned for tree in trees for edge in tree.edges):
        parts.append('<i class="tone p4 pruned"></i><i class="tone m4 pruned"></i> pruned, not trained')
    shades = "".join(f'<i class="shade r{level}"></i>' for level in range(SHADES))
    parts.append(f"fused reward {_text(low_reward)} {shades} {_text(high_reward)}")
    # Every part is numbers and class names made here.
    return Markup(f'<ul class="legend tree-legend">{"".join(f"<li>{part}</li>" for part in parts)}</ul>')


def caption(tree: Tree) -> str:
    """Numbers of a tree in words."""
    known = [value for value in tree.leaf_reward if value is not None]
    noisy, pruned = sum(edge.noisy for edge in tree.edges), sum(edge.pruned for edge in tree.edges)
    text = f"{len(tree.leaves)} leaves from {tree.forwards} network evaluations (as chains: {tree.chain_forwards})"
    if known:
        text += f"; rewards {_text(min(known))} to {_text(max(known))}, mean {_text(sum(known) / len(known))}"
    return f"{text}; {pruned} of {noisy} noisy edges pruned."


def _columns(tree: Tree, layout: Layout) -> list[str]:
    """A line for each place; steps with splits are strong, and named if there is space."""
    bottom, parts, free = layout.height - BOTTOM / 2, [], 0.0
    for k, x in enumerate(layout.x):
        split, sigma = k in tree.splits, tree.sigmas[k]
        what = f"step {k}" if k < tree.steps else "the end"
        name = f"{what}, sigma {sigma:.3g}" + (", splits" if split else "")
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom:g}"'
        parts.append(f'<line class="place{" split" if split else ""}" {line}><title>{name}</title></line>')
        if split and x >= free:
            parts.append(f'<text class="step" x="{x:.1f}" y="15">step {k}</text>')
            parts.append(f'<text class="sigma" x="{x:.1f}" y="30">\u03c3 {sigma:.2f}</text>')
            free = x + LABEL_PX - 1
    return parts


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


def _nodes(tree: Tree, layout: Layout, ranges: Ranges) -> list[str]:
    """Dots of the root, the nodes where lines split or change, and the leaves."""
    below, radius = tree.below(), 5.0 if len(tree.leaves) <= 32 else 3.5
    shown, parts = {0, *tree.leaves}, []
    for way in tree.ways():
        (x, _), (end, _) = layout.nodes[way[0].parent], layout.nodes[way[-1].child]
        if below[way[0].parent] != below[way[-1].child] or end - x >= 4 * radius:  # dots of one line keep a distance
            shown.add(way[0].parent)
    for node in sorted(shown):
        (x, y), (first, last) = layout.nodes[node], below[node]
        who = f"leaf {first + 1}" if first == last else f"leaves {first + 1} to {last + 1}"
        text = f"fused reward {_text(tree.reward[node])} of {who}, at sigma {tree.sigmas[tree.place[node]]:.3g}"
        size = radius + 2 if node == 0 else radius
        parts.append(
            f'<circle class="node {ranges.shade(tree.reward[node])}" cx="{x:.1f}" cy="{y:.1f}" r="{size:g}">'
            f"<title>{text}</title></circle>"
        )
    return parts


def _leaf(tree: Tree, layout: Layout, number: int, anchor: str | None) -> str:
    """Image and reward of a leaf."""
    (x, y), (left, top), (wide, high) = layout.nodes[tree.leaves[number]], layout.images[number], layout.size
    reward = tree.leaf_reward[number]
    box = f'x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    raw = ", ".join(f"{name} {_text(values[number])}" for name, values in tree.raw.items())
    title = escape(f"leaf {number + 1}: reward {_text(reward)}" + (f" ({raw})" if raw else ""))
    image = f'<rect class="{"no-leaf" if anchor is None else "frame"}" {box}/>'
    if anchor is not None:
        view = f"{number % tree.columns} {number // tree.columns} 1 1"
        use = f'<use href="#{escape(anchor)}-sheet"/>'
        image = f'<svg {box} viewBox="{view}" preserveAspectRatio="none">{use}</svg>{image}'
    text = f'<text class="reward" x="{x + DOT:.1f}" y="{y + 4:.1f}">{_text(reward)}</text>'
    return f'<g class="leaf"><title>{title}</title>{image}{text}</g>'


def _text(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}".replace("-", MINUS)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{value:.3g}".replace("-", MINUS)
