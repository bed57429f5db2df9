"""Each finding comes from a run with its fault; a run without one has none; what a folder lacks is listed."""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from string import Formatter

import numpy as np
import pytest

from flowrl.apps.diagnosis import CHECKS, cause, settings
from flowrl.apps.gallery.runs import load_run
from flowrl.config.load import load_config, resolve
from flowrl.core import registry
from flowrl.run.changes import leaves
from flowrl.training.optim import Optimizer
from flowrl.training.options import OptimConfig
from tests.apps.diagnosis.conftest import FAULTS, Simulated, diagnosis, findings
from tests.e2e.test_bad_input import command

ROOT = Path(__file__).resolve().parents[3]
Faulty = Callable[[str], Path]
TRAINED = {
    "no learning rate": ["weights hardly move", "clip never acts", "evaluation unlike training"],
    "tight clip": ["clip always acts"],
    "huge learning rate": ["gradient explodes"],
    "minute reward": ["reward scale"],
    "long prompts": ["text too long"],
    "two aims": ["scorers disagree"],
    "uneven rewards": ["one reward decides"],
    "random reward": ["reward is noise"],
    "three prompts": ["too few samples"],
    "sleeping reward": ["one slow phase"],
}
SIMULATED = ("gradient vanishes", "kl runs away", "ratio below one", "learning rate schedule ended", "blur")


# ---- trained runs


def test_a_constant_reward_gives_dead_groups_first_and_the_end_of_training_says_it(faulty: Faulty, capsys, monkeypatch):
    folder = faulty("constant reward")
    assert list(findings(folder))[:2] == ["dead groups", "reward saturated"]
    log = (folder / "train.log").read_text()
    assert "likely cause: In 100% of the groups all 4 samples have the same reward" in log
    code, printed = command(monkeypatch, capsys, "diagnose", str(folder))
    assert code == 0
    assert "1. dead groups" in printed
    assert "change: rollout.group_size: 8" in printed
    code, printed = command(monkeypatch, capsys, "diagnose", str(folder), "--json")
    told = json.loads(printed)
    assert code == 0
    assert [found["name"] for found in told["findings"]] == list(findings(folder))
    assert set(told["looked_at"]) | set(told["not_looked_at"]) == {check.name for check in CHECKS}


@pytest.mark.slow
@pytest.mark.parametrize("fault", TRAINED)
def test_a_run_with_a_fault_has_its_finding(faulty: Faulty, fault: str):
    found = findings(faulty(fault))
    assert set(TRAINED[fault]) <= set(found), f"{FAULTS[fault]} gave {list(found)}"
    for name in TRAINED[fault]:
        assert np.isfinite(found[name].number.value)


@pytest.mark.slow
def test_a_run_that_learns_has_no_finding_and_its_training_names_no_cause(faulty: Faulty):
    folder = faulty("none")
    assert findings(folder) == {}
    assert "likely cause" not in (folder / "train.log").read_text()


# ---- simulated runs


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_simulated_run_has_no_finding(tmp_path: Path, seed: int):
    result = diagnosis(Simulated(tmp_path / "run", seed).write())
    assert result.findings == []
    assert set(result.not_looked_at) == {"scorers disagree"}, "one output alone"
    assert cause(load_run(tmp_path / "run")) == []


def test_the_command_of_a_cause_can_be_pasted_where_the_folder_has_a_space(tmp_path: Path):
    run = Simulated(tmp_path / "my run")
    run.after = run.before
    run.columns["advantage/dead_group_share"][:] = 1.0
    told = cause(load_run(run.write()))
    assert told[1].endswith(f"flowrl diagnose '{tmp_path}/my run')")


def test_a_kl_that_feeds_itself_runs_away_and_one_that_grows_as_the_cube_does_not(simulated: Simulated):
    done = np.arange(1, 41) / 40
    # Each step leads where the reward's gradient is larger: growth in proportion to itself.
    simulated.columns["policy/kl_reference"] = 1e-4 * np.exp(9 * done)
    assert "kl runs away" in findings(simulated.write())
    simulated.columns["policy/kl_reference"] = 1e-4 * done**3
    assert findings(simulated.write()) == {}


@pytest.mark.parametrize(
    ("std", "largest", "scale", "option"),
    [
        (5e-11, 5e-7, None, "rewards.0.scale: 1e+10"),
        (1e-21, 1e-17, 10.0, "rewards.0.scale: 1e+22"),
        (1e-29, 1e-25, None, "rewards.0.scale: 1e+29"),
        (0.1, 2e-3, None, ""),
    ],
)
def test_rewards_of_a_small_scale_are_named_and_not_the_learning_rate(
    simulated: Simulated, std, largest, scale, option
):
    """A std s gives advantages of s / (s + 1e-4)."""
    simulated.learns_nothing().columns["reward/group_std"][:] = std
    simulated.columns["advantage/largest"][:] = largest
    simulated.columns["grad/norm"][:] = 1e-12
    simulated.config["rewards"][0]["scale"] = scale
    found = diagnosis(simulated.write()).findings
    if option:
        assert (found[0].name, found[0].advice) == ("reward scale", option)
        assert not any("learning_rate" in finding.advice for finding in found)
        assert "scale of the rewards is too small" in cause(load_run(simulated.folder))[0]
    else:
        assert {"gradient vanishes", "weights hardly move"} <= {finding.name for finding in found}


