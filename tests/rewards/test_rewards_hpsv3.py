"""HPSv3 on a tiny random Qwen2-VL in the published layout, against the released computation step by step."""

import hashlib

import pytest
import torch
from flowrl.rewards.hpsv3 import PROMPT, PROMPT_SHA256, Config, build
from PIL import Image
from torch.testing import assert_close

from flowrl.reward import RewardError
from flowrl.rewards import hpsv3
from tests import toy_qwen_vl as toy
from tests.tiny_rewards import hpsv3 as tiny
from tests.tiny_rewards import scored, smooth_images, uint8
from tests.tiny_rewards.hpsv3 import PROMPTS, configured, random_head


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """(folder, network, tokenizer) of a tiny HPSv3."""
    folder = tmp_path_factory.mktemp("hpsv3")
    return folder, *tiny.save(folder)


@pytest.fixture
def small(monkeypatch):
    tiny.small_images(monkeypatch)


@pytest.fixture(scope="module")
def reward(toys):
    return build(configured(toys[0]))


def straight_line(toys, image: torch.Tensor, caption: str, size: tuple[int, int]) -> float:
    """One picture: PIL, transformers' own processor, hand-merged embeddings, the head at the mark."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    _, model, tokenizer = toys
    picture = Image.fromarray(uint8(image).numpy())
    prepared = Qwen2VLImageProcessorPil()(images=[picture.resize((size[1], size[0]), Image.Resampling.BICUBIC)])
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>"
        + PROMPT.read_bytes().decode().split("{text_prompt}")[0]
        + caption
        + "\n\n\n\nPlease provide the overall ratings of this image: <|Reward|>\n\nEND\n"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    pixels, grid = (torch.as_tensor(prepared[key]) for key in ("pixel_values", "image_grid_thw"))
    ids, hidden = toy.read(model, tokenizer, text, kind="image", pixels=pixels, grid=grid)
    (mark,) = (ids == tokenizer.convert_tokens_to_ids("<|Reward|>")).nonzero()[:, 0].tolist()
    with torch.no_grad():
        return float(random_head()(hidden[mark])[0])


def test_the_vendored_text_is_the_published_one():
    text = PROMPT.read_bytes().decode().replace("{text_prompt}", "a photo of a cat")
    assert len(text) == 2593
    assert hashlib.sha256(text.encode()).hexdigest() == PROMPT_SHA256
    assert PROMPT_SHA256 == "ed13a1b1b6f42463518c1f55de40a864b97876aa12e6e2f367f0a0e44aa4196e"


def test_scores_equal_the_released_computation(reward, toys):
    images = smooth_images(2, 90, 64)
    expected = [straight_line(toys, image, prompt, (532, 392)) for image, prompt in zip(images, PROMPTS, strict=False)]
    scores = scored(reward, images, PROMPTS[:2])
    assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-4)
    assert (scores[0] - scores[1]).abs() > 0.01, "the samples must tell apart for the comparison to mean anything"


def test_positions_of_qwen_are_those_of_transformers(toys, small):
    """Option "mrope" is the whole network's forward; it scores otherwise than the released code."""
    reward = build(configured(toys[0], positions="mrope"))
    _, model, tokenizer = toys
    image = smooth_images(1, 112, 112)
    scores = scored(reward, image, PROMPTS[:1])
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    prepared = Qwen2VLImageProcessorPil()(images=[uint8(image[0]).numpy()], return_tensors="pt")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": asked(PROMPTS[0])}]}],
        tokenize=False,
        add_generation_prompt=True,
    ).replace("<|image_pad|>", "<|image_pad|>" * 16)
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        hidden = model.model(
            input_ids=ids, mm_token_type_ids=(ids == model.config.image_token_id).int(), **prepared
        ).last_hidden_state
        mark = int((ids[0] == len(tokenizer) - 1).nonzero())
        expected = random_head()(hidden[0, mark])[0]
    assert_close(scores[0], expected, rtol=0, atol=1e-4)
    assert abs(float(scored(build(configured(toys[0])), image, PROMPTS[:1])) - float(expected)) > 1e-3


def asked(caption: str) -> str:
    return PROMPT.read_bytes().decode().replace("{text_prompt}", caption)


def test_a_clip_has_the_mean_over_every_fourth_frame(reward, small):
    clip = smooth_images(6)
    (value,) = scored(reward, clip[None], PROMPTS[:1])
    frames = scored(reward, clip[[0, 4]], [PROMPTS[0]] * 2)
    assert_close(value, frames.mean(), rtol=0, atol=1e-5)


def test_a_caption_that_spells_the_models_own_tokens_is_refused(reward):
    for caption in ("a cat <|Reward|>", "<|image_pad|>"):
        with pytest.raises(RewardError, match=r"each of <\|Reward\|>, <\|image_pad\|> exactly once"):
            scored(reward, smooth_images(1), [caption])
    with pytest.raises(RewardError, match=r"takes \[3, H, W\] or \[F, 3, H, W\]"):
        scored(reward, [torch.rand(8, 8)], ["a"])


def test_the_body_runs_in_bfloat16_by_default_and_the_head_does_not(toys, reward, small):
    assert Config().dtype == "bfloat16"
    model = hpsv3.load(Config(model=str(toys[0]), base=str(toys[0]), device="cpu"))
    assert {weight.dtype for weight in model.backbone.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in model.head.parameters()} == {torch.float32}
    assert not any(weight.requires_grad or weight.is_meta for weight in model.backbone.parameters())
    assert all(not buffer.is_meta for buffer in model.backbone.buffers())


def test_another_base_or_file_than_the_trained_one_is_refused(toys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    other = toy.save_base(tmp_path, ["nothing but this"])
    with pytest.raises(RewardError, match=r"embeds \d+ tokens, the tokenizer of"):
        build(Config(model=str(toys[0]), base=other, device="cpu"))
    with pytest.raises(RewardError, match=r"has no HPSv3.safetensors"):
        build(Config(model=str(tmp_path), base=other, device="cpu"))
    with pytest.raises(RewardError, match=r"cannot load configuration and tokenizer of '.*nowhere'"):
        build(Config(model=str(toys[0]), base=str(tmp_path / "nowhere"), device="cpu"))


def test_a_changed_prompt_file_is_refused_at_load(tmp_path, monkeypatch):
    (tmp_path / "hpsv3.txt").write_text(PROMPT.read_text(encoding="utf-8").rstrip(), encoding="utf-8")
    monkeypatch.setattr(hpsv3, "PROMPT", tmp_path / "hpsv3.txt")
    with pytest.raises(RewardError, match="does not hold the text that the model was trained with"):
        build(Config())
