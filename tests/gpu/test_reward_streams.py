"""A reward on the GPU scores in a stream of its own while the GPU is at work, and gives the same scores."""

import pytest
import torch
from flowrl.rewards.clip_score import Config, build

from flowrl.media.eight_bits import EightBitImages
from flowrl.scoring.overlap import Ahead, Beside
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Batch
from flowrl.scoring.weighted import WeightedReward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU, COUNT, BATCH = torch.device("cuda"), 24, 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_next_to_sampling_are_those_of_the_end(dtype):
    reward = build(Config(model="tiny-clip", device="cuda", dtype=dtype))
    scorer = Scorer([WeightedReward("clip_score", reward)], batch_size=BATCH)
    levels = torch.randint(256, (COUNT, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images, prompts = EightBitImages(levels, torch.ones(COUNT, dtype=torch.bool)), ["a red circle"] * COUNT
    at_the_end = scorer.score(images, prompts, [{}] * COUNT).raw["clip_cos"]
    busy = torch.randn(4096, 4096, device=GPU)
    ahead = Ahead(scorer, prompts, [{}] * COUNT, GPU)
    assert ahead
    for start in range(0, COUNT, BATCH):
        busy = (busy @ busy).clamp(-1, 1)  # the sampling stream has work
        ahead.add(images[start : start + BATCH])
    found = ahead.scores(images).raw["clip_cos"]
    ahead.close()
    assert torch.equal(found, at_the_end)
    with Beside(scorer, GPU) as beside:
        due = [
            beside.add(k, Batch(images[k : k + BATCH], prompts[:BATCH], [{}] * BATCH)) for k in range(0, COUNT, BATCH)
        ]
        due.append(beside.rest())
    assert torch.equal(torch.cat([scores.raw["clip_cos"] for part in due for _, scores in part]), at_the_end)
