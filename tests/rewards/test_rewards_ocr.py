"""OCR reward: the published vectors with a scripted reader, and the real reader where it is installed."""

import functools
import importlib.util
import itertools
import sys
from concurrent.futures.process import BrokenProcessPool
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards._detection.ocr_reader import Pool, engine
from flowrl.rewards._vision.arrays import eight_bit
from flowrl.rewards.ocr import Config, similarity, target_text

from flowrl.reward import RewardError
from flowrl.rewards import ocr
from tests.rendered_words import render
from tests.tiny_rewards import scored

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


def test_without_forgiveness_the_score_is_the_edit_distance_by_its_recursive_definition():
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abc"), size=rng.integers(1, 8))) for _ in range(60)]
    pairs = list(itertools.pairwise(words))
    found = [similarity(a, b, allow_extra_text=False) for a, b in pairs]
    assert found == [pytest.approx(1 - min(recursive_distance(a, b), len(b)) / len(b)) for a, b in pairs]
    assert len(set(found)) > 5


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
    monkeypatch.setattr(ocr, "load_reader", lambda config: lambda pictures: [texts[int(p.max())] for p in pictures])
    return ocr.build(Config())


def test_every_picture_is_read_and_compared_with_its_own_target(scripted):
    images = torch.tensor([100, 200, 0, 100]).reshape(4, 1, 1, 1).expand(4, 3, 5, 6) / 255
    prompts = ['"Hello World"', '"Hello World"', '"Hello World"', 'a "Tree"']
    values = scripted.score(images, prompts, [{}] * 4)
    torch.testing.assert_close(values, torch.tensor([1.0, 0.9, 0.0, 0.0]))


def test_of_a_video_every_fourth_frame_is_read_and_those_that_read_something_count(scripted):
    videos = torch.zeros(4, 9, 3, 2, 2)
    videos[[0, 2, 3], 0], videos[0, 8] = 100 / 255, 200 / 255  # 1.0 and 0.9; frame 4 is blank
    videos[:2, 1:4] = 1.0  # no such brightness is known: reading it would fail
    videos[2, 4], videos[3, 5] = torch.nan, torch.nan
    values = scripted.score(videos, ['"Hello World"'] * 4, [{}] * 4)
    torch.testing.assert_close(values, torch.tensor([0.95, 0.0, torch.nan, 1.0]), equal_nan=True)


class Scripted:
    """The interface of the package rapidocr, 3.10: a line for bright images, None for dark ones."""

    def __init__(self, params):
        self.params = params

    def __call__(self, pixels):
        assert pixels.flags.c_contiguous
        blue, _, red = pixels[0, 0]
        return SimpleNamespace(txts=("Hello", "Wörld") if red > blue else None)


@pytest.fixture
def successor(monkeypatch):
    """rapidocr in place of rapidocr_onnxruntime."""
    module: Any = ModuleType("rapidocr")
    module.RapidOCR, module.__spec__ = Scripted, ModuleSpec("rapidocr", None)
    monkeypatch.setitem(sys.modules, "rapidocr", module)
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    monkeypatch.setattr(ocr, "version", lambda name: {"rapidocr": "3.10.0"}[name])


@pytest.mark.usefixtures("successor")
def test_the_successor_reads_where_it_alone_is_installed_and_its_scores_are_kept_apart():
    reward = ocr.build(Config())
    assert reward.card.version == "1, rapidocr 3.10.0"
    images = torch.zeros(2, 3, 4, 4)
    images[0, 0] = 1.0
    assert scored(reward, images, ['"Hello W\u00f6rld"'] * 2).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("package", [("rapidocr_onnxruntime", "rapidocr"), ("rapidfuzz",), ("onnxruntime",)])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, package):
    for name in package:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RewardError, match=rf'\({package[-1]}\); run pip install "flowrl\[ocr\]"'):
        ocr.build(Config())


def test_every_line_is_taken_unless_asked_otherwise(monkeypatch):
    asked = []
    monkeypatch.setattr(ocr, "engine", lambda *options: asked.append(options))
    for config in (Config(), Config(min_confidence=0.5)):
        ocr.load_reader(config)
    assert asked == [(0.0, 736), (0.5, 736)]


def tensors(numbers) -> tuple[torch.Tensor, list[str]]:
    drawn = [render(number) for number in numbers]
    pixels = torch.from_numpy(np.stack([picture for picture, _ in drawn]))
    return pixels.permute(0, 3, 1, 2).float() / 255, [f'"{text}"' for _, text in drawn]


@pytest.fixture(params=["rapidocr_onnxruntime", "rapidocr"])
def reader(request, monkeypatch):
    """Each real package in turn."""
    pytest.importorskip(request.param, reason='a reader of the extra ocr: pip install "flowrl[ocr]"')
    if request.param == "rapidocr":
        monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)


@pytest.mark.usefixtures("reader")
def test_rendered_words_are_read_and_no_other_text_is_seen_in_them():
    reward = ocr.build(Config(allow_extra_text=False, detection_side=384))
    images, prompts = tensors(range(20))
    values = scored(reward, images, prompts)
    assert (values == 1).float().mean() >= 0.95
    # The same images, other words; a blank image.
    others = scored(reward, images[:4], prompts[4:8])
    assert others.max() < 0.5
    assert scored(reward, torch.ones(1, 3, 256, 256), ['"word"']).tolist() == [0.0]


@needs_rapidocr
@pytest.mark.slow
@pytest.mark.parametrize("detection_side", [736, 384])
def test_of_200_rendered_words_95_percent_are_read_exactly(detection_side):
    read = engine(0.5, detection_side)
    drawn = [render(number) for number in range(200)]
    right = sum(similarity(read(pixels), text, allow_extra_text=False) == 1 for pixels, text in drawn)
    assert right >= 190


@needs_rapidocr
@pytest.mark.slow
def test_a_pool_reads_what_one_process_reads_and_starts_anew_after_a_worker_has_died():
    images, prompts = tensors(range(4))
    expected = scored(ocr.build(Config(detection_side=384)), images, prompts)
    pictures = [eight_bit(image) for image in images]
    pool = Pool(0.5, 384, workers=2)
    try:
        texts = pool(pictures)
        scores = [similarity(t, p.strip('"'), allow_extra_text=True) for t, p in zip(texts, prompts, strict=True)]
        assert scores == pytest.approx(expected.tolist())
        assert pool._executor is not None
        for process in list(pool._executor._processes.values()):
            process.kill()
        with pytest.raises(BrokenProcessPool):
            pool(pictures)
        assert pool(pictures) == texts
    finally:
        pool.close()
