"""OCR reward: the published vectors with a scripted reader, and the real reader where it is installed."""

import functools
import importlib.util
import itertools
import sys

import numpy as np
import pytest
import torch

from flowrl.reward import RewardError
from rewards import ocr
from rewards.ocr import Config, edit_distance, similarity, target_text

needs_rapidocr = pytest.mark.skipif(
    importlib.util.find_spec("rapidocr_onnxruntime") is None,
    reason='the optional package rapidocr-onnxruntime is not installed: pip install "flowrl[ocr]"',
)
TARGET = "Hello World"


@pytest.mark.parametrize(
    ("recognised", "value"),
    [
        ("Hello World", 1.0),
        ("xxHELLO worldyy", 1.0),
        ("Hello Wrld", 0.9),
        ("GRPO", 0.1),
        ("NASA 2049", 0.0),
        ("", 0.0),
        ("q" * 30, 0.0),
    ],
)
def test_published_vectors(recognised, value):
    assert similarity(recognised, TARGET, allow_extra_text=True) == pytest.approx(value)


def test_extra_text_is_punished_on_demand():
    assert similarity("xxHELLO worldyy", TARGET, allow_extra_text=False) == pytest.approx(0.6)
    assert similarity("hello world", TARGET, allow_extra_text=False) == 1.0


@functools.cache
def recursive_distance(a: str, b: str) -> int:
    """The definition, word for word."""
    if not a or not b:
        return len(a) + len(b)
    change = recursive_distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(change, recursive_distance(a[1:], b) + 1, recursive_distance(a, b[1:]) + 1)


def test_edit_distance_equals_its_recursive_definition():
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abc"), size=rng.integers(0, 8))) for _ in range(60)]
    distances = [edit_distance(a, b) for a, b in itertools.pairwise(words)]
    assert distances == [recursive_distance(a, b) for a, b in itertools.pairwise(words)]
    assert max(distances) > 4


def test_the_target_is_the_metadata_or_the_first_quoted_text():
    assert target_text('a sign "Open" next to "Shut"', {}) == "Open"
    assert target_text("a sign \u201cOpen\u201d by the road", {}) == "Open"
    assert target_text('a sign "Open"', {"text": "Shut"}) == "Shut"


@pytest.mark.parametrize(("prompt", "metadata"), [("a sign", {}), ('a ""', {}), ("a sign", {"text": " "}), ('a "', {})])
def test_a_prompt_without_text_stops_with_the_remedy(prompt, metadata):
    with pytest.raises(RewardError, match="asks for no text; put it in double quotes"):
        target_text(prompt, metadata)


@pytest.fixture
def scripted(monkeypatch):
    """The reward with a reader that returns what the brightest channel value of the picture stands for."""
    texts = {0: "", 100: "Hello World", 200: "Hello Wrld"}
    monkeypatch.setattr(ocr, "load_reader", lambda min_confidence: lambda pixels: texts[int(pixels.max())])
    return ocr.build(Config())


def test_every_picture_is_read_and_compared_with_its_own_target(scripted):
    images = torch.tensor([100, 200, 0, 100]).reshape(4, 1, 1, 1).expand(4, 3, 5, 6) / 255
    prompts = ['"Hello World"', '"Hello World"', '"Hello World"', 'a "Tree"']
    values = scripted.score(images, prompts, [{}] * 4)
    torch.testing.assert_close(values, torch.tensor([1.0, 0.9, 0.0, 0.0]))


def test_of_a_clip_every_fourth_frame_is_read_and_those_that_read_something_count(scripted):
    clip = torch.zeros(2, 9, 3, 2, 2)
    clip[0, 0], clip[0, 8] = 100 / 255, 200 / 255  # 1.0 and 0.9; frame 4 is blank
    clip[:, 1:4] = 1.0  # no such brightness is known: reading it would fail
    values = scripted.score(clip, ['"Hello World"'] * 2, [{}] * 2)
    torch.testing.assert_close(values, torch.tensor([0.95, 0.0]))


def test_an_unreadable_picture_scores_0_and_a_broken_one_nan(scripted):
    images = torch.stack([torch.zeros(3, 4, 4), torch.full((3, 4, 4), torch.nan)])
    values = scripted.score(images, ['"a"'] * 2, [{}] * 2)
    assert values[0] == 0
    assert values[1].isnan()


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    with pytest.raises(RewardError, match=r'pip install "flowrl\[ocr\]"'):
        ocr.build(Config())


def written(text: str, size: int = 256) -> torch.Tensor:
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(picture).text((20, 100), text, fill=(160, 0, 0), font=ImageFont.load_default(32))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


@needs_rapidocr
def test_rendered_text_is_read_and_a_blank_picture_scores_0():
    reward = ocr.build(Config())
    images = torch.stack([written("Hello World"), written("Hello World"), torch.ones(3, 256, 256)])
    values = reward.score(images, ['"hello world"', '"Quick Jumps"', '"hello world"'], [{}] * 3)
    assert values[0] == 1
    assert values[1] < 0.5
    assert values[2] == 0
