"""What a distilled model declares is kept by exports, and followed by what samples them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch.testing import assert_close

from flowrl.apps.command_line import call_of
from flowrl.apps.publish.export import export
from flowrl.core.errors import ModelError
from flowrl.models import generic
from flowrl.run import judged
from flowrl.run.desk import submit
from flowrl.run.requests import Desk
from flowrl.training.signals import Signals
from flowrl.training.world import ALONE
from tests import tiny_sd3 as tiny
from tests.apps.publish.test_export import write_run

DECLARED = {"is_distilled": True, "distilled_sigmas": [1.0, 0.75, 0.5, 0.25], "distilled_kind": "nodes"}
SMALL = {"height": 32, "width": 32, "max_sequence_length": tiny.TOKENS}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.student(tmp_path_factory.mktemp("base"), sd35=True)


@pytest.fixture(scope="module", params=["lora", "full"])
def run(base: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    write_run(folder, base, tiny.LORA if request.param == "lora" else None)
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["rollout"] = {"num_inference_steps": 4, "guidance_scale": 1.0}
    tree["eval"]["guidance_scale"] = None
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


def drawn(pipe: Any, **call: Any) -> tuple[torch.Tensor, list[float]]:
    """An image, and the timesteps at which the network was called."""
    times: list[float] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, given, named: times.extend(named["timestep"].tolist()), with_kwargs=True
    )
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    image = pipe("a red circle", **SMALL, **call, generator=generator, output_type="pt", return_dict=False)[0]
    hook.remove()
    return image, times


def test_a_merged_student_says_so_and_plain_diffusers_draws_it_in_four_steps(run, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    loaded = judged.load(str(run))
    assert "is_distilled" not in caplog.text
    expected, times = drawn(loaded.pipeline, num_inference_steps=4, guidance_scale=1.0)
    folder = export(run, "merged", tmp_path / "merged")
    index = json.loads((folder / "model_index.json").read_text())
    assert index | DECLARED == index
    plain = StableDiffusion3Pipeline.from_pretrained(folder)
    assert "is_distilled" in caplog.text  # what flowrl leaves out
    image, again = drawn(plain, num_inference_steps=4, guidance_scale=1.0)
    assert again == times == [1000.0, 750.0, 500.0, 250.0]
    assert_close(image, expected, atol=1e-5, rtol=0)
    # What flowrl reads of it again: its own steps and no CFG, where nothing is said.
    other = judged.load(str(folder))
    assert other.call == {"num_inference_steps": 4, "guidance_scale": 1.0}
    assert other.distilled == loaded.distilled


def test_a_students_own_steps_are_asked_for_by_flags(run):
    loaded = judged.load(str(run))
    given = (loaded.pipeline, loaded.call)
    assert call_of(*given, None, None, [], loaded.distilled)["num_inference_steps"] == 4
    with pytest.raises(ModelError, match=r"--steps 7: .*; give --steps 4$"):
        call_of(*given, 7, None, [], loaded.distilled)
    for scale, words in ((2.0, []), (None, ["guidance_scale=2"])):
        with pytest.raises(ModelError, match=r"--guidance 2: .*takes no CFG.*; give --guidance 1$"):
            call_of(*given, None, scale, words, loaded.distilled)


@pytest.mark.parametrize(("options", "words"), [({"steps": 7}, "--steps 7: "), ({"guidance": 2.0}, "--guidance 2: ")])
def test_a_run_under_way_answers_what_a_student_does_not_take(base, tmp_path, options, words):
    made = StableDiffusion3Pipeline.from_pretrained(base)
    drawn = SimpleNamespace(prompts=("a red circle",), texts=())
    parts = SimpleNamespace(previews=drawn)
    session: Any = SimpleNamespace(model=tiny.adapter(made), iteration=1, world=ALONE, parts=parts)
    saver: Any = SimpleNamespace(settle=lambda: None, folder=SimpleNamespace(path=tmp_path))
    desk = Desk(tmp_path, ALONE, Signals())
    desk.open(launched=False)
    submit(tmp_path, "sample", options)
    desk.serve(session, saver, last=False)
    (file,) = (tmp_path / "asked").glob("*.json")
    answer = json.loads(file.read_text())
    assert answer["state"] == "failed"
    assert answer["text"].startswith(f"{words}the model is distilled"), answer


def test_a_lora_of_a_student_comes_with_what_its_base_declares(base, tmp_path):
    run = write_run(tmp_path / "run", base, tiny.LORA)
    export(run, "diffusers", tmp_path / "lora")
    assert json.loads((tmp_path / "lora" / "flowrl.json").read_text()) == DECLARED
    plain = write_run(tmp_path / "plain", tiny.save(tmp_path / "base", tiny.pipeline(sd35=True)), tiny.LORA)
    export(plain, "diffusers", tmp_path / "out")
    assert not (tmp_path / "out" / "flowrl.json").exists()


def test_the_users_word_is_exported(tmp_path):
    silent = tiny.save(tmp_path / "base", tiny.pipeline(sd35=True))
    run = write_run(tmp_path / "run", silent, tiny.LORA, distilled="flow_map")
    index = json.loads((export(run, "merged", tmp_path / "out") / "model_index.json").read_text())
    assert (index["is_distilled"], index["distilled_kind"], "distilled_sigmas" in index) == (True, "flow_map", False)


def test_the_generic_adapter_reads_the_same(base):
    model = generic.build(generic.Config(path=str(base), call={"max_sequence_length": tiny.TOKENS}))
    assert model.distilled is not None
    assert model.schedule(4).sigmas[:-1].tolist() == pytest.approx(model.distilled.nodes)
    with pytest.raises(ModelError, match="takes no CFG"):
        model.check_guidance(2.0)
