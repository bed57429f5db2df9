"""The verifier of edits against rendered truth, the VAE's round trip and near misses; the world that it judges.

`python -m tests.rewards.test_shapes_edit [COUNT]` prints the table of docs/rewards/shapes_edit.md.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards._shapes.eye import detect_all
from flowrl.rewards.shapes_edit import CARD, Config, Verdict, build, in_cells, judge
from PIL import Image

from flowrl import edited_shapes, shapes
from flowrl.core.errors import ConfigError
from flowrl.data.prompt_sources import load_prompts
from flowrl.edited_shapes import OPERATIONS, Edit, Pair, parse
from flowrl.moving_shapes import DIRECTIONS
from flowrl.reward import RewardError
from flowrl.rewards import shapes_edit
from flowrl.scoring.build import require_metadata
from flowrl.scoring.entries import RewardEntry, RewardPlan
from flowrl.shapes import COLORS, SHAPES, ObjectSpec, Placed
from scripts.pretraining import edit_prompts

VAE = Path(__file__).resolve().parents[2] / "assets" / "tiny-sd3"
Scene = tuple[Placed, ...]
Miss = Callable[[np.random.Generator, Pair, int], Scene | None]
"""A wrong result of a pair; None: this pair has none such."""


def pick(rng: np.random.Generator, items):
    return items[rng.integers(len(items))]


def other(rng: np.random.Generator, items: tuple[str, ...], item: str) -> str:
    return pick(rng, [each for each in items if each != item])


def touched(pair: Pair) -> set[tuple[str, str]]:
    return {(spec.shape, spec.color or "") for spec in pair.edit.named if pair.edit.operation != "add"}


def neighbours(pair: Pair) -> list[Placed]:
    """Objects of the source that the edit leaves alone."""
    return [p for p in pair.source if (p.shape, p.color) not in touched(pair)]


def stands(placed: Scene, size: int) -> bool:
    """Whether a result could be rendered as a scene."""
    scale = size / 32
    inside = all(p.radius <= min(p.x, p.y) and max(p.x, p.y) <= size - 1 - p.radius for p in placed)
    return inside and shapes.apart(placed, scale)


def without(placed: Scene, item: Placed) -> Scene:
    return tuple(p for p in placed if p != item)


# ---- near misses


def unchanged(rng, pair, size):
    return pair.source


def redrawn(rng, pair, size):
    """The right objects, all of them elsewhere: what was to keep its place is 4 px off or more."""
    scale = size / 32
    for _ in range(200):
        places = rng.uniform(6, 25, (len(pair.result), 2)) * scale
        new = tuple(replace(p, x=float(x), y=float(y)) for p, (x, y) in zip(pair.result, places, strict=True))
        ways = [np.hypot(a.x - b.x, a.y - b.y) for a, b in zip(pair.result, new, strict=True)]
        if stands(new, size) and min(ways, default=0.0) > 4 * scale:
            return new
    return None


def wrong_object(rng, pair, size):
    """The same change of another object."""
    others = [
        ObjectSpec(p.shape, p.color) for p in neighbours(pair) if pair.edit.object != ObjectSpec(p.shape, p.color)
    ]
    edit = pair.edit
    if not others or edit.value in (others[0].shape, others[0].color):
        return None
    result = edited_shapes.apply(replace(edit, object=others[0]), pair.source, size / 32)
    if result and edit.operation == "add":
        new, anchor = result[-1], next(p for p in pair.source if ObjectSpec(p.shape, p.color) == edit.object)
        if shapes.holds(edit.value or "", (new.x, new.y), (anchor.x, anchor.y)):
            return None
    return result


def wrong_value(rng, pair, size):
    """Another colour, shape, direction, size or side, of the right object."""
    edit = pair.edit
    values = [value for value in edited_shapes.VALUES.get(edit.operation, ()) if value != edit.value]
    values = [value for value in values if value not in (edit.object.color, edit.object.shape)]
    return edited_shapes.apply(replace(edit, value=pick(rng, values)), pair.source, size / 32) if values else None


def extra_object(rng, pair, size):
    """One more object, where neither source nor result has one."""
    for _ in range(50):
        x, y = (float(v) for v in rng.uniform(5, 26, 2) * size / 32)
        new = Placed(pick(rng, SHAPES), pick(rng, COLORS), x, y, rng.uniform(3.6, 5) * size / 32)
        if stands((*pair.result, new), size) and stands((*pair.source, new), size):
            return (*pair.result, new)
    return None


def neighbour(change: Callable[[np.random.Generator, Placed, float], Placed | None]) -> Miss:
    """The right edit, and something done to an object that it does not name."""

    def miss(rng, pair, size):
        for _ in range(20 if neighbours(pair) else 0):
            item = pick(rng, neighbours(pair))
            new = change(rng, item, size / 32)
            result = without(pair.result, item) + (() if new is None else (new,))
            if stands(result, size):
                return result
        return None

    return miss


def moved(rng, item, scale):
    angle = rng.uniform(0, 2 * np.pi)
    way = rng.uniform(3.5, 9) * scale
    return replace(item, x=item.x + way * np.cos(angle), y=item.y + way * np.sin(angle))


MISSES: dict[str, Miss] = {
    "unchanged": unchanged,
    "redrawn": redrawn,
    "wrong_object": wrong_object,
    "wrong_value": wrong_value,
    "extra_object": extra_object,
    "neighbour_moved": neighbour(moved),
    "neighbour_recolored": neighbour(
        lambda rng, p, _: replace(p, color=pick(rng, [c for c in COLORS if c != p.color]))
    ),
    "neighbour_reshaped": neighbour(lambda rng, p, _: replace(p, shape=pick(rng, [s for s in SHAPES if s != p.shape]))),
    "neighbour_grown": neighbour(lambda rng, p, _: replace(p, radius=p.radius * 1.5)),
    "neighbour_lost": neighbour(lambda rng, p, _: None),
}


# ---- what the judge says of them


@cache
def vae() -> Any:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return AutoencoderKL.from_pretrained(VAE, subfolder="vae").eval()


@torch.no_grad()
def through_vae(images: np.ndarray) -> np.ndarray:
    """Round trip of images [N, 3, H, W] in [0, 1] through the lab's VAE, as 8 bits."""
    parts = [
        vae().decode(vae().encode(part * 2 - 1).latent_dist.mean).sample for part in torch.from_numpy(images).split(64)
    ]
    return np.round((torch.cat(parts) / 2 + 0.5).clamp(0, 1).numpy() * 255) / 255


