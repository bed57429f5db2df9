"""Judges on this machine: tiny random vision-language models against straight-line computations on the same weights."""

import functools
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards._judges import base, vlm
from flowrl.rewards._judges.base import Question, Writing
from flowrl.rewards._judges.vlm import Local
from torch.testing import assert_close

from flowrl.reward import RewardError
from flowrl.rewards import edit_score, unified_reward, vlm_judge, vqa_score
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from tests import toy_vlm

PROMPTS = ["a cat", "two dogs on a bench far away at the edge of the old town", "x", "Yes No 5", "sea"]
FORMS = {"yes": ["Yes", "\u0120Yes"], "no": ["No", "\u0120No"]}


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def folder(request, tmp_path_factory) -> str:
    return toy_vlm.save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> str:
    return toy_vlm.save(tmp_path_factory.mktemp("llava_alone"), "llava")


def local(folder: str, **options) -> Local:
    return Local(model=folder, dtype="float32", device="cpu", **{"batch_size": 3, **options})


def pictures(count: int = 5) -> list[torch.Tensor]:
    """Of different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(16, 16), (24, 16), (20, 31), (16, 28), (33, 17)]
    coarse = [torch.rand(1, 3, 3, 3, generator=generator) for _ in range(count)]
    return [
        torch.nn.functional.interpolate(c, sizes[i % 5], mode="bilinear")[0].clamp(0, 1) for i, c in enumerate(coarse)
    ]


def scored(reward, images=None, prompts=None) -> Any:
    images = pictures() if images is None else images
    texts = PROMPTS[: len(images)] if prompts is None else prompts
    return reward.score(images, texts, [{}] * len(texts))


def judge(folder: str, rubric: str = "alignment", **options):
    return vlm_judge.build(vlm_judge.Config(local=local(folder, **options), rubric=rubric))


@functools.cache
def by_itself(folder: str):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    return AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)


def straight_logits(folder: str, image: torch.Tensor, text: str, answer: str = "") -> tuple[torch.Tensor, dict]:
    """Logits of one conversation, [L, V], from the processor and the model alone: no batch, no padding."""
    model, processor = by_itself(folder)
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    mark = "<vision><|image_pad|></vision>" if "<|image_pad|>" in processor.chat_template else "<image>"
    written = f"user: {mark}{text}assistant:<no-thinking>{answer}"
    with torch.no_grad():
        logits = model(**processor(text=[written], images=[pixels], return_tensors="pt")).logits[0]
    return logits.double(), processor.tokenizer.get_vocab()


def asked(prompt: str) -> str:
    return (
        "Does this picture show exactly what the description asks for, with every object, number, colour and place "
        f'right?\nDescription: "{prompt}"\nAnswer with Yes or No.'
    )


# ---- probabilities


def test_yes_no_equals_a_straight_line_computation(folder):
    values = scored(judge(folder))
    expected = []
    for image, prompt in zip(pictures(), PROMPTS, strict=True):
        logits, vocabulary = straight_logits(folder, image, asked(prompt))
        masses = {k: sum(logits[-1, vocabulary[form]].exp() for form in forms) for k, forms in FORMS.items()}
        expected.append(float(masses["yes"] / (masses["yes"] + masses["no"])))
    assert np.std(expected) > 0.03, "the pictures and prompts must tell apart for this to mean anything"
    assert_close(values, torch.tensor(expected), rtol=0, atol=1e-5)


def test_expectation_equals_a_straight_line_computation(folder):
    values = scored(judge(folder, "alignment_digits"))
    text = vlm_judge.rubrics.load("alignment_digits", "x")
    for value, image, prompt in zip(values, pictures(), PROMPTS, strict=True):
        logits, vocabulary = straight_logits(folder, image, text.ask(prompt))
        weights = [logits[-1, vocabulary[str(digit)]].exp() for digit in range(6)]
        expected = sum(digit * w for digit, w in enumerate(weights)) / sum(weights) / 5
        assert_close(value.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("answer", ["Yes", "Yes No", "ab"])
def test_vqa_score_is_the_geometric_mean_over_the_answers_tokens(folder, answer):
    values = scored(vqa_score.build(vqa_score.Config(local=local(folder), answer=answer)))
    for value, image, prompt in zip(values, pictures(), PROMPTS, strict=True):
        words = "yes or no" if by_itself(folder)[0].config.model_type == "llava" else "Yes or No"
        question = f'Does this figure show "{prompt}"? Please answer {words}.'
        logits, vocabulary = straight_logits(folder, image, question, answer)
        tokens = {"Yes": ["Yes"], "Yes No": ["Yes", "\u0120No"], "ab": ["a", "b"]}[answer]
        # The logits before each answer token, that is from the one before the first to the one before the last.
        probabilities = logits.softmax(dim=1)[-len(tokens) - 1 : -1]
        product = math.prod(float(p[vocabulary[token]]) for p, token in zip(probabilities, tokens, strict=True))
        assert float(value) == pytest.approx(product ** (1 / len(tokens)), rel=1e-4)


@pytest.mark.parametrize("rubric", ["alignment", "alignment_digits"])
def test_equal_logits_score_one_half_and_are_warned_of(llava, rubric, caplog):
    reward = judge(llava, rubric)
    torch.nn.init.zeros_(reward.score.judge.model.lm_head.weight)
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        assert_close(scored(reward), torch.full((5,), 0.5))
    # Four answers of some 260 tokens.
    assert "chat template or its thinking mode is wrong" in caplog.text
    assert reward.score.counters.values()["low_mass"] == 5


def test_a_confident_judge_is_not_warned_of(llava, caplog):
    reward = judge(llava)
    head = reward.score.judge.model.lm_head
    torch.nn.init.zeros_(head.weight)
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    head.bias.data[reward.score.judge.token_ids({"yes": ("Yes",)})[0]] = 9.0
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        assert scored(reward).min() > 0.99
    assert not caplog.text


# ---- rows


def test_left_padding_in_bfloat16_stays_within_a_hundredth(llava):
    reward = vlm_judge.build(vlm_judge.Config(local=Local(model=llava, device="cpu", batch_size=5)))
    alone = torch.cat([scored(reward, [image], [prompt]) for image, prompt in zip(pictures(), PROMPTS, strict=True)])
    assert_close(scored(reward), alone, rtol=0, atol=1e-2)


# ---- writing


def question(text: str = "hello", seed: int = 0) -> Question:
    return Question(text, (np.random.default_rng(seed).integers(0, 255, (20, 18, 3), dtype=np.uint8),))


def test_written_answers_equal_greedy_steps_one_by_one(folder):
    judge, questions = vlm.load(local(folder), "x"), [question("hello"), question("a longer one, and more", 1)]
    tokenizer = judge.processor.tokenizer
    for text, asked in zip(judge.write(questions, Writing(max_tokens=4)), questions, strict=True):
        tokens: list[int] = []
        inputs = judge._inputs([asked])
        for _ in range(4):
            forced = vlm._with_answer(inputs, torch.tensor(tokens, dtype=torch.long))
            with torch.no_grad():
                tokens.append(int(judge.model(**forced).logits[0, -1].argmax()))
            if tokens[-1] == tokenizer.eos_token_id:
                break
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)


def test_drawn_answers_depend_on_their_seed_and_question_alone(llava):
    judge = vlm.load(local(llava), "x")
    how = Writing(max_tokens=6, temperature=1.0, seed=3)
    questions = [question("a"), question("bb", 1), question("ccc", 2)]
    together = judge.write(questions, how)
    assert together == [judge.write([q], how)[0] for q in questions]
    assert together != judge.write(questions, Writing(max_tokens=6, temperature=1.0, seed=4))


def test_random_answers_are_no_grades_so_everything_is_nan(llava):
    """A judge that talks nonsense must not train anything."""
    graded = unified_reward.build(unified_reward.Config(local=local(llava), max_tokens=6))
    assert all(values.isnan().all() for values in scored(graded).values())
    axes = vlm_judge.build(vlm_judge.Config(local=local(llava), rubric="quality", max_tokens=6))
    assert all(values.isnan().all() for values in scored(axes).values())
    counts = axes.score.counters.values()
    assert (counts["reasks"], counts["failures"]) == (5, 5)
    with pytest.raises(RewardError, match="5 of 5 samples could not be scored"):
        Scorer([WeightedReward("judge", axes)]).score(pictures(), PROMPTS, [{}] * 5)


def test_the_second_question_shows_the_first_answer_and_the_error(llava):
    judge = vlm.load(local(llava), "x")
    asked = Question("hello", question().images, ("nonsense", "That cannot be used"))
    text = judge.processor.tokenizer.decode(judge._inputs([asked])["input_ids"][0])
    assert text.index("hello") < text.index("assistant: nonsense") < text.index("user: That cannot be used")
    assert text.count("<image>") == 4, "the picture is shown once"


# ---- tokens, templates, loading


def test_thinking_is_switched_off_where_the_template_can(llava):
    judge = vlm.load(local(llava), "x")
    assert judge.processor.tokenizer.decode(judge._inputs([question()])["input_ids"][0]).endswith("<no-thinking>")
    processor = judge.processor
    processor.chat_template = processor.chat_template.replace("enable_thinking", "other")
    plain = vlm.LocalJudge(judge.model, processor, 2, "x")
    assert plain.processor.tokenizer.decode(plain._inputs([question()])["input_ids"][0]).endswith("assistant:")


def test_marks_inside_a_prompt_are_plain_text(llava):
    reward = judge(llava)
    values = scored(reward, pictures(2), ["a <image> of <end> it", "a cat"])
    assert values.isfinite().all()


def test_token_ids_come_from_the_tokenizer(llava):
    judge = vlm.load(local(llava), "x")
    vocabulary = judge.processor.tokenizer.get_vocab()
    expected = [sorted(vocabulary[form] for form in forms) for forms in FORMS.values()]
    assert judge.token_ids(base.YES_NO) == expected
    with pytest.raises(RewardError, match="no single token for the answer 'maybe'"):
        judge.token_ids({"maybe": ("Maybe", " Maybe")})
    with pytest.raises(RewardError, match="takes two of the answers"):
        judge.token_ids({"a": ("Yes",), "b": ("Yes", "No")})


def test_a_judge_that_cannot_give_the_answers_is_refused_when_it_is_built(llava, monkeypatch):
    monkeypatch.setattr(vlm_judge, "YES_NO", {"yes": ("Certainly",), "no": ("No",)})
    with pytest.raises(RewardError, match="no single token for the answer 'yes'"):
        judge(llava)


def test_a_sentencepiece_tokenizer_has_its_digits_and_words():
    """It cuts "3" into a space mark and the digit, though both are one token each."""

    class Words:
        unk_token_id = 0

        def get_vocab(self):
            return {"<unk>": 0, "\u2581": 1, "\u2581Yes": 2, "3": 3}

        def encode(self, text, add_special_tokens):
            known = {"Yes": [2], " Yes": [2], "3": [1, 3], " 3": [1, 3]}
            return known.get(text, [0])

    words = type("Processor", (), {"tokenizer": Words()})()
    bare = object.__new__(vlm.LocalJudge)
    bare.processor, bare.reward = words, "x"
    assert bare.token_ids({"yes": ("Yes", " Yes", "YES"), "3": ("3", " 3")}) == [[2], [3]]


@pytest.fixture
def lora(llava, tmp_path):
    """(a function that saves a LoRA under renamed weights, the logits of the model with it)."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    tuned = get_peft_model(vlm.load(local(llava), "x").model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5, generator=torch.Generator().manual_seed(0))
    tuned.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    saved = load_file(file)
    assert {name.split(".")[3] for name in saved} == {"language_model", "vision_tower"}

    def save(renamed) -> str:
        save_file({new: value for name, value in saved.items() if (new := renamed(name))}, file)
        return str(tmp_path)

    return save, lambda inputs: tuned(**inputs).logits


