"""FIND: the learned law of the initial noise, its loss, its optimizer, and what it refuses."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.algorithms.base import Networks
from flowrl.algorithms.find import Config, build
from flowrl.config.load import load_config, resolve
from flowrl.config.schema import RunConfig
from flowrl.contracts.grids import flow_schedule
from flowrl.core.errors import ConfigError
from flowrl.core.strict import load_tree, validate
from flowrl.core.types import Condition, SampleId, Samples, no_edges
from flowrl.credit.critic import text_features
from flowrl.data.prompts import Prompt
from flowrl.losses.batches import InitialBatch
from flowrl.losses.ratio import gaussian_log_prob, noise_prior
from flowrl.rollout.learned_noise import Calibration, LearnedNoise, NoiseWeights, UnknownPrompt
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Evaluations, Policy
from flowrl.rollout.trajectories import NoiseDraws, Rollout, Trajectories
from flowrl.samplers import flow_sde
from flowrl.training.base import Iteration, UpdateContext
from flowrl.training.kinds import training_of
from flowrl.training.learner import Learner
from flowrl.training.metrics import Sums
from flowrl.training.noise_batches import NoiseBatches, NoiseTraining
from flowrl.training.optim import Optimizer
from flowrl.training.options import EmaConfig, OptimConfig
from flowrl.training.world import World
from scripts.lab import find_best_of_n
from tests.toys import ALONE, SHAPE, ToyAdapter

ROOT = Path(__file__).resolve().parents[2]
DIMS = 32
PROMPTS = [(f"prompt {k}", ()) for k in range(4)]


def weights_of(count: int = 4, *, critic: bool = False, **options: Any) -> NoiseWeights:
    weights = NoiseWeights(LearnedNoise(PROMPTS[:count], SHAPE), **options)
    if critic:
        weights.calibration = Calibration(torch.eye(count), DIMS, seed=0, learning_rate=1e-3)
    return weights


class Run:
    """A run whose network is never asked: the reward is a function of the initial latents."""

    def __init__(self, config: Config, weights: NoiseWeights, optim: OptimConfig, *, batch_size: int = 64) -> None:
        self.algorithm, self.weights, adapter = build(config), weights, ToyAdapter()
        for role in self.algorithm.roles:
            weights.snapshot(role)
        self.optimizer = Optimizer(weights, optim, 1000)
        policy = Policy(adapter, flow_sde.build(flow_sde.Config()), 1.0)
        self.networks = Networks(policy, weights)
        self.context = UpdateContext(
            method=self.algorithm,
            networks=self.networks,
            optim=dataclasses.replace(optim, batch_size=batch_size),
            rollout_batch_size=batch_size,
            seed=0,
            world=ALONE,
            counter=Evaluations(adapter.network),
            schedule=flow_schedule(4),
        )
        self.training = training_of(self.algorithm)
        self.learner = Learner(self.training, self.context, self.optimizer)

    def rollout(self, iteration: int, prompts: list[int], group: int, reward: Any, own: slice = slice(None)) -> Rollout:
        laws = torch.tensor(prompts)
        with self.weights.using(self.algorithm.behaviour):
            found = self.weights.network.drawn_from(laws)
        noise = Noise(0, "rollout", iteration, SHAPE, distributions=found)
        ids = tuple(SampleId(slot, k) for slot in range(len(prompts)) for k in range(group))
        everything = noise.initial(ids)
        rewards = reward(everything, laws.repeat_interleave(group)).reshape(1, len(prompts), group)
        samples = Samples(everything[own], ids[own])
        rows = torch.tensor([i.slot for i in samples.ids])
        plan = self.algorithm.plan(flow_schedule(4), self.networks.policy.sampler, iteration, 0)
        cond = Condition({"prompt": torch.zeros(len(prompts), 1)})
        drawn = NoiseDraws(noise.initial(samples.ids), laws)
        return Trajectories(plan, samples, no_edges(samples), cond, rows).scored(rewards, noise=drawn)

    def credit(self, rollout: Rollout) -> Any:
        return self.algorithm.advantages(rollout.rewards, torch.ones(1))

    def iterate(self, iteration: int, prompts: list[int], group: int, reward: Any) -> Sums:
        rollout, sums = self.rollout(iteration, prompts, group, reward), Sums()
        self.learner.update(iteration, rollout, self.credit(rollout), sums)
        return sums

    def initials(self, rollout: Rollout, world: World = ALONE) -> NoiseBatches:
        context = dataclasses.replace(self.context, world=world)
        work = NoiseBatches(context, Iteration(1, rollout, self.credit(rollout), Sums()))
        work.prepare()
        return work


def group(**options: Any) -> Config:
    return Config(baseline="group", **options)


def optim(**options: Any) -> OptimConfig:
    known = {"learning_rate": 0.05, "weight_decay": 0.0, "updates_per_iteration": 1}
    return OptimConfig(**(known | options))


def first_value(latents: Tensor, law: Tensor) -> Tensor:
    """A reward that is linear in one value."""
    return latents.flatten(1)[:, 0]


# ---- the law


@pytest.mark.parametrize("form", ["sum", "sqrt", "mean"])
def test_the_log_density_is_the_gaussians_but_for_its_constant_and_divisor(form):
    torch.manual_seed(0)
    z, mean, std = torch.randn(3, *SHAPE), torch.randn(3, *SHAPE), torch.rand(3, *SHAPE) + 0.1
    exact = torch.distributions.Normal(mean.double(), std.double()).log_prob(z.double()) + np.log(2 * np.pi) / 2
    divisor = {"sum": 1, "sqrt": DIMS**0.5, "mean": DIMS}[form]
    assert_close(gaussian_log_prob(z, mean, std, form), exact.flatten(1).sum(dim=1) / divisor)


def test_under_the_root_form_the_spread_of_the_log_ratio_is_the_move_in_stds_whatever_the_dims():
    torch.manual_seed(0)
    for dims in (16, 1024):
        z, mean, one = torch.randn(4000, dims), torch.full((1, dims), 0.1), torch.ones(1, dims)
        ratio = gaussian_log_prob(z, mean, one, "sqrt") - gaussian_log_prob(z, 0 * mean, one, "sqrt")
        assert float(ratio.std()) == pytest.approx(0.1, rel=0.05)


def test_the_prior_is_zero_with_zero_gradient_at_the_start_and_the_mean_square_behind_it():
    mean, std = torch.zeros(1, *SHAPE, requires_grad=True), torch.ones(1, *SHAPE, requires_grad=True)
    prior = noise_prior(mean, std)
    assert prior.tolist() == [0.0]
    assert all(float(g.abs().max()) == 0 for g in torch.autograd.grad(prior.sum(), (mean, std)))
    assert noise_prior(mean + 2, std + 0.5).tolist() == [pytest.approx(4.25)]


def test_at_the_start_a_rollout_has_bitwise_the_noise_of_the_base():
    ids = [SampleId(slot, k) for slot in range(3) for k in range(2)]
    plain = Noise(3, "rollout", 5, SHAPE)
    laws = weights_of().network.drawn_from(torch.tensor([2, 0, 2]))
    assert torch.equal(dataclasses.replace(plain, distributions=laws).initial(ids), plain.initial(ids))


def test_a_learned_noise_is_mean_plus_std_times_the_keyed_one_whatever_the_batch():
    weights, ids = weights_of(), [SampleId(slot, k) for slot in range(3) for k in range(2)]
    for k in range(4):
        weights.network.mean[k].data += 10.0 * k
        weights.network.std[k].data *= 1 + k
    numbers = torch.tensor([2, 0, 3])
    noise = Noise(3, "rollout", 5, SHAPE, distributions=weights.network.drawn_from(numbers))
    found, eps = noise.initial(ids), Noise(3, "rollout", 5, SHAPE).initial(ids)
    for row, i in enumerate(ids):
        k = int(numbers[i.slot])
        assert_close(found[row], 10.0 * k + (1 + k) * eps[row])
    parts = [noise.initial(ids[4:]), noise.initial(ids[1:4]), noise.initial(ids[:1])]
    assert torch.equal(torch.cat(parts[::-1]), found)


# ---- the loss


def test_the_ratio_is_one_at_the_start_for_laws_that_have_moved():
    run = Run(group(), weights_of(), optim())
    for parameter in run.weights.parameters.values():
        parameter.data += 0.1 * torch.rand(SHAPE)
    work = run.initials(run.rollout(1, [1, 3], 4, first_value))
    for batch, counts in work.batches(0):
        assert counts
        output = run.algorithm.loss(batch, run.networks)
        assert float(output.metrics["policy/ratio_mean"]) == len(batch) == 8
        assert float(output.metrics["policy/clip_fraction"]) == 0
        glossary = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
        assert [name for name in output.metrics if f"`{name}`" not in glossary] == []


def loss_at(config: Config, advantage: float, move: float) -> tuple[float, Tensor]:
    """Loss and gradient by the mean for a sample that the law moved towards by `move` stds in all values."""
    weights = weights_of(1)
    latents, old = torch.ones(1, *SHAPE), build(config).log_prob(torch.ones(1, *SHAPE), torch.tensor([0]), weights)
    weights.network.mean[0].data += move
    batch = InitialBatch(latents, torch.tensor([0]), torch.tensor([advantage]), old.detach())
    networks: Any = SimpleNamespace(weights=weights)
    loss = build(config).loss(batch, networks).loss
    loss.backward()
    assert weights.network.mean[0].grad is not None
    return float(loss.detach()), weights.network.mean[0].grad


def test_the_loss_by_hand_is_the_clipped_ratio_and_the_prior():
    # log ratio of a value 1 after a move of 0.1: (1 - 0.81) / 2 a dimension
    config = group(prior_coef=0.5, reward_scale=3.0, clip_range=0.2, log_prob="mean")
    ratio = float(np.exp(0.095))
    assert loss_at(config, 2.0, 0.1)[0] == pytest.approx(-6 * ratio + 0.5 * 0.01, rel=1e-5)
    sharp = dataclasses.replace(config, clip_range=0.05)
    assert loss_at(sharp, 2.0, 0.1)[0] == pytest.approx(-6 * 1.05 + 0.5 * 0.01, rel=1e-5)
    assert loss_at(sharp, -2.0, 0.1)[0] == pytest.approx(6 * ratio + 0.5 * 0.01, rel=1e-5)


def test_the_clip_ends_a_gain_and_not_the_correction_of_a_loss():
    """PPO's minimum, which released code leaves out: it also stops what must be undone."""
    sharp = group(prior_coef=0.0, clip_range=0.05, log_prob="mean")
    assert float(loss_at(sharp, 2.0, 0.1)[1].abs().max()) == 0
    assert float(loss_at(sharp, -2.0, 0.1)[1].min()) > 0


