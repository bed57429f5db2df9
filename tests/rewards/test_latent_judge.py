"""The judge of latents: its folder, what it reads, what it refuses, and its training. And assets/tiny-judge."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flowrl.rewards._latent_judge import network as networks
from flowrl.rewards._latent_judge.training import Levels
from flowrl.rewards.latent_judge import Config, Trainer, build
from torch import Tensor, nn
from torch.testing import assert_close

from flowrl.core.types import Condition
from flowrl.reward import LatentReward, RewardError

TRUNK = {
    "sample_size": 4,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 6,
    "pos_embed_max_size": 4,
}


def asked(count: int, seed: int = 0, width: int = 12) -> tuple[Tensor, Tensor, Condition]:
    """Latents, noise levels and prompts."""
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(count, 5, width, generator=generator)
    cond = Condition({"prompt_embeds": embeds, "pooled": torch.randn(count, 6, generator=generator)})
    return torch.randn(count, 4, 4, 4, generator=generator), torch.rand(count, generator=generator), cond


def drawn(seed: int = 0) -> networks.Judge:
    """A judge whose weights, those that start at 0 too, are drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        judge = networks.Judge(TRUNK, hidden=8)
        for p in judge.parameters():
            nn.init.normal_(p, std=0.3)
    return judge.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LatentReward:
    folder = tmp_path_factory.mktemp("judge")
    networks.save(drawn(), folder)
    return build(Config(model=str(folder)))


# ---- what it reads


def test_every_row_is_judged_alone_under_its_own_level_and_prompt(small: LatentReward):
    x, sigma, cond = asked(5)
    together = small.value(x, sigma, cond)
    alone = [small.value(x[i : i + 1], sigma[i : i + 1], cond.index(torch.tensor([i]))) for i in range(5)]
    assert together.shape == (5,)
    assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
    turned = torch.arange(5).roll(1)
    for other in (small.value(x, sigma[turned], cond), small.value(x, sigma, cond.index(turned))):
        assert ((other - together).abs() > 1e-4).all()


def test_gradients_reach_the_latents_and_no_weight(small: LatentReward):
    x, sigma, cond = asked(3)
    x.requires_grad_(True)
    small.value(x, sigma, cond).sum().backward()
    assert x.grad is not None
    assert (x.grad.flatten(1).norm(dim=1) > 0).all()
    assert small.network is not None
    assert all(p.grad is None and not p.requires_grad for p in small.network.parameters())
    assert not small.network.training


def test_it_is_saved_in_half_precision_and_loaded_as_float32(small: LatentReward):
    x, sigma, cond = asked(4)
    rounded = copy.deepcopy(drawn()).half().float()
    assert_close(small.value(x, sigma, cond), rounded(x, sigma, cond["prompt_embeds"], cond["pooled"]))


def test_its_tokens_are_those_before_the_output_norm_of_the_transformer():
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        transformer: Any = SD3Transformer2DModel.from_config(TRUNK)
    transformer.eval().requires_grad_(False)
    judge, (x, sigma, cond) = networks.from_transformer(transformer, 8), asked(3)
    seen: dict[str, Tensor] = {}
    transformer.norm_out.register_forward_hook(lambda module, given, out: seen.update(tokens=given[0]))
    transformer(x, cond["prompt_embeds"], cond["pooled"], 1000 * sigma)
    found = judge.tokens(x, sigma, cond["prompt_embeds"], cond["pooled"])
    assert_close(found, F.layer_norm(seen["tokens"], (16,)))


# ---- what it refuses


def test_latents_and_prompts_of_another_model_are_refused_by_name(small: LatentReward):
    x, sigma, cond = asked(2)
    with pytest.raises(RewardError, match=r"latents of shape \(4, 2, 2\).*\(4, 4, 4\)"):
        small.value(x[..., :2, :2], sigma, cond)
    with pytest.raises(RewardError, match=r"prompts have no 'pooled'.*prompt_embeds"):
        small.value(x, sigma, Condition({"prompt_embeds": cond["prompt_embeds"]}))
    with pytest.raises(RewardError, match=r"prompt_embeds has 20 values a token.*12"):
        small.value(x, sigma, asked(2, width=20)[2])


def test_a_folder_without_a_judge_is_refused_by_name(tmp_path: Path):
    with pytest.raises(RewardError, match=r"no judge of latents.*config.json"):
        build(Config(model=str(tmp_path)))
    networks.save(drawn(), tmp_path)
    file = tmp_path / networks.CONFIG
    text = file.read_text(encoding="utf-8")
    for told, reason in (('"kind": "LatentJudge"', "kind='Other'"), ('"hidden": 8', "size mismatch")):
        file.write_text(text.replace(told, told.replace("LatentJudge", "Other").replace("8", "9")), encoding="utf-8")
        with pytest.raises(RewardError, match=reason):
            build(Config(model=str(tmp_path)))


# ---- training


def test_levels_have_their_shares():
    sigma = Levels(clean=0.5, low=0.25).draw(4000, torch.Generator().manual_seed(0))
    low = (sigma >= 0.03) & (sigma <= 0.1)
    assert abs(float((sigma == 0).double().mean()) - 0.5) < 0.04
    assert abs(float(low.double().mean()) - (0.25 + 0.25 * 0.07)) < 0.04
    assert 0.9 < float(sigma.max()) <= 1


def lesson() -> dict[str, Any]:
    """Latents of two kinds, told apart by the sign of their mean."""
    x0, _, cond = asked(48)
    labels = torch.arange(48).remainder(2)
    return {"x0": 0.3 * x0 + (2.0 * labels - 1).view(-1, 1, 1, 1), "cond": cond, "labels": labels}


def test_renewing_teaches_labels_and_leaves_the_judge_frozen():
    judge = drawn()
    trainer = Trainer(judge, rate=5e-3, batch_size=16)
    first = trainer.renew(**lesson())
    for _ in range(15):
        last = trainer.renew(**lesson())
    assert last["loss"] < 0.5 * first["loss"]
    assert last["accuracy"] > 0.85
    assert not judge.training
    assert all(p.grad is None and not p.requires_grad for p in judge.parameters())


def test_renewing_goes_on_bit_for_bit_from_its_state():
    straight = Trainer(drawn(), batch_size=16)
    straight.renew(**lesson())
    kept, resumed = copy.deepcopy(straight.state_dict()), Trainer(drawn(1), batch_size=16, seed=5)
    resumed.load_state_dict(kept)
    assert straight.renew(**lesson()) == resumed.renew(**lesson())
    for p, q in zip(straight.network.parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(p, q)