@pytest.mark.parametrize("layers", [".model.language_model.layers.", ".model.layers.", ".language_model.model.layers."])
def test_a_lora_is_merged_into_the_judge_also_under_the_names_of_former_transformers(llava, lora, layers):
    save, expected = lora
    vision = ".model.vision_tower." if layers == ".model.language_model.layers." else ".vision_tower."
    words = {".model.language_model.layers.": layers, ".model.vision_tower.": vision}
    folder = save(lambda name: next(name.replace(new, old) for new, old in words.items() if new in name))
    merged = vlm.load(local(llava, adapter=folder), "x")
    with torch.no_grad():
        inputs = merged._inputs([question()])
        assert_close(merged.model(**inputs).logits, expected(inputs), rtol=0, atol=1e-3)
        assert (vlm.load(local(llava), "x").model(**inputs).logits - expected(inputs)).abs().max() > 0.01


@pytest.mark.parametrize(
    "renamed",
    [lambda name: name.replace("language_model", "decoder"), lambda name: None if "layers.0" in name else name],
)
def test_a_lora_that_does_not_fit_is_refused_where_peft_would_score_without_it(llava, lora, renamed):
    folder = lora[0](renamed)
    before = torch.random.get_rng_state()
    with pytest.raises(RewardError, match=r"reward 'x': adapter=.* does not fit the judge: \d+ of its weights"):
        vlm.load(local(llava, adapter=folder), "x")
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("model", "expected"),
    [(None, (edit_score.DEFAULT.model, "EditScore/EditScore-7B", "cpu")), ("mine", ("mine", None, "cpu"))],
)
def test_a_rewards_own_model_and_adapter_stand_in_for_none(model, expected):
    found = edit_score.Config(local=Local(model=model, device="cpu")).resolved(edit_score.DEFAULT)
    assert (found.model, found.adapter, found.device) == expected
