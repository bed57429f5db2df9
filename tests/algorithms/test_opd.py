"""On-policy distillation: the closed form, the weights of its steps, domains, guidance, runs that need no reward."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import flowrl
from flowrl.algorithms.opd import Config, Opd, kl_weight
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import StepPlan, kept_plan
from flowrl.diffusion.process import FlowProcess
from flowrl.diffusion.schedules import Schedule
from flowrl.losses.batches import StateBatch
from flowrl.models.base import LoraSettings
from flowrl.models.weights.roles import Weights
from flowrl.run.session import Session
from flowrl.run.teaching import verdicts
from flowrl.samplers import cps, flow_sde, ode
from tests.e2e.conftest import assert_same_gradient, digest, finish, start, train

LORA = LoraSettings(rank=4, alpha=8)
BASE: dict[str, Any] = {
    "name": "run",
    "iterations": 2,
    "model": {"name": "sd3", "path": "tiny-sd3", "max_sequence_length": 9, "lora": {"rank": 4, "alpha": 8}},
    "data": {"prompts": "prompts.jsonl", "eval_prompts": "prompts.jsonl"},
    "rollout": {"num_inference_steps": 4, "prompts_per_iteration": 4, "group_size": 2, "batch_size": 4},
    "algorithm": {"name": "opd", "teachers": {"colour": "colour", "size": "size"}},
    "optim": {"learning_rate": 1e-3, "batch_size": 3, "updates_per_iteration": 1},
    "eval": {"batch_size": 8},
    "checkpoint": {"every": 1, "keep": 9},
}
RECORDS = [
    {"prompt": "a red circle", "domain": "colour"},
    {"prompt": "a blue square", "domain": "colour"},
    {"prompt": "a large circle", "domain": "size"},
    {"prompt": "a small square", "domain": "size"},
]


def teach(folder: Path, lora: LoraSettings | None, seed: int, size: float = 0.05) -> None:
    """A teacher's weights in a folder: those of the tiny model, moved at random."""
    from flowrl.models import sd3

    model = sd3.build(sd3.Config(path="tiny-sd3"))
    weights, generator = Weights(model.network, lora, model.lora_targets, 0), torch.Generator().manual_seed(seed)
    for p in weights.parameters.values():
        p.data += size * p.data.std().clamp(min=0.02) * torch.randn(p.shape, generator=generator)
    weights.save(folder, type(model.pipeline))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its prompts and two teachers, LoRAs of other ranks than the student's."""
    folder = tmp_path_factory.mktemp("opd")
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    (folder / "run.yaml").write_text(yaml.safe_dump(BASE | {"output": str(folder / "runs")}))
    teach(folder / "colour", LoraSettings(rank=2, alpha=4, targets=["attn.to_q", "ff.net.2"]), 1, 1.0)
    teach(folder / "size", LoraSettings(rank=6, alpha=6), 2, 1.0)
    return folder


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return made


def gradient(session: Session, batches: list[StateBatch]) -> dict[str, Tensor]:
    parameters = session.weights.parameters
    for batch in batches:
        session.method.loss(batch, session.networks).loss.backward()
    result = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    for p in parameters.values():
        p.grad = None
    return result


def batches_of(session: Session, size: int | None = None) -> list[StateBatch]:
    rollout = session.roll_out(1)
    return list(session.batches(rollout, session.credit(rollout), size))


# ---- the weights of the steps


def steps(noise_level: float) -> Any:
    """Those of 10 steps at shift 3, at the noise levels of the sheet's table."""
    t = torch.linspace(1, 0, 11)
    sigmas = 3 * t / (1 + 2 * t)
    return StepPlan(Schedule(sigmas, 1000 * sigmas[:-1]), (noise_level,) * 10, train=()).steps(
        torch.tensor([0, 2, 4, 6, 7, 8, 9]), FlowProcess()
    )


@pytest.mark.parametrize(
    ("sampler", "level", "expected"),
    [
        (flow_sde.build(flow_sde.Config()), 0.7, [0.001, 0.006, 0.024, 0.082, 0.165, 0.377]),
        (cps.build(cps.Config(noise_level=0.7)), 0.7, [0.001, 0.006, 0.023, 0.085, 0.19, 0.66]),
        (ode.build(ode.Config()), 0.0, [0.0006, 0.0012, 0.0023, 0.0054, 0.009, 0.016, 0.031]),
    ],
)
def test_the_weights_of_the_kl_are_those_of_the_table(sampler, level, expected):
    found = kl_weight(sampler, FlowProcess(), steps(level))[: len(expected)].tolist()
    assert found == pytest.approx(expected, rel=0.035, abs=5e-4 if level else 5e-5)


