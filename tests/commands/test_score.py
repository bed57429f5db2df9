"""`flowrl score` on files, and the contract it tries on a reward."""

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.commands import score
from flowrl.contracts.rewards import RewardTrial, trial_batch
from flowrl.core.errors import ConfigError
from flowrl.media import media
from flowrl.media.eight_bits import EightBitImages
from flowrl.reward import Card, Reward, RewardError
from flowrl.scoring.surroundings import Batch

MINE = "def score(images, prompts, metadata):\n    return [float(image.mean()) for image in images]\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three grey pictures, 0.2, 0.4 and 0.6, the last of another size."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number, side in enumerate((8, 8, 6), 1):
        media.write(torch.full((3, side, 8), number / 5), pictures / f"{number}")
    return pictures


def run(capsys, *words: Any, code: int = 0, **options) -> tuple[list[dict], str]:
    """Lines and the error stream of a call."""
    with pytest.raises(SystemExit) as left:
        score.command(*words, **{"batch_size": 16, **options})
    shown = capsys.readouterr()
    assert left.value.code == code, shown.err
    return [json.loads(line) for line in shown.out.splitlines()], shown.err


def mine(tmp_path: Path, text: str = MINE, name: str = "mine.py") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_several_rewards_score_every_picture_in_one_line_each(capsys, tmp_path, folder):
    lines, told = run(capsys, folder, [mine(tmp_path), "jpeg"], options=["jpeg.quality=50"], batch_size=2)
    assert [line["image"] for line in lines] == ["1.png", "2.png", "3.png"]
    assert [line["mine"] for line in lines] == pytest.approx([0.2, 0.4, 0.6])
    assert all(0 < line["jpeg_kb"] < 1 for line in lines)
    assert "mine: mean 0.4 over 3, 0 failed" in told
    assert run(capsys, folder, ["jpeg"], out=tmp_path / "scores")[0] == []
    assert len((tmp_path / "scores" / "scores.jsonl").read_text().splitlines()) == 3


def test_one_reward_twice_with_other_options_by_a_prefix(capsys, tmp_path, folder):
    lines, told = run(capsys, folder, ["jpeg", "low=jpeg"], options=["low.quality=10"], batch_size=2)
    assert all(line["jpeg_kb"] >= line["low_jpeg_kb"] > 0 for line in lines)
    assert "low_jpeg_kb: mean" in told
    single, _ = run(capsys, folder, ["jpeg"], options=["quality=10"], batch_size=2)
    assert [line["low_jpeg_kb"] for line in lines] == [line["jpeg_kb"] for line in single]


RECORDS = [{"image": f"elsewhere/{n}.png", "prompt": "abc"[n - 1], "want": "x" * n} for n in (3, 1, 2)]


@pytest.mark.parametrize(
    ("name", "content", "matched"),
    [
        ("p.txt", "a\nb\nc\n", False),
        ("p.csv", "image,prompt,want\n2.png,b,xx\n1.png,a,x\n3.png,c,xxx\n", True),
        ("p.json", json.dumps(RECORDS), True),
        ("p.jsonl", "\n".join(map(json.dumps, RECORDS)), True),
    ],
)
def test_records_are_matched_by_file_name_and_lines_by_order(capsys, tmp_path, folder, name, content, matched):
    (tmp_path / name).write_text(content)
    text = "def score(images, prompts, metadata):\n    return [len(r.get('want', '')) for r in metadata]\n"
    lines, _ = run(capsys, folder, [mine(tmp_path, text)], prompts=str(tmp_path / name))
    assert [line["prompt"] for line in lines] == ["a", "b", "c"]
    assert [line["mine"] for line in lines] == ([1, 2, 3] if matched else [0, 0, 0])


@pytest.mark.parametrize("key", ["video", "file", "file_name"])
def test_records_may_name_their_file_under_other_keys(capsys, tmp_path, folder, key):
    records = [{key if name == "image" else name: value for name, value in record.items()} for record in RECORDS]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    text = f"def score(images, prompts, metadata):\n    return [len(r[{key!r}] + r['want']) for r in metadata]\n"
    lines, _ = run(capsys, folder, [mine(tmp_path, text)], prompts=str(tmp_path / "p.jsonl"))
    assert [line["prompt"] for line in lines] == ["a", "b", "c"]
    assert [line["mine"] for line in lines] == [16, 17, 18], "metadata go with their file"


