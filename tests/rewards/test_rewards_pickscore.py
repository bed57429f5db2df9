"""PickScore on a tiny random CLIP, against a straight-line computation on the same weights."""

import math

import pytest
import torch
from flowrl.rewards._vision import clips
from flowrl.rewards._vision.pixels import Pixels, broken
from flowrl.rewards.pickscore import Config, build
from torch.testing import assert_close

from tests import toy_clip
from tests.rewards.test_rewards_clip_score import embeddings
from tests.tiny_rewards import PROMPTS, scored, smooth_images, uint8


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return toy_clip.save(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def reward(folder):
    return build(Config(model=folder, tokenizer=folder, device="cpu"))


def test_scores_are_cosines_of_transformers_at_the_clips_temperature(reward, folder):
    from transformers import CLIPModel

    images = smooth_images()
    seen, said = embeddings("transformers", folder, images, PROMPTS)
    expected = CLIPModel.from_pretrained(folder).logit_scale.exp().detach() * (seen * said).sum(dim=1)
    assert expected.std() > 0.5, "the pictures and prompts must tell apart for this to mean anything"
    assert_close(scored(reward, images), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (40, 57), (91, 33), (20, 31)])
def test_exact_preprocessing_equals_that_of_transformers(height, width):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = torch.rand(3, height, width, generator=torch.Generator().manual_seed(1))
    processor = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    expected = torch.as_tensor(processor(images=[uint8(image).numpy()], return_tensors="pt")["pixel_values"])[0]
    assert_close(Pixels(size=24)(image[None])[0], expected, rtol=0, atol=1e-5)


def test_fast_preprocessing_is_close_to_the_exact_one():
    exact, fast = (Pixels(size=24, preprocess=way) for way in ("exact", "fast"))
    smooth, hard = smooth_images(1, 91, 60), (smooth_images(1, 61, 64) > 0.5).float()
    # Eight bits are 1/255 apart, rounded twice; normalising divides by 0.26 at least.
    assert_close(fast(smooth), exact(smooth), rtol=0, atol=2.5 / 255 / 0.26)
    # At hard edges PIL also cuts the overshoot of the bicubic kernel off between its two passes.
    assert_close(fast(hard), exact(hard), rtol=0, atol=0.03 / 0.26)


def test_the_row_of_a_broken_picture_lies_where_the_rows_of_the_others_do():
    elsewhere = torch.empty(3, 5, 5, device="meta")
    assert broken(elsewhere, 4, "exact").device.type == "cpu", "PIL's pictures are in memory, wherever they came from"
    assert broken(elsewhere, 4, "fast").device.type == "meta"


def test_the_card_bounds_the_score_by_the_temperature(reward):
    scale = math.exp(2.6592)  # CLIP's initial logit_scale
    assert (reward.card.low, reward.card.high) == (pytest.approx(-scale), pytest.approx(scale))


def test_the_projected_embedding_is_found_in_both_forms_of_output():
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    value = torch.ones(2, 3)
    assert clips.projected(value) is value
    assert (
        clips.projected(BaseModelOutputWithPooling(last_hidden_state=torch.zeros(2, 1, 3), pooler_output=value))
        is value
    )
