"""The determinantal gain, -log (L^-1)_ii of L = 1 + E E^T (arXiv 2511.20647), and the reward that is made of it."""

import math

import pytest
import torch
from flowrl.rewards.diversity import Config, apart, build, colour_waves, diversity_gain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.credit.advantages import AdvantageConfig, group
from tests.tiny_rewards import scored, smooth_images
from tests.tiny_rewards.diversity import save_clip, save_dinov2

LN2 = math.log(2)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the formula


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(1, 7), width=st.integers(1, 9), seed=st.integers(0, 100))
def test_the_gain_is_the_leave_one_out_difference_of_log_determinants(samples, width, seed):
    rows = draw(2, samples, width, seed=seed)
    found = diversity_gain(3 * rows)
    for p in range(2):
        unit = (rows[p] / rows[p].norm(dim=1, keepdim=True)).double()
        kernel = unit @ unit.T + torch.eye(samples, dtype=torch.float64)
        for i in range(samples):
            rest = [j for j in range(samples) if j != i]
            without = kernel[rest][:, rest].logdet() if rest else torch.zeros((), dtype=torch.float64)
            assert float(found[p, i]) == pytest.approx(float(kernel.logdet() - without), abs=1e-6)
    assert float(found.min()) >= math.log((samples + 1) / samples) - 1e-6
    assert float(found.max()) <= LN2 + 1e-6


@pytest.mark.parametrize("samples", [2, 5, 24])
def test_equal_samples_share_the_least_gain_and_orthogonal_ones_have_the_most(samples):
    same = torch.ones(1, samples, 30)
    assert_close(diversity_gain(same), torch.full((1, samples), math.log((samples + 1) / samples)))
    assert_close(diversity_gain(torch.eye(30)[None, :samples]), torch.full((1, samples), LN2))


def test_duplicates_share_the_smallest_gain():
    rows = draw(1, 6, 20)
    rows[0, 4] = 2.5 * rows[0, 1]
    found = diversity_gain(rows)[0]
    assert float(found[1]) == pytest.approx(float(found[4]), abs=1e-6)
    others = found[[0, 2, 3, 5]]
    assert float(found[1]) < float(others.min()) - 0.05


def test_one_sample_alone_has_ln_2_and_so_no_advantage():
    gain = diversity_gain(draw(3, 1, 4))
    assert_close(gain, torch.full((3, 1), LN2))
    credit = group(gain[None], torch.ones(1), AdvantageConfig(std="group"))
    assert credit.values.abs().max() == 0
    assert credit.dead.all()


def test_a_broken_row_is_masked_and_changes_no_other():
    rows = draw(1, 5, 8)
    expected = diversity_gain(rows[:, [0, 1, 3, 4]])
    rows[0, 2, 3] = math.nan
    found = diversity_gain(rows)
    assert found.isnan().tolist() == [[False, False, True, False, False]]
    assert_close(found[:, [0, 1, 3, 4]], expected)


# ---- distances and clusters


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(1, 7), near=st.floats(-0.9, 1.0), seed=st.integers(0, 100))
def test_a_cluster_is_a_connected_part_and_a_distance_is_to_the_nearest(samples, near, seed):
    rows = draw(1, samples, 3, seed=seed)
    rows[0, -1] = 2 * rows[0, 0]  # the same direction
    distance, share = apart(rows, near)
    unit = torch.nn.functional.normalize(rows[0].double(), dim=1)
    cosine = (unit @ unit.T).clamp(max=1)
    for i in range(samples):
        others = [1 - float(cosine[i, j]) for j in range(samples) if j != i]
        assert float(distance[0, i]) == pytest.approx(min(others, default=1.0), abs=1e-6)
        part, fringe = {i}, [i]
        while fringe:
            k = fringe.pop()
            new = {j for j in range(samples) if j != k and cosine[k, j] > near} - part
            part, fringe = part | new, [*fringe, *new]
        assert float(share[0, i]) == pytest.approx(1 / len(part))


def test_at_a_threshold_of_one_each_is_a_cluster_and_a_broken_row_is_in_none():
    rows = draw(2, 5, 8)
    rows[:, 3] = rows[:, 1]
    assert apart(rows, 1.0)[1].tolist() == [[1.0] * 5] * 2
    assert apart(rows, 0.999)[1][0].tolist() == [1.0, 0.5, 1.0, 0.5, 1.0]
    expected = apart(rows[:, [0, 1, 2, 3]], 0.0)
    rows[:, 4, 2] = math.nan
    found = apart(rows, 0.0)
    assert found[:, :, 4].isnan().all()
    assert_close(found[:, :, :4], expected)


def test_near_adds_outputs_and_moves_no_gain():
    shown = smooth_images(5)
    shown[4] = shown[0]
    plain, more = build(Config()), build(Config(near=0.99))
    found = more.score(shown, ["a"] * 5, [{}] * 5)
    assert isinstance(found, dict)
    assert tuple(found) == more.card.outputs == ("diversity", "diversity_distance", "diversity_share")
    assert torch.equal(found["diversity"], scored(plain, shown, ["a"] * 5))
    assert_close(found["diversity_distance"][[0, 4]], torch.zeros(2), atol=1e-6, rtol=0)
    assert found["diversity_share"][[0, 4]].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"near=1\.5 must be in"):
        Config(near=1.5)


# ---- the reward