def test_images_are_in_the_order_of_their_numbers_and_the_screen_says_how_they_were_matched(capsys, tmp_path):
    """What is read, and what is left out, is said; 10.png comes after 9.png."""
    kinds = ["png", "bmp", "tif", "tiff", "jfif", "jpg"] * 2
    for number, kind in enumerate(kinds):
        Image.new("RGB", (8, 8), (number, number, number)).save(tmp_path / f"{number}.{kind}")
    (tmp_path / "more").mkdir()
    (tmp_path / "notes.heic").write_text("")
    (tmp_path / "0.json").write_text("{}")
    order = random.Random(0).sample(range(12), 12)
    records = [{"prompt": f"number {n}", "image_path": f"x/{n}.{kinds[n]}", "level": n / 255} for n in order]
    listed = tmp_path / "records.jsonl"
    listed.write_text("\n".join(map(json.dumps, records)))
    text = "def score(i, p, m):\n    return [float(i[k].mean()) - m[k]['level'] for k in range(len(i))]\n"
    (tmp_path / "own").mkdir()
    lines, told = run(capsys, tmp_path, [mine(tmp_path / "own", text)], prompts=str(listed))
    assert [line["image"] for line in lines] == [f"{n}.{kind}" for n, kind in enumerate(kinds)]
    assert [line["mine"] for line in lines] == pytest.approx([0] * 12, abs=2 / 255), "each record with its own image"
    assert "12 files matched with 12 records by 'image_path'" in told
    assert "left out: 2 sub-folders (more, own)" in told
    assert "left out: 2 files that are no images or videos (notes.heic, records.jsonl)" in told
    (tmp_path / "own" / "lines.txt").write_text("".join(f"line {n}\n" for n in range(100, 112)))
    with pytest.raises(ConfigError, match="two orders"):
        score.command(tmp_path, ["jpeg"], prompts=str(tmp_path / "own" / "lines.txt"), batch_size=1)


def test_a_bomb_and_a_cut_picture_are_null_with_the_reason(capsys, tmp_path, folder, monkeypatch):
    Image.new("RGB", (64, 64)).save(folder / "4.png")
    (folder / "2.png").write_bytes((folder / "2.png").read_bytes()[:-30])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # twice the limit is an error of Pillow
    lines, told = run(capsys, folder, [mine(tmp_path)])
    assert [line["mine"] is None for line in lines] == [False, True, False, True]
    assert "2.png cannot be read" in told
    assert "4.png cannot be read: it has more pixels" in told


def test_what_cannot_be_read_or_scored_is_null_and_never_a_number(capsys, tmp_path, folder):
    (folder / "2.png").write_bytes((folder / "2.png").read_bytes()[:40])
    body = "if len(i) > 1 or float(i[0].mean()) > 0.5:\n        raise ValueError\n    return [1.0]"
    text = f"def score(i, p, m):\n    {body}\n"
    lines, told = run(capsys, folder, [mine(tmp_path, text)])
    assert [line["mine"] for line in lines] == [1.0, None, None]
    assert "2.png cannot be read" in told
    assert "mine: mean 1 over 1, 2 failed" in told
    lines, told = run(capsys, folder, [mine(tmp_path, "def score(i, p, m):\n    1 / 0\n")], code=1)
    assert {line["mine"] for line in lines} == {None}
    assert "no sample scored, 3 failed" in told


def test_clips_are_scored_by_a_reward_that_takes_them_and_refused_by_one_that_does_not(capsys, tmp_path):
    clip = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    media.write(clip, tmp_path / "clip")
    lines, _ = run(capsys, tmp_path, ["jpeg"])
    assert lines[0]["jpeg_kb"] > 0
    media.write(clip, tmp_path / "other")
    for reward in ("shapes", mine(tmp_path)):
        with pytest.raises(ConfigError, match=r" judges images, and clip\.webp is a video"):
            score.command(tmp_path, [reward], batch_size=1)
        with pytest.raises(ConfigError, match=r" judges images, and clip\.webp is a video"):
            score.command(tmp_path, check=reward)


