"""DDPO's prompt alignment: BERTScore against a straight-line computation, what is asked, and what is masked."""

import dataclasses
import functools
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards._judges import bert
from flowrl.rewards._judges.bert import Options
from flowrl.rewards._vision import arrays
from PIL import Image
from torch.testing import assert_close

from flowrl.reward import RewardError
from flowrl.rewards import vlm_caption
from tests import toy_vlm
from tests.fake_chat import FakeChat, Reply
from tests.tiny_rewards import scored
from tests.tiny_rewards.judges import brightness, grey
from tests.tiny_rewards.vlm_caption import LAYER, POSITIONS, options, save_roberta

TEXTS = ("a red cat sits here", "The image contains a cat", "a", "blue", "a red dog runs far away from the old town")


@pytest.fixture(scope="module")
def roberta(tmp_path_factory) -> str:
    return save_roberta(tmp_path_factory.mktemp("roberta"))


@functools.cache
def states(folder: str, text: str) -> tuple[np.ndarray, list[bool]]:
    """Embeddings of one text behind LAYER layers, no batch and no padding, and which tokens are words."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    tokens = ["<s>", *tokenizer.tokenize(" " + text)[: POSITIONS - 2], "</s>"]
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(tokens)])
    with torch.no_grad():
        hidden = model.embeddings(input_ids=ids)
        for layer in list(model.encoder.layer)[:LAYER]:
            hidden = layer(hidden, None)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return hidden[0].double().numpy(), [token not in ("<s>", "</s>") for token in tokens]


def straight(folder: str, candidate: str, reference: str) -> list[float]:
    """Recall, precision, F1, token by token."""
    (y, y_words), (x, x_words) = states(folder, candidate), states(folder, reference)

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))

    recalls = [max(cosine(a, b) for b in y) for a, word in zip(x, x_words, strict=True) if word]
    precisions = [max(cosine(a, b) for a in x) for b, word in zip(y, y_words, strict=True) if word]
    recall, precision = sum(recalls) / len(recalls), sum(precisions) / len(precisions)
    return [recall, precision, 2 * precision * recall / (precision + recall)]


# ---- BERTScore


def test_bertscore_equals_a_straight_line_computation(roberta):
    pairs = [(c, r) for c in TEXTS for r in TEXTS]
    found = bert.load(options(roberta), "x")(*zip(*pairs, strict=True))
    expected = torch.tensor([straight(roberta, c, r) for c, r in pairs], dtype=torch.float64)
    assert expected.std(dim=0).min() > 0.02, "the texts must tell apart for this to mean anything"
    # The network is float32, and batches are padded.
    assert_close(found, expected, rtol=0, atol=2e-6)


def test_a_text_matches_itself_and_exchange_swaps_recall_and_precision(roberta):
    compare = bert.load(options(roberta), "x")
    assert_close(compare(TEXTS, TEXTS), torch.ones(len(TEXTS), 3).double(), rtol=0, atol=1e-6)
    forth, back = compare(TEXTS[:2], TEXTS[3:]), compare(TEXTS[3:], TEXTS[:2])
    assert_close(forth, back[:, [1, 0, 2]], rtol=0, atol=1e-12)
    assert (forth[:, 0] - forth[:, 1]).abs().max() > 1e-3


def test_special_tokens_are_partners_and_count_in_no_mean():
    """Two texts of a word between marks: the word of one is the mark of the other."""
    axes = torch.eye(3).double()
    words = torch.tensor([False, True, False])
    candidate, reference = (axes[[0, 1, 2]], words), (axes[[1, 2, 2]], words)
    # cos(word of the reference, a mark of the candidate) = 1; the same the other way round.
    assert bert.matched(candidate, reference).tolist() == [1.0, 1.0, 1.0]
    assert bert.matched((axes[[0, 1, 0]], words), (axes[[0, 2, 0]], words))[:2].tolist() == [0.0, 0.0]
    assert bert.matched((axes[[0, 1, 0]], words), (axes[[0, 2, 0]], words))[2].isnan()


def test_the_layer_is_known_for_published_models_and_asked_for_otherwise(roberta):
    assert Options().depth == 17
    assert Options(model="microsoft/deberta-xlarge-mnli").depth == 40
    assert Options(layer=3).depth == 3
    with pytest.raises(RewardError, match=r"bertscore.layer=4, but .* has 3"):
        bert.load(options(roberta, layer=4), "x")


# ---- the reward


def build(roberta: str, **own: Any):
    given: dict[str, Any] = {"bertscore": options(roberta)}
    return vlm_caption.build(vlm_caption.Config(**(given | own)))


def test_recall_of_the_prompts_reference_in_the_answer_is_what_is_trained_on(scripted, roberta):
    scripted.words = lambda q: TEXTS[0] if brightness(q)[0] < 100 else TEXTS[4]
    reward = build(roberta)
    found = reward.score(grey(50, 150), ["a cat", "a dog"], [{}] * 2)
    expected = [
        straight(roberta, TEXTS[0], "The image contains a cat"),
        straight(roberta, TEXTS[4], "The image contains a dog"),
    ]
    assert reward.card.outputs[0] == "vlm_caption_recall"
    assert list(found) == list(reward.card.outputs)
    assert_close(torch.stack(list(found.values()), dim=1), torch.tensor(expected), rtol=0, atol=3e-6)
    assert {q.text for q in scripted.asked} == {"Answer concisely: what is going on in this image?"}
    assert {(w.max_tokens, w.temperature) for w in scripted.writings} == {(64, 0.0)}


def test_what_was_not_answered_is_nan_and_spoils_no_other(scripted, roberta):
    answers = {10: "a cat", 20: None, 30: "  \n", 40: "a cat"}
    scripted.words = lambda q: answers[brightness(q)[0]]
    images = grey(10, 20, 30, 40, 50).clone()
    images[4, 0, 0, 0] = math.nan
    found = build(roberta).score(images, ["a cat"] * 5, [{}] * 5)
    for values in found.values():
        assert values.isnan().tolist() == [False, True, True, False, True]
        assert values[0] == values[3] > 0
    assert scripted.counters.values()["failures"] == 1, "said nothing; the judge counts what it failed itself"


def test_strict_is_the_share_of_questions_whose_truth_occurs(scripted, roberta):
    said = {"how many?": "There are two dogs.", "what?": "Dogs in a garden", "where?": None}
    scripted.words = lambda q: said[q.text]
    records = [
        {"questions": ["how many?", "what?"], "answers": ["two", "dog"]},
        {"questions": ["how many?"], "answers": ["two dogs"]},
        {"questions": ["how many?", "where?"], "answers": ["two", "sea"]},
        {"questions": ["what?"], "answers": ["cat"]},
    ]
    reward = vlm_caption.build(vlm_caption.Config(mode="strict"))
    images = grey(1, 2, 3, 4, 5).clone()
    images[4] = math.nan
    found = reward.score(images, [""] * 5, [*records, records[0]])
    # "Dogs" holds no "dog": letter by letter. One question unanswered: the share is not known.
    assert_close(found, torch.tensor([0.5, 1.0, math.nan, 0.0, math.nan]), equal_nan=True)
    assert reward.card.outputs == ("vlm_caption_strict",)
    assert (reward.card.low, reward.card.requires) == (0.0, ("questions", "answers"))


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"questions": ["a"]},
        {"questions": ["a"], "answers": ["b", "c"]},
        {"questions": [], "answers": []},
        {"questions": "a", "answers": "b"},
        {"questions": ["a"], "answers": [""]},
        {"questions": ["a"], "answers": [2]},
    ],
)
def test_a_record_without_questions_and_answers_is_refused_before_anything_is_asked(scripted, record):
    scripted.words = lambda q: "x"
    reward = vlm_caption.build(vlm_caption.Config(mode="strict"))
    with pytest.raises(RewardError, match="as many strings under"):
        reward.score(grey(1), [""], [record])
    assert scripted.asked == []


def test_the_default_card_and_the_version_tells_what_decides_a_score(scripted, roberta):
    versions = set()
    for own in ({}, {"jpeg_quality": None}, {"question": "what?"}, {"bertscore": options(roberta, layer=1)}):
        built = build(roberta, **own).card
        assert dataclasses.replace(built, version="1", memory_gib=vlm_caption.CARD.memory_gib) == vlm_caption.CARD
        versions.add(built.version)
    assert len(versions) == 4


# ---- JPEG


def noise(side: int = 16) -> torch.Tensor:
    return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))


def through_jpeg(image: torch.Tensor, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(arrays.eight_bit(image)).save(file, format="JPEG", quality=quality)
    return np.array(Image.open(io.BytesIO(file.getvalue())))


@pytest.fixture(scope="module")
def server():
    chat = FakeChat()
    yield chat
    chat.stop()


@pytest.mark.parametrize("quality", [80, 30, None])
def test_a_server_is_sent_jpeg_of_the_papers_quality_unless_told_otherwise(server, roberta, quality):
    server.reset(lambda request: Reply("a cat"))
    http = vlm_caption.Config().http
    own = {} if quality == 80 else {"jpeg_quality": quality}
    config = {"backend": "http", "http": dataclasses.replace(http, base_url=server.url, model="m"), **own}
    reward = build(roberta, **config)
    assert reward.card.overlap
    found = scored(reward, noise(), ["a cat"])
    assert float(found["vlm_caption_recall"][0]) == pytest.approx(
        straight(roberta, "a cat", "The image contains a cat")[0], abs=3e-6
    )
    (request,) = server.requests
    request.images_as = "png" if quality is None else "jpeg"
    expected = arrays.eight_bit(noise()[0]) if quality is None else through_jpeg(noise()[0], quality)
    assert np.array_equal(request.images[0], expected)


def test_on_this_machine_the_judge_sees_the_picture_through_the_same_jpeg(roberta, tmp_path, monkeypatch):
    from flowrl.rewards._judges import vlm

    seen: list[np.ndarray] = []
    real = vlm._seen

    def spied(pixels, quality):
        seen.append(np.array(real(pixels, quality)))
        return real(pixels, quality)

    monkeypatch.setattr(vlm, "_seen", spied)
    folder = toy_vlm.save(tmp_path, "llava")
    reward = build(roberta, local=vlm.Local(model=folder, dtype="float32", device="cpu"), max_tokens=4)
    reward.score(noise(), ["a cat"], [{}])
    assert np.array_equal(seen[0], through_jpeg(noise()[0], 80))
