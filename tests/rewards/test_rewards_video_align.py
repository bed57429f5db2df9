"""VideoAlign on a tiny random Qwen2-VL in the published layouts, against the released computation step by step."""

import dataclasses
import json
import math

import pytest
import torch
from flowrl.rewards.video_align import CARD, build, frame_indices, read_settings, values_of
from torch.testing import assert_close

from flowrl.reward import RewardError
from tests import toy_qwen_vl as toy
from tests.tiny_rewards import smooth_images
from tests.tiny_rewards import video_align as tiny
from tests.tiny_rewards.video_align import (
    ALPHA,
    NORMS,
    PROMPTS,
    RANK,
    TEXT,
    Toy,
    configured,
    settings_file,
    split_lora,
)


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        tiny.own_text(patch)
        yield tiny.save(tmp_path_factory.mktemp("video_align"))


@pytest.fixture
def small(monkeypatch):
    tiny.small_frames(monkeypatch)


@pytest.fixture(scope="module")
def reward(toys):
    return build(configured(toys))


def clips(count: int = 3, frames: int = 9, height: int = 60, width: int = 90, seed: int = 0) -> torch.Tensor:
    return smooth_images(count * frames, height, width, seed).view(count, frames, 3, height, width)


def scored(reward, images, prompts=PROMPTS, metadata=None) -> torch.Tensor:
    """[4, B]: the sum, VQ, MQ, TA."""
    result = reward.score(images, prompts, metadata or [{}] * len(prompts))
    return torch.stack([result[name] for name in CARD.outputs])