def test_a_ratio_below_one_is_a_drift_past_the_clip_and_not_chance(simulated: Simulated):
    rng = np.random.default_rng(0)
    # GRPO-Guard's mechanism: the replayed mean lies off the rollout's by d std, so E[log ratio] = -d^2 / 2, and the
    # average over dims keeps it while the fluctuation averages out.
    log_ratio = -(0.08**2) / 2 + rng.normal(0, 5e-4, size=(40, 64))
    simulated.columns["policy/ratio/step00"] = np.exp(log_ratio).mean(axis=1)
    assert "ratio below one" in findings(simulated.write())
    simulated.columns["policy/ratio/step00"] = np.exp(log_ratio - log_ratio.mean()).mean(axis=1)
    assert findings(simulated.write()) == {}


@pytest.mark.parametrize(
    ("schedule", "planned"), [("linear", 40), ("cosine", 40), ("linear", 30), ("cosine", 30), ("constant", 30)]
)
def test_a_schedule_that_ended_before_the_run(simulated: Simulated, schedule, planned: int):
    config = OptimConfig(learning_rate=4e-4, schedule=schedule)
    optimizer = Optimizer.__new__(Optimizer)  # its schedule alone: no weights
    optimizer.config, optimizer.total_updates, rates = config, 2 * planned, []
    for update in range(80):
        optimizer.updates = update
        rates.append(optimizer.learning_rate())
    simulated.columns["optim/learning_rate"] = np.asarray(rates).reshape(40, 2).mean(axis=1)
    assert ("learning rate schedule ended" in findings(simulated.write())) is (planned < 40 and schedule != "constant")


