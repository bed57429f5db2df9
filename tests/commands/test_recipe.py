"""`flowrl new config`: a recipe by what a person knows runs, fits, and says why; what nothing fits is refused."""

import io
import json
from itertools import product
from pathlib import Path

import pytest
import yaml

from flowrl.commands import _plan_hours as hours
from flowrl.commands._recipe import CHOICES, Draft, Known
from flowrl.commands.new import command, write
from flowrl.commands.plan import command as plan
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError, Fault
from flowrl.planning import memory
from flowrl.run.trainer import Trainer

SD3, FLUX, WAN = (
    "stabilityai/stable-diffusion-3.5-medium",
    "black-forest-labs/FLUX.1-dev",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
)
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
PAIRS = "hf:owner/pairs:train"


@pytest.fixture
def measured(monkeypatch):
    """Peaks of a model of 20 GiB in its encoding and 4 GiB a row in its update, since measuring takes seconds."""

    def stand_in(adapter, encoders, resolved, *, reference):
        config, rows = resolved.model.config, resolved.run.optim.batch_size
        update = rows * 2**30 * (1 if config.gradient_checkpointing is True else 4)
        known = {"encode": 1, "rollout": 2**30, "decode": 2**30, "images": 2**30, "evaluation": 2**30, "update": update}
        return known | {"forward_flop": 1.0, "edge_flop": 1.0, "fitted": 1.0}, {}

    monkeypatch.setattr(memory, "_measure", stand_in)


def tree(draft: Draft) -> dict:
    return yaml.safe_load(str(draft))


@pytest.mark.parametrize(
    ("model", "learns", "gb"),
    [
        *product((SD3, FLUX, WAN, "tiny-sd3"), ("reward", "pairs"), (24, 80)),
        (SDXL, "reward", 24),
        ("tiny-sd", "pairs", 8),
    ],
)
def test_every_combination_of_answers_is_planned(measured, tmp_path, model, learns, gb):
    reward = "jpeg" if model.startswith("tiny") else "ocr"
    known = Known(model, [reward], memory=gb) if learns == "reward" else Known(model, memory=gb, pairs=PAIRS)
    draft = Draft("mine", known, tmp_path)
    (tmp_path / "mine.yaml").write_text(str(draft), encoding="utf-8")
    run = resolve(load_config(tmp_path / "mine.yaml"), offline=True)
    assert (run.run.name, run.model.config.path) == ("mine", model)
    assert draft.needs is not None
    assert draft.needs <= gb * 2**30
    assert bool(run.members) == (learns == "pairs")
    assert [plan.name for plan in run.rewards] == ([] if learns == "pairs" else [reward])
    video, real = model == WAN, not model.startswith("tiny")
    expected = "pairs" if learns == "pairs" else "noise" if model == SDXL else "video" if video else "memory"
    if learns == "reward" and not video and model != SDXL and (gb > 24 or not real):
        expected = "nothing"
    assert [run.algorithm.name, draft.why["algorithm"]] == CHOICES["methods"][expected]


