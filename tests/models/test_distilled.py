"""Distilled checkpoints: what says so, from stub folders of JSON files alone; what a distilled model refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.core.errors import ModelError
from flowrl.models.generic.adapter import Config, Generic
from flowrl.models.pipelines import declared, distilled
from flowrl.models.pipelines.distilled import Distilled, Kind
from flowrl.rollout.library import load_model
from tests import tiny_pipelines as tiny
from tests import tiny_sd3

NODES = [1.0, 0.75, 0.5, 0.25]
FLOW = "FlowMatchEulerDiscreteScheduler"
EULER = {"timestep_spacing": "trailing", "prediction_type": "epsilon"}
FLUX = {"guidance_embeds": False}


def stub(folder: Path, index: dict[str, Any], scheduler: str | dict[str, Any] = FLOW, network: Any = None) -> Path:
    """A folder of JSON files, as a checkpoint's."""
    values = {"_class_name": scheduler} if isinstance(scheduler, str) else scheduler
    modular = index.pop("modular", None)
    files = {"scheduler/scheduler_config.json": values, "transformer/config.json": network or {}}
    files |= {"model_index.json": index} if modular is None else {"modular_model_index.json": modular}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def read(folder: Path, said: distilled.Said | None = None) -> Distilled | None:
    scheduler, network = (
        json.loads((folder / name).read_text())
        for name in ("scheduler/scheduler_config.json", "transformer/config.json")
    )
    return distilled.found(declared.index_of(str(folder)), scheduler, network, said)


ROWS: dict[str, tuple[dict[str, Any], Kind | None, tuple[float, ...] | None]] = {
    "a student of flowrl": (
        {"index": {"is_distilled": True, "distilled_sigmas": NODES, "distilled_kind": "nodes"}},
        "nodes",
        (1.0, 0.75, 0.5, 0.25),
    ),
    "FLUX.2-klein": ({"index": {"_class_name": "Flux2KleinPipeline", "is_distilled": True}}, "nodes", None),
    "FLUX.2-klein KV": ({"index": {"_class_name": "Flux2KleinKVPipeline"}}, "nodes", None),
    "FLUX.2-klein base": ({"index": {"_class_name": "Flux2KleinPipeline"}, "network": FLUX}, None, None),
    "klein base, saved": ({"index": {"_class_name": "Flux2KleinPipeline", "is_distilled": False}}, None, None),
    "Krea-2 Turbo": ({"index": {"_class_name": "Krea2Pipeline", "is_distilled": True}}, "nodes", None),
    "Helios": ({"index": {"_class_name": "HeliosPyramidPipeline", "is_distilled": True}}, "nodes", None),
    "Cosmos3": (
        {"index": {"modular": {"is_distilled": True, "distilled_sigmas": [0.9, 0.5]}}},
        "nodes",
        (0.9, 0.5),
    ),
    "Z-Image-Turbo": ({"index": {"_class_name": "ZImagePipeline"}}, None, None),
    "FLUX.1-schnell": ({"index": {"_class_name": "FluxPipeline"}, "network": FLUX}, "nodes", None),
    "FLUX.1-dev": ({"index": {"_class_name": "FluxPipeline"}, "network": {"guidance_embeds": True}}, None, None),
    "Qwen-Image": ({"index": {"_class_name": "QwenImagePipeline"}, "network": FLUX}, None, None),
    "Wan": (
        {"index": {"_class_name": "WanPipeline"}, "network": FLUX, "scheduler": "UniPCMultistepScheduler"},
        None,
        None,
    ),
    "SANA-Sprint": ({"index": {"_class_name": "SanaSprintPipeline"}, "scheduler": "SCMScheduler"}, "consistency", None),
    "AnyFlow": ({"index": {}, "scheduler": "FlowMapEulerDiscreteScheduler"}, "flow_map", None),
    "pi-Flow": ({"index": {}, "scheduler": "PiflowScheduler"}, "nodes", None),
    "TCD": ({"index": {}, "scheduler": "TCDScheduler"}, "flow_map", None),
    "flow LCM": ({"index": {}, "scheduler": "FlowMatchLCMScheduler"}, "consistency", None),
    "LCM": ({"index": {}, "scheduler": "LCMScheduler"}, "consistency", None),
    "LCM by its network": (
        {"index": {}, "scheduler": "DDIMScheduler", "network": {"time_cond_proj_dim": 256}},
        "consistency",
        None,
    ),
    "SDXL-Turbo": (
        {"index": {}, "scheduler": {"_class_name": "EulerAncestralDiscreteScheduler"} | EULER},
        "adversarial",
        None,
    ),
    "zero terminal SNR": (
        {"index": {}, "scheduler": {"_class_name": "EulerDiscreteScheduler", "rescale_betas_zero_snr": True} | EULER},
        None,
        None,
    ),
    "a flow map of flowrl": ({"index": {"is_distilled": True, "distilled_kind": "flow_map"}}, "flow_map", None),
}


DECLARED = {"a student of flowrl", "FLUX.2-klein", "FLUX.2-klein KV", "Krea-2 Turbo", "Helios", "Cosmos3"}
DECLARED |= {"a flow map of flowrl"}


@pytest.mark.parametrize("row", ROWS)
def test_a_checkpoint_is_what_its_files_say(row, tmp_path):
    files, kind, nodes = ROWS[row]
    folder = stub(tmp_path, **{**files, "index": dict(files["index"])})
    result = read(folder)
    assert (result and result.kind, result and result.nodes) == (kind, nodes)
    assert (result is not None and result.declared) == (row in DECLARED)
    # The user's word comes first.
    assert read(folder, "none") is None
    said = read(folder, "consistency")
    assert said is not None
    assert (said.kind, said.nodes, said.declared) == ("consistency", None, True)


