"""HPSv3 on a tiny random Qwen2-VL in the published layout, against the released computation step by step."""

import hashlib

import pytest
import torch
from flowrl.rewards._judges import qwen_vl
from flowrl.rewards._vision.pixels import STD
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


SIZES = {"small": (90, 64), "of Wan": (240, 416), "large": (720, 1280)}
LEVELS, MEAN_LEVELS = 2.0, 0.4
"""Largest and mean difference of "fast" from the released way, in levels of 255: its three roundings to 8 bits."""


def drawn(kind: str, height: int, width: int) -> torch.Tensor:
    """[3, height, width] in [0, 1]: noise has the most overshoot of the bicubic kernel, squares the hardest edges."""
    noise = torch.rand(3, height, width, generator=torch.Generator().manual_seed(0))
    squares = (noise[:, ::8, ::8] > 0.5).float().kron(torch.ones(8, 8))[:, :height, :width]
    return {"smooth": smooth_images(1, height, width)[0], "noise": noise, "squares": squares}[kind]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["smooth", "noise", "squares"])
def test_floats_are_the_patches_of_the_released_processor_within_two_levels(kind, size):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = drawn(kind, *SIZES[size])
    own = hpsv3.resized(image, "fast")
    assert own is not None
    values, grid = qwen_vl.patches(own)
    picture = Image.fromarray(uint8(image).numpy()).resize((own.shape[3], own.shape[2]), Image.Resampling.BICUBIC)
    prepared = Qwen2VLImageProcessorPil()(images=[picture])
    assert torch.equal(grid, torch.as_tensor(prepared["image_grid_thw"]))
    apart = (values - torch.as_tensor(prepared["pixel_values"])).abs().reshape(len(values), 3, -1)
    levels = apart * 255 * torch.tensor(STD)[:, None]
    assert float(levels.max()) < LEVELS
    assert float(levels.mean()) < MEAN_LEVELS


def test_the_gradient_of_floats_is_the_slope_of_the_score(toys, reward, small):
    """In a video, whose frames that are not looked at have none; the scores of both ways are near."""
    fast, image = build(configured(toys[0], preprocess="fast")), 0.2 + 0.6 * smooth_images(1, 112, 112)
    assert not reward.card.differentiable
    assert fast.card.differentiable
    assert_close(scored(fast, image, PROMPTS[:1]), scored(reward, image, PROMPTS[:1]), rtol=0, atol=0.02)
    assert not scored(fast, image, PROMPTS[:1]).requires_grad
    video = image[:, None].repeat(1, 6, 1, 1, 1).requires_grad_()
    (slope,) = torch.autograd.grad(scored(fast, video, PROMPTS[:1]).sum(), video)
    assert slope.flatten(2).any(dim=2).tolist() == [[True, False, False, False, True, False]]
    along = slope / slope.norm()
    with torch.no_grad():
        up, down = (float(scored(fast, video + sign * 0.2 * along, PROMPTS[:1])) for sign in (1, -1))
    assert (up - down) / 0.4 == pytest.approx(float(slope.norm()), rel=0.05)
    assert not scored(reward, video, PROMPTS[:1]).requires_grad


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