@pytest.mark.parametrize("config", [group(), Config()], ids=["group", "critic"])
def test_on_a_quadratic_reward_every_mean_goes_to_its_own_target(config):
    torch.manual_seed(0)
    targets = torch.randn(2, DIMS)

    def reward(latents: Tensor, law: Tensor) -> Tensor:
        return -(latents.flatten(1) - targets[law]).square().sum(dim=1) / DIMS

    run = Run(config, weights_of(2, critic=config.baseline == "critic"), optim(learning_rate=0.03, batch_size=64))
    scores = [run.rollout(k, [0, 1], 16, reward).rewards.mean() for k in (1001, 1002)]
    for iteration in range(1, 121):
        run.iterate(iteration, [0, 1], 32, reward)
    for k in range(2):
        error = (run.weights.network.mean[k].detach().flatten() - targets[k]).square().mean()
        assert float(error) < 0.4 * float(targets[k].square().mean())
    better = [run.rollout(k, [0, 1], 16, reward).rewards.mean() for k in (1001, 1002)]
    assert all(after > before / 2 for before, after in zip(scores, better, strict=True))


# ---- V


def test_an_advantage_is_the_reward_less_what_v_said_before_it_was_fitted_to_it():
    weights = weights_of(critic=True)
    run = Run(Config(), weights, optim())
    rollout = run.rollout(1, [3, 1], 4, first_value)
    rollout.rewards[0, 1, 2] = torch.nan
    assert weights.calibration is not None
    assert rollout.noise is not None
    laws = weights.network.distributions(rollout.noise.numbers)
    before = weights.calibration(laws, rollout.noise.numbers).detach()
    work = run.initials(rollout)
    expected = (rollout.rewards[0] - before[:, None]).flatten()
    valid = expected.isfinite()
    assert valid.tolist() == [k != 6 for k in range(8)]
    assert_close(work.advantage[valid], expected[valid])
    assert sorted(work.shares[0].tolist()) == valid.nonzero().squeeze(1).tolist()
    assert not torch.equal(weights.calibration(laws, rollout.noise.numbers), before)
    error = work.iteration.sums.means()["noise/critic_error"]
    assert error == pytest.approx(float(expected[valid].square().mean()), rel=1e-5)


