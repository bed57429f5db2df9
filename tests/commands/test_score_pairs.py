"""`flowrl score --pairs`: how often a reward agrees with the choices of a preference set; and scores of edits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowrl.commands import score
from flowrl.commands._pair_scores import Found
from flowrl.core.errors import ConfigError
from flowrl.media import media
from tests.commands.test_score import MINE, mine, run
from tests.edits import write_edits


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def grey(folder: Path, level: int, side: int = 8, name: str = "") -> str:
    """Name of an image of one level."""
    name = name or f"{level}-{side}.png"
    Image.new("RGB", (side, 8), (level, level, level)).save(folder / name)
    return name


@pytest.fixture
def graded(tmp_path: Path) -> Path:
    """Two pairs that brightness judges right, one wrong, one tied, one with a broken image, and two prompts."""
    pairs = [(200, 100), (90, 20), (30, 60), (50, 50)]
    records = [
        {
            "prompt": f"prompt {k // 2}",
            "chosen": grey(tmp_path, won, 8 + k),
            "rejected": grey(tmp_path, lost, 5, f"lost-{k}.png"),
            "task": "ab"[k % 2],
        }
        for k, (won, lost) in enumerate(pairs)
    ]
    (tmp_path / "broken.png").write_bytes((tmp_path / "lost-0.png").read_bytes()[:40])
    records.append({"prompt": "prompt 2", "chosen": "lost-0.png", "rejected": "broken.png", "task": "a"})
    return write(tmp_path, records)


def test_the_accuracy_is_the_share_of_pairs_that_are_not_tied(capsys, tmp_path, graded):
    lines, told = run(capsys, reward=[mine(tmp_path)], pairs=str(graded), batch_size=4)
    assert [line["pair"] for line in lines] == [f"line {k}" for k in range(1, 6)]
    assert lines[2]["chosen"]["mine"] == pytest.approx(30 / 255), "whichever of the two was scored first"
    assert lines[2]["rejected"]["mine"] == pytest.approx(60 / 255)
    assert lines[4]["rejected"] == {"mine": None}
    assert "mine: accuracy 0.667 (95 % interval" in told
    assert "on 3 pairs; 1 ties (25.0%), 1 not scored; 3 prompts or sources" in told
    assert "  a: accuracy 0.500" in told
    assert "  b: accuracy 1.000" in told
    run(capsys, reward=[mine(tmp_path)], pairs=str(graded), batch_size=1, out=tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "agreement.json").read_text())["mine"]
    assert {name: facts[name] for name in ("wins", "losses", "ties", "unscored", "prompts")} == {
        "wins": 2,
        "losses": 1,
        "ties": 1,
        "unscored": 1,
        "prompts": 3,
    }
    assert facts["low"] < 2 / 3 < facts["high"]
    assert [json.loads(line) for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()] == lines


def test_less_is_better_where_the_card_says_so_and_labels_name_the_chosen_one(capsys, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (3, 32, 32, 3), dtype=np.uint8)
    for k, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / f"noise-{k}.png")
    flat = grey(tmp_path, 9)
    records = [
        {"caption": "x", "jpg_0": f"noise-{k}.png", "jpg_1": flat, "label_0": label}
        for k, label in enumerate((0, 1, 0.5))
    ]
    _, told = run(capsys, reward=["jpeg"], pairs=str(write(tmp_path, records)))
    assert "jpeg_kb: accuracy 0.500" in told
    assert "on 2 pairs; 0 ties" in told, "a tie of the people is no pair"


def test_a_judge_of_edits_sees_the_source_with_both_images(capsys, tmp_path):
    records = write_edits(tmp_path, 14)
    for k, record in enumerate(records):  # the rejected one is the source in other bytes
        Image.open(tmp_path / record["image"]).save(tmp_path / f"same-{k}.png", compress_level=0)
        record |= {"chosen": f"right-{k}.png", "rejected": f"same-{k}.png"}
    write(tmp_path, [*records, records[0] | {"chosen": "right-1.png"}])
    source = ["records.source=image"]
    lines, told = run(capsys, reward=["shapes_edit"], pairs=str(tmp_path), options=source)
    assert all(line["rejected"]["edit_unchanged"] == 1 for line in lines)
    assert "edit_strict: accuracy 1.000" in told
    assert "on 14 pairs; 1 ties (6.7%), 0 not scored; 14 prompts or sources" in told, "two pairs share a source"
    assert "  recolor: accuracy 1.000" in told
    with pytest.raises(ConfigError, match="has no 'images', which the reward 'shapes_edit' needs"):
        score.command(reward=["shapes_edit"], pairs=str(tmp_path))


def test_a_source_under_two_names_is_one_and_records_without_the_column_are_named(capsys, tmp_path):
    pair = {"prompt": "x", "chosen": grey(tmp_path, 90), "rejected": grey(tmp_path, 30)}
    named = [(grey(tmp_path, 7, name="a.png"), "recolor"), (grey(tmp_path, 7, name="b.png"), "")]
    records = [pair | {"image": file, "operation": operation} for file, operation in named]
    records.append(pair | {"image": grey(tmp_path, 8, name="c.png")})
    _, told = run(
        capsys, reward=[mine(tmp_path)], pairs=str(write(tmp_path, records)), options=["records.source=image"]
    )
    assert "on 3 pairs; 0 ties (0.0%), 0 not scored; 2 prompts or sources" in told
    assert "  recolor: accuracy 1.000 (no interval) on 1 pairs" in told
    assert "  (none): accuracy 1.000" in told


def test_which_of_a_pair_is_read_first_is_drawn_and_each_keeps_its_scores(tmp_path):
    from flowrl.data.preferences import load_preferences

    records = [{"prompt": "p", "chosen": grey(tmp_path, 9), "rejected": grey(tmp_path, 5)}] * 40
    found = Found(load_preferences(str(write(tmp_path, records)), "x"), 3)
    batches = list(found.batches())
    assert [len(batch) for batch in batches] == [6] * 13 + [2]
    first = [Path(str(sample[0].source)).name for batch in batches for sample in batch[::2]]  # pyright: ignore
    assert 10 < first.count("9-8.png") < 30


def test_images_inside_a_table_and_folders_of_frames_are_read(capsys, tmp_path):
    table, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    for k, level in enumerate((90, 30)):
        (tmp_path / f"video-{k}").mkdir()
        for frame in range(3):
            grey(tmp_path / f"video-{k}", level, name=f"{frame}.png")
    columns = {"caption": ["x"], "jpg_0": [grey(tmp_path, 30)], "jpg_1": [grey(tmp_path, 90)], "label_0": [0]}
    columns |= {name: [(tmp_path / columns[name][0]).read_bytes()] for name in ("jpg_0", "jpg_1")}
    parquet.write_table(table.table(columns), tmp_path / "pairs.parquet")
    write(tmp_path, [{"prompt": "x", "chosen": "video-0", "rejected": "video-1"}])
    mean = mine(tmp_path, "import flowrl\nCARD = flowrl.Card(outputs=('mine',), modality='any')\n" + MINE)
    for source in ("pairs.parquet", "pairs.jsonl"):
        lines, told = run(capsys, reward=[mean], pairs=str(tmp_path / source))
        assert [lines[0][side]["mine"] for side in ("chosen", "rejected")] == pytest.approx([90 / 255, 30 / 255])
        assert "mine: accuracy 1.000 (no interval) on 1 pairs" in told


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"images": Path("x")}, "IMAGES x: --pairs .* has images and prompts of its own"),
        ({"prompts": "x"}, "--prompts x: --pairs"),
        ({"reward": None, "check": "jpeg"}, "--check jpeg: --pairs"),
        ({"options": ["records.sourc=image"]}, "sourc"),
        ({"options": ["records.source=nowhere"]}, "no record can be used"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(graded, given, words):
    with pytest.raises(ConfigError, match=words):
        score.command(**{"reward": ["jpeg"], "pairs": str(graded)} | given)


# ---- a folder of edited images


def test_the_sources_of_edits_come_from_the_list_that_they_were_drawn_for(capsys, tmp_path):
    """As `flowrl sample` leaves them: two of each, whose instruction may be that of another source."""
    records = write_edits(tmp_path, 7)
    records.append(records[0] | {"image": "source-3.png"})
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    drawn = tmp_path / "drawn"
    from flowrl.core.files import file_sha256

    for k, record in enumerate(records):
        right = tmp_path / ("right-0.png" if k == 7 else f"right-{k}.png")
        mark = [{"file": record["image"], "sha256": file_sha256(tmp_path / record["image"])}]
        for seed in range(2):
            media.write(media.read(right), drawn / f"{k:05d}-{seed}-abc", {"prompt": record["prompt"], "images": mark})
    lines, told = run(capsys, drawn, ["shapes_edit"], prompts=str(tmp_path / "edits.jsonl"))
    assert [line["edit_strict"] for line in lines] == [1] * 14 + [0, 0]
    assert "16 files matched with 8 records" in told
    other = [{**record, "image": f"{k:05d}-0-abc.png", "images": [record["image"]]} for k, record in enumerate(records)]
    (tmp_path / "named.jsonl").write_text("".join(json.dumps(record) + "\n" for record in reversed(other)))
    for file in drawn.glob("*-1-*"):
        file.unlink()
    lines, _ = run(capsys, drawn, ["shapes_edit"], prompts=str(tmp_path / "named.jsonl"))
    assert [line["edit_strict"] for line in lines] == [1] * 7 + [0], "image names the file beside images"
