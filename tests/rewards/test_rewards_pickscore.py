"""PickScore on a tiny random CLIP, against a straight-line computation on the same weights."""

import math

import pytest
import torch
from flowrl.rewards._vision import clips
from flowrl.rewards._vision.pixels import Pixels, broken
from flowrl.rewards.pickscore import Config, build
from torch.testing import assert_close

from flowrl.reward import RewardError
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from tests import toy_clip

PROMPTS = ["a cat", "two dogs on a bench far away at the edge of the old town", "a cat", "x", "sea"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return toy_clip.save(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def reward(folder):
    return build(Config(model=folder, tokenizer=folder, device="cpu"))


def pictures(count: int = 5, height: int = 40, width: int = 52, seed: int = 0) -> torch.Tensor:
    """Smooth and strongly coloured, so that resizing matters little and the scores differ."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 5, generator=generator)
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")


def scored(reward, images, prompts=PROMPTS) -> torch.Tensor:
    return reward.score(images, prompts, [{}] * len(prompts))


def straight_line(folder: str, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """One sample at a time: transformers' own PIL preprocessing, the two towers, the two projections."""
    from transformers import CLIPModel, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = toy_clip.IMAGE_SIZE
    processor = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), CLIPTokenizer.from_pretrained(folder)
    scores = []
    for image, prompt in zip(images, prompts, strict=True):
        eight_bit = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        pixels = torch.as_tensor(processor(images=[eight_bit], return_tensors="pt")["pixel_values"])
        tokens = tokenizer(prompt).input_ids
        tokens = tokens[: toy_clip.TEXT_LENGTH - 1] + tokens[-1:] if len(tokens) > toy_clip.TEXT_LENGTH else tokens
        with torch.no_grad():
            seen = model.vision_model(pixels).pooler_output[0] @ model.visual_projection.weight.T
            said = model.text_model(torch.tensor([tokens])).pooler_output[0] @ model.text_projection.weight.T
        cosine = (seen * said).sum() / (seen.square().sum().sqrt() * said.square().sum().sqrt())
        scores.append(model.logit_scale.exp() * cosine)
    return torch.stack(scores)


def test_scores_equal_a_straight_line_computation(reward, folder):
    images = pictures()
    expected = straight_line(folder, images, PROMPTS)
    assert expected.std() > 0.5, "the pictures and prompts must tell apart for this to mean anything"
    assert_close(scored(reward, images), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (40, 57), (91, 33), (20, 31)])
def test_exact_preprocessing_equals_that_of_transformers(height, width):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = torch.rand(3, height, width, generator=torch.Generator().manual_seed(1))
    processor = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    eight_bit = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    expected = torch.as_tensor(processor(images=[eight_bit], return_tensors="pt")["pixel_values"])[0]
    assert_close(Pixels(size=24)(image[None])[0], expected, rtol=0, atol=1e-5)


def test_fast_preprocessing_is_close_to_the_exact_one():
    exact, fast = (Pixels(size=24, preprocess=way) for way in ("exact", "fast"))
    smooth, hard = pictures(1, 91, 60), (pictures(1, 61, 64) > 0.5).float()
    # Eight bits are 1/255 apart, rounded twice; normalising divides by 0.26 at least.
    assert_close(fast(smooth), exact(smooth), rtol=0, atol=2.5 / 255 / 0.26)
    # At hard edges PIL also cuts the overshoot of the bicubic kernel off between its two passes.
    assert_close(fast(hard), exact(hard), rtol=0, atol=0.03 / 0.26)


def test_a_score_depends_on_its_own_picture_and_prompt_alone(reward):
    images = pictures()
    together = scored(reward, images)
    alone = torch.cat([scored(reward, images[i : i + 1], PROMPTS[i : i + 1]) for i in range(5)])
    assert_close(together, alone, rtol=0, atol=1e-4)
    assert_close(scored(reward, images.flip(0), PROMPTS[::-1]), together.flip(0), rtol=0, atol=1e-4)
    other = scored(reward, images, [PROMPTS[1], PROMPTS[0], *PROMPTS[2:]])
    assert (other[:2] - together[:2]).abs().min() > 0.01
    assert_close(other[2:], together[2:], rtol=0, atol=1e-4)


def test_pictures_of_different_sizes_come_as_a_list(reward):
    images = [pictures(1, 40, 52)[0], pictures(1, 33, 64, seed=1)[0]]
    alone = [scored(reward, [image], ["a cat"])[0] for image in images]
    assert_close(scored(reward, images, ["a cat"] * 2), torch.stack(alone), rtol=0, atol=1e-4)


def test_a_picture_with_nan_is_masked_and_no_other(reward):
    images = pictures()
    expected = scored(reward, images)
    images[1, 0, 3, 3] = math.nan
    masked = scored(reward, images)
    assert masked.isnan().tolist() == [False, True, False, False, False]
    assert_close(masked[[0, 2, 3, 4]], expected[[0, 2, 3, 4]], rtol=0, atol=1e-4)


def test_the_row_of_a_broken_picture_lies_where_the_rows_of_the_others_do():
    elsewhere = torch.empty(3, 5, 5, device="meta")
    assert broken(elsewhere, 4, "exact").device.type == "cpu", "PIL's pictures are in memory, wherever they came from"
    assert broken(elsewhere, 4, "fast").device.type == "meta"


def test_gradients_reach_the_pictures_only_where_the_card_says_so(reward, folder):
    fast = build(Config(model=folder, tokenizer=folder, device="cpu", preprocess="fast"))
    assert (reward.card.differentiable, fast.card.differentiable) == (False, True)
    images = pictures().requires_grad_()
    assert not scored(reward, images).requires_grad
    scored(fast, images)[0].backward()
    # The first score pulls on the first picture alone.
    assert images.grad[0].abs().max() > 0
    assert images.grad[1:].abs().max() == 0


def test_scoring_leaves_the_random_state_the_gradient_mode_and_autocast_alone(reward):
    images, state = pictures(), torch.get_rng_state()
    expected = scored(reward, images)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scored(reward, images), expected), "the network runs in float32 under autocast too"
        assert torch.is_autocast_enabled("cpu")


def test_the_card_bounds_the_score_by_the_temperature(reward):
    scale = math.exp(2.6592)  # CLIP's initial logit_scale
    assert (reward.card.low, reward.card.high) == (pytest.approx(-scale), pytest.approx(scale))
    scores = Scorer([WeightedReward("pickscore", reward)], batch_size=2).score(pictures(), PROMPTS, [{}] * 5)
    assert scores.failures == 0


def test_a_clip_has_the_mean_of_its_frames(reward):
    two = pictures(2)
    clip = torch.stack([two[0], two[1]])
    together = scored(reward, [clip, two[1]], ["a cat", "sea"])
    frames = scored(reward, two, ["a cat", "a cat"])
    assert frames.diff().abs() > 0.01
    assert_close(together, torch.stack([frames.mean(), scored(reward, two[1:], ["sea"])[0]]), rtol=0, atol=1e-4)


def test_weights_that_cannot_be_found_are_named(tmp_path, folder):
    missing = str(tmp_path / "nowhere")
    with pytest.raises(RewardError, match=r"'pickscore' cannot load CLIPModel.*nowhere"):
        build(Config(model=missing, tokenizer=folder))


def test_the_projected_embedding_is_found_in_both_forms_of_output():
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    value = torch.ones(2, 3)
    assert clips.projected(value) is value
    assert (
        clips.projected(BaseModelOutputWithPooling(last_hidden_state=torch.zeros(2, 1, 3), pooler_output=value))
        is value
    )