RATE = (
    "import flowrl\nCARD = flowrl.Card(outputs=('mine',), modality='video')\n"
    "def score(videos, prompts, metadata):\n    return [len(v) / r['fps'] for v, r in zip(videos, metadata)]\n"
)


def test_video_files_are_scored_with_their_frame_rate_and_stay_in_8_bits(capsys, tmp_path, monkeypatch):
    """Videos of several sizes too: a size at a time."""
    pytest.importorskip("av", reason="needs the extra video")
    for name, frames, side, fps, form in (("a", 8, 32, 16, "mp4"), ("b", 8, 32, 8, "webp"), ("c", 9, 48, 3, "mp4")):
        media.write(torch.rand(frames, 3, side, side), tmp_path / name, {"prompt": name}, fps=fps, form=form)
    held, floats = list[Any](), EightBitImages.floats
    monkeypatch.setattr(EightBitImages, "floats", lambda self: held.append(tuple(self.levels.shape)) or floats(self))
    lines, _ = run(capsys, tmp_path, [mine(tmp_path, RATE)])
    assert [line["mine"] for line in lines] == [0.5, 1.0, 3.0]
    assert [line["prompt"] for line in lines] == ["a", "b", "c"]
    assert {(2, 8, 3, 32, 32), (1, 9, 3, 48, 48)} <= set(held)
    (tmp_path / "records.jsonl").write_text('{"prompt": "x", "fps": 2}\n' * 3)
    lines, _ = run(capsys, tmp_path, [mine(tmp_path, RATE)], prompts=str(tmp_path / "records.jsonl"))
    assert [line["mine"] for line in lines] == [4.0, 4.0, 4.5], "a given rate stays"


def test_a_folder_of_both_is_refused_with_the_file_that_does_not_fit(folder):
    media.write(torch.rand(8, 3, 8, 8), folder / "4")
    told = {"shapes": r"judges images, and 4\.webp is a video", "motion": r"judges videos, and 3\.png is an"}
    for reward, words in told.items():
        with pytest.raises(ConfigError, match=f"'{reward}' {words}.*; keep (images|videos) in a folder of their"):
            score.command(folder, [reward])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "b.mp4 cannot be read: it is empty: it has 0 bytes; write it again, or leave it out"),
        (b"no video", "b.mp4 cannot be read: it is not a readable video"),
        (None, "b.mp4 cannot be read: it is empty: there is no video in it; write it again, or leave it out"),
    ],
)
def test_a_video_file_that_cannot_be_read_is_null_and_the_others_are_scored(capsys, tmp_path, content, words):
    av = pytest.importorskip("av", reason="needs the extra video")
    if content is None:
        with av.open(str(tmp_path / "b.mp4"), "w") as container:
            stream = container.add_stream("aac", rate=44100)
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 44100
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
    else:
        (tmp_path / "b.mp4").write_bytes(content)
    _, told = run(capsys, tmp_path, ["jpeg"], code=1)
    assert words in told
    assert "no sample scored, 1 failed" in told
    for name in "ac":
        media.write(torch.rand(8, 3, 32, 32), tmp_path / name, form="mp4")
    rated = RATE.replace(
        "def score",
        "from flowrl.reward import Card\n\nCARD = Card(outputs=('mine',), modality='any', "
        "requires=('fps',))\n\n\ndef score",
    )
    lines, told = run(capsys, tmp_path, ["jpeg", mine(tmp_path, rated)])
    assert [line["jpeg_kb"] is None for line in lines] == [False, True, False]
    assert [line["mine"] for line in lines] == [0.5, None, 0.5], "a rate that is needed is not asked of it"
    assert words in told
    assert "over 2, 1 failed" in told


def test_a_video_file_without_the_extra_ends_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(b"no video")
    words = r"a.mp4 needs a package that is not installed \(av\); .*run pip install 'flowrl\[video\]'"
    with pytest.raises(ConfigError, match=words) as caught:
        score.command(tmp_path, ["jpeg"])
    assert caught.value.exit_code == 2


