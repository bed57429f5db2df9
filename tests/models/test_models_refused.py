"""Models that cannot be trained as configured: named with the remedy, for every kind of adapter, before training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrl.core import registry
from flowrl.core.errors import ModelError
from flowrl.models import generic
from flowrl.models.base import LoraSettings
from flowrl.models.weights.roles import Weights
from flowrl.planning import parity
from tests import tiny_pipelines as tiny

CASES = {"sd3": "sd3", "flux": "flux", "qwen_image": "qwen_image", "wan": "wan", "generic": "flux"}
CLASSES = {name: registry.load("models", case).PIPELINE for name, case in CASES.items()}
EVERY = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny pipelines; text encoders that stand in for large ones are null in them."""
    root = tmp_path_factory.mktemp("models")
    for case in set(CASES.values()):
        tiny.make(case).save_pretrained(root / case)
    return {name: root / case for name, case in CASES.items()}


@pytest.fixture
def copied(saved: dict[str, Path], tmp_path: Path) -> Any:
    """A copy of an adapter's folder, with entries of its model_index.json changed."""

    def copy(name: str, **entries: Any) -> Path:
        folder = Path(shutil.copytree(saved[name], tmp_path / name))
        index = folder / "model_index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | entries))
        return folder

    return copy


def build(name: str, path: Path, pipeline: Any = None, **options: Any) -> Any:
    module = registry.load("models", name)
    own = {"call": {"max_sequence_length": 8}} if name == "generic" else {"max_sequence_length": 8}
    config = module.Config(path=str(path), **({"height": 16, "width": 16} | own | options))
    if pipeline is None:
        return module.build(config)
    return (module.Generic if name == "generic" else module.FAMILY.adapter)(pipeline, config)


@EVERY
def test_a_folder_that_is_no_pipeline(name, tmp_path):
    with pytest.raises(
        ModelError, match=r"is not a pipeline folder: it has no model_index\.json; give the folder that"
    ):
        build(name, tmp_path)


@EVERY
def test_a_component_without_its_folder(name, copied):
    folder = copied(name)
    shutil.rmtree(folder / "vae")
    with pytest.raises(ModelError, match="names 'vae', but there is no folder 'vae'; copy the whole pipeline"):
        build(name, folder)


@EVERY
@pytest.mark.parametrize("part", ["vae", "scheduler"])
def test_a_component_that_is_null(name, copied, part):
    with pytest.raises(ModelError, match=rf"{CLASSES[name]} needs its component '{part}'.*give a complete pipeline"):
        build(name, copied(name, **{part: [None, None]}))


@EVERY
def test_a_text_encoder_that_is_null(name, copied):
    with pytest.raises(ModelError, match=rf"{CLASSES[name]} needs its component 'text_encoder'"):
        build(name, copied(name, text_encoder=[None, None], tokenizer=[None, None])).encode(["a red circle"])


@pytest.mark.parametrize("name", sorted(set(CASES) - {"generic"}))
def test_a_folder_of_another_class_than_the_named_adapters(name, copied):
    folder = copied(name, _class_name="SanaPipeline")
    with pytest.raises(ModelError, match=rf"is a SanaPipeline, and this adapter is for {CLASSES[name]}; leave"):
        build(name, folder)


@EVERY
@pytest.mark.parametrize("kind", ["DPMSolverMultistepScheduler", "FlowMatchHeunDiscreteScheduler"])
def test_a_scheduler_whose_steps_cannot_be_made_stochastic(name, kind):
    import diffusers

    pipeline = tiny.make(CASES[name])
    pipeline.scheduler = getattr(diffusers, kind)()
    with pytest.raises(ModelError, match=rf"{kind}|FlowMatchEulerDiscreteScheduler") as caught:
        build(name, Path("tiny"), pipeline).schedule(4)
    assert "FlowMatchEulerDiscreteScheduler" in str(caught.value) or "use_flow_sigmas" in str(caught.value)
    assert "Hooked" not in str(caught.value)


@pytest.mark.parametrize("name", ["generic", "wan"])
def test_a_scheduler_without_a_step(name):
    pipeline = tiny.make(CASES[name])
    pipeline.scheduler.__class__ = type("Endless", (type(pipeline.scheduler),), {"step": None})
    with pytest.raises(ModelError, match=r"has no step\(\) and set_timesteps\(\)"):
        build(name, Path("tiny"), pipeline).schedule(4)


@EVERY
def test_lora_targets_that_match_nothing(name):
    model = build(name, Path("tiny"), tiny.make(CASES[name]))
    with pytest.raises(ModelError, match=r"targets=\['to_z'\] binds to no module of .*; try model.lora.targets=null$"):
        Weights(model.network, LoraSettings(rank=2, alpha=2, targets=["to_z"]), model.lora_targets, seed=0)


def test_a_size_that_the_network_has_no_positions_for_is_one_line():
    """As `flowrl doctor --model tiny-wan`, at the size of Wan's own call."""
    with pytest.raises(ModelError, match="WanPipeline cannot be used at 832 x 480 px: RuntimeError: shape"):
        next(parity.checks(generic.build(generic.Config(path="tiny-wan")), 1.0))
