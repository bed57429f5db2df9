"""Drawings of trees: geometry, colours, pictures, and the report's section of them."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.apps.gallery import build, treechart, trees
from flowrl.apps.gallery.runs import load_run
from flowrl.apps.gallery.treechart import DOT, TEXT, WIDTH, Layout, Ranges
from flowrl.apps.gallery.trees import Edge, Tree
from flowrl.credit.advantages import Advantages
from flowrl.diffusion.tree_shapes import Branching, completions, offshoots, splits
from flowrl.evaluation import evaluation_tree
from flowrl.media import media
from tests.apps.folders import EVIL, Page, make_run

SHAPES: dict[str, Branching] = {
    "branch": splits(20, {0: 2, 3: 2, 6: 2, 9: 2}, range(19)),
    "mixed": splits(10, {2: 3, 4: 3}, [2, 3, 4]),
    "offshoots": offshoots(9, range(8), 4),
    "merged": offshoots(12, [0, 2, 3], 2, strides=(1, 2, 3), merge=2),
    "chain": completions(10, range(3, 8)),
    "two": splits(2, {0: 2}, [0]),
    "largest": splits(50, dict.fromkeys((0, 1, 2, 10, 30, 40), 2), range(49)),
    "every step": offshoots(50, range(32), 2),
}


def grown(shape: Branching, *, seed: int = 0, size: tuple[int, int] = (8, 8), credit: bool = True, **changed) -> dict:
    """A tree's file, with drawn rewards and advantages, and the last half of the leaves pruned in its noisy end."""
    draw = torch.Generator().manual_seed(seed)
    count, steps = shape.leaves, shape.num_steps
    noisy = [k for k in range(steps) if shape.noisy[k].any()]
    plan = SimpleNamespace(
        tree=shape, train=noisy, leaves=count, schedule=SimpleNamespace(sigmas=torch.linspace(1, 0, steps + 1))
    )
    rewards = torch.rand(1, 1, count, generator=draw)
    raw = {"light": rewards[0], "corner": rewards[0] - 0.5}
    rollout: Any = SimpleNamespace(plan=plan, rewards=rewards, raw=raw, paths=None)
    values = torch.randn(1, count, steps, generator=draw)
    for k in range(steps):  # leaves behind one edge share its number
        values[0, :, k] = values[0, shape.child(k).clamp(min=0), k]
    pruned = torch.zeros(1, count, steps, dtype=torch.bool)
    pruned[:, count // 2 :, noisy[-1]] = True
    given = Advantages(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1), steps=values, pruned=pruned)
    columns = -(-count // 8)
    record = {"tag": "base", "iteration": 0, "method": "branch_grpo", "prompt": "two circles", "guidance_scale": 1.0}
    record |= evaluation_tree.tree_record(rollout, torch.ones(1), given if credit else None, 0.0)
    record |= {"sheet": {"columns": columns, "width": size[0], "height": size[1]}, "note": None}
    return record | changed


def saved(folder: Path, record: dict, tag: str = "base") -> Path:
    """The file and its pictures, in `eval/` of a run folder."""
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    sheet, count = record["sheet"], len(record["leaves"]["reward"])
    images = torch.rand(count, 3, sheet["height"], sheet["width"], generator=torch.Generator().manual_seed(1))
    media.write(media.contact_sheet(images, sheet["columns"], 128)[0], folder / "eval" / f"tree-{tag}")
    file = folder / "eval" / f"tree-{tag}.json"
    file.write_text(json.dumps(record | {"tag": tag}))
    return file


@pytest.fixture(params=SHAPES)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    return trees.read(saved(tmp_path, grown(SHAPES[request.param])))


def drawing(tree: Tree, sheet: dict | None = None) -> str:
    return str(treechart.draw(tree, Ranges.of([tree]), sheet, "a"))


Piece = tuple[str, tuple[float, ...]]


def paths(svg: str) -> list[tuple[str, list[Piece], str]]:
    """(classes, commands with their numbers, title) of every line."""
    found = re.findall(r'<path class="([^"]*)" d="([^"]*)"><title>([^<]*)</title>', svg)
    return [
        (name, [(c, tuple(map(float, nums.split()))) for c, nums in re.findall(r"([MCH])([-\d. ]*)", d)], title)
        for name, d, title in found
    ]


def ends(pieces: list[Piece]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Where a line starts, and where it ends."""
    assert [command for command, _ in pieces] in (["M", "C"], ["M", "C", "H"], ["M", "H"])
    x, y = start = pieces[0][1]
    for command, numbers in pieces[1:]:
        x, y = numbers[-2:] if command == "C" else (numbers[0], y)
    return start, (x, y)


def heights(pieces: list[Piece], columns: list[tuple[float, float]], t: float) -> dict[int, float]:
    """y of a line a share `t` of the curve's parameter into each column that it passes."""
    found, (_, y) = {}, pieces[0][1]
    x = pieces[0][1][0]
    for command, numbers in pieces[1:]:
        right = numbers[4] if command == "C" else numbers[0]
        for number, (low, high) in enumerate(columns):
            if low >= x - 0.15 and high <= right + 0.15:
                rise = 3 * t**2 * (1 - t) + t**3
                found[number] = y + (numbers[5] - y) * rise if command == "C" else y
        x, y = right, numbers[5] if command == "C" else y
    return found


# ---- geometry


def test_every_edge_leads_from_its_parent_to_its_child_on_one_line(tree):
    layout, ways = Layout.of(tree), tree.ways()
    assert sorted((e.parent, e.child) for way in ways for e in way) == sorted((e.parent, e.child) for e in tree.edges)
    lines = sorted(ends(pieces) for _, pieces, _ in paths(drawing(tree)))
    expected = sorted((layout.nodes[way[0].parent], layout.nodes[way[-1].child]) for way in ways)
    assert len(lines) == len(expected)
    for found, wanted in zip(lines, expected, strict=True):
        assert [c for point in found for c in point] == pytest.approx([c for p in wanted for c in p], abs=0.06)
    for way in ways:
        assert all(one.child == other.parent for one, other in pairwise(way))
        assert len({(e.noisy, e.advantage, e.pruned) for e in way}) == 1


def test_lines_never_cross(tree):
    layout, below = Layout.of(tree), tree.below()
    columns, ranges = list(pairwise(layout.x)), Ranges.of([tree])
    lines = [(way, paths(treechart._way(tree, layout, ranges, way))[0][1]) for way in tree.ways()]
    for way, pieces in lines:  # up or down within the first column, so that two lines never do so side by side
        ends_at = [numbers[4] for command, numbers in pieces if command == "C"]
        assert ends_at == pytest.approx([layout.x[tree.place[way[0].parent] + 1]] * len(ends_at), abs=0.06)
    for t in (0.25, 0.5, 0.75, 0.999):
        here: dict[int, list[tuple[int, float]]] = {}
        for way, pieces in lines:
            for column, y in heights(pieces, columns, t).items():
                here.setdefault(column, []).append((below[way[-1].child][0], y))
        assert sorted(here) == list(range(tree.steps))
        for points in here.values():
            ys = [y for _, y in sorted(points)]
            assert all(a < b for a, b in pairwise(ys)), "those of higher leaves are higher"


def test_places_go_from_left_to_right_and_a_node_stands_amid_its_leaves(tree):
    layout = Layout.of(tree)
    assert all(a < b for a, b in pairwise(layout.x))
    assert (layout.x[0], len(layout.x)) == (treechart.LEFT, tree.steps + 1)
    for node, (first, last) in enumerate(tree.below()):
        x, y = layout.nodes[node]
        assert x == layout.x[tree.place[node]]
        assert y == pytest.approx((layout.nodes[tree.leaves[first]][1] + layout.nodes[tree.leaves[last]][1]) / 2)


@pytest.mark.parametrize("size", [(8, 8), (832, 480), (480, 832), (1024, 64)])
@pytest.mark.parametrize("name", ["branch", "mixed", "two", "largest"])
def test_leaves_pictures_and_rewards_do_not_overlap_and_stay_inside(tmp_path, name, size):
    tree = trees.read(saved(tmp_path, grown(SHAPES[name]) | {"sheet": {"columns": 1, "width": 8, "height": 8}}))
    tree = replace(tree, size=size)
    layout = Layout.of(tree)
    ys = [layout.nodes[leaf][1] for leaf in tree.leaves]
    assert all(b - a >= 16 for a, b in pairwise(ys)), "a line of text is 11 px"
    wide, high = layout.size
    assert wide / high == pytest.approx(size[0] / size[1])
    for x, y in layout.images:
        assert x >= layout.x[-1] + DOT + TEXT - 1e-6, "the reward stands before it"
        assert y >= 0
        assert x + wide <= WIDTH + 1e-6
        assert y + high <= layout.height
    for number, (x, y) in enumerate(layout.images):
        for a, b in layout.images[number + 1 :]:
            assert abs(a - x) >= wide or abs(b - y) >= high
    for number, (_, y) in enumerate(layout.images):
        assert y + high / 2 == pytest.approx(ys[number])
    assert layout.x[-1] > WIDTH / 2, "the tree keeps half of the drawing"


def test_split_steps_are_marked_and_named_with_their_sigma(tree):
    svg = drawing(tree)
    marked = re.findall(r'<line class="place split" x1="([\d.]+)"', svg)
    assert [float(x) for x in marked] == pytest.approx([Layout.of(tree).x[k] for k in tree.splits], abs=0.06)
    named = [int(k) for k in re.findall(r">step (\d+)</text>", svg)]
    assert set(named) <= set(tree.splits)
    assert named[0] == tree.splits[0]
    if len(tree.splits) < 12:
        assert named == list(tree.splits), "each has room"
    sigmas = re.findall(r">\u03c3 ([\d.]+)</text>", svg)
    assert sigmas == [f"{tree.sigmas[k]:.2f}" for k in named]
    xs = [float(x) for x in re.findall(r'class="step" x="([\d.]+)"', svg)]
    assert all(b - a >= 40 for a, b in pairwise(xs)), "names do not touch"


# ---- colours


def test_an_edge_shows_the_sign_and_the_size_of_its_advantage_and_the_pruned_ones_are_dimmed(tree):
    ranges, layout = Ranges.of([tree]), Layout.of(tree)
    assert any(edge.pruned for edge in tree.edges)
    for way in tree.ways():
        name, _, title = paths(treechart._way(tree, layout, ranges, way))[0]
        classes, advantage = name.split(), way[0].advantage
        assert ("ode" in classes) != way[0].noisy, "dashed, where solid ones are noisy"
        assert ("pruned" in classes) == way[0].pruned == title.endswith(", pruned")
        if advantage is None:
            assert classes[:3:2] == ["edge", "ode"]
            assert classes[1] == "none"
            assert "deterministic" in title
            continue
        assert classes[1][0] == ("p" if advantage > 0 else "m")
        assert int(classes[1][1]) == max(1, -(-4 * abs(advantage) // ranges.advantage))
        assert f"advantage {treechart._signed(advantage)}" in title


def test_colours_of_several_drawings_mean_the_same():
    ranges = Ranges.of([])
    assert (ranges.tone(0.0), ranges.tone(None), ranges.shade(None), ranges.shade(0.3)) == ("z", "none", "none", "r3")
    ranges = Ranges(2.0, (0.0, 1.0))
    assert [ranges.tone(a) for a in (2.0, 1.01, -0.49, -1e-9, 5.0)] == ["p4", "p3", "m1", "m1", "p4"]
    assert [ranges.shade(r) for r in (-1.0, 0.0, 0.34, 0.999, 1.0, 2.0)] == ["r0", "r0", "r2", "r5", "r5", "r5"]


def test_the_root_the_forks_and_the_leaves_have_dots_with_their_reward_that_keep_apart(tree):
    found = re.findall(r'class="node (\w+)" cx="([\d.]+)" cy="([\d.]+)" r="[\d.]+"><title>([^<]*)', drawing(tree))
    dots, ranges, nodes = [(float(x), float(y)) for _, x, y, _ in found], Ranges.of([tree]), Layout.of(tree).nodes
    shown = set()
    for (x, y), (shade, _, _, title) in zip(dots, found, strict=True):
        node = min(range(len(nodes)), key=lambda k: math.dist(nodes[k], (x, y)))
        assert math.dist(nodes[node], (x, y)) < 0.2
        assert shade == ranges.shade(tree.reward[node])
        assert title.startswith(f"fused reward {treechart._text(tree.reward[node])} of lea")
        shown.add(node)
    forks = {e.parent for e in tree.edges if tree.below()[e.parent] != tree.below()[e.child]}
    assert {0, *tree.leaves, *forks} <= shown
    apart = 6 if tree.steps > 20 else 12  # px; 3.5 and 5 are their radii, and a fork is always shown
    assert all(b - a >= apart for (a, y), (b, z) in pairwise(sorted(dots, key=lambda p: p[::-1])) if y == z)


def test_without_advantages_lines_are_neutral_and_the_legend_is_shorter(tmp_path):
    tree = trees.read(saved(tmp_path, grown(SHAPES["chain"], credit=False)))
    assert {name.split()[1] for name, _, _ in paths(drawing(tree))} == {"none"}
    assert any("ode" not in name for name, _, _ in paths(drawing(tree)))
    ranges = Ranges.of([tree])
    assert "tone" not in treechart.legend([tree], ranges)
    other = trees.read(saved(tmp_path, grown(SHAPES["chain"])))
    told = treechart.legend([other], Ranges.of([other]))
    largest = max(abs(edge.advantage) for edge in other.edges if edge.advantage is not None)
    assert f"\u2212{largest:.3g}" in told
    assert f"+{largest:.3g}" in told
    assert "pruned" in told


def test_the_caption_counts_evaluations_and_those_of_the_leaves_as_chains(tree, tmp_path):
    other = trees.read(saved(tmp_path, grown(SHAPES["branch"])))
    text = treechart.caption(other)
    assert text.startswith("16 leaves from 203 network evaluations (as chains: 320); rewards ")
    assert f"{sum(e.pruned for e in other.edges)} of {218 - 16} noisy edges pruned" in text
    parent = {edge.child: edge.parent for edge in tree.edges}
    steps = 0
    for node in tree.leaves:
        while node in parent:
            node, steps = parent[node], steps + 1
    assert tree.chain_forwards == steps
    assert f"(as chains: {steps})" in treechart.caption(tree)


# ---- pictures


def test_each_leaf_shows_its_own_picture_of_the_sheet(tmp_path):
    tree = trees.read(saved(tmp_path, grown(SHAPES["mixed"])))
    sheet = {"src": "data:image/png;base64,AAAA", "pixelated": True}
    svg = drawing(tree, sheet)
    views = re.findall(r'viewBox="(\d+) (\d+) 1 1"', svg)
    assert [(int(x), int(y)) for x, y in views] == [(leaf % 2, leaf // 2) for leaf in range(9)]
    assert svg.count("data:image/png") == 1
    assert '<image id="a-sheet"' in svg
    assert 'width="2" height="5" preserveAspectRatio="none" class="pixelated"' in svg
    assert drawing(tree).count('class="no-leaf"') == 9


# ---- on the page


@pytest.fixture(scope="module")
def with_trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "grown", num_prompts=4)
    for seed, (tag, iteration) in enumerate([("base", 0), *((f"iteration-{k:06d}", k) for k in range(20, 120, 20))]):
        saved(folder, grown(SHAPES["branch"], seed=seed, iteration=iteration, prompt=EVIL), tag)
    saved(folder, grown(SHAPES["branch"], seed=9, iteration=120, prompt=EVIL, note="<b>why</b>"), "tuned")
    return folder


def test_the_section_draws_base_the_latest_evaluations_and_tuned_and_unfolds_the_last(with_trees):
    page = Page(build([with_trees]))
    boxes = re.findall(r'<details class="tree-box" id="([^"]+)"( open)?>', page.source)
    tags = ["base", "iteration-000060", "iteration-000080", "iteration-000100", "tuned"]
    assert boxes == [(f"run-0-tree-{tag}", " open" if tag == "tuned" else "") for tag in tags]
    assert [i for i in page.ids if i.endswith("-tree")] == ["run-0-tree"]
    assert "#run-0-tree" in page.links
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert all(link.startswith(("#", "data:image/")) for link in page.links)
    assert list(load_run(with_trees).evaluations).count("tuned") == 1
    assert not any(tag.startswith("tree-") for tag in load_run(with_trees).evaluations)
    shown = [load_run(with_trees).trees[tag] for tag in tags]
    assert str(treechart.legend(shown, Ranges.of(shown))) in page.source, "one meaning of the colours"
    # Small images stay exact though their sheet is large.
    assert page.source.count('<image id="run-0-tree-') == 5
    assert len(re.findall(r'<image id="run-0-tree-[^>]*data:image/png[^>]*class="pixelated"', page.source)) == 5


def test_texts_of_a_trees_file_are_never_markup(with_trees, tmp_path):
    folder = make_run(tmp_path / "evil", num_prompts=2)
    record = grown(SHAPES["two"], prompt=EVIL, note="<b>why</b>", method="<i>m</i>")
    record["leaves"]["raw"] = {EVIL: record["leaves"]["raw"]["light"]}
    saved(folder, record)
    saved(folder, record, 'iteration-"><script>x')
    page = Page(build([folder]))
    assert page.source.count("<script") == 1
    for text in ("<b>why", "<i>m"):
        assert text not in page.source
    assert EVIL in page.text("p")
    assert any(EVIL in text for text in page.texts["title"])


def test_a_run_without_trees_has_no_such_section_and_a_tree_without_images_is_drawn(tmp_path):
    folder = make_run(tmp_path / "bare", num_prompts=2)
    page = Page(build([folder]))
    assert "run-0-tree" not in page.ids
    assert '<svg class="tree"' not in page.source
    assert "Tree" not in page.text("a", "h2").split()
    saved(folder, grown(SHAPES["two"])).with_suffix(".png").unlink()
    source = Page(build([folder])).source
    assert source.count('class="no-leaf"') == 2


WRONG = {
    "no edge leads to a node": lambda r: r["edges"].update(child=[1] * len(r["edges"]["child"])),
    "a parent is not there": lambda r: r["edges"].update(parent=[99] * len(r["edges"]["parent"])),
    "a column is shorter": lambda r: r["edges"]["noisy"].pop(),
    "an edge leads back": lambda r: r["nodes"]["place"].__setitem__(1, 0),
    "a leaf has no reward": lambda r: r["leaves"]["reward"].pop(),
    "a node has no reward": lambda r: r["nodes"]["reward"].pop(),
    "a leaf is left over": lambda r: r["sigmas"].append(0.0),
    "the sheet is empty": lambda r: r["sheet"].update(columns=0),
    "a part is missing": lambda r: r.pop("edges"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_no_tree_is_named(tmp_path, what):
    record = grown(SHAPES["mixed"])
    file = saved(tmp_path, record)
    WRONG[what](record)
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"tree-base\.json is not a tree .*; delete it"):
        trees.read(file)


def test_an_unknown_number_is_none_and_a_way_ends_where_a_number_changes(tmp_path):
    edges = tuple(Edge(k, k + 1, True, None if k == 1 else 1.0, k == 3) for k in range(4))
    tree = replace(
        trees.read(saved(tmp_path, grown(SHAPES["two"]))),
        **{"sigmas": (1.0, 0.7, 0.5, 0.2, 0.0), "splits": (), "place": tuple(range(5)), "reward": (None,) * 5},
        **{"edges": edges, "leaves": (4,), "leaf_reward": (0.5,), "raw": {}},
    )
    assert [[edge.parent for edge in way] for way in tree.ways()] == [[0], [1], [2], [3]]
    assert "advantage \u2013" in drawing(tree)
    whole = replace(tree, edges=tuple(Edge(k, k + 1, True, 1.0, False) for k in range(4)))
    assert [len(way) for way in whole.ways()] == [4]
    assert "steps 0 to 3: advantage +1" in drawing(whole)
