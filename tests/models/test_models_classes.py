"""The adapter of a model without a name: chosen by the pipeline's class, from JSON files alone."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

from flowrl.config.components import model_component
from flowrl.core import registry
from flowrl.core.errors import ConfigError, ModelError
from flowrl.models.pipelines.classes import choose, natives
from tests import tiny_sd3

CONFIGS = tiny_sd3.ROOT / "assets" / "model_configs"
RESPONSE: Any = SimpleNamespace(headers={}, request=None)  # what an error reads of an HTTP response
KNOWN: dict[str, str] = json.loads((CONFIGS / "index.json").read_text())
NATIVE = {
    "sd15": "sd",
    "sd21": "sd",
    "sdxl": "sdxl",
    "sd35-medium": "sd3",
    "sd35-large": "sd3",
    "flux1-dev": "flux",
    "qwen-image": "qwen_image",
    "wan21-t2v-1.3b": "wan",
    "wan21-t2v-14b": "wan",
    "wan22-t2v-a14b": "wan",
    "wan22-ti2v-5b": "wan",
}


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def copied(tmp_path: Path) -> Any:
    """A copy of an embedded configuration, as a local folder."""
    return lambda name: Path(shutil.copytree(CONFIGS / name, tmp_path / name))


def test_every_native_adapter_declares_its_class():
    assert set(natives().values()) == set(registry.names("models")) - {"generic"}
    assert natives()["StableDiffusion3Pipeline"] == "sd3"


@pytest.mark.parametrize("name", NATIVE)
def test_the_native_adapter_is_taken_for_its_class(copied, name):
    hub_id = next(path for path, folder in KNOWN.items() if folder == name)
    assert choose(hub_id).name == NATIVE[name]  # embedded: no network
    assert choose(str(copied(name))).name == NATIVE[name]


def test_an_asset_is_found_and_the_name_written_out():
    chosen = model_component({"path": "tiny-sd3"})
    assert (chosen.name, chosen.config.path) == ("sd3", "tiny-sd3")
    assert model_component({"path": "tiny-sd3", "name": None}).name == "sd3"
    assert model_component({"path": "tiny-sd3", "name": "generic"}).name == "generic"


@pytest.mark.parametrize("kind", ["FluxKontextPipeline", "FluxFillPipeline", "SanaPipeline", ["mine", "MyPipeline"]])
def test_any_other_class_goes_to_the_generic_adapter(copied, kind):
    folder = copied("flux1-dev")
    edit(folder / "model_index.json", _class_name=kind)
    choice = choose(str(folder))
    assert choice.name == "generic"
    assert (kind if isinstance(kind, str) else "MyPipeline") in choice.reason


SCHEDULER, UNET = "scheduler/scheduler_config.json", "unet/config.json"
OWN_GRID = sorted(name for name, family in NATIVE.items() if family in ("sd3", "flux", "qwen_image"))
"""Whose native adapters make their own grid; Wan's own scheduler is UniPC."""


@pytest.mark.parametrize(
    ("name", "file", "values", "native"),
    [
        *((name, "transformer/config.json", {"in_channels": 384}, False) for name in NATIVE if name[:2] != "sd"),
        *((name, "transformer/config.json", {"in_channels": 384}, False) for name in ("sd35-medium", "sd35-large")),
        *((name, UNET, {"in_channels": 384}, False) for name in ("sd15", "sd21", "sdxl")),
        ("sdxl", UNET, {"projection_class_embeddings_input_dim": 2560}, False),  # a refiner
        *((name, SCHEDULER, {"_class_name": "UniPCMultistepScheduler"}, name not in OWN_GRID) for name in NATIVE),
        *((name, SCHEDULER, {"_class_name": "FlowMatchEulerDiscreteScheduler"}, False) for name in ("sd15", "sdxl")),
        *((name, SCHEDULER, {"prediction_type": "flow_prediction"}, False) for name in ("sd15", "sdxl")),
    ],
)
def test_a_checkpoint_of_its_class_that_the_native_adapter_cannot_take_goes_to_the_generic_one(
    copied, name, file, values, native
):
    folder = copied(name)
    edit(folder / file, **values)
    choice = choose(str(folder))
    assert choice.name == (NATIVE[name] if native else "generic")
    assert ("cannot take this checkpoint" in choice.reason) == (not native)


def test_an_option_of_another_adapter_says_which_was_chosen_and_why():
    with pytest.raises(ConfigError) as caught:
        model_component({"path": "tiny-sd3", "call": {}})
    assert "model.call: unknown key" in str(caught.value)
    assert "model.name is left out and taken to be sd3: StableDiffusion3Pipeline is its class" in str(caught.value)
    with pytest.raises(ConfigError, match=r"model\.path is required"):
        model_component({})


def test_a_single_file_needs_a_name(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(
        ModelError, match=r"single file.*set model\.name to one of flux, qwen_image, sd, sd3, sdxl, wan"
    ):
        choose(str(tmp_path / "weights.safetensors"))


def test_what_is_no_pipeline_is_named(tmp_path, copied):
    with pytest.raises(ModelError, match="is not a pipeline folder"):
        choose(str(tmp_path))
    with pytest.raises(ModelError, match="no such file, folder or embedded asset"):
        choose("./nowhere")
    folder = copied("flux1-dev")
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"its vae/config\.json cannot be read"):
        choose(str(folder))
    (folder / "model_index.json").write_text("[")
    with pytest.raises(ModelError, match=r"its model_index\.json cannot be read"):
        choose(str(folder))


# ---- a hub id that is not embedded


def test_only_json_files_of_a_hub_id_are_downloaded(monkeypatch, copied):
    folder, asked = copied("flux1-dev"), []

    def download(repository: str, name: str, revision: str | None = None) -> str:
        asked.append((repository, name, revision))
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert model_component({"path": "owner/flux", "revision": "v2"}).name == "flux"
    names = [name for _, name, _ in asked]
    assert names[0] == "model_index.json"
    assert all(name.endswith(".json") for name in names)
    assert {(repository, revision) for repository, _, revision in asked} == {("owner/flux", "v2")}
    asked.clear()
    edit(folder / "model_index.json", _class_name="SanaPipeline")
    assert choose("owner/flux").name == "generic"
    assert [name for _, name, _ in asked] == ["model_index.json"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("no connection"), "the hub cannot be reached"),
        (RemoteEntryNotFoundError("404", response=RESPONSE), r"the hub's repository has no model_index\.json"),
        (OSError("disk"), "could not be loaded"),
    ],
)
def test_a_hub_id_that_cannot_be_read_asks_for_a_name(monkeypatch, error, words):
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(
        ModelError, match=rf"model\.path='owner/unheard-of'.*{words}.*set model\.name to one of .*generic"
    ):
        choose("owner/unheard-of")