def drawn(kind: str, count: int, size: int) -> Iterator[tuple[Pair, Scene]]:
    """Pairs with a right ("true") or a wrong result, the operations in turn as far as they have such."""
    rng, number = np.random.default_rng((7, size)), 0
    while count:
        pair = edited_shapes.draw(OPERATIONS[number % len(OPERATIONS)], rng, size)
        result = pair.result if kind == "true" else MISSES[kind](rng, pair, size)
        number += 1
        if result is not None:
            count -= 1
            yield pair, result


def verdicts(kind: str, count: int, size: int = 32, *, vae: bool = False) -> list[tuple[Edit, Verdict]]:
    pairs, results = zip(*drawn(kind, count, size), strict=True)
    sources = np.stack([shapes.render(pair.source, size) for pair in pairs])
    images = np.stack([shapes.render(result, size) for result in results])
    seen = (detect_all(values) for values in (sources, through_vae(images) if vae else images))
    told = [[in_cells(found, size, size) for found in each] for each in seen]
    return [(pair.edit, judge(pair.edit, *both)) for pair, *both in zip(pairs, *told, strict=True)]


def strict(kind: str, count: int, size: int = 32, *, vae: bool = False) -> float:
    return float(np.mean([verdict.row[0] for _, verdict in verdicts(kind, count, size, vae=vae)]))


@pytest.mark.parametrize(("size", "vae"), [(32, False), (64, False), (32, True)])
@pytest.mark.parametrize("count", [84, pytest.param(4000, marks=pytest.mark.slow)])
def test_rendered_results_pass(size, vae, count):
    assert strict("true", count, size, vae=vae) >= 0.995


