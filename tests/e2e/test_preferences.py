"""Learning from given pictures on a real pipeline: resumed runs, processes, broken pictures, and that it learns."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrl.commands.train import AFTER
from flowrl.core.errors import ConfigError
from flowrl.core.files import json_ready
from flowrl.data.preferences import PreferenceSource, load_preferences
from tests import ranks
from tests import tiny_pipelines as tiny
from tests.e2e.conftest import assert_same_gradient, digest, inside, train

SCENE = (
    "data={pairs: {path: pairs, per_iteration: 4, flip: false}, eval_prompts: 'shapes:heldout', max_eval_prompts: 2}",
    "rollout={num_inference_steps: 3, batch_size: 4}",
    "rewards=[]",
    "eval={rewards: [{path: brightness.py}], batch_size: 8}",
    "model.lora={rank: 4, alpha: 8}",
)
METHODS = {
    "diffusion_dpo": "algorithm={name: diffusion_dpo, beta: 10}",
    "auto_beta": "algorithm={name: diffusion_dpo, beta: 10, auto_beta: {}}",
    "diffusion_kto": "algorithm={name: diffusion_kto, beta: 10}",
    "sft": "algorithm={name: sft, kl: {coef: 0.1}}",
    # A checkpoint at every iteration, so that the second one draws with another network than the first.
    "seppo": "algorithm={name: seppo, beta: 10, every: 1, keep: 2, times: {name: logit_normal, count: 2}}",
}
SLOW = [name if name == "seppo" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


def scene(seed: int, light: float) -> Image.Image:
    """Noise about a grey of that brightness."""
    values = 255 * light + 30 * np.random.default_rng(seed).standard_normal((40, 36, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def make_pairs(folder: Path, count: int, seed: int = 0) -> None:
    """Bright pictures preferred to dark ones."""
    folder.mkdir()
    lines = []
    for k in range(count):
        for name, light in (("chosen", 0.8), ("rejected", 0.2)):
            scene(seed + 2 * k + (light < 0.5), light).save(folder / f"{name}-{k}.png")
        lines.append({"prompt": f"a red circle {k}", "chosen": f"chosen-{k}.png", "rejected": f"rejected-{k}.png"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_votes(file: Path, labels: list[float]) -> None:
    """Two JPEGs a row, the bright one being what its label prefers."""
    rows = []
    for k, label in enumerate(labels):
        row: dict = {"caption": f"a blue square {k}", "label_0": float(label)}
        for column, preferred in (("jpg_0", label == 1), ("jpg_1", label != 1)):
            buffer = io.BytesIO()
            scene(2 * k + preferred, 0.8 if preferred else 0.2).save(buffer, "JPEG")
            row[column] = buffer.getvalue()
        rows.append(row)
    if file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        return
    for k, row in enumerate(rows):
        for column in ("jpg_0", "jpg_1"):
            (file.parent / f"{k}-{column}.jpg").write_bytes(row[column])
            row[column] = f"{k}-{column}.jpg"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def pairs(place: Path) -> Path:
    make_pairs(place / "pairs", 6)
    return place


def told(run: str) -> list[dict]:
    return [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", SLOW)
def test_interrupted_and_resumed_training_is_bitwise_the_uninterrupted_one(pairs: Path, name: str):
    words = (*SCENE, METHODS[name])
    train("name=whole", "iterations=2", *words)
    train("name=parts", "iterations=1", *words)
    train("name=parts", "iterations=2", *words, resume=True)
    assert digest("parts", 2) == digest("whole", 2) != digest("whole", 1)
    assert all(row["grad/norm"] > 0 for row in told("parts"))
    if name == "seppo":
        state = json.loads(Path("runs/whole/checkpoints/iteration-000002/state.json").read_text())["algorithm"]
        assert state["made"] == 3


ONE_UPDATE = ("iterations=1", "optim.updates_per_iteration=1")


@pytest.mark.parametrize(
    "name", [name if name == "diffusion_dpo" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
@pytest.mark.usefixtures("pairs")
def test_the_generic_adapter_takes_the_native_ones_first_update(name: str):
    entered = "model={name: generic, path: tiny-sd3, lora: {rank: 4, alpha: 8}, call: {max_sequence_length: 9}}"
    train("name=native", *SCENE, METHODS[name], *ONE_UPDATE)
    train("name=entered", "model=null", *SCENE[:-1], entered, METHODS[name], *ONE_UPDATE)
    for metric in ("matching/error", "policy/loss"):
        assert told("entered")[0][metric] == pytest.approx(told("native")[0][metric], rel=1e-4)
    assert_same_gradient("entered", "native")


@pytest.mark.usefixtures("pairs")
def test_edits_learn_from_their_sources():
    """FLUX Kontext by its own call: other sources change the loss, on captions alone it is another one too."""
    tiny.make("flux_kontext").save_pretrained("kontext")
    call = f"call: {{max_sequence_length: {tiny.TOKENS}, _auto_resize: false}}"
    model = f"model={{name: generic, path: ./kontext, height: 16, width: 16, lora: {{rank: 2, alpha: 4}}, {call}}}"
    lines = [json.loads(line) for line in Path("pairs/pairs.jsonl").read_text().splitlines()]
    errors = []
    for k, side in enumerate(("chosen", "rejected", "chosen")):
        edits = [line | {"image": f"{side}-{5 - n}.png"} for n, line in enumerate(lines)]
        Path(f"edits-{k}.jsonl").write_text("".join(json.dumps(absolute(line)) + "\n" for line in edits))
        records = ", records: {source: image}" if k < 2 else ""
        data = f"data={{pairs: {{path: edits-{k}.jsonl, per_iteration: 4, flip: false, posterior: mean{records}}}}}"
        train(
            f"name=edits-{k}",
            "model=null",
            data,
            "rollout={num_inference_steps: 3, batch_size: 4}",
            "rewards=[]",
            model,
            METHODS["sft"],
            "eval.every=0",
            *ONE_UPDATE,
        )
        row = told(f"edits-{k}")[0]
        assert row["grad/norm"] > 0
        errors.append(row["matching/error"])
    assert len({round(error, 4) for error in errors}) == 3


def absolute(line: dict) -> dict:
    return {
        name: str(Path("pairs", value).resolve()) if value.endswith(".png") else value for name, value in line.items()
    }


DATA = SCENE[0].replace("pairs: {", "pairs: {eval: heldout, ")
HELD_OUT = (DATA, *SCENE[1:4], "model={name: sd3, path: tiny-sd3, lora: null, max_sequence_length: 9}")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In a folder where every method has run for one update, in one group of two processes; one held-out pair."""
    folder = tmp_path_factory.mktemp("two")
    make_pairs(folder / "pairs", 6)
    make_pairs(folder / "heldout", 1, seed=1000)
    jobs = [[*SCENE, words, f"name={name}-2"] for name, words in METHODS.items()]
    for shard in ("false", "true"):
        jobs.append([*HELD_OUT, METHODS["diffusion_dpo"], f"model.shard={shard}", f"name=held-out-{shard}"])
    with inside(folder):
        ranks.run([["run.yaml", *words, *ONE_UPDATE] for words in jobs], timeout_s=1200)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.usefixtures("two")