def test_similarity_of_pictures_is_a_gaussian_of_their_colour_difference():
    shown = smooth_images(12)
    near = (shown[:1] + 0.1 * draw(12, 3, 1, 1).tanh()).clamp(0, 1)
    grids = torch.nn.functional.adaptive_avg_pool2d(torch.cat([shown, near]), 8).flatten(1)
    unit = torch.nn.functional.normalize(colour_waves(0.2)(list(torch.cat([shown, near]))), dim=1)
    difference = torch.cdist(grids, grids).square() / grids.shape[1]
    # 256 random waves: the error of their mean is 1 / sqrt(512) at most, five times that for 276 pairs.
    assert_close(unit @ unit.T, (-difference / (2 * 0.2**2)).exp(), rtol=0, atol=5 / 512**0.5)


def test_a_picture_unlike_the_others_of_its_prompt_scores_best():
    reward = build(Config())
    shown = smooth_images(1).repeat(4, 1, 1, 1)
    shown[2] = smooth_images(1, seed=1)[0]
    gain = scored(reward, shown, ["a"] * 4)
    assert int(gain.argmax()) == 2
    assert float(gain[2]) > float(gain[0]) + 0.2
    assert_close(gain[[0, 1, 3]], gain[:1].expand(3))


def test_only_pictures_of_the_same_prompt_are_compared_wherever_they_stand():
    reward, shown = build(Config()), smooth_images(7)
    prompts, metadata = ["a", "b", "a", "a", "b", "a", "c"], [{}, {}, {}, {"text": "x"}, {}, {}, {}]
    found = scored(reward, shown, prompts, metadata)
    for places in ([0, 2, 5], [1, 4], [3], [6]):
        alone = reward.score(shown[places], [prompts[i] for i in places], [metadata[i] for i in places])
        assert_close(found[places], alone)
    assert float(found[3]) == float(found[6]) == pytest.approx(LN2)


# ---- videos


def moving(steps: list[tuple[int, int]], start: tuple[int, int] = (12, 12), frames: int = 9) -> torch.Tensor:
    """Videos of a red square of 8 pixels on grey, which moves by (down, across) pixels a frame; [B, F, 3, 32, 32]."""
    videos = torch.full((len(steps), frames, 3, 32, 32), 0.5)
    for video, (down, across) in zip(videos, steps, strict=True):
        for number, frame in enumerate(video):
            top, left = start[0] + down * number, start[1] + across * number
            frame[:, top : top + 8, left : left + 8] = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
    return videos


def test_videos_with_the_same_first_frame_and_another_motion_are_told_apart():
    reward, least = build(Config()), math.log(5 / 4)
    four = moving([(0, 1), (0, -1), (1, 0), (-1, 0)])
    assert torch.equal(four[0, 0], four[3, 0])
    same = scored(reward, moving([(0, 1)] * 4), ["a"] * 4)
    assert_close(same, torch.full((4,), least))
    found = scored(reward, four, ["a"] * 4)
    assert float(found.min()) > least + 0.1, found
    odd = scored(reward, moving([(0, 1), (0, 1), (0, 1), (0, 0)]), ["a"] * 4)
    assert int(odd.argmax()) == 3, "the one that stays"
    assert float(odd[3]) > float(odd[:3].max()) + 0.1


def test_the_same_frames_in_another_order_are_another_video():
    reward, least = build(Config()), math.log(3 / 2)
    there = moving([(0, 1)], start=(12, 4))
    found = scored(reward, torch.cat([there, there.flip(1)]), ["a"] * 2)
    assert float(found.min()) > least + 0.05
    # One frame is an image.
    single = scored(reward, four := moving([(0, 1), (1, 1)])[:, :1], ["a"] * 2)
    assert_close(single, scored(reward, four[:, 0], ["a"] * 2))


def test_the_similarity_of_videos_is_the_mean_of_their_frames_and_a_broken_frame_masks_its_video():
    reward, videos = build(Config()), torch.rand(3, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize(colour_waves(0.2)(list(videos.flatten(0, 1))), dim=1).view(3, 4, -1)
    kernel = torch.einsum("afd,bfd->ab", unit, unit).double() / 4 + torch.eye(3, dtype=torch.float64)
    assert_close(scored(reward, videos, ["a"] * 3), -kernel.inverse().diagonal().log().float(), atol=1e-5, rtol=0)
    videos[1, 3, 0, 0, 0] = math.nan
    found = scored(reward, videos, ["a"] * 3)
    assert found.isnan().tolist() == [False, True, False]
    assert_close(found[[0, 2]], scored(reward, videos[[0, 2]], ["a"] * 2))


def test_videos_of_several_lengths_are_compared_at_as_many_instants_as_the_shortest_has():
    reward, long = build(Config()), moving([(0, 1), (1, 0)])
    found = reward.score([long[0], long[1, ::2]], ["a"] * 2, [{}] * 2)
    assert_close(found, scored(reward, long[:, ::2], ["a"] * 2))


# ---- networks


@pytest.mark.parametrize("save", [save_clip, save_dinov2])
def test_a_network_may_give_the_embeddings(tmp_path, save):
    reward = build(Config(backbone=save(tmp_path), device="cpu"))
    shown = smooth_images(3)
    shown[1] = shown[0]
    gain = scored(reward, shown, ["a"] * 3)
    assert_close(gain[0], gain[1])
    assert float(gain[2]) > float(gain[0]) + 1e-5
