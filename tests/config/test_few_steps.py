"""A run on a distilled model: its steps and guidance, the training times, what is noted and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.algorithms.base import SampleMethod
from flowrl.commands.plan import command, step_plan
from flowrl.config.checks import check_model
from flowrl.config.components import component
from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.core.types import SampleId
from flowrl.models.pipelines.distilled import Distilled
from flowrl.planning import memory
from tests import tiny_pipelines as tiny
from tests import tiny_sd3
from tests.remedies import follows
from tests.remedies.following import command_fault, follow_settings, loaded, numbered, provoked, recipe, with_remedy

FEW = ("rollout.num_inference_steps=4", "eval.num_inference_steps=4", "rollout.batch_size=16", "optim.batch_size=16")
PLAIN = ("algorithm={name: awm, solver: ode, kl: {coef: 0.0}}", *FEW)
MANY = "rollout.num_inference_steps=10"


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd3.student(tmp_path_factory.mktemp("student"))


@pytest.fixture
def read(student: Path) -> Any:
    def resolved(recipe: str, *words: str) -> Resolved:
        file = tiny_sd3.ROOT / "configs" / "lab" / f"{recipe}.yaml"
        return resolve(load_config(file, [f"model.path={student}", *words]))

    return resolved


def refusal(resolved: Resolved) -> str:
    """The message of a plan's refusal; empty: there is none."""
    adapter = memory.skeleton(resolved)
    try:
        check_model(resolved, adapter)
        step_plan(resolved, adapter)
    except ConfigError as error:
        return str(error)
    return ""


def test_times_of_a_method_are_the_nodes_unless_the_user_names_others(read):
    resolved = read("awm", *PLAIN)
    adapter = memory.skeleton(resolved)
    times = resolved.algorithm.build().times(adapter.schedule(4), [SampleId(0, k) for k in range(8)], 1, 0)
    assert torch.equal(times.sigma.sort(dim=1).values, torch.tensor([0.25, 0.5, 0.75, 1.0]).repeat(8, 1))
    kept = resolved.tree()["algorithm"]["times"]
    assert (kept["name"], kept["count"], kept["fraction"]) == ("subset", 4, 1.0)
    assert "its training times are the noise levels of the model's steps" in check_model(resolved, adapter)[-1]
    named = read("awm", "algorithm={name: awm, solver: ode, kl: {coef: 0.0}, times: {name: uniform, count: 3}}", *FEW)
    assert "algorithm.times.name=uniform draws times between the model's own" in check_model(named, adapter)[-1]
    assert "algorithm.solver" not in " ".join(check_model(named, adapter))
    assert read("awm", *FEW).algorithm.config.times.count == 2
    left = read("awm", "algorithm={name: awm, solver: dpm2_heun, kl: {coef: 0.0}}", *FEW)
    assert any("algorithm.solver=dpm2_heun leaves the path" in note for note in check_model(left, adapter))
    assert left.algorithm.config.times.name == "subset"
    assert read("awm", "algorithm={name: awm, kl: {coef: 0.0}}", *FEW).algorithm.config.solver == "ode"
    # Nothing is known of the plain model.
    plain = read("awm", PLAIN[0], "model.path=tiny-sd3", MANY).algorithm.config.times
    assert (plain.name, plain.count) == ("discrete_wo_init", 6)
    assert read("awm", PLAIN[0], "model.distilled=none", MANY).algorithm.config.times == plain


@pytest.mark.parametrize("name", registry.names("algorithms"))
def test_every_method_on_samples_takes_the_nodes(name):
    made = component("algorithms", {"name": name}, "algorithm")
    moved, method = made.config.on_nodes(4), made.build()
    if not isinstance(method, SampleMethod):
        assert moved is made.config
        return
    assert 1 <= moved.terms(4) <= 4
    assert moved.times.name == "subset"
    assert set(moved.times.nodes(4)) == {0, 1, 2, 3}
    # A solver of order 2 joins two velocities, which a map from node to node does not allow.
    assert vars(moved).get("solver", "ode") == "ode"
    assert made.config.on_nodes(4, {"solver", "times"}) == made.config


