"""The four-step student: what it is taught, that its seed decides it, and what the shipped folder is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flowrl
from flowrl.core.types import Condition
from flowrl.diffusion.process import FlowProcess
from scripts.pretraining import student
from scripts.pretraining.__main__ import parse
from scripts.pretraining.student import NODES, SHARED, Round, Settings, Teacher
from scripts.pretraining.student_measure import figures
from tests.tiny_sd3 import ROOT

TEACHER, FOLDER = ROOT / "assets" / "tiny-sd3", ROOT / "assets" / "tiny-sd3-student"


def _settings(output: Path = FOLDER, **changed: Any) -> Settings:
    first = Round(trajectories=8, updates=2, rate=1e-3)
    rounds = (first, Round(trajectories=8, updates=1, rate=1e-3))
    return Settings(**{"output": output, "teacher": TEACHER, "rounds": rounds, "batch_size": 4} | changed)


def _walked(walker: Any) -> tuple[Tensor, Tensor]:
    """States and velocities at the nodes, [4, 5], of the field of `Bend` from 0."""
    bend: Any = Bend()
    walk = Teacher(bend, _settings()).path(torch.zeros(3, 5), Condition({"text": torch.zeros(3, 1)}), walker)
    _, states, velocities = zip(*walk, strict=True)
    return torch.stack(states)[:, 0], torch.stack(velocities)[:, 0]


class Bend:
    """An adapter whose velocity is its timestep: 1000 sigma everywhere, times the guidance scale."""

    process, prediction_type, channel_axis = FlowProcess(), "velocity", 1

    def predict(self, x: Tensor, timestep: Tensor, cond: Condition, guidance_scale: float) -> Tensor:
        return guidance_scale * timestep[:, None].expand_as(x)


MEANS = torch.tensor([4000 * (sigma - 1 / 16) for sigma in NODES])[:, None].expand(4, 5)
"""Of v = 4000 sigma in two steps of 1/8 from each node."""


def test_a_lesson_is_the_mean_velocity_of_the_teachers_own_steps_to_the_next_node():
    states, velocities = _walked(None)
    assert_close(velocities, MEANS)
    assert_close(states[1:], states[:-1] - velocities[:-1] / 4)
    assert not states[0].any()


def test_where_the_student_walks_the_states_are_its_own_and_the_velocities_the_teachers():
    """The student has the same field without guidance: one step of 1/4 at each node's velocity."""
    states, velocities = _walked(Bend())
    assert_close(states[:, 0], torch.tensor([0.0, -250.0, -437.5, -562.5]))
    assert_close(velocities, MEANS)


def test_two_rounds_twice_give_the_same_bits_and_another_seed_others(tmp_path: Path):
    """And what is written loads with them, but for their rounding to half precision, at the declared nodes."""
    models = [student.distil(_settings(tmp_path, seed=seed)) for seed in (3, 3, 4)]
    states = [model.adapter.network.state_dict() for model in models]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not all(torch.equal(states[0][key], states[2][key]) for key in states[0])
    student.write(models[0], _settings(tmp_path))
    written = student.load(tmp_path)
    assert written.adapter.distilled is not None
    assert written.adapter.distilled.nodes == NODES
    for key, value in written.adapter.network.state_dict().items():
        assert torch.equal(value, states[0][key].half().float())


def test_the_record_is_of_the_scripts_settings():
    record = json.loads((FOLDER / "pretraining.json").read_text(encoding="utf-8"))
    args = parse(["tiny-sd3-student"])
    settings = Settings(seed=args.seed, teacher=args.teacher, output=args.output)
    assert record["settings"] == json.loads(json.dumps(settings.facts()))


def test_the_students_folder_declares_itself_shares_its_text_and_vae_and_stays_below_nine_megabytes():
    index = json.loads((FOLDER / "model_index.json").read_text(encoding="utf-8"))
    declared = {"is_distilled": True, "distilled_sigmas": [1.0, 0.75, 0.5, 0.25], "distilled_kind": "nodes"}
    assert declared.items() <= index.items()
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 9e6
    shared = [file.relative_to(FOLDER) for file in files if file.parent.name in SHARED]
    assert {name.parent.name for name in shared} == set(SHARED)
    assert all((FOLDER / name).read_bytes() == (TEACHER / name).read_bytes() for name in shared)


def test_plain_diffusers_samples_the_student_at_its_four_nodes():
    """With T5 tokens padded to 256, as the pipeline does by itself."""
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline

    pipe: Any = StableDiffusion3Pipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler.set_timesteps(4)
    assert pipe.scheduler.sigmas.tolist() == [*NODES, 0.0]
    seen = []

    def watch(pipe: Any, step: int, timestep: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.append(float(timestep))
        return kwargs

    image = pipe(
        "a red circle", num_inference_steps=4, guidance_scale=1.0, callback_on_step_end=watch, output_type="np"
    )
    assert seen == [1000 * sigma for sigma in NODES]
    assert image.images[0].std() > 0.05


def test_a_lora_trains_on_the_student_at_its_nodes():
    """An iteration of the lab's recipe; every step is noisy but the last."""
    words = {
        "model.path": "tiny-sd3-student",
        "rollout.num_inference_steps": 4,
        "eval.num_inference_steps": 4,
        "rollout.prompts_per_iteration": 2,
        "rollout.group_size": 4,
        "data.max_prompts": 4,
        "data.max_eval_prompts": 2,
    }
    recipe = ROOT / "configs" / "lab" / "flow_grpo-lora.yaml"
    with flowrl.Session(str(recipe), *(f"{key}={value}" for key, value in words.items())) as session:
        assert session.model.schedule(4).sigmas.tolist() == [*NODES, 0.0]
        assert session.step(1)["grad/norm"] > 0


@pytest.mark.slow
def test_the_shipped_student_passes_as_often_as_its_record_says():
    """All held-out captions, one seed, the same noise: rounding moves single images only."""
    from flowrl.diffusion.plan import solver_plan

    record = json.loads((FOLDER / "pretraining.json").read_text(encoding="utf-8"))
    model = student.load(FOLDER)
    found = figures(model, solver_plan(model.adapter.schedule(4)), seeds=1)["strict"]["mean"]
    assert abs(found - record["rows"]["student, 4 steps"]["strict"]["mean"]) < 0.06
