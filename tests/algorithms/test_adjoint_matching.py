"""Adjoint Matching: the lean adjoint against autograd, the slope of Gaussian data, the loss, a tilted mixture."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import flowrl
from flowrl.algorithms.adjoint_matching import Config, build
from flowrl.core.errors import ConfigError
from flowrl.core.types import SampleId
from flowrl.data.prompts import Prompt
from flowrl.diffusion.process import expand
from flowrl.diffusion.schedules import Schedule, shifted_linspace
from flowrl.losses.batches import GradientBatch, LossOutput, Microbatch, summed
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.trajectories import Asked, Rollout
from flowrl.samplers import dance_sde, ddim
from flowrl.samplers.base import Sampler, step_std
from flowrl.scoring.gradient import Reading, Slope
from flowrl.scoring.surroundings import Latents
from flowrl.training.adjoint_batches import AdjointBatches
from flowrl.training.base import Iteration
from flowrl.training.gradient_batches import GradientBatches
from flowrl.training.kinds import training_of
from flowrl.training.learner import Learner
from flowrl.training.metrics import Sums
from flowrl.training.optim import Optimizer
from flowrl.training.options import OptimConfig
from tests.toys import Session, ToyAdapter, context_of, gradient_of, nudge, optim_of, roll_out, rollout_of

DDIM = ddim.build(ddim.Config())
WIDE = 5


class Adapter(ToyAdapter):
    """A flow whose latents are `width` numbers, on sigma = 1 ... 0 in equal steps; the network gives the velocity."""

    def __init__(self, network: nn.Module, width: int = 1) -> None:
        super().__init__()
        self.network, self.width = network, width

    def latent_shape(self) -> tuple[int, ...]:
        return self.width, 1, 1

    def schedule(self, num_inference_steps: int) -> Schedule:
        sigmas = shifted_linspace(num_inference_steps, 1.0)
        return Schedule(sigmas, 1000 * sigmas[:-1])


class Matrices(nn.Module):
    """A linear network with a full matrix without symmetry, another at each time and for each prompt."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.own, self.timed, self.told = (
            nn.Parameter(0.5 * torch.randn(WIDE, WIDE, generator=generator)) for _ in range(3)
        )

    def forward(self, x: Tensor, timestep: Tensor, prompt: Tensor) -> Tensor:
        matrix = self.own + expand(timestep / 1000, self.own.expand(len(x), -1, -1)) * self.timed
        matrix = matrix + prompt[:, :1, None] * self.told
        return torch.einsum("bij,bj->bi", matrix, x.flatten(1)).reshape(x.shape)


class Exact(nn.Module):
    """The velocity of a mixture of Gaussians in one dimension, whose means and shares are trained."""

    def __init__(self, means: tuple[float, ...], std: float) -> None:
        super().__init__()
        self.means, self.std = nn.Parameter(torch.tensor(means)), std
        self.shares = nn.Parameter(torch.zeros(len(means)))

    def forward(self, x: Tensor, timestep: Tensor, prompt: Tensor) -> Tensor:
        sigma, flat = timestep[:, None] / 1000, x.flatten(1)
        variance = (1 - sigma) ** 2 * self.std**2 + sigma**2
        error = flat - (1 - sigma) * self.means
        likely = torch.softmax(self.shares - error.square() / (2 * variance), dim=1)
        x0 = (likely * (self.means + (1 - sigma) * self.std**2 / variance * error)).sum(dim=1, keepdim=True)
        return ((flat - x0) / sigma).reshape(x.shape)

    @torch.no_grad()
    def tilt(self, slope: float) -> None:
        """Become exact for the same data weighted by exp(slope x)."""
        self.shares += slope * self.means
        self.means += slope * self.std**2