@pytest.mark.parametrize("name", ["flow_sde", "cps"])
def test_with_its_weights_the_loss_is_the_kl_of_the_two_steps_of_the_sampler(place, name):
    with Session("run.yaml", f"rollout.sampler.name={name}", "algorithm.weight=kl", "algorithm.nodes=null") as session:
        for batch in batches_of(session):
            policy, (role,) = session.networks.policy, [list(session.method.roles)[batch.domain]]
            own = policy.transition(batch.latents, batch.step, batch.cond)
            with session.weights.using(role):
                teacher = policy.transition(batch.latents, batch.step, batch.cond)
            assert bool((own.std > 0).all())
            loss = session.method.loss(batch, session.networks).loss
            assert_close(loss, own.kl(teacher).sum(), rtol=1e-3, atol=1e-6)


def test_by_default_it_is_the_plain_square_at_the_states_of_the_ode_each_step_alike(place):
    with Session("run.yaml", "algorithm.nodes=null") as session:
        rollout = session.roll_out(1)
        assert not any(rollout.plan.stochastic)
        assert rollout.plan.keep == (0, 1, 2, 3)
        found = list(session.batches(rollout, session.credit(rollout)))
        assert sorted(torch.cat([batch.steps for batch in found]).tolist()) == sorted(list(range(4)) * 8)
        x = torch.cat([batch.latents for batch in found])
        kept = torch.cat([rollout.samples.kept[k].x for k in range(4)])
        assert sorted(x.flatten(1).sum(1).tolist()) == sorted(kept.flatten(1).sum(1).tolist()), "the stored states"
        output = session.method.loss(found[0], session.networks)
        assert_close(output.loss, output.per_step["opd/distance"].sum())


# ---- teachers


def test_domains_never_meet_in_a_forward_and_their_gradients_add_up(place):
    """Of all domains of an iteration together, whatever the batches."""
    with Session("run.yaml") as session:
        rollout = session.roll_out(1)
        small, large = (list(session.batches(rollout, session.credit(rollout), size)) for size in (2, 64))
        assert {batch.domain for batch in large} == {0, 1}
        assert len(large) == 2
        assert len(small) > 2
        parts = [gradient(session, [batch]) for batch in large]
        whole = gradient(session, small)
        for name, value in whole.items():
            assert_close(value, sum(part[name] for part in parts), rtol=1e-3, atol=1e-6)


def test_a_teacher_that_is_the_student_gives_no_loss_and_is_named(place):
    words = ("algorithm.teachers={all: null}", "data.max_prompts=4")
    with Session("run.yaml", *words) as session:
        found = batches_of(session)
        assert all(float(session.method.loss(batch, session.networks).loss.detach()) == 0 for batch in found)
        assert all(not bool(value.any()) for value in gradient(session, found).values())
        session.method.loss(found[0], session.networks)
    row = {"iteration": 1, "opd/distance_all": 0.0}
    assert "the teacher of all is the student itself" in (session.method.warning(row) or "")
    assert session.method.warning(row | {"iteration": 2}) is None
    assert session.method.warning(row | {"opd/distance_all": 1e-9}) is None


def test_the_guidance_of_the_teacher_is_its_own(place):
    """The untouched network with CFG teaches the student without: one forward a step then does for two."""
    with Session("run.yaml", "algorithm.teachers={}", "algorithm.teacher_guidance=4.0") as session:
        batch = batches_of(session)[0]
        policy, place_ = session.networks.policy, (batch.latents, batch.step, batch.cond)
        assert policy.guidance_scale == 1
        raw = [session.model.predict(batch.latents, batch.step.timestep, batch.cond, s) for s in (1.0, 4.0)]
        expected = (raw[0] - raw[1]).square().flatten(1).mean(dim=1)
        assert float(expected.detach().min()) > 0
        assert_close(session.method.loss(batch, session.networks).per_step["opd/distance"], expected.detach())
        assert_close(policy.output(*place_), raw[0])