def test_the_methods_are_those_of_the_page():
    page = (Path(__file__).resolve().parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    needs = {
        "pairs": "pairs of images, no reward",
        "noise": "noise-prediction model (SD 1.5, SDXL)",
        "video": "video",
        "rewards": "several rewards",
        "memory": "small card, little memory",
        "hours": "fastest on the clock",
    }
    for need, words in needs.items():
        assert f"algorithms/{CHOICES['methods'][need][0]}.md" in rows[words]


def test_savings_are_taken_until_it_fits_and_each_has_its_reason(measured, tmp_path):
    large, small = (Draft("mine", Known(SD3, ["jpeg"], memory=gb), tmp_path) for gb in (80, 16))
    assert tree(large)["model"]["gradient_checkpointing"] is False
    assert tree(small)["model"]["gradient_checkpointing"] is True
    assert tree(small)["model"]["memory"] == {"group_offload": ["text_encoders"]}
    assert "# model.gradient_checkpointing: updates recompute" in str(small)
    assert tree(small)["optim"]["batch_size"] == 8
    with pytest.raises(
        ConfigError, match=r"--memory 2: .* needs [\d.]+ GiB by flowrl plan.*give --memory \d+"
    ) as caught:
        Draft("mine", Known(SD3, ["jpeg"], memory=2), tmp_path)
    (remedy,) = caught.value.remedies
    nearest = float(remedy.flag.split()[1])
    needs = Draft("mine", Known(SD3, ["jpeg"], memory=nearest), tmp_path).needs
    assert needs is not None
    assert needs <= nearest * 2**30


def test_hours_give_the_iterations_where_there_is_a_measurement(measured, tmp_path):
    one = Draft("mine", Known(SD3, ["pickscore"], memory=80, hours=6), tmp_path)
    assert (tree(one)["algorithm"], one.why["optim"]) == ({"name": "awm"}, "as sd3/flow_grpo-pickscore")
    took = hours.seconds("NVIDIA H100 80GB HBM3", one.resolved, one.adapter, one.result, one.own)
    assert took is not None
    assert took[1] is not None
    assert 0.7 * 6 * 3600 < tree(one)["iterations"] * (took[0] + took[1]) <= 0.75 * 6 * 3600
    assert "hours for" in str(one.why["iterations"])
    with pytest.raises(ConfigError, match=r"--hours 0\.01: .* give --hours [\d.]+") as caught:
        Draft("mine", Known(SD3, ["jpeg"], memory=80, hours=0.01), tmp_path)
    (remedy,) = caught.value.remedies
    assert (
        tree(Draft("mine", Known(SD3, ["jpeg"], memory=80, hours=float(remedy.flag.split()[1])), tmp_path))[
            "iterations"
        ]
        >= 10
    )
    unknown = Draft("mine", Known("tiny-sd3", ["jpeg"], memory=80, hours=6), tmp_path)
    assert "no measurement" in str(unknown.why["iterations"])


def test_own_files_are_named_from_the_recipes_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("reward", "bright", tmp_path, short=True)
    Path("prompts.txt").write_text("\n".join(f"a {n} red circle" for n in range(40)), encoding="utf-8")
    command("config", "mine", Path("deeper"), model="tiny-sd3", reward=["bright.py"], prompts="prompts.txt", memory=8.0)
    run = resolve(load_config("deeper/mine.yaml"), offline=True)
    assert run.run.data.prompts == str(tmp_path / "prompts.txt")
    assert [plan.entry.path for plan in run.rewards] == [str(tmp_path / "bright.py")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rewards": ["jpg"]}, "did you mean 'jpeg'"),
        ({"rewards": ["broken.py"]}, r"--reward broken\.py is refused, and no recipe is written.*shape"),
        ({"rewards": ["nowhere.py"]}, r"--reward nowhere\.py is refused"),
        ({"rewards": ["jpeg"], "model": "stabilityai/stable-diffusion-3.5-mediun"}, "did you mean .*3.5-medium'"),
        ({"rewards": ["jpeg"], "prompts": "nowhere.txt"}, "nowhere.txt"),
        ({"rewards": ["motion"]}, "video"),
    ],
)
def test_what_cannot_be_used_is_named_before_a_recipe_is_written(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def score(images, prompts, metadata):\n    return images.mean()\n", encoding="utf-8")
    with pytest.raises(Fault, match=f"(?s){words}"):
        write("config", "mine", tmp_path, known=tuple(vars_of({"model": "tiny-sd3"} | given)))
    assert not (tmp_path / "mine.yaml").exists()


def vars_of(given: dict) -> list:
    known = Known(**given)
    return [known.model, known.rewards, known.prompts, known.pairs, known.memory, known.hours]


def test_a_terminal_is_asked_for_what_is_missing_and_a_script_is_told(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(
        ConfigError, match="needs --model, and --reward or --pairs; give --model tiny-sd3 --reward shapes"
    ):
        Known().ask()
    with pytest.raises(ConfigError, match=r"give --reward shapes$"):
        Known("tiny-sd3").ask()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["jpeg shapes", "", "24", ""])
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    known = Known("tiny-sd3")
    known.ask()
    assert known == Known("tiny-sd3", ["jpeg", "shapes"], memory=24.0)
    assert [question.partition(",")[0] for question in asked[:2]] == ["rewards", "prompts"]
    monkeypatch.setattr("builtins.input", lambda question: "much")
    with pytest.raises(ConfigError, match="memory='much' must be a number"):
        Known("tiny-sd3", ["jpeg"]).ask()


def test_the_answer_of_a_plan_stands_first(capsys):
    plan("quickstart", [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Answer")
    assert lines[1].startswith("memory: ")
    assert "fits a card of 8 GB" in lines[1]
    assert [line for line in lines[:8] if line.startswith("NVIDIA H200: no measurement of this model")]


@pytest.mark.slow
def test_a_written_recipe_is_measured_and_trains_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command("config", model="tiny-sd3", reward=["shapes"], memory=8.0)
    few = ["data.max_eval_prompts=2", "rollout.prompts_per_iteration=2", "rollout.group_size=4"]
    plan("mine.yaml", few, measure=True)
    assert "s an iteration" in capsys.readouterr().out.partition("Configuration")[0].partition("measured: ")[2]
    assert not Path("runs").exists()
    resolved = resolve(load_config("mine.yaml", [*few, "iterations=1"]))
    Trainer(resolved).fit()
    assert json.loads((resolved.run.folder / "summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_recipe_for_24_gb_fits_by_the_plan_itself(tmp_path):
    draft = Draft("mine", Known(SD3, ["ocr"], memory=24), tmp_path)
    assert draft.needs is not None
    assert 8 * 2**30 < draft.needs <= 24 * 2**30
