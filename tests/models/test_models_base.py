"""Where a model comes from, and what it says where it cannot be loaded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline

from flowrl.core.errors import ConfigError, ModelError
from flowrl.models import sd3
from flowrl.models.base import LoraSettings
from flowrl.models.pipelines.paths import asset_folder, null_components, resolve_path
from flowrl.scoring.entries import reward_plan
from tests import tiny_sd3 as tiny


def test_a_single_safetensors_file_goes_to_the_single_file_loader(tmp_path, monkeypatch):
    file = tmp_path / "sd35.safetensors"
    file.touch()
    seen = {}

    def load(path, **options):
        seen.update(options, path=path)
        return tiny.pipeline()

    monkeypatch.setattr(StableDiffusion3Pipeline, "from_single_file", load)
    sd3.build(sd3.Config(path=str(file), load_t5=False))
    assert seen == {"path": str(file), "dtype": torch.float32, "text_encoder_3": None, "tokenizer_3": None}
    with pytest.raises(ModelError, match="belong to a hub id, not to a single file"):
        sd3.build(sd3.Config(path=str(file), variant="fp16"))


def test_a_file_that_is_no_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "broken.safetensors"
    file.write_bytes(b"no tensors here")
    with pytest.raises(ModelError, match=r"model\.path='.*broken\.safetensors' could not be loaded"):
        sd3.build(sd3.Config(path=str(file)))


PICKLE = r"pickle checkpoints are not read; convert it to \.safetensors"
NOWHERE = "no such file, folder or embedded asset; a hub id looks like 'owner/name'"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *((path, PICKLE) for path in ("model.ckpt", "folder/model.pt", "model.bin")),
        *((path, NOWHERE) for path in ("./nothing", "/nothing/here", "tiny-sd4", "a/b/c", "model.safetensors")),
    ],
)
def test_pickles_and_paths_that_are_not_there_are_refused_with_what_a_path_may_be(path, message):
    with pytest.raises(ModelError, match=message):
        resolve_path(path)


def test_a_path_in_a_folder_that_is_here_asks_no_hub(tmp_path, monkeypatch):
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"'runs/nope': there is no such file .* folder runs is here; it has: quickst"):
        resolve_path("runs/nope")
    assert resolve_path("owner/nope") == "owner/nope"
    with pytest.raises(ConfigError, match=r"head='runs/nope': there is no such file"):
        reward_plan({"name": "aesthetic", "head": "runs/nope"}, "--reward aesthetic")


def test_hub_failures_name_the_remedy(monkeypatch):
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    response: Any = SimpleNamespace(headers={}, request=None)  # what the errors read of an HTTP response
    causes = {
        "is gated: accept its licence": GatedRepoError("gated", response=response),
        "no such repository, or it is private": RepositoryNotFoundError("missing", response=response),
        "without a network, give a folder": OfflineModeIsEnabled("offline"),
    }
    for message, cause in causes.items():

        def fail(*args, cause=cause, **options):
            raise OSError("wrapped, as diffusers does") from cause

        monkeypatch.setattr(StableDiffusion3Pipeline, "from_pretrained", fail)
        with pytest.raises(ModelError, match=f"^model.path='owner/name'.*{message}"):
            sd3.build(sd3.Config(path="owner/name"))
        monkeypatch.setattr(AutoencoderKL, "from_pretrained", fail)
        with pytest.raises(ModelError, match=f"^model.vae='owner/vae'.*{message}"):
            sd3.build(sd3.Config(path="owner/name", vae="owner/vae"))


def test_an_embedded_asset_goes_before_a_local_path(tmp_path, monkeypatch):
    asset, local = tmp_path / "assets" / "mine", tmp_path / "mine"
    for place in (asset, local):
        place.mkdir(parents=True)
    (asset / "model_index.json").write_text('{"text_encoder_3": [null, null], "vae": ["diffusers", "AutoencoderKL"]}')
    monkeypatch.chdir(tmp_path)
    assert asset_folder("mine") is None
    assert resolve_path("mine") == "mine"
    monkeypatch.setenv("FLOWRL_ASSETS", str(asset.parent))
    assert resolve_path("mine") == str(asset)
    assert null_components(str(asset)) == {"text_encoder_3": None}
    assert null_components("owner/name") == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rank": 0}, "rank=0"), ({"alpha": 0}, "alpha=0 must be positive"), ({"targets": []}, "binds to nothing")],
)
def test_a_lora_that_could_do_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoraSettings(**options)
