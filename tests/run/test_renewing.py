"""Judges of latents that a run trains further: on which samples, with which labels, and the same after a restart."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import flowrl
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError, RewardError
from flowrl.run.session import Session
from tests import ranks
from tests.remedies import follows

JUDGE = str(Path(__file__).parents[1] / "toy_latent.py")
RENEW = "renew: {every: 2, by: jpeg_kb, at_least: 1.0}"


def words(renew: str = RENEW, second: str = "{name: jpeg, weight: 0.0}") -> list[str]:
    return [
        "configs/lab/flow_grpo.yaml",
        "rollout.num_inference_steps=3",
        "rollout.prompts_per_iteration=2",
        "rollout.group_size=2",
        "rollout.batch_size=4",
        "algorithm.sde_steps=[0]",
        "data.max_prompts=4",
        "data.max_eval_prompts=1",
        "eval.num_inference_steps=2",
        "optim.batch_size=4",
        "optim.updates_per_iteration=1",
        f"rewards=[{{path: {JUDGE}, {renew}}}, {second}]",
    ]


def judge(session: Session) -> Any:
    assert session.rewards is not None
    return session.rewards.entries[0].reward.on_latents


def weights(session: Session) -> list[Tensor]:
    networks = (judge(session).network, session.model.network)
    return [value.clone() for network in networks for value in network.state_dict().values()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def test_every_second_iteration_its_own_samples_with_the_labels_of_the_other_reward(monkeypatch):
    with flowrl.Session(*words()) as session:
        own, calls = judge(session).trainer, []
        renew = own.renew

        def recorded(x0: Tensor, cond: Any, labels: Tensor) -> Any:
            calls.append((x0, cond, labels))
            return renew(x0, cond, labels)

        monkeypatch.setattr(own, "renew", recorded)
        before = judge(session).network.state_dict()["head.weight"].clone()
        row = session.step(1)
        assert not calls
        assert "renewal/toy_latent/loss" not in row
        assert torch.equal(before, judge(session).network.head.weight)
        rollout = session.roll_out(2)
        rollout.raw["jpeg_kb"][0, 1] = torch.nan
        row = session.update(rollout, session.credit(rollout))
        ((x0, cond, labels),) = calls
        places = [(0, 0), (1, 0), (1, 1)]
        for k, (slot, sample) in enumerate(places):
            (place,) = [n for n, i in enumerate(rollout.samples.ids) if (i.slot, i.sample) == (slot, sample)]
            assert torch.equal(x0[k], rollout.samples.x0[place])
            expected = session.parts.sampling.texts.lookup([rollout.prompts[slot]])["prompt_embeds"][0]
            assert torch.equal(cond["prompt_embeds"][k], expected)
            assert labels[k] == float(rollout.raw["jpeg_kb"][slot, sample] >= 1.0)
        assert row["renewal/toy_latent/share_true"] == pytest.approx(float(labels.mean()))
        assert row["renewal/toy_latent/loss"] > 0
        assert not torch.equal(before, judge(session).network.head.weight)
        network = judge(session).network
        assert not network.training
        assert not any(parameter.requires_grad for parameter in network.parameters())


def test_a_restart_after_a_renewal_is_the_undisturbed_run():
    renew = RENEW.replace("every: 2", "every: 1")
    with flowrl.Session(*words(renew)) as session:
        session.step(1)
        tensors, plain = session.state()
        tensors = {name: value.clone() for name, value in tensors.items()}
        row = session.step(2)
        expected = weights(session)
    with flowrl.Session(*words(renew)) as again:
        first = weights(again)
        again.load_state(1, tensors, plain)
        assert not same(weights(again)[:3], first[:3]), "the judge of the checkpoint is another one"
        found = again.step(2)
        assert same(weights(again), expected)
        assert found["renewal/toy_latent/loss"] == row["renewal/toy_latent/loss"]


def test_random_numbers_of_the_process_do_not_follow_from_a_renewal():
    with flowrl.Session(*words(RENEW.replace("every: 2", "every: 1"))) as session:
        own = judge(session).trainer

        def draws(x0: Tensor, cond: Any, labels: Tensor) -> dict[str, float]:
            torch.manual_seed(7)
            return {}

        own.renew = draws
        torch.manual_seed(0)
        session.step(1)
        assert torch.initial_seed() != 7


@follows("flowrl/config/checks.py:_check_renewal", "flowrl/config/checks.py:_check_renewal#2")
@pytest.mark.parametrize(
    ("override", "words_of", "value"),
    [
        ("eval.rewards=[{path: JUDGE, renew: {every: 1, by: jpeg_kb}}]", "evaluations train nothing", None),
        ("rewards=[{name: jpeg, renew: {every: 1, by: jpeg_kb}}]", "jpeg judges no latents", None),
        (
            "rewards=[{path: JUDGE, renew: {every: 1, by: none}}, {name: jpeg, weight: 0.0}]",
            "there are jpeg_kb",
            "jpeg_kb",
        ),
    ],
)
def test_what_cannot_be_renewed_is_refused_with_what_can(override, words_of, value):
    base, *others = words()
    given = [*others[:-1], override.replace("JUDGE", JUDGE)]
    with pytest.raises(ConfigError, match=words_of) as refused:
        resolve(load_config(base, given))
    ((key, to),) = refused.value.remedies[0].settings.items()
    assert to == value
    resolve(load_config(base, [*given, f"{key}={'null' if to is None else to}"]))


def test_a_number_of_iterations_below_one_is_refused():
    with pytest.raises(ConfigError, match="every=0 must be at least 1"):
        resolve(load_config(words()[0], words(RENEW.replace("every: 2", "every: 0"))[1:]))


def test_a_judge_without_a_trainer_is_refused(tmp_path):
    text = Path(JUDGE).read_text().replace(", network, Trainer(network))", ", network)")
    (tmp_path / "plain.py").write_text(text)
    given = [word.replace(JUDGE, str(tmp_path / "plain.py")) for word in words()]
    with pytest.raises(RewardError, match="'plain': what it builds has no `trainer`"):
        flowrl.Session(*given)


@pytest.mark.slow
def test_two_processes_renew_as_one_and_a_resumed_run_as_the_undisturbed_one(tmp_path, monkeypatch):
    base, *others = words(RENEW.replace("every: 2", "every: 1"))
    recipe = Path(base).resolve()
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    given = [str(recipe), *others, "checkpoint.every=1", "eval.best_guidance=[]", "data.eval_prompts=null"]
    ranks.run([[*given, "name=two", "iterations=2"]], processes=2)
    ranks.run(
        [
            [*given, "name=one", "iterations=2"],
            [*given, "name=cut", "iterations=1"],
            [*given, "name=cut", "iterations=2", "--resume"],
        ],
        processes=1,
    )
    one, two, cut = (state(tmp_path / "runs" / name) for name in ("one", "two", "cut"))
    for name, value in one.items():
        assert torch.equal(cut[name], value), name
        torch.testing.assert_close(two[name], value, rtol=1e-2, atol=1e-3)


def state(run: Path) -> dict[str, Tensor]:
    """Weights of the judge in the checkpoint of the second iteration."""
    tensors = load_file(run / "checkpoints" / "iteration-000002" / "state.safetensors")
    return torch.load(io.BytesIO(tensors["judges/toy_latent"].numpy().tobytes()), weights_only=True)["network"]