def test_images_without_their_edges_are_blurred_and_noisier_ones_are_not(simulated: Simulated):
    image = simulated.images
    # What a large step of the solver leaves out: each pixel is the mean of its neighbours.
    shifts = [np.roll(image, (y, x), axis=(1, 2)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    simulated.tuned_images = np.mean(shifts, axis=0)
    found = findings(simulated.write())
    assert list(found) == ["blur"]
    assert found["blur"].change.option == "rollout.num_inference_steps"
    simulated.config["rollout"]["num_inference_steps"] = 28
    assert findings(simulated.write()) == {}, "not a training with few steps"


def test_findings_are_ordered_and_one_that_costs_time_alone_is_last(simulated: Simulated):
    simulated.columns["time/reward_s"] = np.full(40, 1.0)
    simulated.columns["advantage/dead_group_share"] = np.full(40, 0.9)
    found = diagnosis(simulated.write()).findings
    assert [one.name for one in found] == ["dead groups", "one slow phase"]
    assert [one.likelihood for one in found] == sorted((one.likelihood for one in found), reverse=True)


def test_power_counts_prompts_and_a_significant_change_needs_none(simulated: Simulated):
    rng = np.random.default_rng(1)
    simulated.after = simulated.before + rng.normal(0, 0.3, size=simulated.before.shape)
    simulated.before, simulated.after = simulated.before[:6], simulated.after[:6]
    found = findings(simulated.write())
    assert "too few samples" in found
    wanted = int(found["too few samples"].change.value.split()[0])
    assert wanted > 6
    simulated.after = simulated.before + 0.3
    assert "too few samples" not in findings(simulated.write())


# ---- folders that lack something


def test_what_an_older_run_does_not_have_is_listed_and_the_rest_is_looked_at(simulated: Simulated):
    simulated.config.pop("rollout")
    simulated.config.pop("optim")
    simulated.columns = {"advantage/dead_group_share": np.full(40, 0.1), "grad/norm": np.full(40, 0.1)}
    folder = simulated.write()
    (folder / "provenance.json").write_text("{}")
    result = diagnosis(folder)
    assert result.findings == []
    assert "dead groups" in result.looked_at
    assert result.not_looked_at["gradient vanishes"] == "config.yaml has no optim.eps"
    assert result.not_looked_at["text too long"].startswith("provenance.json has no lengths")
    assert result.not_looked_at["one slow phase"].startswith("metrics.jsonl has no time/iteration_s")


@pytest.mark.parametrize("iterations", [0, 1, 2])
def test_a_run_with_too_few_iterations_has_no_trend(simulated: Simulated, iterations: int):
    simulated.iterations = iterations
    result = diagnosis(simulated.write())
    assert result.findings == []
    assert {"gradient explodes", "kl runs away", "learning rate schedule ended"} <= set(result.not_looked_at)
    assert ("dead groups" in result.looked_at) == (iterations == 2)


def test_a_run_that_has_just_begun_is_told_what_is_missing(simulated: Simulated, monkeypatch, capsys):
    folder = simulated.write()
    for name in ("metrics.jsonl", "summary.json", "provenance.json", "eval/base.json", "eval/tuned.json"):
        (folder / name).unlink()
    code, printed = command(monkeypatch, capsys, "diagnose", str(folder))
    assert code == 0
    assert "nothing found" in printed
    assert "dead groups: metrics.jsonl has no row" in printed


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, monkeypatch, capsys):
    for folder, said in ((tmp_path, "is not a run"), (tmp_path / "nothing", "there is no such folder")):
        code, printed = command(monkeypatch, capsys, "diagnose", str(folder))
        assert (code, said in printed) == (2, True)


# ---- the table and the page


def test_every_finding_has_a_test_and_a_section_of_the_page():
    shown = {"dead groups", "reward saturated", *SIMULATED, *(name for names in TRAINED.values() for name in names)}
    assert shown == {check.name for check in CHECKS}
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").lower()
    assert [check.name for check in CHECKS if f"\n### {check.name}\n" not in page] == []


@pytest.mark.parametrize(("iterations", "found"), [(2, False), (9, False), (10, True)])
def test_a_higher_rate_is_advised_from_20_updates_on(simulated: Simulated, iterations: int, found: bool):
    """Two updates an iteration: ten times the rate does in 20 updates what the rate does in 200."""
    sim = simulated.learns_nothing()
    sim.iterations = iterations
    sim.columns["policy/clip_fraction"] = np.zeros(40)
    sim.columns["policy/approx_kl"] = np.full(40, 1e-14)
    result = diagnosis(sim.write())
    told = {"weights hardly move", "clip never acts"}
    assert (told <= {each.name for each in result.findings}) is found
    assert (told <= result.not_looked_at.keys()) is not found
    if not found:
        words = f"it needs 20 updates of the weights, and there are {2 * iterations}"
        assert {result.not_looked_at[name] for name in told} == {words}


def test_the_search_for_a_loss_scale_is_no_explosion(simulated: Simulated):
    """One update of each of the first two iterations is skipped: 2 of 8, more than the share of a long run."""
    simulated.iterations = 4
    simulated.columns["optim/skipped"][:2] = 0.5
    assert "gradient explodes" not in [each.name for each in diagnosis(simulated.write()).findings]
    simulated.columns["optim/skipped"][:3] = 0.5
    assert "gradient explodes" in [each.name for each in diagnosis(simulated.write()).findings]


def test_few_images_of_one_score_are_no_saturation(simulated: Simulated):
    """Eight of eight images with one score come by chance in one case of 128 at even odds, and often at others."""
    simulated.before = simulated.after = np.full((8, 2), 1.0)
    assert "reward saturated" in diagnosis(simulated.write()).not_looked_at
    simulated.before = simulated.after = np.full((10, 2), 1.0)
    assert "reward saturated" in [each.name for each in diagnosis(simulated.write()).findings]


def test_every_advice_names_an_option_of_a_recipe():
    """The keys that the checks name, against the options of the embedded recipe and of all methods and samplers."""
    import importlib

    known = set(leaves(resolve(load_config("quickstart", ["rollout.exploration={pool: 64}"])).tree()))
    for kind, where in (("algorithms", "algorithm"), ("samplers", "rollout.sampler"), ("models", "model")):
        for name in registry.names(kind):
            config = importlib.import_module(f"flowrl.{kind}.{name}").Config
            known |= {f"{where}.{item.name}" for item in fields(config)}
    known |= {".".join(key.split(".")[:n]) for key in known for n in range(1, key.count(".") + 1)}
    named = {option for option, _ in settings.REMEDIES.values()}
    for check in CHECKS:
        entries = (check.texts, *check.texts.get("cases", {}).values())
        named |= {entry["change"][0] for entry in entries if "change" in entry}
    whole = {key for key in named if re.fullmatch(r"[a-z]+(\.\w+)+", key)}  # the rest have words of the check in them
    assert len(whole) > 10
    assert whole - known == set()


def test_the_words_of_every_text_are_those_that_its_check_gives():
    """A word that a check forgets would end `flowrl diagnose`, in a case that few runs have."""
    for check in CHECKS:
        source, cases = inspect.getsource(check.look), check.texts.get("cases", {})
        entries = (check.texts, *cases.values())
        texts = [
            text for each in entries for part in ("sentence", "number", "change") for text in listed(each.get(part))
        ]
        words = {name for text in texts for _, name, _, _ in Formatter().parse(text) if name}
        assert words - {"value", "limit", "noun"} <= given(source), check.name
        assert {case for case in cases if f'"{case}"' not in source} == set(), check.name


def given(source: str) -> set[str]:
    """Names of keyword arguments and keys in a source."""
    return {name for pair in re.findall(r'\b(\w+)=|"(\w+)": ', source) for name in pair if name}


def listed(text: str | list[str] | None) -> list[str]:
    return text if isinstance(text, list) else [text] if text else []
