"""`algorithm.frames`: the gradient of rewards at a few frames of a video, decoded from as few latents as give them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flowrl
from flowrl.config.checks import check_model
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.core.rng import normal, stream
from flowrl.data.prompts import Prompt
from flowrl.models.base import ModelAdapter
from flowrl.models.wan import Config, build
from flowrl.moving_shapes import draw, parse, prompts
from flowrl.reward import Card, Reward
from flowrl.scoring.gradient import RewardGradient, Slope
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Latents
from flowrl.scoring.weighted import WeightedReward

SEED, COUNT = 3, 9
KEYS = [(SEED, 1, slot, 0) for slot in range(3)]


@pytest.fixture(scope="module")
def wan() -> Any:
    return build(Config(path="tiny-wan", height=32, width=32, num_frames=COUNT, max_sequence_length=12))


@pytest.fixture(scope="module")
def x0(wan: Any) -> Tensor:
    return 0.5 * normal(wan.latent_shape(), 0, "frames", [(k,) for k in range(3)])


def colours(frame: Tensor) -> Tensor:
    """[B] of [B, 3, H, W]: not linear, so that the mean of scores is not the score of a mean."""
    return (frame * torch.tensor([0.5, -1.0, 2.0])[:, None, None]).mean(dim=(1, 2, 3)).exp() * 1e3


def score(images: Any, prompts: Any, metadata: Any) -> Tensor:
    return colours(images) if images.ndim == 4 else torch.stack([colours(video).mean() for video in images])


def climbed(wan: Any, x0: Tensor, frames: int | None, at_once: int = 2, keys: Any = KEYS) -> Slope:
    reward = Reward(score, Card(outputs=("colour",), modality="any", differentiable=True))
    climb = RewardGradient(Scorer([WeightedReward("colour", reward)]), wan, at_once, frames=frames)
    cond, rows = wan.blank_condition(1), torch.zeros(len(x0), dtype=torch.int64)
    return climb(Latents(x0, cond, rows), [(1.0, [Prompt(f"p{k}") for k in range(len(x0))], cond, rows)], keys)


@pytest.mark.parametrize("frame", range(COUNT))
def test_the_leading_latents_give_a_frame_as_the_whole_video_does_with_its_gradient(wan, x0, frame):
    x = x0[:1].clone().requires_grad_()
    few = wan.leading(x, frame)
    assert few.shape[2] == (frame + 1) // 2 + 1
    own, whole = wan.decode_with_grad(few)[:, frame], wan.decode_with_grad(x)[:, frame]
    assert_close(own, whole, rtol=0, atol=1e-6)
    found, expected = (torch.autograd.grad((image * x0.mean() + image.square()).sum(), x)[0] for image in (own, whole))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_alone_only_the_first_frame_is_exact_and_the_others_need_latents_before_theirs(wan):
    """The last frame of 24 videos from its last 1, 2, 3 latents; docs/concepts/reward_gradients.md has the numbers."""
    rng = np.random.default_rng(0)
    videos = np.stack([draw(parse(caption), rng, COUNT, 32) for caption in prompts("heldout")[:24]])
    x = wan.encode_images(torch.from_numpy(videos).float())
    whole = wan.decode(x)
    assert_close(wan.decode(x[:, :, :1])[:, 0], whole[:, 0], rtol=0, atol=1e-6)
    for count, expected in ((1, 0.0378), (2, 0.0136), (3, 0.0039)):
        error = wan.decode(x[:, :, -count:])[:, -1] - whole[:, -1]
        assert float(error.square().mean().sqrt()) == pytest.approx(expected, rel=0.1)
    x.requires_grad_()
    weights = normal(whole[:, -1].shape[1:], 0, "weights", [(k,) for k in range(24)])
    (slope,) = torch.autograd.grad((wan.decode_with_grad(x)[:, -1] * weights).sum(), x)
    shares = slope.square().sum(dim=(0, 1, 3, 4))
    assert float(shares[-1] / shares.sum()) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("frames", [1, 3])
def test_value_and_gradient_are_those_of_the_mean_over_the_frames_drawn_by_identity(wan, x0, frames):
    found = climbed(wan, x0, frames)
    for row, (seed, *key) in enumerate(KEYS):
        drawn = stream(seed, "gradient_frames", *key).choice(COUNT, frames, replace=False).tolist()
        assert len({*drawn}) == frames
        x = x0[row : row + 1].clone().requires_grad_()
        expected = colours(wan.decode_with_grad(x)[0, drawn]).mean()
        assert float(found.value[row]) == pytest.approx(float(expected.detach()), rel=1e-5)
        assert_close(found.gradient[row], torch.autograd.grad(expected, x)[0][0], rtol=1e-3, atol=1e-7)
    alone = climbed(wan, x0[1:2], frames, keys=KEYS[1:2])
    assert_close(found.gradient[1], alone.gradient[0], rtol=1e-4, atol=1e-8)
    assert_close(found.saturated[1], alone.saturated[0], rtol=1e-4, atol=1e-5)


def test_all_frames_are_the_whole_video_and_another_iteration_draws_others(wan, x0):
    whole, every = climbed(wan, x0, None), climbed(wan, x0, COUNT)
    assert_close(every.value, whole.value, rtol=1e-5, atol=0)
    assert_close(every.gradient, whole.gradient, rtol=1e-3, atol=1e-8)
    assert_close(every.saturated, whole.saturated)
    values = {float(value) for k in range(4) for value in climbed(wan, x0[:1], 1, keys=[(SEED, k, 0, 0)]).value}
    assert len(values) > 1


@pytest.mark.parametrize(
    ("frames", "there", "modality", "why"),
    [
        (1, 1, "any", "the model makes 1"),
        (10, 9, "any", "the model makes 9"),
        (2, 9, "video", "clip_score scores whole videos"),
    ],
)
def test_what_has_no_such_frames_is_refused(frames, there, modality, why):
    run, model = resolve(load_config("lab/refl", [f"algorithm.frames={frames}"])), ModelAdapter()
    module: Any = SimpleNamespace(CARD=Card(outputs=("x",), modality=modality))
    model.num_frames = there
    with pytest.raises(ConfigError, match=rf"algorithm\.frames={frames}: {why}"):
        check_model(replace(run, rewards=(replace(run.rewards[0], module=module),)), model)


def test_a_run_on_videos_climbs_at_drawn_frames():
    size = "height: 32, width: 32, num_frames: 9, max_sequence_length: 12"
    words = (f"model={{name: wan, path: tiny-wan, {size}}}", "data.prompts=shapes:motion-train")
    few = ("rollout.prompts_per_iteration=2", "rollout.num_inference_steps=3", "optim.batch_size=2", "guard.mode=off")
    prompts = ("data.eval_prompts=shapes:motion-heldout", "data.max_prompts=8", "data.max_eval_prompts=1")
    options = (*words, *few, *prompts, "rollout.batch_size=2", "eval.rewards=[]", "algorithm.frames=2")
    with flowrl.Session("configs/lab/refl.yaml", *options) as session:
        row = session.step(1)
        assert row["grad/norm"] > 0
        assert row["reward_gradient/flat_share"] == 0