def test_one_and_two_processes_take_the_same_first_update(name: str):
    """Of Diffusion-KTO this is the offset too, which is a mean over both."""
    train(f"name={name}-1", *SCENE, METHODS[name], *ONE_UPDATE)
    one, other = told(f"{name}-1")[0], told(f"{name}-2")[0]
    for metric in ("matching/error", "policy/loss"):
        assert one[metric] == pytest.approx(other[metric], rel=1e-4)
    assert_same_gradient(f"{name}-1", f"{name}-2")


@pytest.mark.slow
@pytest.mark.usefixtures("two")
def test_a_process_without_a_held_out_pair_takes_part():
    one = train("name=held-out", *HELD_OUT, METHODS["diffusion_dpo"], *ONE_UPDATE)
    for shard in ("false", "true"):
        other = json.loads(Path(f"runs/held-out-{shard}/summary.json").read_text())
        # One pair has no interval: NaN here, null in the file.
        assert other["implicit_accuracy"] == json_ready(one["implicit_accuracy"])
        assert other["implicit_accuracy"]["n"] == 1


@pytest.mark.parametrize("form", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_a_table_like_pick_a_pics_is_learned_from_and_held_out_pairs_preferred(place: Path, form: str):
    """Bright against dark noise: told apart after a few updates; label 0 means the second is preferred."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    labels = [k % 2 for k in range(8)] + [0.5]
    write_votes(place / f"train.{form}", labels)
    make_pairs(place / "heldout", 6, seed=1000)
    data = f"path: train.{form}, eval: heldout, per_iteration: 8, caption_dropout: 0.0"
    words = (*SCENE[1:3], "data={pairs: {" + data + "}}", "eval={}", "optim.updates_per_iteration=1", "optim.ema=null")
    summary = train(
        "iterations=8", "optim.batch_size=16", *words, "algorithm={name: diffusion_dpo, beta: 50}", after=AFTER
    )
    rows = told("run")
    assert rows[0]["policy/margin"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["policy/loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert rows[-1]["policy/implicit_accuracy"] == 1
    assert rows[-1]["policy/loss"] < 0.5
    assert summary["implicit_accuracy"]["mean"] == 1
    assert summary["implicit_accuracy"]["n"] == 6
    assert summary["primary"] is None, "nothing is drawn and nothing scored"
    assert Path("runs/run/gallery/index.html").is_file()
    facts = json.loads(Path("runs/run/provenance.json").read_text())["data"]["pairs"]
    assert (facts["rows"], facts["usable"], facts["skipped"]) == (9, 8, {"tie": 1})


def test_a_broken_picture_is_counted_and_many_stop_the_run_with_what_was_trained_saved(pairs: Path):
    (pairs / "pairs" / "chosen-0.png").write_bytes(b"broken")
    words = (*SCENE, METHODS["diffusion_dpo"], "iterations=3", "data.eval_prompts=null", "eval={}")
    train("name=one", *words)
    assert sum(row["pairs/unreadable"] for row in told("one")) == 2  # twelve draws: every pair twice
    readable = PreferenceSource(load_preferences("pairs", "data.pairs"), 4, seed=0).draw(1)[0]
    for k in range(6):
        (pairs / "pairs" / f"rejected-{k}.png").write_bytes(b"broken")
    for name in ("chosen", "rejected"):
        scene(99, 0.5).save(pairs / "pairs" / f"{name}-{readable}.png")
    many = (*words, "name=many", "checkpoint={every: 9}", "optim.updates_per_iteration=1")
    # After 4 pairs up to 3.8 may be lost, after 8 up to 5.2.
    with pytest.raises(ConfigError, match=r"of 8 pairs drawn so far have an image that cannot be read"):
        train(*many)
    assert [folder.name for folder in Path("runs/many/checkpoints").glob("iteration-*")] == ["iteration-000001"]
    train(*many, "data.pairs.records={max_broken: 1}", resume=True)
    assert len(told("many")) == 3


def test_a_win_rate_is_told_and_pictures_alone_are_drawn_where_nothing_scores_them(pairs: Path, capsys):
    words = (*SCENE, METHODS["sft"], "iterations=1", "eval.save_images=2")
    summary = train("name=scored", *words)
    found = summary["win_rate"]["brightness"]
    assert found["wins"] + found["losses"] + found["ties"] == 2
    assert "win rate by brightness" in capsys.readouterr().out
    bare = train("name=bare", *words, "eval.rewards=[]")
    assert (bare["win_rate"], bare["base"]) == ({}, {})
    assert len(list(Path("runs/bare/eval/tuned").glob("*.png"))) == 2
    assert "scores nothing" in capsys.readouterr().out