def straight_line(toys: Toy, clip: torch.Tensor, caption: str, chosen: list[int], size: tuple[int, int]) -> list[float]:
    """One clip: torchvision, transformers' own processor, hand-merged embeddings, the head at the three marks."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    eight_bit = (clip[chosen] * 255).round().byte()
    frames = resize(eight_bit, list(size), InterpolationMode.BICUBIC, antialias=True)
    processor = Qwen2VLVideoProcessor(do_resize=False, cap_pixels_per_frame=False)
    prepared = processor(videos=[frames], return_tensors="pt", do_sample_frames=False)
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|><|video_pad|><|vision_end|>{TEXT.replace('{text_prompt}', caption)}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    pixels, grid = prepared["pixel_values_videos"], prepared["video_grid_thw"]
    ids, hidden = toy.read(toys.model, toys.tokenizer, text, kind="video", pixels=pixels, grid=grid)
    values = []
    for name, (mean, std) in NORMS.items():
        (mark,) = (ids == toys.tokenizer.convert_tokens_to_ids(f"<|{name}_reward|>")).nonzero()[:, 0].tolist()
        values.append((float(toys.head[0] @ hidden[mark]) - mean) / std)
    return [sum(values), *values]


@pytest.mark.parametrize(
    ("total", "rate", "count"), [(53, 15, 8), (81, 16, 10), (129, 24, 10), (33, 16, 4), (16, 8, 4), (49, 8, 12)]
)
def test_as_many_frames_are_looked_at_as_in_the_released_code(total, rate, count):
    indices = frame_indices(total, rate)
    assert len(indices) == count
    assert (indices[0], indices[-1]) == (0, total - 1)
    assert indices == [round(i * (total - 1) / (count - 1)) for i in range(count)]


def test_short_and_long_clips_keep_to_the_bounds():
    assert frame_indices(3, 24) == [0, 2]
    assert frame_indices(2, 24) == [0, 1]
    assert len(frame_indices(10_000, 1)) == 768
    assert len(frame_indices(81, 16, fps=None, num_frames=7)) == 8
    with pytest.raises(RewardError, match="at least 2 frames, got 1"):
        frame_indices(1, 24)


def test_scores_equal_the_released_computation(reward, toys):
    images = clips(2)
    # 9 frames at 4 a second are 2.25 s: 4.5 frames, rounded to 4; 60 x 90 is enlarged to 100,352 pixels.
    expected = [straight_line(toys, c, p, [0, 3, 5, 8], (280, 392)) for c, p in zip(images, PROMPTS, strict=False)]
    scores = scored(reward, images, PROMPTS[:2])
    assert_close(scores.T, torch.tensor(expected), rtol=0, atol=1e-4)
    assert (scores[:, 0] - scores[:, 1]).abs().min() > 1e-3, "the samples must tell apart"


def test_a_checkpoint_of_adapter_and_rest_scores_as_the_whole_one(reward, toys, tmp_path, small):
    from safetensors.torch import save_file

    plain, factors = split_lora(toy.published(toys.model))
    base, last = tmp_path / "base", tmp_path / "checkpoint-11"
    last.mkdir()
    toy.save_base(base, [TEXT, *PROMPTS])
    embedding = plain.pop("model.embed_tokens.weight")
    plain.pop("lm_head.weight")
    # The base knows neither the marks nor the trained merger.
    untrained = {name: value + ("merger" in name) for name, value in plain.items()}
    save_file({**untrained, "model.embed_tokens.weight": embedding[:-3].clone()}, base / "model.safetensors")
    rest = {name: value for name, value in plain.items() if "merger" in name}
    rest |= {"model.embed_tokens.weight": embedding, "rm_head.weight": toys.head}
    torch.save({f"base_model.model.{n}": v for n, v in rest.items()}, last / "non_lora_state_dict.pth")
    adapter = {f"{n}.lora_{p}.weight": v for n, pair in factors.items() for p, v in zip("AB", pair, strict=True)}
    save_file({f"base_model.model.{n}": v for n, v in adapter.items()}, last / "adapter_model.safetensors")
    (tmp_path / "model_config.json").write_text(json.dumps(settings_file(str(base))))
    other = build(configured(toys, model=str(tmp_path)))
    assert_close(scored(other, clips()), scored(reward, clips()), rtol=0, atol=1e-5)
    (last / "adapter_model.safetensors").unlink()
    with pytest.raises(RewardError, match=r"has neither model.pth nor adapter_model.safetensors"):
        build(configured(toys, model=str(tmp_path)))


def test_the_caption_changes_text_alignment_alone(reward, small):
    clip = clips(1).expand(3, -1, -1, -1, -1)
    _, quality, motion, alignment = scored(reward, clip, ["a cat", "a storm over the sea, seen from far away", ""])
    # Causal attention; the kernels may add up in another order for another length.
    assert_close(quality, quality[:1].expand(3), rtol=0, atol=1e-5)
    assert_close(motion, motion[:1].expand(3), rtol=0, atol=1e-5)
    assert (alignment[:, None] - alignment).abs()[~torch.eye(3, dtype=torch.bool)].min() > 1e-3


def test_the_frame_rate_says_which_frames_are_seen(reward, toys, small):
    clip = clips(1, frames=24)
    rates = [scored(reward, clip, PROMPTS[:1], [{"fps": fps}]) for fps in (24, 4)]
    assert (rates[0] - rates[1]).abs().max() > 1e-3
    assert torch.equal(rates[1], scored(reward, clip, PROMPTS[:1])), "the option stands in where metadata is silent"
    without = build(configured(toys, fps=None))
    assert (without.card.requires, reward.card) == (("fps",), dataclasses.replace(CARD, requires=()))
    assert torch.equal(scored(without, clip, PROMPTS[:1], [{"fps": 4}]), rates[1])
    for record in ({}, {"fps": "24"}, {"fps": 0}, {"fps": math.nan}):
        with pytest.raises(RewardError, match="needs each video's frames a second"):
            scored(without, clip, PROMPTS[:1], [record])


def test_values_are_normalised_and_summed_as_published(toys):
    settings = read_settings(toys.folder / "model_config.json")
    means = torch.tensor([[mean] for mean, _ in NORMS.values()])
    stds = torch.tensor([[std] for _, std in NORMS.values()])
    assert values_of(means, settings, True) == pytest.approx([0, 0, 0, 0], abs=1e-6)
    assert values_of(means + stds, settings, True) == pytest.approx([3, 1, 1, 1], abs=1e-5)
    assert values_of(means, settings, False) == pytest.approx([7.6508, 3.6757, 1.1646, 2.8105], abs=1e-4)
    # A head of three outputs: each mark has its own.
    three = dataclasses.replace(settings, output_dim=3)
    assert values_of(torch.arange(9.0).view(3, 3), three, False) == [12.0, 0.0, 4.0, 8.0]


def test_captions_and_pictures_that_cannot_be_asked_about_are_refused(reward):
    with pytest.raises(
        RewardError, match=r"each of <\|VQ_reward\|>, <\|MQ_reward\|>, <\|TA_reward\|>, .* exactly once"
    ):
        scored(reward, clips(1), ["a cat <|VQ_reward|>"])
    with pytest.raises(RewardError, match=r"takes videos \[F, 3, H, W\], got \[3, 60, 90\]"):
        scored(reward, clips(1)[:, 0], ["a cat"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_config.prompt_template_type": "detailed"}, "prompt_template_type is 'detailed', only"),
        ({"data_config.sample_type": "multi_pts"}, "sample_type is 'multi_pts', only 'uniform'"),
        ({"data_config.eval_dim": "VQ"}, "eval_dim is"),
        ({"model_config.use_special_tokens": False}, "use_special_tokens is False"),
        ({"data_config.fps": None}, "has neither fps nor num_frames"),
        ({"model_config.output_dim": 4}, "output_dim=4 is not 1 or 3"),
    ],
)
def test_a_checkpoint_made_otherwise_is_refused(tmp_path, changes, message):
    (tmp_path / "model_config.json").write_text(json.dumps(settings_file("base", **changes)))
    with pytest.raises(RewardError, match=message):
        read_settings(tmp_path / "model_config.json")


def test_lora_is_scaled_as_the_checkpoint_says(tmp_path):
    path = tmp_path / "model_config.json"
    for changes, scale in (
        ({}, ALPHA / RANK),
        ({"peft_lora_config.use_rslora": True}, ALPHA / math.sqrt(RANK)),
        ({"peft_lora_config.lora_enable": False}, 0.0),
    ):
        path.write_text(json.dumps(settings_file("base", **changes)))
        assert read_settings(path).lora_scale == pytest.approx(scale)


def test_what_is_missing_is_named(toys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RewardError, match=r"set prompt_file to prompt_template.py"):
        build(configured(toys, prompt_file=None))
    (tmp_path / "prompt.txt").write_text(TEXT.replace("sharpness", "clarity"))
    with pytest.raises(RewardError, match="does not hold the text that the model was trained with"):
        build(configured(toys, prompt_file=str(tmp_path / "prompt.txt")))
    with pytest.raises(RewardError, match=r"is not the model_config.json of a VideoAlign checkpoint"):
        build(configured(toys, model=str(tmp_path)))
    (tmp_path / "model_config.json").write_text(json.dumps(settings_file(toys.base)))
    with pytest.raises(RewardError, match="has no checkpoint-N"):
        build(configured(toys, model=str(tmp_path)))
    bare = settings_file(toys.base)
    del bare["inference_config"]
    (tmp_path / "model_config.json").write_text(json.dumps(bare))
    with pytest.raises(RewardError, match=r"no inference_config to normalise with; set use_norm: false"):
        build(configured(toys, model=str(tmp_path)))