def test_hidden_files_are_skipped(capsys, tmp_path, folder):
    (folder / "._1.png").write_bytes(b"of macOS")
    (folder / ".clip.mp4").write_bytes(b"of macOS")
    lines, told = run(capsys, folder, [mine(tmp_path)])
    assert [line["image"] for line in lines] == ["1.png", "2.png", "3.png"]
    assert "cannot be read" not in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either --reward"),
        ({"reward": ["jpeg"], "check": "jpeg"}, "either --reward"),
        ({"reward": ["jpeg", "shapes"], "options": ["quality=3"]}, "name its reward, NAME.key=value"),
        ({"reward": ["jpeg", "jpeg"]}, "two rewards are called 'jpeg'; give one a prefix, --reward PREFIX=jpeg"),
        ({"reward": ["jpeg", "a b=jpeg"]}, "prefix='a b' must be letters"),
        ({"reward": ["clip_score", "flowrl.rewards.clip_score"], "options": ["clip_score.model=x"]}, "them a prefix"),
        ({"reward": ["geneval"]}, "needs 'include' for every image"),
        ({"check": "geneval", "images": None}, "needs include for every sample"),
        ({"reward": ["jpeg"], "prompts": "two.txt"}, "2 prompts for 3 files, .* under 'image'"),
        ({"reward": ["jpeg"], "prompts": "bad.jsonl"}, "line 1: needs a string under 'text', got 1"),
        ({"reward": ["jpeg"], "prompts": "other.jsonl"}, "no record has the file '1.png'; 'image' is 'x.png'"),
        (
            {"reward": ["jpeg"], "prompts": "both.jsonl"},
            r"no record has the file '2.png' under 'image' \(2 of 3 lack one\)",
        ),
        ({"reward": ["jpeg"], "prompts": "twice.jsonl"}, "two records name the same file"),
        ({"reward": ["jpeg"], "prompts": "gone.txt"}, "no such file"),
        ({"reward": ["jpeg"], "images": Path("nowhere")}, "'nowhere': there is no such file or folder; give one"),
        ({"reward": ["jpeg"], "prompts": "two.xlsx"}, "not read from a .xlsx file; give a .txt"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_loaded(folder, tmp_path, options, words):
    (tmp_path / "two.txt").write_text("a\nb\n")
    (tmp_path / "two.xlsx").write_text("a\nb\n")
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "p", "image": "x.png"}\n')
    (tmp_path / "both.jsonl").write_text('{"prompt": "p", "image": "1.png", "file": "2.png"}\n' * 3)
    records = [{"prompt": f"p{place}", "video": f"{number}.png"} for place, number in enumerate((1, 2, 3, 3))]
    (tmp_path / "twice.jsonl").write_text("\n".join(map(json.dumps, records)))
    given = {"images": folder, "batch_size": 4} | options
    if "prompts" in given:
        given["prompts"] = str(tmp_path / given["prompts"])
    with pytest.raises(ConfigError, match=words):
        score.command(**given)


# ---- the contract


def failing(run_score, **card) -> dict[str, str]:
    """Trial -> remedy of those that a reward fails."""
    reward = Reward(run_score, Card(**({"outputs": ("mine",), "modality": "any"} | card)))
    return {f.law: f.expected for f in RewardTrial("mine", reward, trial_batch(reward.card)).run() if not f.good}


def means(images, prompts=(), metadata=()) -> Tensor:
    return torch.stack([image.mean() for image in images])


def pads(images, prompts, metadata):
    """Every image filled up to the height of the tallest."""
    height = max(image.shape[-2] for image in images)
    return means(images) * torch.tensor([image.shape[-2] / height for image in images])


def seeds_the_world(images, prompts, metadata):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return means(images)


def changes_pictures(images, prompts, metadata):
    for image in images:
        image.mul_(0.5)
    return means(images)


def pictures_only(images, prompts, metadata):
    if images[0].ndim != 3:
        raise ValueError("no videos")
    return means(images)


def red_without_blue(images, prompts, metadata):
    """The third frame taken from the first, of a video."""
    return torch.stack([(image[0] - image[2]).mean() for image in images])