def test_no_teacher_is_in_the_optimizer_and_the_student_is_active_again(place):
    with Session("run.yaml") as session:
        batch = batches_of(session)[0]
        before = session.model.predict(batch.latents, batch.step.timestep, batch.cond, 1.0)
        session.method.loss(batch, session.networks).loss.backward()
        assert torch.equal(session.model.predict(batch.latents, batch.step.timestep, batch.cond, 1.0), before)
        named = dict(session.model.network.named_parameters())
        taught = [name for name in named if ".teacher" in name]
        assert taught
        assert all(not named[name].requires_grad and named[name].grad is None for name in taught)
        assert not set(taught) & set(session.weights.parameters)
        assert len(session.optimizer.gradients()) == len(session.weights.parameters)


def test_the_nodes_of_a_sample_are_keyed_by_its_identity():
    method, grid = Opd(Config(nodes=2)), Schedule(torch.linspace(1, 0, 7), torch.arange(6.0))
    plan, ids = kept_plan(grid, 0.0), [SampleId(slot, sample) for slot in range(3) for sample in range(40)]
    found = method.steps(ids, plan, 1, 0)
    assert found.shape == (120, 2)
    assert bool((found[:, 0] < found[:, 1]).all())
    assert set(found.flatten().tolist()) == set(range(6))
    assert torch.equal(method.steps(ids[7:9], plan, 1, 0), found[7:9])
    assert not torch.equal(method.steps(ids, plan, 2, 0), found)
    assert kept_plan(grid, 0.7).keep == (0, 1, 2, 3, 4), "a flow's last step leaves no noise, and has no KL"


# ---- what is refused, and what is said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.updates_per_iteration=2"], r"are one update.*optim\.updates_per_iteration=1"),
        (["algorithm.nodes=9"], r"a rollout has 4 steps.*algorithm\.nodes=4"),
        (["algorithm.teachers.colour=nowhere"], r"algorithm\.teachers\.colour='.*nowhere': there is no such file"),
        (["rollout.shared_noise=true"], r"rollout\.shared_noise=true: without noise"),
        (["eval.best_guidance=[2.0]"], "there is no reward to compare by"),
        (["data.priority={by: spread}"], "opd has no credit by rewards"),
        (["algorithm.nodes=0"], "nodes=0"),
    ],
)
def test_what_has_no_meaning_is_refused_before_anything_is_loaded(place, words, message):
    with pytest.raises(ConfigError, match=message):
        resolve(load_config("run.yaml", words))


def test_a_prompt_without_a_teacher_is_refused_by_its_text(place, tmp_path):
    for record, message in (
        ({"prompt": "a dog"}, "has no 'domain'"),
        ({"prompt": "a dog", "domain": "x"}, "domain 'x'"),
    ):
        (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, [*RECORDS, record])))
        with pytest.raises(ConfigError, match=f"prompt 5, 'a dog', .*{message}.*colour, size"):
            Session("run.yaml", f"data.prompts={tmp_path / 'other.jsonl'}")


def test_teachers_that_do_not_beat_the_base_or_do_not_disagree_are_named():
    worse = {"a": {"a": {"x": -0.1, "y": 0.0}, "b": {"x": 0.2}}, "b": {"a": {"x": -0.1}, "b": {"x": 0.2}}}
    assert [text[:33] for text in verdicts(worse)] == ["the teacher of a is no better tha"]
    agreed = {"a": {"a": {"x": 0.3}, "b": {"x": 0.1}}, "b": {"a": {"x": 0.1}, "b": {"x": 0.3}}}
    assert [text[:31] for text in verdicts(agreed)] == ["every teacher beats the base on"]
    assert verdicts({"a": {"a": {"x": 0.3}}}) == []


# ---- runs


def test_a_run_needs_no_reward_says_so_learns_and_exports_the_student_alone(place):
    summary = train("name=plain", "iterations=3", "algorithm.nodes=null", "optim.learning_rate=5.0e-4")
    rows = [json.loads(line) for line in Path("runs/plain/metrics.jsonl").read_text().splitlines()]
    assert summary["status"] == "finished"
    assert all(row["reward/none"] == 1 and "reward/total_mean" not in row for row in rows)
    assert 0 < rows[-1]["opd/distance"] < 0.9 * rows[0]["opd/distance"]
    both = rows[0]["opd/distance_colour"] + rows[0]["opd/distance_size"]
    assert rows[0]["opd/distance"] == pytest.approx(both / 2, rel=1e-4), "each prompt is drawn once"
    assert "nothing judges the teachers" in Path("runs/plain/train.log").read_text()
    assert not [name for name in load_file("runs/plain/adapter/pytorch_lora_weights.safetensors") if "teacher" in name]
    assert "nfe/rollout" in rows[0]