@pytest.mark.parametrize("count", [35, pytest.param(800, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MISSES)
def test_near_misses_are_refused_but_for_one_in_a_hundred(kind, count):
    assert strict(kind, count) <= 0.01
    assert strict(kind, count // 2, vae=True) <= 0.01


@pytest.mark.parametrize(
    ("kind", "follows", "keeps", "unchanged"),
    [
        ("true", 1, 1, 0),
        ("unchanged", 0, 1, 1),
        ("wrong_value", 0, 1, 0),
        ("extra_object", 1, 0, 0),
        ("neighbour_moved", 1, 0, 0),
        ("neighbour_recolored", 1, 0, 0),
        ("neighbour_reshaped", 1, 0, 0),
        ("neighbour_grown", 1, 0, 0),
        ("neighbour_lost", 1, 0, 0),
    ],
)
def test_what_follows_and_what_keeps_are_judged_apart(kind, follows, keeps, unchanged):
    told = verdicts(kind, 42)
    assert np.mean([each.follows for _, each in told]) == pytest.approx(follows, abs=0.03)
    assert np.mean([each.keeps for _, each in told]) == pytest.approx(keeps, abs=0.03)
    assert np.mean([each.unchanged for _, each in told]) == unchanged


def test_partial_orders_results_and_is_one_where_strict_is():
    means = {}
    for kind in ("true", *MISSES):
        rows = np.asarray([verdict.row for _, verdict in verdicts(kind, 28)])
        assert ((rows[:, 1] == 1) == (rows[:, 0] == 1)).all()
        means[kind] = rows[:, 1].mean()
    assert means["unchanged"] == 0.5  # a copy keeps everything and follows nothing
    assert means["wrong_object"] < means["unchanged"] < means["neighbour_moved"] < means["true"] == 1


# ---- as a reward


def image(placed: Scene, size: int = 32) -> torch.Tensor:
    return torch.from_numpy(shapes.render(placed, size))


def file_of(folder: Path, placed: Scene, size: int = 32) -> str:
    path = folder / "source.png"
    Image.fromarray(np.round(255 * shapes.render(placed, size).transpose(1, 2, 0)).astype(np.uint8)).save(path)
    return str(path)


RED, GREEN = Placed("circle", "red", 9, 9, 5), Placed("cross", "green", 22, 20, 5)


def test_source_and_result_may_differ_in_size_and_a_bad_image_is_nan(tmp_path):
    source = file_of(
        tmp_path, tuple(replace(p, x=2 * p.x + 0.5, y=2 * p.y + 0.5, radius=2 * p.radius) for p in (RED, GREEN)), 64
    )
    right = image((replace(RED, color="blue"), GREEN))
    given = [right, image((RED, GREEN)), torch.full_like(right, torch.nan)]
    record = {"images": [source]}
    told = build(Config()).score(given, ["make the red circle blue"] * 3, [record] * 3)
    assert list(told) == list(CARD.outputs)
    rows = torch.stack(list(told.values()), dim=1)
    assert rows[0].tolist() == [1, 1, 1, 1, 0]
    assert rows[1].tolist() == [0, 0.5, 0, 1, 1]
    assert rows[2].isnan().all()


@pytest.mark.parametrize(
    ("instruction", "source", "words"),
    [
        ("remove the blue square", (RED, GREEN), "names the blue square, of which the source shows 0, not 1"),
        ("swap the red circle and the red cross", (RED, GREEN), "names the red cross, of which .* 0, not 1"),
        ("add a blue cross above the green circle", (RED, GREEN), "names the green circle.* shows a .* and|, a"),
        ("remove the red circle", (RED, replace(RED, x=22)), "shows 2, not 1"),
        ("remove the red dog", (RED, GREEN), "is no edit of the shapes world; it looks like"),
        ("make the red circle red", (RED, GREEN), "is no edit"),
        ("swap the red circle and the red circle", (RED, GREEN), "is no edit"),
    ],
)
def test_an_instruction_that_names_nothing_in_the_source_is_refused_by_name(tmp_path, instruction, source, words):
    record = {"images": [file_of(tmp_path, source)]}
    for asked in (
        lambda: shapes_edit.check_prompt(instruction, record),
        lambda: build(Config()).score(image(source)[None], [instruction], [record]),
    ):
        with pytest.raises(RewardError, match=words):
            asked()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"images": []}, r"the one image to edit in metadata\[\"images\"\], got \[\]"),
        ({"images": "a.png"}, "got 'a.png'"),
        ({"images": ["no.png"]}, "cannot read the source image 'no.png'"),
    ],
)
def test_a_missing_source_is_refused(record, words):
    with pytest.raises(RewardError, match=words):
        shapes_edit.check_prompt("remove the red circle", record)


def test_a_source_of_another_world_is_refused(tmp_path):
    path = tmp_path / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    with pytest.raises(RewardError, match=r"noise\.png' shows something that is no shape of this world"):
        shapes_edit.check_prompt("remove the red circle", {"images": [str(path)]})


