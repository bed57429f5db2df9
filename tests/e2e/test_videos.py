"""A video model through the real loop: clips are rewarded, saved, shown, drawn and scored."""

import base64
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.commands.train import AFTER
from flowrl.core.errors import ConfigError
from flowrl.media import media
from flowrl.models import generic
from flowrl.run.trained import frame_rate
from tests import tiny_pipelines as tiny
from tests.e2e.conftest import train
from tests.e2e.test_bad_input import command

MOTION = """
import flowrl

CARD = flowrl.Card(outputs=("motion",), modality="video")

def score(videos, prompts, metadata):
    assert videos.shape[1:] == (5, 3, 16, 16), videos.shape
    return videos.diff(dim=1).abs().mean(dim=(1, 2, 3, 4))
"""
WAN = f"{{path: ./wan, height: 16, width: 16, num_frames: 5, fps: 8, max_sequence_length: {tiny.TOKENS}, "
RUN = (
    f"model={WAN}lora: {{rank: 2, alpha: 4}}}}",
    "rewards=[{path: motion.py}]",
    "data.eval_prompts=shapes:heldout",
    "data.max_eval_prompts=2",
    "eval={num_inference_steps: 2, batch_size: 2}",
    "rollout.group_size=2",
    "rollout.batch_size=2",
    "optim.batch_size=2",
)


@pytest.fixture
def clips(place: Path) -> Path:
    tiny.make("wan").save_pretrained(place / "wan")
    (place / "motion.py").write_text(MOTION)
    return place


def test_a_run_on_clips_saves_and_shows_them(clips: Path, monkeypatch, capsys):
    summary = train("iterations=1", *RUN, after=AFTER)
    assert summary["status"] == "finished"
    saved = sorted(Path("runs/run/eval").glob("*/*"))
    assert [file.name for file in saved] == ["00000-0.webp", "00001-0.webp"] * 2
    assert media.read(saved[0]).shape == (5, 3, 16, 16)
    assert media.facts(saved[0]) == (5, 8), "model.fps"
    record = json.loads(Path("runs/run/eval/base.json").read_text())
    # What was scored is what was saved, to the 8 bits of a file.
    frames = media.read(saved[0])
    assert float(frames.diff(dim=0).abs().mean()) == pytest.approx(record["scores"]["motion"][0][0], abs=1 / 255)

    page = Path("runs/run/gallery/index.html").read_text()
    embedded = re.findall(r"data:image/webp;base64,([^\"]+)", page)
    shown: list[Any] = [Image.open(io.BytesIO(base64.b64decode(data))) for data in embedded]
    assert len(shown) == page.count('class="reel" data-frames="5"') >= 4
    assert {image.size for image in shown} == {(5 * 18, 18)}, "frames side by side, 2 pixels apart"
    assert "Videos of 5 frames, 8 a second" in page
    assert "no image saved" not in page

    # The run's weights draw clips, and any reward scores the files.
    code, printed = command(monkeypatch, capsys, "sample", "runs/run", "a red circle", "--out", "drawn")
    assert code == 0, printed
    (file,) = Path("drawn").glob("*.webp")
    assert media.read(file).shape == (5, 3, 16, 16)
    assert media.facts(file) == (5, 8), "the run's rate"
    code, printed = command(monkeypatch, capsys, "score", "drawn", "--reward", "motion.py")
    assert code == 0
    assert json.loads(printed.splitlines()[0])["motion"] > 0


def test_no_line_of_a_run_on_clips_speaks_of_images(clips: Path, monkeypatch, capsys):
    """Also where no clip is saved, whose file would tell what it is, and where all clips of a prompt score alike."""
    still = MOTION.replace("videos.diff(dim=1).abs().mean(dim=(1, 2, 3, 4))", "[0.5] * len(videos)")
    (clips / "motion.py").write_text(still)
    words = (*RUN[:4], "eval={num_inference_steps: 2, batch_size: 2, save_images: 0}", *RUN[5:], "iterations=1")
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *words)
    assert code == 0, printed
    assert "all 2 videos are tied (a tie: equal scores, or videos that are equal in 8 bits)" in printed
    assert "all samples of a prompt" in printed or "for every sample" in printed
    assert "image" not in printed.lower()


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("{name: shapes}", ["'shapes' judges images, and the model makes videos", "leave it out"]),
        ("{path: brightness.py}", ["'brightness' judges images, and the model makes videos", "modality='any'"]),
    ],
)
def test_a_reward_for_pictures_is_refused_for_clips_before_training(clips, monkeypatch, capsys, reward, words):
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *RUN, f"rewards=[{reward}]")
    assert code == 2, printed
    for word in words:
        assert word in printed
    assert not list(Path("runs/run/eval").glob("*"))


def test_a_reward_for_videos_is_refused_for_pictures_before_any_weights_are_loaded(place, monkeypatch, capsys):
    for key in ("rewards", "eval.rewards"):
        words = (f"{key}=[{{name: video_align, outputs: {{video_align_vq: 1.0}}}}]", "model.path=tiny-sd3")
        code, printed = command(monkeypatch, capsys, "train", "run.yaml", *words)
        assert code == 2, printed
        assert "reward 'video_align' judges videos, and the model makes images" in printed
        assert "use a video model with more than one frame" in printed
    assert not Path("runs/run/eval").exists()