def climb_of(reward: Callable[[Tensor], Tensor]) -> Callable[..., Slope]:
    """What stands for the rewards' gradient: that of a function [M, ...] -> [M]."""

    def climb(latents: Latents, readings: Sequence[Reading], keys: Any = ()) -> Slope:
        x = latents.x0.clone().requires_grad_()
        value = reward(x)
        return Slope(value.detach(), torch.autograd.grad(value.sum(), x)[0], torch.zeros(len(x)))

    return climb


def bent(x0: Tensor) -> Tensor:
    return torch.sin(x0.flatten(1)).sum(dim=1)


def linear(x0: Tensor) -> Tensor:
    return x0.flatten(1).sum(dim=1)


def chain(network: nn.Module, width: int = 1, steps: int = 8, guidance: float = 1.0, **options: Any) -> Session:
    algorithm = build(Config(**options))
    return roll_out(
        *(Adapter(network, width),), algorithm=algorithm, sampler=DDIM, num_steps=steps, guidance_scale=guidance
    )


def full(session: Session) -> Rollout:
    slots = len({i.slot for i in session.ids})
    rewards = torch.zeros(1, slots, len(session.ids) // slots)
    prompts = tuple(Prompt(f"prompt {slot}") for slot in range(slots))
    return dataclasses.replace(rollout_of(session, rewards), prompts=prompts)


def prepared(session: Session, reward: Callable[[Tensor], Tensor], batch_size: int = 4) -> AdjointBatches:
    rollout = full(session)
    credit = session.algorithm.advantages(rollout.rewards, torch.ones(1))
    context = context_of(session, optim_of(1, batch_size), climb=climb_of(reward))
    work = AdjointBatches(context, Iteration(1, rollout, credit, Sums()))
    work.prepare()
    return work


def batch_of(work: AdjointBatches) -> Microbatch:
    """All kept edges in one forward."""
    ((batch, _),) = AdjointBatches.in_step(_with_batches(work, len(work.rollout.edges)), work.shares[0].sort().values)
    return batch


def _with_batches(work: AdjointBatches, size: int) -> AdjointBatches:
    optim = dataclasses.replace(work.context.optim, batch_size=size)
    work.context = dataclasses.replace(work.context, optim=optim)
    return work


def by_autograd(session: Session, strength: float) -> Tensor:
    """-strength dR/dx after each trained step, through the chain of the untouched, unguided network with the very
    noise of the rollout, in one graph, [B, n, ...]."""
    plan, edges, adapter = session.plan, session.edges, session.adapter
    count, steps = len(session.ids), len(plan)
    train = edges.parent.reshape(count, -1).shape[1]
    parent, child = (edges.nodes[place.reshape(count, -1)] for place in (edges.parent, edges.child))
    nodes = [*parent.unbind(dim=1), child[:, -1], session.samples.x0]
    cond = session.cond.index(session.rows)

    def mean(x: Tensor, k: int) -> Tensor:
        here, there = (float(sigma) for sigma in plan.schedule.sigmas[k : k + 2])
        v = adapter.predict(x, torch.full((count,), 1000 * here), cond, 1.0)
        x0, eps = x - here * v, x + (1 - here) * v
        ratio = there * (1 - here) / (here * (1 - there))
        # sqrt(sigma'^2 - std^2) with std = sigma' sqrt(1 - r^2); without noise at the end
        return (1 - there) * x0 + there * (ratio if k < train else 1.0) * eps

    found = []
    for first in range(1, train + 1):
        start = nodes[first].clone().requires_grad_()
        x = start
        for k in range(first, steps):
            x = mean(x, k)
            x = x + (nodes[k + 1] - x).detach()  # the frozen noise, and what guidance adds
        found.append(torch.autograd.grad(-strength * bent(x).sum(), start)[0])
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_lean_adjoint_is_that_of_autograd_through_the_whole_chain_of_the_untouched_network(guidance):
    """The matrices have no symmetry, so a missing transpose would show; a rollout with CFG has adjoints without."""
    session = chain(Matrices(), WIDE, guidance=guidance, strength=2.5)
    expected = by_autograd(session, 2.5)
    nudge(session.adapter.network, 0.1)  # an update moves the policy, and not the reference
    for size in (4, 1):
        found = prepared(session, bent, size).rollout.edges.columns["adjoint"].reshape(expected.shape)
        assert float(expected.flatten(2).norm(dim=2).min()) > 0.1
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("std", "row"),
    [
        (0.5, [1.06, 0.92, 0.66, 0.40, 0.22, 0.11, 0.04]),
        (1.0, [1.12, 1.20, 1.18, 1.00, 0.71, 0.40, 0.16]),
        (4.0, [1.14, 1.32, 1.56, 1.88, 2.27, 2.56, 1.97]),
    ],
)
def test_on_gaussian_data_the_adjoint_has_the_slope_of_the_clean_mean(std, row):
    """(1 - sigma) / sigma^2 Cov(x0 | x): the table of the sheet, at sigma .125 to .875 of eight steps."""
    work = prepared(chain(Exact((0.0,), std), growth=None), linear)
    sums = work.iteration.sums.means()
    sigma = torch.arange(1, 8, dtype=torch.float64) / 8
    exact = (1 - sigma) * std**2 / ((1 - sigma) ** 2 * std**2 + sigma**2)
    found = torch.tensor([sums[f"adjoint/growth/step{k:02d}"] for k in range(7, 0, -1)], dtype=torch.float64)
    assert_close(found, exact, rtol=1e-6, atol=1e-6)
    assert [round(value, 2) for value in exact.tolist()] == row