def test_rewards_are_watched_and_change_nothing(place):
    Path("bright.py").write_text("def score(images, prompts, metadata):\n    return images.mean(dim=(1, 2, 3))\n")
    train("name=none", "algorithm.compared=0")
    train("name=watched", "algorithm.compared=2", "rewards=[{path: bright.py}]", "rollout.batch_size=4")
    assert digest("watched", 2) == digest("none", 2)
    row = json.loads(Path("runs/watched/metrics.jsonl").read_text().splitlines()[0])
    assert 0 < row["reward/bright_mean"] < 1
    said = "the teacher of size less the base on 2 prompts of colour: bright"
    assert said in Path("runs/watched/train.log").read_text()


@pytest.mark.parametrize("extra", [(), ("model.lora=null", "algorithm.teacher_guidance=3.0")])
def test_a_resumed_run_is_bitwise_the_whole_one_and_other_teachers_are_refused(place, extra):
    name = f"run{len(extra)}"
    train(f"name={name}whole", *extra)
    train(f"name={name}parts", "iterations=1", *extra)
    train(f"name={name}parts", *extra, resume=True)
    assert digest(f"{name}parts", 2) == digest(f"{name}whole", 2)
    state = load_file(f"runs/{name}whole/checkpoints/iteration-000002/state.safetensors")
    assert not [key for key in state if "teacher" in key]
    if not extra:
        return
    method = Session("run.yaml", *extra, "algorithm.teachers={colour: size, size: colour}").method
    with pytest.raises(ValueError, match="holds other weights than those that the run has learned from"):
        method.load_state_dict({"teachers": {"teacher0": "x", "teacher1": "y"}})


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(place):
    train("name=one", "iterations=1")
    code, output = finish(start("train", "run.yaml", "name=two", "iterations=1", "--processes", "2"))
    assert code == 0, output
    assert_same_gradient("one", "two")


def test_a_teacher_of_full_weights_teaches_a_lora_and_full_weights(place, tmp_path):
    teach(tmp_path / "run" / "adapter", None, 3)
    (tmp_path / "run" / "config.yaml").write_text("")
    words = ["algorithm.teachers={all: " + str(tmp_path / "run") + "}"]
    distances = []
    for lora in ("model.lora={rank: 4, alpha: 8}", "model.lora=null"):
        with Session("run.yaml", *words, lora) as session:
            distances.append(session.step(1)["opd/distance"])
    assert distances[0] == pytest.approx(distances[1], rel=1e-4)
    assert distances[0] > 0
    with pytest.raises(ModelError, match=r"model\.shard=true"):
        Session("run.yaml", *words, "model.shard=true")


# ---- why not a policy gradient


def test_a_detached_kl_as_advantage_has_no_signal_and_the_sampled_log_ratio_has():
    """x' = theta + s z, and the teacher's mean is m: the gradient of the KL is (theta - m) / s^2."""
    theta, m, s, count = 1.0, 0.0, 0.5**0.5, 400_000
    z = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score = z / s  # d log p(x') / d theta
    kl = (theta - m) ** 2 / (2 * s**2)  # of x_k alone: the same for every z
    error = float(score.std()) / count**0.5
    assert abs(float((-kl * score).mean())) < 4 * kl * error
    x = theta + s * z
    log_ratio = ((x - theta) ** 2 - (x - m) ** 2) / (2 * s**2)  # log p_T - log p_old, detached
    signal = log_ratio * score
    assert float(signal.mean()) == pytest.approx(-(theta - m) / s**2, abs=4 * float(signal.std()) / count**0.5)
    assert -(theta - m) / s**2 == pytest.approx(-2.0)
    assert float(signal.std()) > 2, "the closed form has the same gradient and no noise"


def test_it_is_a_method_of_its_own_kind():
    assert isinstance(Opd(Config()), flowrl.StateMethod)
