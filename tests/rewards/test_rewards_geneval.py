"""GenEval's rules on made-up detections, and the real networks' plumbing on tiny random weights."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards._detection import detectors
from flowrl.rewards._detection.detectors import COLORS, ClipColors, Detection, box_of, cut_out
from flowrl.rewards._vision import clips
from flowrl.rewards.geneval import Config, read_clauses, relative_position, scorer
from torch.testing import assert_close

from flowrl.reward import RewardError
from flowrl.rewards import geneval
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from tests import toy_clip
from tests.tiny_rewards import geneval as tiny
from tests.tiny_rewards import scored

PICTURE = torch.zeros(1, 3, 8, 8)
CAT, DOG = (100.0, 0.0, 110.0, 10.0), (0.0, 0.0, 10.0, 10.0)


def seen(label: str, box=DOG, color: str = "red", confidence: float = 0.95) -> tuple[Detection, str]:
    return Detection(label, confidence, box), color


def judged(found, record: dict, **options) -> dict[str, float]:
    """Scores of one picture in which `found`, a list of `seen`, was detected."""
    names = {id(item): color for item, color in found}

    def namer(pixels, detections):
        return [names[id(item)] for item in detections]

    reward = scorer(Config(**options), lambda pixels: [item for item, _ in found], namer)
    scores = Scorer([WeightedReward("geneval", reward)]).score(PICTURE, ["a prompt"], [record])
    return {name.removeprefix("geneval_"): value.item() for name, value in scores.raw.items()}


def clause(label: str, count: int = 1, **more) -> dict:
    return {"class": label, "count": count, **more}


SINGLE = {"tag": "single_object", "include": [clause("dog")]}
COUNTING = {"tag": "counting", "include": [clause("dog", 3)], "exclude": [clause("dog", 4)]}
COLOR = {"tag": "colors", "include": [clause("dog", color="red")]}
POSITION = {"tag": "position", "include": [clause("cat"), clause("dog", position=["left of", 0])]}
ATTRIBUTES = {"tag": "color_attr", "include": [clause("dog", color="red"), clause("cat", color="blue")]}
LEFT, RIGHT = [seen("dog", DOG), seen("cat", CAT)], [seen("dog", CAT), seen("cat", DOG)]


@pytest.mark.parametrize(
    ("record", "found", "legacy", "partial", "strict", "official"),
    [
        (SINGLE, [seen("dog")], 1, 1, 1, 1),
        (SINGLE, [], 0, 0, 0, 0),
        (SINGLE, [seen("dog")] * 2, 0, 0, 0, 1),
        (SINGLE, [seen("dog")] * 3, -1, -1, 0, 1),
        (SINGLE, [seen("dog")] * 40, -14, -14, 0, 1),
        (COUNTING, [seen("dog")] * 4, 2 / 3, 2 / 3, 0, 0),
        (COUNTING, [seen("dog")] * 3, 1, 1, 1, 1),
        (COUNTING, [seen("dog")] * 2, 2 / 3, 2 / 3, 0, 0),
        (COLOR, [seen("dog", color="blue")], 0.5, 0.5, 0, 0),
        (COLOR, [seen("dog"), seen("dog")], 0, 0, 0, 1),
        (POSITION, LEFT, 1, 1, 1, 1),
        (POSITION, RIGHT, 0.75, 2 / 3, 0, 0),
        (POSITION, LEFT[:1], 1 / 3, 1 / 3, 0, 0),
        (POSITION, LEFT[1:], 1 / 3, 1 / 3, 0, 0),
        (ATTRIBUTES, [seen("dog", color="red"), seen("cat", color="white")], 0.75, 0.75, 0, 0),
        (ATTRIBUTES, [seen("dog", color="red"), seen("cat", color="blue")], 1, 1, 1, 1),
    ],
)
def test_published_vectors(record, found, legacy, partial, strict, official):
    fixed = {"partial": pytest.approx(partial), "strict": strict, "official": official}
    assert judged(found, record) == fixed
    assert judged(found, record, mode="legacy") == fixed | {"legacy": pytest.approx(legacy)}


RED_AT_PLACE = {"include": [clause("cat"), clause("dog", color="red", position=["left of", 0])]}
TWO_AT_PLACE = {"include": [clause("cat"), clause("dog", 2, position=["left of", 0])]}


@pytest.mark.parametrize(
    ("record", "found", "rule", "score"),
    [
        # A position is not looked at where the number or the colour fails.
        (RED_AT_PLACE, [seen("dog", color="blue"), seen("cat", CAT)], "partial", (1 + 1 + 0) / 3),
        (RED_AT_PLACE, [*LEFT, seen("dog")], "partial", (1 + 0 + 0) / 3),
        # Every pair must stand in the relation.
        (TWO_AT_PLACE, [*LEFT, seen("dog")], "official", 1),
        (TWO_AT_PLACE, [*LEFT, seen("dog", (200, 0, 210, 10))], "official", 0),
        # The official rule looks at the most confident objects only.
        (COLOR, [seen("dog", color="blue", confidence=0.5), seen("dog", confidence=0.9)], "official", 1),
        (COLOR, [seen("dog", confidence=0.5), seen("dog", color="blue")], "official", 0),
    ],
)
def test_the_rules_of_several_clauses_and_objects(record, found, rule, score):
    assert judged(found, record)[rule] == pytest.approx(score)


@pytest.mark.parametrize(("tag", "threshold"), [("counting", 0.9), ("single_object", 0.3)])
def test_an_object_counts_above_the_confidence_of_its_task(tag, threshold):
    record = SINGLE | {"tag": tag}
    assert judged([seen("dog", confidence=threshold)], record)["strict"] == 0
    assert judged([seen("dog", confidence=threshold + 0.01)], record)["strict"] == 1


def test_the_mode_decides_which_score_is_trained_on_and_all_are_reported():
    for mode in ("partial", "strict", "official"):
        card = scorer(Config(mode=mode), lambda pixels: [], lambda pixels, detections: []).card
        assert card.outputs[0] == f"geneval_{mode}"
        assert sorted(card.outputs) == ["geneval_official", "geneval_partial", "geneval_strict"]
    card = scorer(Config(mode="legacy"), lambda pixels: [], lambda pixels, detections: []).card
    assert card.outputs == ("geneval_legacy", "geneval_partial", "geneval_strict", "geneval_official")


def test_a_class_that_the_detector_was_never_taught_stops_with_its_name():
    reward = scorer(Config(), lambda pixels: [], lambda pixels, detections: [], labels={"cat", "zebra"})
    with pytest.raises(RewardError, match=r"does not know the class 'dog' .* 2 others \(such as cat, zebra\)"):
        reward.score(PICTURE, [""], [SINGLE])


def test_a_picture_that_the_detector_cannot_look_at_is_masked_and_no_other(caplog):
    def detector(pixels):
        if pixels.max() == 0:
            raise detectors.DetectionError("out of memory")
        return [seen("dog")[0]]

    reward = scorer(Config(), detector, lambda pixels, detections: [])
    values = scored(reward, torch.cat([PICTURE, PICTURE + 1]), [""] * 2, [SINGLE] * 2)
    assert [values["geneval_partial"].isnan().tolist(), values["geneval_official"][1].item()] == [[True, False], 1.0]
    assert "out of memory" in caplog.text


def test_a_relation_holds_for_swapped_boxes_the_other_way_round():
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    rng = np.random.default_rng(0)
    kinds = set()
    for _ in range(300):
        corners = rng.uniform(0, 100, (2, 2))
        a, b = (np.concatenate([corner, corner + rng.uniform(5, 40, 2)]).tolist() for corner in corners)
        forward, backward = relative_position(a, b), relative_position(b, a)
        assert {opposite[relation] for relation in forward} == backward
        kinds.add(len(forward))
    assert kinds == {0, 1, 2}


@pytest.mark.parametrize(
    ("box", "relations"),
    [
        ((0, 0, 10, 10), set()),
        ((1, 1, 11, 11), set()),
        ((0, 30, 10, 40), {"below"}),
        ((0, -30, 10, -20), {"above"}),
        ((30, 0, 40, 10), {"right of"}),
        ((-30, -30, -20, -20), {"left of", "above"}),
        # The offset is 3, of which a tenth of both widths (2) is margin: a third is left, less than half.
        ((3, 0, 13, 10), set()),
        # With that margin, half of the offset is left from 4 on; of 3 for a box of twice the width, from 6 on.
        ((3.9, 0, 13.9, 10), set()),
        ((4.1, 0, 14.1, 10), {"right of"}),
        ((0.9, 0, 20.9, 10), set()),
        ((1.1, 0, 21.1, 10), {"right of"}),
    ],
)
def test_relations_to_a_box_at_the_origin(box, relations):
    assert relative_position(box, (0, 0, 10, 10)) == relations


@pytest.mark.parametrize(
    ("include", "reason"),
    [
        ([], "needs GenEval's records"),
        (["dog"], "not one of GenEval's clauses"),
        ([{"count": 1}], "KeyError: 'class'"),
        ([clause("dog", 0)], "count=0 must be at least 1"),
        ([clause("dog", color="teal")], "color='teal'; use one of red"),
        ([clause("dog", position=["beside", 0])], "position 'beside'; use one of left of"),
        ([clause("dog", position=["above", 0])], "clause 0, which does not come before it"),
    ],
)
def test_a_record_that_is_not_genevals_stops_with_the_reason(include, reason):
    with pytest.raises(RewardError, match=reason):
        read_clauses({"include": include}, "include")


def test_colours_are_asked_for_only_where_the_prompt_does():
    def namer(pixels, detections):
        raise AssertionError("no colour was asked for")

    reward = scorer(Config(), lambda pixels: [item for item, _ in LEFT], namer)
    assert scored(reward, PICTURE, [""], [POSITION])["geneval_strict"].tolist() == [1]


def test_an_object_is_cut_out_on_grey():
    pixels = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    mask = np.zeros((6, 8), dtype=bool)
    mask[1:4, 2:7] = True
    mask[1, 2] = False
    assert box_of(mask) == (2, 1, 7, 4)
    crop = cut_out(pixels, Detection("dog", 1.0, box_of(mask), mask))
    assert crop.shape == (3, 5, 3)
    assert (crop[0, 0] == 0x99).all()
    assert np.array_equal(crop[1:], pixels[2:4, 2:7])
    assert cut_out(pixels, Detection("dog", 1.0, (2.4, 1.0, 2.3, 1.1))).shape == (1, 1, 3)
    assert cut_out(pixels, Detection("dog", 1.0, (7.7, 5.8, 8.0, 6.0))).tolist() == pixels[5:, 7:].tolist()


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = toy_clip.save(tmp_path_factory.mktemp("clip"))
    return clips.load(folder, folder, device="cpu", preprocess="exact", reward="geneval")


def test_the_colour_is_the_nearest_mean_of_three_phrasings(clip):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8).repeat(10, axis=0).repeat(12, axis=1)
    found = [Detection("cup", 1.0, (x, y, x + 14.0, y + 12.0)) for x in (0, 20, 40) for y in (0, 13, 26)]
    expected = []
    for item in found:
        crop = torch.from_numpy(cut_out(pixels, item)).permute(2, 0, 1) / 255
        image = clip.embed_images([crop])[0]
        scores = {}
        for color in COLORS:
            phrases = [f"a photo of a {color} cup", f"a photo of a {color}-colored cup", f"a photo of a {color} object"]
            mean = torch.stack([clip.embed_texts([phrase])[0] for phrase in phrases]).mean(dim=0)
            scores[color] = (image @ mean / mean.norm()).item()
        expected.append(max(scores, key=scores.__getitem__))
    namer = ClipColors(clip)
    assert namer(pixels, found) == expected
    assert len(set(expected)) > 1
    assert namer(pixels, []) == []


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return tiny.detector(tmp_path_factory.mktemp("mask2former"))


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 60)])
def test_detections_are_the_best_pairs_of_query_and_class(detector, height, width):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = detector(pixels)
    inputs = detector.processor(images=[pixels], return_tensors="pt")
    with torch.no_grad():
        outputs = detector.model(**{name: inputs[name] for name in ("pixel_values", "pixel_mask")})
    probabilities = outputs.class_queries_logits[0].softmax(dim=-1)[:, :-1]
    best = sorted(probabilities.flatten().tolist(), reverse=True)[: len(probabilities)]
    assert 0 < len(found) <= len(best)
    assert {item.label for item in found} <= {"dog", "computer mouse", "tv remote"}
    for item in found:
        assert item.mask.shape == (height, width)
        assert box_of(item.mask) == item.box
        # Confidence is the class's probability times the mean probability of the mask, which is above a half.
        assert any(0.5 * p <= item.confidence <= p for p in best)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 60), (70, 33)])
def test_a_mask_lies_where_the_object_is_whatever_the_processor_resizes_to(detector, height, width):
    """A stand-in network whose first mask is the left half of its input and whose second one is empty."""

    def network(pixel_values, pixel_mask):
        masks = torch.full((1, 2, *(size // 4 for size in pixel_values.shape[-2:])), -9.0)
        masks[:, 0, :, : masks.shape[-1] // 2] = 9.0
        logits = torch.tensor([[[0.0, 5.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0]]])
        return SimpleNamespace(masks_queries_logits=masks, class_queries_logits=logits)

    network.device, network.config = torch.device("cpu"), detector.model.config
    (found,) = detectors.Mask2Former(network, detector.processor)(np.zeros((height, width, 3), dtype=np.uint8))
    assert found.label == "computer mouse"
    assert found.confidence == pytest.approx(math.exp(5) / (math.exp(5) + 3), abs=0.02)
    # A pixel of the network's mask is four of its input and so up to four of the picture.
    assert found.box == pytest.approx((0, 0, width / 2, height), abs=4)
    assert found.mask is not None
    assert found.mask[:, : width // 2 - 4].all()


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """A tiny random DETR of two classes, saved and loaded like a real one."""
    from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessor, ResNetConfig

    size: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
    backbone = ResNetConfig(**(size | {"layer_type": "basic", "out_features": ["stage4"]}))
    config = DetrConfig(
        backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=7,
        id2label={0: "dog", 1: "keyboard"}, label2id={"dog": 0, "keyboard": 1},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("detr")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        DetrForObjectDetection(config).save_pretrained(folder)
    DetrImageProcessor(size={"shortest_edge": 64, "longest_edge": 128}).save_pretrained(folder)
    return detectors.load_detector(str(folder), device="cpu", reward="geneval")


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 60)])
def test_boxes_of_a_detector_without_masks_are_in_pixels_of_the_picture(boxes, height, width):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = boxes(pixels)
    inputs = boxes.processor(images=[pixels], return_tensors="pt")
    with torch.no_grad():
        outputs = boxes.model(**inputs)
    expected = []
    for logits, (x, y, w, h) in zip(outputs.logits[0], outputs.pred_boxes[0].tolist(), strict=True):
        probabilities = logits.softmax(dim=-1)[:-1].tolist()
        index = probabilities.index(max(probabilities))
        left, right = max((x - w / 2) * width, 0), min((x + w / 2) * width, width)
        top, bottom = max((y - h / 2) * height, 0), min((y + h / 2) * height, height)
        name = ("dog", "computer keyboard")[index]
        expected.append((name, pytest.approx(probabilities[index]), pytest.approx((left, top, right, bottom))))
    assert [(item.label, item.confidence, item.box) for item in found] == expected
    assert boxes.labels == {"dog", "computer keyboard"}
    assert all(item.mask is None for item in found)


def test_colours_are_named_on_the_benchmarks_crops(monkeypatch, tmp_path):
    """djghosh13/geneval transforms by open_clip, which rounds half an odd margin half to even."""
    import open_clip
    from PIL import Image

    kept = []
    monkeypatch.setattr(geneval, "load_detector", lambda *_, **__: SimpleNamespace(labels=None))
    monkeypatch.setattr(geneval, "scorer", lambda config, detector, namer, labels=None: kept.append(namer))
    folder = toy_clip.save(tmp_path)
    geneval.build(Config(color_model=folder, device="cpu"))
    pixels = np.random.default_rng(0).integers(0, 256, (32, 35, 3), dtype=np.uint8)
    transform: Any = open_clip.image_transform(32, False)
    expected = transform(Image.fromarray(pixels))
    (namer,) = kept
    assert_close(namer.clip.pixels([torch.from_numpy(pixels).permute(2, 0, 1) / 255])[0], expected, rtol=0, atol=1e-6)


def test_a_detector_that_cannot_be_found_is_named(tmp_path):
    with pytest.raises(RewardError, match=r"'geneval' cannot load the detector .*nowhere"):
        detectors.load_detector(str(tmp_path / "nowhere"), device="cpu", reward="geneval")