def test_v_learns_what_tells_prompts_and_laws_apart_and_its_state_goes_on_bitwise():
    weights = weights_of(critic=True)
    judge, numbers = weights.calibration, torch.arange(4)
    rewards = torch.tensor([[0.0, 0.2], [1.0, 1.2], [2.0, torch.nan], [3.0, 3.2]])
    laws = weights.network.distributions(numbers)
    laws = dataclasses.replace(laws, mean=laws.mean.detach(), std=laws.std.detach())
    assert judge is not None
    judge.fit(laws, numbers, rewards, 10)
    other = weights_of(critic=True)
    other.load_state({name: value.clone() for name, value in weights.state().items()})
    assert other.calibration is not None
    for one in (judge, other.calibration):
        one.fit(laws, numbers, rewards, 300)
    assert_close(judge(laws, numbers), torch.tensor([0.1, 1.1, 2.0, 3.1]), atol=0.1, rtol=0)
    assert torch.equal(other.calibration(laws, numbers), judge(laws, numbers))


def test_text_features_are_means_over_tokens_of_whatever_a_condition_holds():
    cond = Condition(
        {
            "embeds": torch.arange(12.0).reshape(2, 3, 2),
            "pooled": torch.tensor([[7.0], [8.0]]),
            "mask": torch.ones(2, 3, dtype=torch.int64),
            "listed": [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])],
        }
    )
    assert text_features(cond).tolist() == [[2.0, 3.0, 7.0, 2.0], [8.0, 9.0, 8.0, 5.0]]