def test_a_student_is_noted_in_one_line_and_its_plan_is_on_its_nodes(read, student, capsys):
    resolved = read("awm", *PLAIN)
    command("lab/awm", [f"model.path={student}", *PLAIN])
    text = " ".join(capsys.readouterr().out.split())
    assert "note: the model is distilled on fixed noise levels 1, 0.75, 0.5, 0.25 (is_distilled): it takes" in text
    plan = step_plan(resolved, memory.skeleton(resolved))
    assert plan.schedule.sigmas.tolist() == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (
            "rollout.num_inference_steps=7",
            "rollout.num_inference_steps=7: the model is distilled on fixed noise levels",
        ),
        ("eval.num_inference_steps=28", "eval.num_inference_steps=28: the model"),
        ("rollout.exploration={pool: 32, num_inference_steps: 2}", "rollout.exploration.num_inference_steps=2: the"),
        ("rollout.guidance_scale=4.5", "rollout.guidance_scale=4.5: the model is distilled"),
        ("eval.guidance_scale=2", "eval.guidance_scale=2: the model is distilled"),
        ("eval.best_guidance=[1.0,2.0]", "eval.best_guidance=[1.0, 2.0]: the model, which is distilled"),
    ],
)
def test_what_a_student_does_not_take_is_refused_by_key(read, word, text):
    message = refusal(read("awm", *PLAIN, word))
    assert message.startswith(text)
    assert "; try " in message


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("mix_grpo_flash", "the rollout's steps begin at the noise levels 1, 0.75, "),
        ("g2rpo", "algorithm: g2rpo takes steps of the rollout that span several"),
        ("tree_grpo", ""),
        ("flow_grpo", ""),
        ("flow_grpo_fast", ""),
    ],
)
def test_a_rollout_on_other_steps_than_the_nodes_is_refused(read, recipe, text):
    few = ("rollout.num_inference_steps=4", "eval.num_inference_steps=4")
    message = refusal(read(recipe, *few))
    assert message.startswith(text)
    assert bool(message) == bool(text), message


@pytest.mark.parametrize(("kind", "fixed"), [("flow_map", False), ("consistency", False), ("nodes", True)])
def test_kinds_without_listed_steps_take_any_number(read, kind, fixed):
    words = (PLAIN[0], MANY, "model.path=tiny-sd3", f"model.distilled={kind}", "eval.num_inference_steps=3")
    resolved = read("awm", *words)
    note = check_model(resolved, memory.skeleton(resolved))[0]
    assert "made for 1 to 8 steps" in note
    assert ("which are not listed" in note) == fixed
    assert "takes no CFG" in refusal(read("awm", *words, "eval.guidance_scale=3"))


CASES = [
    ("models/pipelines/distilled.py:_remedy 2", "awm", (*PLAIN, "rollout.num_inference_steps=7")),
    ("config/checks.py:check_model 2", "awm", (*PLAIN, "eval.best_guidance=[1.0,2.0]")),
    ("config/few_steps.py:check_plan 1", "mix_grpo_flash", FEW[:2]),
    ("config/few_steps.py:check_plan 3", "g2rpo", FEW[:2]),
]


@pytest.mark.parametrize(("place", "name", "words"), CASES, ids=[case[0] for case in CASES])
@follows(*(place for case in CASES for place in numbered(case[0])))
def test_a_run_on_a_student_is_valid_with_each_remedy(student, place, name, words, tmp_path):
    tree = recipe(name)
    given = [f"model.path={student}", *words]
    fault = provoked(lambda: loaded(tmp_path, tree, given, deep=True), numbered(place))
    follow_settings(lambda tree, words: loaded(tmp_path, tree, words, deep=True), tree, given, fault)


@follows("flowrl/config/few_steps.py:check_plan#2", "flowrl/models/pipelines/distilled.py:_levels")
def test_remedies_of_a_grid_or_a_list_that_is_not_the_models(tmp_path):
    folder, tree = tmp_path / "flux", recipe("flow_grpo")
    tree["model"] = {"path": str(folder), "height": 16, "width": 16, "max_sequence_length": 8}
    pipe: Any = tiny.make("flux")
    pipe.scheduler = type(pipe.scheduler)()
    pipe.save_pretrained(folder)
    Distilled(kind="nodes", sigmas=(1.0, 0.75, 0.5, 0.25), evidence="", declared=True).write(folder)

    def check(tree: Any, words: Any) -> None:
        loaded(tmp_path, tree, words, deep=True)

    check(tree, FEW)
    given = [*FEW, "model.shift=3.0"]
    fault = provoked(lambda: check(tree, given), ["flowrl/config/few_steps.py:check_plan#2"])
    follow_settings(check, tree, given, fault)
    Distilled(kind="nodes", sigmas=(0.25, 0.5), evidence="", declared=True).write(folder)
    fault = provoked(lambda: check(tree, FEW), ["flowrl/models/pipelines/distilled.py:_levels"])
    follow_settings(check, tree, FEW, fault)


@follows("flowrl/models/pipelines/distilled.py:_remedy")
def test_remedies_of_a_command_on_a_student(student, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in ("--steps 7", "--guidance 4.5"):
        words = ["sample", str(student), "a red circle", *option.split()]
        fault = provoked(lambda words=words: command_fault(words), ["flowrl/models/pipelines/distilled.py:_remedy"])
        for remedy in fault.remedies:
            command_fault(with_remedy(words, remedy))
    assert len(list(Path("samples").glob("*.png"))) == 1  # both are the same call