def test_steps_before_a_place_of_high_noise_where_adjoints_grow_are_left_out():
    """With data of std 4 they are 2.27 times as long at sigma .625, which ends step 2."""
    limited, free = (prepared(chain(Exact((0.0,), 4.0), growth=most), linear) for most in (1.5, None))
    assert set(limited.rollout.edges.step[limited.shares[0]].tolist()) == {3, 4, 5, 6}
    assert set(free.rollout.edges.step[free.shares[0]].tolist()) == set(range(7))
    assert limited.iteration.sums.means()["adjoint/left_out"] == pytest.approx(3 / 7)
    narrow = prepared(chain(Exact((0.0,), 0.5)), linear)
    assert narrow.iteration.sums.means()["adjoint/left_out"] == 0


def test_the_loss_at_the_untouched_network_is_the_square_of_std_times_the_adjoint_after_the_step():
    for normalise in (False, True):
        session = chain(Matrices(), WIDE, growth=None, normalise=normalise, strength=3.0)
        work = prepared(session, bent)
        batch = batch_of(work)
        output = session.algorithm.loss(batch, session.networks)
        std = step_std(DDIM, session.adapter.process, session.plan.steps(batch.steps, session.adapter.process))
        square = (expand(std, batch.latents) * batch.columns["adjoint"]).square().flatten(1).sum(dim=1)
        if normalise:
            means = torch.stack([output.per_step["adjoint/loss"][batch.steps == k].mean() for k in range(7)])
            assert_close(means, torch.ones(7), rtol=1e-5, atol=0)
        else:
            assert_close(output.per_step["adjoint/loss"], square, rtol=1e-5, atol=1e-6)
            assert float(output.loss.detach()) == pytest.approx(float(square.sum()), rel=1e-5)
        assert float(output.metrics["adjoint/control"]) == 0


def test_at_strength_0_the_adjoint_is_0_and_the_untouched_network_the_minimum():
    session = chain(Matrices(), WIDE, strength=0.0)
    batch = batch_of(prepared(session, bent))
    assert not batch.columns["adjoint"].any()
    loss = session.algorithm.loss(batch, session.networks).loss
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(not g.any() for g in gradient_of(session.adapter.network).values())
    nudge(session.adapter.network)
    # Elsewhere twice the KL of the steps, whose own is a mean over the WIDE values.
    own, reference = session.networks.transition(batch), session.networks.frozen("reference", batch)
    expected = 2 * WIDE * own.kl(reference).sum()
    assert_close(session.algorithm.loss(batch, session.networks).loss, expected, rtol=1e-5, atol=0)