# ---- the world


@pytest.mark.parametrize("operation", OPERATIONS)
def test_pairs_are_scenes_that_differ_by_the_edit_alone(operation):
    rng = np.random.default_rng(5)
    for size in (32, 64):
        for _ in range(15):
            pair = edited_shapes.draw(operation, rng, size)
            assert parse(pair.edit.instruction) == pair.edit
            assert stands(pair.source, size)
            assert stands(pair.result, size)
            assert set(neighbours(pair)) <= set(pair.result)
            assert set(edited_shapes.apply(pair.edit, pair.source, size / 32) or ()) == set(pair.result)
            assert len({p.color for p in pair.source}) == len(pair.source)
            if operation == "move":
                (old,), (new,) = (set(a) - set(b) for a, b in ((pair.source, pair.result), (pair.result, pair.source)))
                ux, uy = DIRECTIONS[pair.edit.value or ""]
                assert (new.x - old.x, new.y - old.y) == (8 * ux * size / 32, 8 * uy * size / 32)


def test_an_edit_without_room_has_no_result():
    assert edited_shapes.apply(parse("move the red circle left"), (RED, GREEN)) is None
    beside = replace(GREEN, x=9 + 12, y=9)
    assert edited_shapes.apply(parse("make the red circle larger"), (RED, beside)) is None


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_the_lists_of_edits_are_what_their_script_draws(part):
    folder = edit_prompts.FOLDER
    records = [json.loads(line) for line in (folder / f"shapes-edit-{part}.jsonl").read_text().splitlines()]
    pairs = edit_prompts.draw(part, 84)
    assert [record["prompt"] for record in records[:84]] == [pair.edit.instruction for pair in pairs]
    assert max(Counter(r["operation"] for r in records).values()) <= 1 + len(records) // len(OPERATIONS)
    assert len(records) == {"train": 1000, "heldout": 500}[part]
    for record, pair in list(zip(records, pairs, strict=False))[::6]:
        with Image.open(folder / record["image"]) as stored:
            assert stored.tobytes() == edit_prompts.as_image(shapes.render(pair.source)).tobytes()
        shapes_edit.check_prompt(record["prompt"], {"images": [str(folder / record["image"])]})


def test_a_list_of_edits_is_read_with_its_sources_and_a_wrong_source_is_named_before_training(tmp_path):
    prompts = load_prompts("shapes-edit-train.jsonl", "data.prompts", most=14)
    assert [prompt.metadata["operation"] for prompt in prompts] == 2 * list(OPERATIONS)
    assert [prompt.metadata["images"] for prompt in prompts] == [list(prompt.images) for prompt in prompts]
    plan = RewardPlan(RewardEntry(name="shapes_edit"), shapes_edit, Config())
    require_metadata("data.prompts", prompts, [plan], [CARD])
    wrong = replace(prompts[1], metadata={"images": [file_of(tmp_path, (replace(RED, color="yellow"),))]})
    words = r"data\.prompts: prompt 2, 'remove the .*of which the source shows 0, not 1; it shows a yellow circle: give"
    with pytest.raises(ConfigError, match=words):
        require_metadata("data.prompts", [prompts[0], wrong], [plan], [CARD])


def test_parts_share_no_content_and_a_draw_keeps_to_its_part():
    rng = np.random.default_rng(2)
    for part in ("heldout", "train", "pretrain"):
        assert {edited_shapes.draw("remove", rng, part=part).part for _ in range(20)} == {part}
    pair = edited_shapes.draw("recolor", rng)
    assert pair.part == replace(pair, source=tuple(replace(p, x=p.x + 1) for p in reversed(pair.source))).part


def main(count: int) -> None:
    print("| result | strict, 32 px | 64 px | 32 px through the VAE |\n|---|---|---|---|")
    each = count // len(MISSES)
    for kind in ("true", *MISSES):
        number = count if kind == "true" else each
        shares = [strict(kind, number, size, vae=vae) for size, vae in ((32, False), (64, False), (32, True))]
        print(
            f"| {'**true**' if kind == 'true' else kind} | {' | '.join(f'{100 * share:.2f} %' for share in shares)} |",
            flush=True,
        )
    started = time.process_time()
    verdicts("true", 500)
    print(f"\n{2 * (time.process_time() - started):.1f} ms of CPU for a pair, drawn and rendered and judged")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