def test_evaluations_may_save_mp4(clips: Path, monkeypatch, capsys):
    pytest.importorskip("av", reason="needs the extra video")
    assert train("iterations=1", *RUN, "eval.videos=mp4", after=AFTER)["status"] == "finished"
    saved = sorted(Path("runs/run/eval").glob("*/*"))
    assert [file.name for file in saved] == ["00000-0.mp4", "00001-0.mp4"] * 2
    assert media.facts(saved[0]) == (5, 8)
    assert Path("runs/run/gallery/index.html").read_text().count('class="reel" data-frames="5"') >= 4
    monkeypatch.setitem(sys.modules, "av", None)
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *RUN, "eval.videos=mp4", "name=other")
    assert code == 2, printed
    assert "eval.videos=mp4 needs a package that is not installed (av); " in printed
    assert "run pip install 'flowrl[video]'" in printed
    assert not Path("runs/other/eval").exists()


def test_a_frame_rate_of_0_is_refused_before_training(clips, monkeypatch, capsys):
    code, printed = command(monkeypatch, capsys, "plan", "run.yaml", *RUN, "model.fps=0")
    assert code == 2, printed
    assert "a frame rate must be above 0, in frames a second" in printed


def test_the_rate_of_any_pipeline_is_that_of_its_call():
    """LTX is told a rate, 25 by itself, and moves by it: shown at another, its videos would be too slow."""
    for name, fps in (("wan", 16), ("ltx", 25)):
        assert generic.Generic(tiny.make(name), generic.Config(path="x")).fps == fps
        assert frame_rate("x", tiny.make(name), {}) == fps
    pipeline, told = tiny.make("ltx"), {"frame_rate": 30}
    assert generic.Generic(pipeline, generic.Config(path="x", call=told)).fps == frame_rate("x", pipeline, told) == 30
    assert generic.Generic(pipeline, generic.Config(path="x", call=told, fps=12)).fps == 12
    wrongs: list[dict[str, Any]] = [{"call": {"frame_rate": -1}}, {"call": {"fps": 0}, "fps": 12}, {"fps": 0}]
    for wrong in wrongs:
        with pytest.raises(
            ConfigError, match=r"model\.(call\.frame_rate=-1|call\.fps=0|fps=0): a frame rate must be above"
        ):
            generic.Config(path="x", **wrong)
    with pytest.raises(ConfigError, match=r"--set frame_rate=0: a frame rate must be above 0"):
        frame_rate("x", pipeline, {"frame_rate": 0})


def test_one_frame_is_a_picture_for_every_adapter(clips: Path):
    call = {"num_frames": 1, "max_sequence_length": tiny.TOKENS}
    model = generic.build(generic.Config(path="wan", height=16, width=16, call=call))
    assert model.num_frames == 1
    assert model.decode(torch.zeros(2, *model.latent_shape())).shape == (2, 3, 16, 16)


# ---- preference sets of videos

DPO = (
    f"model={WAN}lora: {{rank: 2, alpha: 4}}}}",
    "algorithm={name: diffusion_dpo, beta: 50, times: {name: discrete, count: 2, fraction: 1}}",
    "rollout={num_inference_steps: 4, batch_size: 2}",
    "rewards=[]",
    "eval={}",
    "optim={learning_rate: 1.0e-3, batch_size: 2, updates_per_iteration: 1}",
)


def test_pairs_are_made_from_a_video_run_and_two_iterations_of_dpo_learn_from_them(clips, monkeypatch, capsys):
    words = (*RUN, "rollout.sampler=null", "data.max_prompts=2")
    code, printed = command(monkeypatch, capsys, "pairs", "run.yaml", *words, "--out", "set", "--count", "3")
    assert code == 0, printed
    assert "3 pairs" in printed
    made = [json.loads(line) for line in Path("set/pairs.jsonl").read_text().splitlines()]
    assert len(made) == 3
    for line in made:
        for side in ("chosen", "rejected"):
            frames = media.read(Path("set") / line[side])
            assert frames.shape == (5, 3, 16, 16)
            # The file is what was scored: small videos are kept without loss.
            assert float(frames.diff(dim=0).abs().mean()) == pytest.approx(line[f"{side}_scores"]["motion"], rel=1e-5)
        assert line["chosen_scores"]["motion"] > line["rejected_scores"]["motion"]
    data = "data={pairs: {path: set, eval: set, per_iteration: 2, flip: false, posterior: mean}}"
    summary = train("name=dpo", "iterations=2", *DPO, data, after=AFTER)
    assert summary["status"] == "finished"
    rows = [json.loads(line) for line in Path("runs/dpo/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(row["pairs/unreadable"] == 0 and row["grad/norm"] > 0 for row in rows)
    assert rows[0]["policy/margin"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["policy/margin"] != 0
    assert summary["implicit_accuracy"]["n"] == 3
    assert Path("runs/dpo/gallery/index.html").is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda videos: videos[:3], ["skipped 1, frame", "has 3 frames", "model.num_frames=5", "give longer videos"]),
        (lambda videos: videos[:0], ["skipped 1, unreadable video", "b.webp"]),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_before_the_model_is_loaded(clips, monkeypatch, capsys, change, words):
    frames = torch.randint(0, 256, (5, 3, 16, 16)).to(torch.uint8)
    media.encode_video(clips / "a.webp", frames, 16)
    other = change(frames)
    if len(other):
        media.encode_video(clips / "b.webp", other, 16)
    else:
        (clips / "b.webp").write_bytes(b"cut off")
    (clips / "pairs.jsonl").write_text(json.dumps({"prompt": "x", "chosen": "a.webp", "rejected": "b.webp"}))
    next((clips / "wan" / "transformer").glob("*.safetensors")).unlink()  # the set is read first
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", *DPO, "data={pairs: {path: pairs.jsonl}}")
    assert code == 2, printed
    assert not [word for word in words if word not in printed], printed