@pytest.mark.parametrize(
    ("run_score", "card", "expected"),
    [
        (lambda i, p, m: means(i) - means(i).nanmean(), {}, {"alone as in a batch", "NaN image", "sizes differ"}),
        (lambda i, p, m: means(i) - means(i).nanmean(), {"needs_groups": True}, set()),
        (pads, {}, {"sizes differ"}),
        (lambda i, p, m: means(i) + torch.arange(len(p)), {}, {"order", "alone as in a batch", "sizes differ"}),
        (lambda i, p, m: means(i).nan_to_num(0.0), {}, {"NaN image"}),
        (lambda i, p, m: torch.stack(list(i)).flatten(1).mean(dim=1), {}, {"sizes differ"}),
        (lambda i, p, m: means(i) + torch.tensor([1.0 / len(each.split()) for each in p]), {}, {"odd prompts"}),
        (seeds_the_world, {}, {"leaves state alone"}),
        (changes_pictures, {}, {"leaves inputs alone"}),
        (lambda i, p, m: means(i) * torch.ones((), requires_grad=True), {}, {"gradient"}),
        (lambda i, p, m: means(i).detach() + 0 * i[0].sum(), {"differentiable": True}, {"gradient"}),
        (pictures_only, {}, {"videos"}),
        (pictures_only, {"modality": "image"}, set()),
        (red_without_blue, {}, {"videos"}),
        (red_without_blue, {"modality": "image"}, set()),
        (lambda *batch: means(*batch) + 5, {"high": 1.0}, {"scores"}),
        (lambda *batch: means(*batch)[:1], {}, {"scores"}),
        (lambda *batch: means(*batch) * math.nan, {}, {"scores"}),
        (means, {}, set()),
        (means, {"differentiable": True}, set()),
    ],
)
def test_each_broken_rule_is_found_and_named_with_its_remedy(run_score, card, expected):
    found = failing(run_score, **card)
    assert set(found) == expected
    assert all(len(remedy) > 20 for remedy in found.values())


@pytest.mark.parametrize(
    ("clips", "modality", "told"),
    [
        (4, "any", r"a video of equal frames differs from its image by \S+; all samples are videos"),
        (1, "any", r"a video of equal frames differs from its image by \S+; 1 of 4 samples are videos"),
        (0, "any", r"a video of equal frames differs from its image by \S+"),
        (0, "image", "not tried: modality image"),
    ],
)
def test_the_law_of_videos_says_whether_it_was_tried(clips, modality, told):
    given = trial_batch(Card(outputs=("mine",), modality="any"))
    images = [image.expand(3, *image.shape) if row < clips else image for row, image in enumerate(given.images[:4])]
    reward = Reward(means, Card(outputs=("mine",), modality=modality))
    trial = RewardTrial("mine", reward, Batch(images, given.prompts[:4], given.metadata[:4]))
    assert re.fullmatch(told, {finding.law: finding.measured for finding in trial.run()}["videos"])


def test_a_reward_that_draws_is_found_by_several_rules():
    found = failing(lambda i, p, m: means(i) + torch.rand(len(p)))
    assert set(found) >= {"same twice", "leaves state alone", "order", "alone as in a batch"}


def test_a_refusal_in_words_is_allowed_for_odd_prompts_only():
    def refuses(images, prompts, metadata):
        if any(len(prompt) > 100 or not prompt.strip() for prompt in prompts):
            raise RewardError("what is this")
        return means(images)

    assert failing(refuses) == {}


def test_the_command_exits_with_1_and_says_what_to_mend(capsys, tmp_path, folder):
    text = "def score(images, prompts, metadata):\n    return [float(i.nan_to_num().mean()) for i in images]\n"
    for images in (None, folder):
        with pytest.raises(SystemExit) as left:
            score.command(images, check=mine(tmp_path, text), batch_size=4)
        assert left.value.code == 1
        shown = capsys.readouterr().out
        assert "FAIL  NaN image: mine = " in shown
        assert "expected: return NaN for an image that is not finite" in shown
        assert shown.count("FAIL") == 1
    with pytest.raises(SystemExit) as left:
        score.command(None, check="jpeg", batch_size=4)
    assert left.value.code == 0
    (folder / "1.png").write_text("no picture")
    with pytest.raises(ConfigError, match=r"1\.png cannot be read"):
        score.command(folder, check="jpeg", batch_size=4)