def test_the_option_keeps_the_listed_steps(tmp_path):
    folder = stub(tmp_path, {"distilled_sigmas": NODES, "is_distilled": True, "distilled_kind": "flow_map"})
    found = [read(folder), read(folder, "nodes")]
    assert [said and said.nodes for said in found] == [None, tuple(NODES)]
    assert None not in found


@pytest.mark.parametrize(
    "levels", [[0.25, 0.5], [1.0, 0.5, 0.5], [1.5, 0.5], [0.5, 0.0], [], "1", [True, 0.5], [1, "0.5"]]
)
def test_listed_noise_levels_that_cannot_be_are_refused_and_named(levels, tmp_path):
    folder = stub(tmp_path, {"is_distilled": True, "distilled_sigmas": levels})
    with pytest.raises(
        ModelError, match=r"distilled_sigmas=.* must fall strictly and lie in \(0, 1\].*model\.distilled=none"
    ) as caught:
        read(folder)
    assert json.dumps(levels) in str(caught.value)
    assert read(folder, "none") is None


def test_a_kind_that_is_not_known_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(ModelError, match=r"distilled_kind='node' is not known; there are: nodes, flow_map"):
        read(stub(tmp_path, {"is_distilled": True, "distilled_kind": "node"}))


@pytest.mark.parametrize(
    ("known", "entries"),
    [
        (Distilled(kind="nodes", evidence="", declared=True), {"is_distilled": True}),
        (Distilled(kind="nodes", sigmas=(1.0, 0.5), evidence="", declared=True),
         {"is_distilled": True, "distilled_sigmas": [1.0, 0.5], "distilled_kind": "nodes"}),
        (Distilled(kind="flow_map", evidence="", declared=True), {"is_distilled": True, "distilled_kind": "flow_map"}),
        (Distilled(kind="adversarial", evidence="its scheduler"), {}),
    ],
)  # fmt: skip
def test_what_is_declared_is_written_and_read_again(known, entries, tmp_path):
    folder = stub(tmp_path, {"_class_name": "StableDiffusion3Pipeline"})
    known.write(folder)
    assert (
        json.loads((folder / "model_index.json").read_text()) == {"_class_name": "StableDiffusion3Pipeline"} | entries
    )
    again = read(folder)
    assert (again and (again.kind, again.sigmas)) == ((known.kind, known.sigmas) if entries else None)


def test_a_name_alone_is_told_once(tmp_path, caplog):
    pipe = tiny_sd3.pipeline()
    with caplog.at_level(logging.WARNING, "flowrl"):
        for place, told in (("Some-Turbo-Model", 1), ("Some-Turbo-Model", 1), ("plain", 1), ("x-lightning", 2)):
            pipe.register_to_config(_name_or_path=str(tmp_path / place))
            assert declared.of_pipeline(pipe) is None
            assert len([r for r in caplog.records if "sounds like a distilled model" in r.message]) == told
        pipe.register_to_config(_name_or_path="another-turbo")
        assert declared.of_pipeline(pipe, "none") is None
        found = declared.of_pipeline(pipe, "nodes")
    assert found is not None
    assert found.kind == "nodes"
    assert len(caplog.records) == 2


# ---- pipelines


@pytest.mark.parametrize(("case", "free_at"), [("flux_2_klein", 1.0), ("krea_2", 0.0), ("z_image", 0.0)])
def test_no_guidance_is_the_scale_of_the_family(case, free_at):
    """klein and Krea-2 by their own flag, which no file need hold; Z-Image says nothing."""
    pipe: Any = tiny.make(case)
    said: Any = "nodes" if case == "z_image" else None
    if said is None:
        pipe.register_to_config(is_distilled=True)
    model = Generic(pipe, Config(path="tiny", height=16, width=16, distilled=said))
    assert model.distilled is not None
    assert model.distilled.kind == "nodes"
    assert not model.takes_guidance
    model.check_guidance(free_at)
    with pytest.raises(ModelError, match=rf"guidance_scale={free_at + 0.5:g}: .* whose scale is {free_at:g} then"):
        model.check_guidance(free_at + 0.5)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd3.student(tmp_path_factory.mktemp("student"))


def test_a_loaded_student_has_its_steps_alone(student, monkeypatch):
    model = load_model(str(student), max_sequence_length=tiny_sd3.TOKENS)
    calls: list[float] = []
    whole = model.adapter.predict

    def counted(x: Any, timestep: Any, *given: Any) -> Any:
        calls.append(float(timestep[0]))
        return whole(x, timestep, *given)

    monkeypatch.setattr(model.adapter, "predict", counted)
    images = model.sample("a red circle")
    assert calls == [1000.0, 750.0, 500.0, 250.0]
    assert torch.equal(images, model.sample("a red circle", num_inference_steps=4, guidance_scale=1.0))
    with pytest.raises(
        ModelError, match=r"num_inference_steps=7: .* 1, 0\.75, 0\.5, 0\.25 .*try num_inference_steps=4"
    ):
        model.sample("a red circle", num_inference_steps=7)
    with pytest.raises(ModelError, match=r"guidance_scale=2: .*takes no CFG.*try guidance_scale=1"):
        model.sample("a red circle", guidance_scale=2.0)