# ---- the optimizer


def test_prompts_that_are_not_drawn_keep_law_and_moments_bitwise():
    """AdamW's momentum and its decay would move them; their moments and step counters must rest as well."""
    run = Run(group(), weights_of(), optim(ema=EmaConfig(decay=0.5)))
    run.iterate(1, [0, 1], 8, first_value)
    kept = {k: v.clone() for k, v in run.weights.state().items() if k.startswith("policy/") and k[-1] in "03"}
    moments = {k: v.clone() for k, v in run.optimizer.state()[0].items() if k.split("/")[0][-1] in "03"}
    assert {k.split("/")[0] for k in moments} == {"mean.0", "std.0"}
    run.iterate(2, [1, 2], 8, first_value)
    state, after = run.weights.state(), run.optimizer.state()[0]
    assert all(torch.equal(state[k], v) for k, v in kept.items())
    assert all(torch.equal(after[k], v) for k, v in moments.items())
    assert float(after["mean.1/step"]) == 2
    assert float(after["mean.2/step"]) == 1
    assert not torch.equal(state["policy/mean.2"], torch.zeros(SHAPE))


def test_stds_stay_above_their_bound_in_every_role_and_can_be_left_at_one():
    run = Run(group(least_std=0.9), weights_of(), optim(learning_rate=0.5, ema=EmaConfig(decay=0.0, warmup=False)))
    for iteration in (1, 2):
        run.iterate(iteration, [0, 1, 2, 3], 8, first_value)
    stds = [value for name, value in run.weights.state().items() if "/std." in name]
    assert len(stds) == 8
    assert min(float(value.min()) for value in stds) == pytest.approx(0.9)
    fixed = Run(group(train_std=False), weights_of(train_std=False), optim())
    fixed.iterate(1, [0, 1], 8, first_value)
    assert all(float(value.detach().min()) == 1 for value in fixed.weights.network.std)
    assert not [name for name in fixed.weights.state() if "std" in name]