def test_the_first_step_down_the_loss_moves_the_data_with_the_reward():
    for form in ("exact", "efficient"):
        network = Exact((0.0,), 1.0)
        session = chain(network, form=form)
        if form == "efficient":
            _, batch = efficient(network, torch.zeros(8), 0.5)
        else:
            batch = batch_of(prepared(session, linear))
        session.algorithm.loss(batch, session.networks).loss.backward()
        means = network.get_parameter("means").grad
        assert means is not None
        assert float(means) < 0


def test_a_loss_above_its_bound_has_no_gradient_and_is_counted():
    session = chain(Matrices(), WIDE, growth=None, normalise=False)
    batch = batch_of(prepared(session, bent))
    losses = session.algorithm.loss(batch, session.networks).per_step["adjoint/loss"]
    bound = float(losses.median())
    session.algorithm.config = Config(growth=None, normalise=False, loss_clip=bound)
    clipped = session.algorithm.loss(batch, session.networks)
    assert clipped.per_step["adjoint/clipped_share"].tolist() == (losses >= bound).float().tolist()
    clipped.loss.backward()
    kept = gradient_of(session.adapter.network)
    session.algorithm.config = Config(growth=None, normalise=False)
    session.adapter.network.zero_grad()
    (rows,) = (losses < bound).nonzero(as_tuple=True)
    part = prepared(session, bent)
    part.shares = [part.shares[0].sort().values[rows]]
    session.algorithm.loss(batch_of(part), session.networks).loss.backward()
    for name, value in gradient_of(session.adapter.network).items():
        assert_close(kept[name], value, rtol=1e-4, atol=1e-5)


def test_the_control_is_that_of_the_network_without_guidance():
    session = chain(Matrices(), WIDE, guidance=3.0)
    batch = batch_of(prepared(session, bent))
    nudge(session.adapter.network)
    guided_loss = session.algorithm.loss(batch, session.networks).loss
    plain = dataclasses.replace(session.networks.policy, guidance_scale=1.0)
    networks = dataclasses.replace(session.networks, policy=plain)
    assert torch.equal(guided_loss, session.algorithm.loss(batch, networks).loss)


def test_the_window_trains_the_last_steps_that_leave_noise_and_keeps_what_lies_between():
    plan = chain(Matrices(), WIDE, window=0.5).plan
    assert plan.stochastic == (True,) * 7 + (False,)
    assert (plan.train, plan.keep) == ((3, 4, 5, 6), (7,))
    # What ends below sigma 0.01 has no noise.
    fine = chain(Matrices(), WIDE, steps=200).plan
    assert fine.train == tuple(range(198))
    assert fine.keep == (198, 199)
    assert_close(
        prepared(chain(Matrices(), WIDE, window=0.5), bent).rollout.edges.columns["adjoint"].reshape(6, 4, WIDE, 1, 1),
        by_autograd(chain(Matrices(), WIDE, strength=1.0), 1.0)[:, 3:],
        rtol=1e-4,
        atol=1e-5,
    )


# ---- what it samples in the end


MODES, SPREAD, SLOPE = (-1.0, 1.0), 0.4, 0.6
PATHS, STEPS = 512, 50


class Quick(Noise):
    """Noise from one stream: that of an identity would take most of the time here."""

    def initial(self, ids: Sequence[SampleId]) -> Tensor:
        return self.step(ids, -1)

    def step(self, ids: Sequence[SampleId], index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * (self.iteration or 0) + index + 1)
        return torch.randn(len(ids), *self.shape, generator=generator)


def drawn(session: Session, iteration: int, count: int = PATHS) -> Session:
    """The same session with other samples of its policy."""
    ids = tuple(SampleId(0, sample) for sample in range(count))
    asked = Asked(ids, session.cond, torch.zeros(count, dtype=torch.int64))
    noise = Quick(0, "rollout", iteration, session.adapter.latent_shape())
    samples, edges = run(session.policy, session.plan, noise, asked, batch_size=count)
    return dataclasses.replace(session, ids=ids, samples=samples, edges=edges, rows=asked.rows)


