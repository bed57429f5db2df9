"""ViPO: advantages by position, from the option to the weights."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from flowrl.algorithms import flow_grpo
from flowrl.algorithms.dance_grpo import SeparateConfig
from flowrl.algorithms.flow_grpo import clipped_terms
from flowrl.core import registry
from flowrl.credit.advantages import AdvantageConfig, Advantages, advantages, unclipped
from flowrl.credit.saliency import SpatialConfig, apply_map
from flowrl.credit.selection import SelectConfig
from flowrl.losses.ratio import Surrogate, clipped_ratio_loss
from flowrl.rollout.saliency_maps import mapper
from flowrl.samplers import cps, flow_sde
from flowrl.samplers.base import StepDistribution
from flowrl.training.metrics import Sums
from tests.algorithms.test_flow_grpo import assert_gradients_close
from tests.credit.test_spatial import pictures, tiny_dinov2
from tests.toys import Session, ToyAdapter, draw_advantages, learner_of, nudge, roll_out, rollout_of

METHODS = ("dance_grpo", "flow_grpo", "flow_grpo_fast", "mix_grpo", "mix_grpo_flash")
BY_POSITION, BY_SAMPLE = SpatialConfig(ratio="position"), SpatialConfig(ratio="sample")
CLIP = 0.02


class WideToy(ToyAdapter):
    """Latents that are not square, pictures large enough to see something in."""

    def latent_shape(self) -> tuple[int, ...]:
        return (2, 4, 6)

    def decode(self, latents: Tensor) -> Tensor:
        return nn.functional.interpolate(ToyAdapter.decode(self, latents), scale_factor=8, mode="bilinear")


def session(spatial: SpatialConfig | None, name: str = "flow_grpo", adapter: ToyAdapter | None = None, **options):
    module = registry.load("algorithms", name)
    clip = options.pop("clip_range", CLIP)
    return roll_out(
        adapter or ToyAdapter(), algorithm=module.build(module.Config(spatial=spatial, clip_range=clip, **options))
    )


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the option


@pytest.mark.parametrize("name", METHODS)
def test_a_ratio_by_position_has_no_published_clip_range(name):
    """Presets belong to (law, form, ratio)."""
    config, law = registry.load("algorithms", name).Config, flow_sde.build(flow_sde.Config())
    with pytest.raises(ValueError, match=r"clip_range=null: .* spatial\.ratio=position"):
        config(spatial=BY_POSITION).check(law, 8)
    config(spatial=BY_POSITION, clip_range=CLIP).check(law, 8)
    plain, sampled = config(), config(spatial=BY_SAMPLE)
    sampled.check(law, 8)
    assert sampled.clip(law) == plain.clip(law)


def test_a_law_that_is_not_scored_as_a_gaussian_keeps_its_ratio():
    law, config = cps.build(cps.Config()), flow_grpo.Config(spatial=BY_POSITION, clip_range=CLIP)
    with pytest.raises(ValueError, match=r"'unscaled'; try spatial\.ratio=sample"):
        config.check(law, 8)
    config = flow_grpo.Config(spatial=BY_SAMPLE)
    config.check(law, 8)
    assert flow_grpo.build(config).log_prob_form(law) == "unscaled"


# ---- credit


RULES = {
    "group": AdvantageConfig(clip=0.7),
    "per_reward": AdvantageConfig(name="per_reward", std="group", clip=0.7),
    "gdpo": AdvantageConfig(name="gdpo", std="group", clip=0.7),
    "separate": SeparateConfig(name="separate", std="group", clip=0.7),
    "median": AdvantageConfig(name="median", clip=0.7),
    "unbounded": AdvantageConfig(clip=None),
    "selected": AdvantageConfig(std="group", clip=0.7, select=SelectConfig(keep=2)),
}
WEIGHTS = torch.tensor([3.0, 0.0, -0.3])


def rewards() -> Tensor:
    values = uniform(3, 4, 6)
    values[0, 1, 2] = torch.nan
    values[:, 3] = 0.5
    return values


@pytest.mark.parametrize("rule", RULES)
def test_maps_of_ones_give_the_plain_credit_bitwise_under_every_rule(rule):
    """In a `separate` column the weight follows the clip."""
    plain, open_ = (f(rewards(), WEIGHTS, RULES[rule]) for f in (advantages, unclipped))
    assert all(torch.equal(getattr(open_, n), getattr(plain, n)) for n in ("valid", "dead", "kept"))
    values = open_.values.flatten(0, 1)
    found = apply_map(values, torch.ones(len(values), 5, 7), "sample", open_.bound)
    assert torch.equal(found, plain.values.flatten(0, 1))
    dense = apply_map(values, torch.ones(len(values), 5, 7), "position", open_.bound)
    assert torch.equal(dense, found[:, :, None, None].expand_as(dense))
    if rule != "unbounded":
        assert open_.bound is not None
        assert float((values.abs() > open_.bound).sum()) > 0, "nothing was clipped"


def test_an_advantage_is_normalised_then_multiplied_then_clipped():
    """a map may bring an advantage back inside the clip."""
    credit = unclipped(torch.tensor([[[0.0, 0.0, 0.0, 4.0]]]), torch.ones(1), AdvantageConfig(std="none", clip=1.0))
    maps = torch.tensor([0.2, 0.5, 1.5])[None].expand(4, 3)
    found = apply_map(credit.values.flatten(0, 1), maps, "position", credit.bound)
    assert_close(found[:, 0], torch.tensor([[-0.2, -0.5, -1.0]] * 3 + [[0.6, 1.0, 1.0]]))
    assert_close(apply_map(credit.values.flatten(0, 1), maps, "sample", credit.bound)[:, 0], found[:, 0].mean(dim=1))


def test_one_ratio_for_all_positions_may_take_the_mean_advantage():
    """max(-A r, -A clamp(r)) is linear in |A|, so for M >= 0 the mean over positions of the losses is the same."""
    log_ratio, maps = 0.05 * draw_advantages(64), uniform(64, 5, 7)
    dense = apply_map(draw_advantages(64).roll(1)[:, None], maps, "position", torch.tensor([1.0])).squeeze(1)
    mean = apply_map(draw_advantages(64).roll(1)[:, None], maps, "sample", torch.tensor([1.0])).squeeze(1)
    everywhere, _ = clipped_ratio_loss(log_ratio[:, None, None].expand_as(dense), dense, (CLIP, CLIP))
    once, clipped = clipped_ratio_loss(log_ratio, mean, (CLIP, CLIP))
    assert 0 < int(clipped.sum()) < 64
    assert_close(once, everywhere.flatten(1).mean(dim=1))


def test_bounds_belong_to_columns():
    with pytest.raises(ValueError, match="must be one for each of 2 columns"):
        apply_map(torch.ones(3, 2), torch.ones(3, 4), "position", torch.ones(3))


# ---- the loss


def test_on_policy_maps_of_ones_have_the_gradient_of_grpo():
    """Mean over channels and positions, unclipped; through the rollout, the buffer and the loss."""
    dense, plain = session(BY_POSITION), session(None)
    assert dense.edges.old_log_prob.shape == (len(dense.edges), 4, 4)
    assert_close(dense.edges.old_log_prob.flatten(1).mean(dim=1), plain.edges.old_log_prob)
    advantage = draw_advantages(len(plain.edges))
    found = dense.gradient(advantage[:, None, None].expand(-1, 4, 4), batch_size=7)
    assert_gradients_close(found, plain.gradient(advantage, batch_size=7))


def by_hand(run: Session, batch, columns: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Loss [E] and share of clipped positions [E] from torch's own Gaussian."""
    policy = run.networks.transition(batch)
    law = torch.distributions.Normal(policy.mean, policy.std[:, None, None, None])
    ratio = (law.log_prob(batch.next_latents).mean(dim=1) - batch.old_log_prob).exp()
    loss, gone = torch.zeros_like(ratio), torch.zeros_like(ratio)
    for a in columns:
        beyond = torch.where(a > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
        loss = loss + torch.where(beyond, -a * ratio.detach().clamp(1 - CLIP, 1 + CLIP), -a * ratio)
        gone = gone + beyond / len(columns)
    return loss.mean(dim=(1, 2)), gone.mean(dim=(1, 2))


@pytest.mark.parametrize("name", METHODS)
def test_off_policy_the_loss_is_the_mean_over_positions_of_clipped_ratios_written_by_hand(name):
    """ratio, clip and max per position; DanceGRPO's one loss per reward too."""
    run = session(BY_POSITION, name, adapter=WideToy())
    nudge(run.adapter.network, 0.05)
    columns = 2 if name == "dance_grpo" else 1
    dense = draw_advantages(len(run.edges) * columns * 24).reshape(-1, columns, 4, 6)
    data = run.batches(dense[:, 0], batch_size=100)[0]
    batch = dataclasses.replace(data, advantage=dense)
    output = run.algorithm.loss(batch, run.networks)
    loss, gone = by_hand(run, batch, list(dense.unbind(1)))
    assert_close(output.loss, loss.sum(), rtol=1e-5, atol=1e-5)
    assert 0 < float(gone.mean()) < 1
    assert_close(output.per_step["policy/clip_fraction"], gone)
    assert output.per_step["policy/ratio"].shape == (len(batch),)
    assert_close(output.metrics["policy/clip_fraction"], gone.sum())
    expected = torch.autograd.grad(loss.sum(), list(run.adapter.network.parameters()))
    found = torch.autograd.grad(output.loss, list(run.adapter.network.parameters()))
    names = [n for n, _ in run.adapter.network.named_parameters()]
    assert_gradients_close(dict(zip(names, found, strict=True)), dict(zip(names, expected, strict=True)))


def test_an_advantage_of_another_shape_than_the_log_prob_raises():
    run, plain = session(BY_POSITION), session(None)
    edges = len(run.edges)
    for wrong in (torch.ones(edges), torch.ones(edges, 4, 1), torch.ones(edges, 1, 4), torch.ones(edges, 4, 5)):
        with pytest.raises(ValueError, match="must agree"):
            run.algorithm.loss(run.batches(wrong)[0], run.networks)
    with pytest.raises(ValueError, match="must agree"):
        plain.algorithm.loss(plain.batches(torch.ones(edges, 4, 4))[0], plain.networks)


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_clips_have_a_loss_on_their_own_latent_grid(frames):
    """T_lat = (F - 1) / 4 + 1."""
    clips, latents = torch.stack([pictures(frames), pictures(frames).flip(0, 3)]), (4, (frames - 1) // 4 + 1, 4, 6)
    maps = mapper(SpatialConfig(), latents)(clips)
    assert maps.shape == (2, *latents[1:])
    mean = uniform(2, *latents, seed=1).requires_grad_()
    log_prob = StepDistribution(mean, torch.tensor([0.5, 0.9])).log_prob(uniform(2, *latents, seed=2), "position")
    advantage = apply_map(torch.tensor([[1.5], [-0.5]]), maps, "position", torch.tensor([5.0]))
    assert advantage.shape == (2, 1, *latents[1:])
    terms = clipped_terms(log_prob - log_prob.detach(), [advantage.squeeze(1)], Surrogate(bounds=(CLIP, CLIP)))
    assert terms.loss.shape == (2,)
    assert_close(terms.loss.detach(), -torch.tensor([1.5, -0.5]) * maps.flatten(1).mean(dim=1))
    terms.loss.sum().backward()
    # What the map leaves out has no gradient, everything else has.
    assert torch.equal((mean.grad != 0).any(dim=1), maps > 0)


# ---- the learner


def learn(run: Session, maps: Tensor | None, **options) -> tuple[Sums, Advantages]:
    columns = torch.stack([uniform(2, 3), uniform(2, 3, seed=1)])
    credit = run.algorithm.advantages(columns, torch.tensor([1.0, 0.5]))
    rollout, sums = dataclasses.replace(rollout_of(run, columns), maps=maps), Sums()
    learner_of(run, **options).update(1, rollout, credit, sums, gate=torch.float32)
    return sums, credit


@pytest.mark.parametrize("name", METHODS)
def test_maps_of_ones_and_one_ratio_for_all_are_the_plain_method_bitwise(name):
    """Two optimizer steps through the real learner."""
    trained = []
    for spatial, maps in ((None, None), (BY_SAMPLE, torch.ones(6, 4, 4))):
        run = session(spatial, name, clip_range=1e-3)
        before = [p.detach().clone() for p in run.adapter.network.parameters()]
        learn(run, maps)
        trained.append([p.detach().clone() for p in run.adapter.network.parameters()])
        assert not torch.equal(trained[-1][0], before[0])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("recompute", ["rollout", "recompute"])
@pytest.mark.parametrize("backbone", ["fixed", "dinov2"])
def test_the_learner_trains_by_position_on_latents_that_are_not_square(tmp_path, backbone, recompute):
    """In a batch composition that is not the rollout's; the gate measures the largest position."""
    name = "fixed" if backbone == "fixed" else tiny_dinov2(tmp_path)
    run = session(SpatialConfig(backbone=name), adapter=WideToy(), old_log_prob=recompute)
    before = [p.detach().clone() for p in run.adapter.network.parameters()]
    maps = mapper(run.algorithm.spatial, run.adapter.latent_shape())(run.adapter.decode(run.samples.x0))
    assert maps.shape == (6, 4, 6)
    sums, _ = learn(run, maps, batch_size=7)
    means = sums.means()
    assert means["spatial/map_mean"] == pytest.approx(float(maps.mean()))
    assert means["spatial/flat_share"] == 0
    assert 0 < means["grad/norm"] < float("inf")
    assert all(not torch.equal(p, b) for p, b in zip(run.adapter.network.parameters(), before, strict=True))


def test_every_edge_has_the_map_of_its_own_sample(monkeypatch):
    run, seen = session(BY_POSITION), []
    maps = torch.arange(1.0, 7)[:, None, None].expand(6, 4, 4) / 10
    plain = run.algorithm.loss

    def loss(batch, networks):
        seen.append((batch.step.index, batch.advantage))
        return plain(batch, networks)

    monkeypatch.setattr(run.algorithm, "loss", loss)
    _, credit = learn(run, maps)
    values = credit.values.flatten() * torch.arange(1.0, 7) / 10
    found = torch.cat([advantage[:, 0, 0, 0] for _, advantage in seen])
    assert_close(found.sort().values, values.repeat(len(run.plan.train)).sort().values)
    assert all(torch.equal(a, a[:, :, :1, :1].expand_as(a)) for _, a in seen)