def test_a_law_that_keeps_its_moment_rests_where_it_is_not_drawn():
    run = Run(group(keep_moment=True), weights_of(), optim(learning_rate=0.2))
    run.iterate(1, [0, 1], 8, first_value)
    noise = run.weights.network
    moments = [float((m.square() + s.square()).detach().mean()) for m, s in zip(noise.mean, noise.std, strict=True)]
    assert moments == pytest.approx([1.0] * 4, abs=1e-6)
    assert float(noise.mean[0].detach().square().mean()) > 0.01
    kept = [noise.mean[0].detach().clone(), noise.std[0].detach().clone()]
    run.iterate(2, [1, 2], 8, first_value)
    assert torch.equal(noise.mean[0], kept[0])
    assert torch.equal(noise.std[0], kept[1])


def test_the_parts_of_two_processes_have_together_the_gradient_of_one():
    def gradient(*halves: tuple[World, slice]) -> dict[str, Tensor]:
        run = Run(Config(), weights_of(critic=True), optim(), batch_size=3)
        for world, own in halves:
            run.weights.calibration = weights_of(critic=True).calibration  # each process has its own, alike
            work = run.initials(run.rollout(1, [0, 2], 6, first_value, own), world)
            for batch, _ in work.batches(0):
                run.algorithm.loss(batch, run.networks).loss.backward()
        return {name: p.grad for name, p in run.weights.parameters.items() if p.grad is not None}

    device = torch.device("cpu")
    one = gradient((ALONE, slice(None)))
    two = gradient((World(0, 2, device), slice(0, 6)), (World(1, 2, device), slice(6, 12)))
    assert set(one) == set(two) == {"mean.0", "mean.2", "std.0", "std.2"}
    for name, value in one.items():
        assert_close(two[name], value)


def test_with_refresh_one_law_draws_for_so_many_iterations_and_is_what_the_ratio_compares_with():
    run = Run(group(refresh=2), weights_of(), optim())
    assert (run.algorithm.behaviour, run.algorithm.roles) == ("old", ("old",))

    def drawn() -> Tensor:
        noise = run.rollout(1, [0], 8, first_value).noise
        assert noise is not None
        return noise.initial

    first = drawn()
    run.iterate(1, [0], 8, first_value)
    assert torch.equal(drawn(), first)
    work = run.initials(run.rollout(2, [0], 8, first_value))
    (batch, _) = next(iter(work.batches(0)))
    assert float(run.algorithm.loss(batch, run.networks).metrics["policy/approx_kl"]) > 0
    run.iterate(2, [0], 8, first_value)
    assert not torch.equal(drawn(), first)
    assert run.algorithm.state_dict() == {"iterations": 2}


# ---- files and prompts