def moments(x0: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean and std of samples [B, ...] with weights [B]."""
    x, share = x0.flatten().double(), torch.ones(len(x0)) if weight is None else weight
    share = share.double() / share.double().sum()
    mean = (share * x).sum()
    return torch.stack([mean, (share * (x - mean).square()).sum().sqrt()])


def reward(x0: Tensor) -> Tensor:
    return SLOPE * linear(x0)


def trained(sampler: Sampler, updates: int, rate: float = 3e-3, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and std of the base chain's samples, of these weighted by exp(R), and of the trained chain's."""
    algorithm = build(Config(**options))
    adapter = Adapter(Exact(MODES, SPREAD))
    session = roll_out(adapter, algorithm=algorithm, sampler=sampler, num_steps=STEPS, prompts=1, group=1)
    base = drawn(session, 10_000, 20_000).samples.x0
    optim = OptimConfig(learning_rate=rate, weight_decay=0.0, batch_size=PATHS * STEPS, schedule="cosine")
    context = context_of(session, optim, climb=climb_of(reward))
    learner = Learner(training_of(algorithm), context, Optimizer(session.weights, optim, updates))
    for iteration in range(1, updates + 1):
        rollout = full(drawn(session, iteration))
        learner.update(iteration, rollout, algorithm.advantages(rollout.rewards, torch.ones(1)), Sums())
    return moments(base), moments(base, reward(base).exp()), moments(drawn(session, 20_000, 20_000).samples.x0)


@pytest.mark.slow
def test_a_mixture_ends_at_the_base_chains_samples_weighted_by_the_reward():
    base, target, found = trained(DDIM, 200, rate=2e-2, growth=None, normalise=False, timestep_fraction=0.5)
    assert float(target[0] - base[0]) > 0.5
    assert_close(found, target, rtol=0.05, atol=0)


@pytest.mark.slow
def test_noise_that_remembers_the_start_misses_the_mean():
    sampler = dance_sde.build(dance_sde.Config())
    base, target, found = trained(sampler, 60, rate=2e-2, growth=None, normalise=False, timestep_fraction=0.5)
    assert float(found[0] - base[0]) < 0.5 * float(target[0] - base[0])


# ---- the efficient form


def recorded(session: Session, batch: GradientBatch, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The coefficient of the network's output at the terms of a batch."""
    seen: list[Tensor] = []

    def climbing(output: Tensor, batch: GradientBatch) -> LossOutput:
        seen.append(batch.coefficient)
        return summed(-(batch.coefficient * output).flatten(1).sum(dim=1), {})

    monkeypatch.setattr("flowrl.algorithms.adjoint_matching.climbing", climbing)
    session.algorithm.loss(batch, session.networks)
    return seen[0].flatten()


def efficient(network: Exact, clean: Tensor, sigma: float, **options: Any) -> tuple[Session, GradientBatch]:
    """A session of the network and its untouched copy; finished samples [M] noised to sigma, their reward SLOPE x."""
    session = chain(network, form="efficient", **options)
    count = len(clean)
    clean = clean.reshape(-1, 1, 1, 1).float()
    eps = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    k = round(8 * (1 - sigma))
    step = session.plan.steps(torch.full((count,), k), session.adapter.process)
    x = (1 - sigma) * clean + sigma * eps
    cond = session.cond.index(torch.zeros(count, dtype=torch.int64))
    return session, GradientBatch(x, step, cond, torch.full_like(clean, SLOPE), {}, clean)


@pytest.mark.parametrize("sigma", [0.25, 0.5, 1.0])
def test_on_a_gaussian_the_pull_cancels_the_reward_at_the_tilted_mean(sigma, monkeypatch):
    """The mean shifts by lambda k Var: there the coefficient is 0 within 1 % of the reward's part, as m is not 0."""
    network, samples = Exact((0.0,), 1.0), SLOPE + torch.randn(64, generator=torch.Generator().manual_seed(0))
    session, batch = efficient(network, samples, sigma)
    alone = recorded(session, batch, monkeypatch)
    assert_close(alone, torch.full((64,), -sigma / ((1 - sigma) ** 2 + sigma**2) * SLOPE), rtol=1e-5, atol=0)
    network.tilt(SLOPE)  # the policy; its untouched copy stays
    assert float(recorded(session, batch, monkeypatch).abs().max()) < 0.01 * float(alone.abs().max())


@pytest.mark.parametrize("sigma", [0.25, 0.5, 0.75])
def test_on_a_mixture_no_coefficient_is_left_on_average_at_the_tilted_data(sigma, monkeypatch):
    """Against 1 and x, as the regression sees it: of the reward's part less than 5 %."""
    generator, share = torch.Generator().manual_seed(0), torch.softmax(SLOPE * torch.tensor(MODES), dim=0)
    mode = (torch.rand(200_000, generator=generator) > share[0]).long()
    samples = torch.tensor(MODES)[mode] + SLOPE * SPREAD**2 + SPREAD * torch.randn(len(mode), generator=generator)
    network = Exact(MODES, SPREAD)
    session, batch = efficient(network, samples, sigma)
    alone = recorded(session, batch, monkeypatch)
    network.tilt(SLOPE)
    found, x = recorded(session, batch, monkeypatch), batch.latents.flatten()
    assert abs(float(found.mean() / alone.mean())) < 0.05
    assert abs(float((found * x).mean())) < 0.05 * float((alone * x).mean().abs() + alone.abs().mean())


def test_the_efficient_form_noises_each_sample_to_every_step_of_the_window():
    session = chain(Matrices(), WIDE, form="efficient", window=0.5)
    assert session.plan.keep == ()
    rollout = full(session)
    credit = session.algorithm.advantages(rollout.rewards, torch.ones(1))
    context = context_of(session, optim_of(1, 4), climb=climb_of(bent))
    work = GradientBatches(context, Iteration(1, rollout, credit, Sums()))
    batches = [batch for batch, _ in work.batches(0)]
    assert [set(batch.steps.tolist()) for batch in batches] == 2 * [{4}, {5}, {6}, {7}]
    noise = []
    for batch in batches[:4]:
        assert batch.clean is not None
        sigma = expand(batch.step.sigma, batch.latents)
        noise.append((batch.latents - (1 - sigma) * batch.clean) / sigma)
    assert 0.7 < float(torch.stack(noise).std()) < 1.3
    assert float((noise[0] - noise[1]).abs().min()) > 1e-3
    # Before the first update only the reward moves the network, and at strength 0 nothing.
    session.algorithm.config = Config(form="efficient", strength=0.0)
    session.algorithm.loss(batches[0], session.networks).loss.backward()
    assert all(not g.any() for g in gradient_of(session.adapter.network).values())


# ---- in a run


def test_other_noise_is_refused_and_an_update_moves_nothing_of_the_judge():
    words = ("model.lora={rank: 4, alpha: 8}", "data.max_prompts=4", "data.max_eval_prompts=4")
    few = ("rollout.prompts_per_iteration=4", "rollout.batch_size=4", "optim.batch_size=4")
    with pytest.raises(ConfigError, match="the first noise says nothing"):
        flowrl.Session("configs/judge/adjoint_matching.yaml", *words, "rollout.sampler={name: ddim, eta: 0.5}")
    with flowrl.Session("configs/judge/adjoint_matching.yaml", *words, *few) as session:
        row = session.step(1)
        assert row["grad/norm"] > 0
        assert row["adjoint/control"] == 0
        assert session.rewards is not None
        (entry,) = session.rewards.entries
        judge = entry.reward.on_latents
        assert judge is not None
        assert judge.network is not None
        assert all(p.grad is None for p in judge.network.parameters())