def test_saved_laws_come_back_with_their_prompts_and_repeats_share_one(tmp_path):
    noise = LearnedNoise([("a", ()), ("b", ("/x.png",)), ("a", ())], SHAPE)
    assert len(noise.prompts) == len(noise.mean) == 2
    noise.mean[1].data += 1.5
    noise.save(tmp_path)
    again = LearnedNoise.load(tmp_path / "learned_noise.safetensors")
    numbers = again.numbers([("b", ("/x.png",)), ("a", ())])
    assert numbers.tolist() == [1, 0]
    assert torch.equal(again.drawn_from(numbers).mean, torch.stack([torch.full(SHAPE, 1.5), torch.zeros(SHAPE)]))
    with pytest.raises(UnknownPrompt, match="b"):
        again.numbers([("b", ())])


def test_an_evaluation_on_other_prompts_is_refused():
    train = [Prompt("a", {}), Prompt("b", {})]
    NoiseTraining(build(Config())).check_prompts(train, train[1:])
    with pytest.raises(ConfigError, match=r"data\.eval_prompts: 'c' is not a training prompt.*null"):
        NoiseTraining(build(Config())).check_prompts(train, [Prompt("b", {}), Prompt("c", {})])


# ---- refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.sampler={name: flow_sde}"], r"rollout\.sampler=.*would not decide the image"),
        (["rollout.shared_noise=true"], r"rollout\.shared_noise=true"),
        (["rollout.exploration={pool: 64}"], r"rollout\.exploration: find"),
        (["model.lora={rank: 4, alpha: 8}"], r"model\.lora: find trains the initial noise"),
        (["model.shard=true"], r"model\.shard=true: find"),
        (["optim.weight_decay=0.01"], r"optim\.weight_decay=0\.01 would shrink the stds"),
    ],
)
def test_what_has_no_meaning_for_a_frozen_network_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        resolve(load_config(ROOT / "configs" / "lab" / "find.yaml", words))


def test_a_recipe_of_find_with_a_name_alone_starts_and_keeps_its_stds(tmp_path):
    """The published least std ends in exploding gradients (docs/algorithms/find.md), and a decay shrinks the stds."""
    tree = load_tree(ROOT / "configs" / "lab" / "find.yaml") | {"algorithm": {"name": "find"}}
    optim = {key: value for key, value in tree["optim"].items() if key != "weight_decay"}
    found = resolve(validate(RunConfig, tree | {"optim": optim}, ""))
    assert (found.run.optim.weight_decay, found.algorithm.config.least_std) == (0.0, 0.5)
    assert found.tree()["optim"]["weight_decay"] == 0.0
    other = tree | {"algorithm": {"name": "flow_grpo", "clip_range": 1e-3}, "optim": optim}
    assert resolve(validate(RunConfig, other, "")).run.optim.weight_decay == 1e-4


def test_a_plan_counts_the_laws_as_what_is_trained_and_no_forward_in_updates(monkeypatch, capsys):
    from tests.e2e.test_bad_input import command

    code, printed = command(monkeypatch, capsys, "plan", str(ROOT / "configs" / "lab" / "find.yaml"))
    assert code == 0, printed
    words = " ".join(printed.split())
    assert "trained: initial noise of 32 prompts 16,384" in words  # 32 prompts x 256 values x mean and std
    assert "1 updates of 128 samples; 200 iterations = 800 updates" in words
    assert "update forwards of 128 0 0 0" in words
    assert "0 TFLOP in the updates" in words


# ---- the comparison with best-of-n


@pytest.fixture(scope="module")
def script() -> Any:
    return find_best_of_n


def test_best_of_a_share_is_between_its_neighbours(script):
    values, judged = np.array([0.5, 1.0, 1.0, 0.0, 0.5]), np.array([0.0, 1.0, 0.25, 0.0, 1.0])
    half = (script.best_of(values, judged, 2) + script.best_of(values, judged, 3)) / 2
    assert script.best_of_share(values, judged, 2.5) == pytest.approx(half)
