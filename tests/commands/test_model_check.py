"""`flowrl doctor` and `flowrl plan` on models and data that are not here: told apart, and nothing asked by a plan."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from flowrl.commands import _listed, doctor
from flowrl.commands._model_check import place_of
from flowrl.commands._plan_data import data_here
from flowrl.config.load import load_config, resolve
from flowrl.core import registry
from flowrl.core.errors import ModelError
from flowrl.models.base import ModelConfig
from tests.e2e.test_bad_input import command
from tests.tiny_sd3 import ROOT


def answer(status: int) -> Any:
    return httpx.Response(status, request=httpx.Request("HEAD", "https://huggingface.co"))


ANSWERS = [
    (GatedRepoError("gated", response=answer(403)), ("is gated", "accept its licence", "hf auth login")),
    (RepositoryNotFoundError("401", response=answer(401)), ("no such repository, or it is private", "spelling")),
    (RepositoryNotFoundError("404", response=answer(404)), ("no such repository, or it is private", "spelling")),
    (RevisionNotFoundError("404", response=answer(404)), ("has no revision 'v9'", "model.revision")),
    (RemoteEntryNotFoundError("404", response=answer(404)), ("no model_index.json",)),
    (HfHubHTTPError("401", response=answer(401)), ("refuses your token (401)", "hf auth login")),
    (HfHubHTTPError("403", response=answer(403)), ("forbids access to your token (403)",)),
    (LocalEntryNotFoundError("no connection"), ("the hub cannot be reached", "give a folder that is here")),
]


def answers(monkeypatch: pytest.MonkeyPatch, error: Exception, cached: str | None = None) -> None:
    """A hub that fails with an error; `cached` is the file in the cache."""

    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: cached)


@pytest.mark.parametrize(
    ("error", "words"), ANSWERS, ids=[f"{type(error).__name__}-{words[0]}" for error, words in ANSWERS]
)
def test_a_model_that_cannot_be_had_is_told_with_its_reason_and_remedy(monkeypatch, capsys, error, words):
    answers(monkeypatch, error)
    config = ModelConfig(path="owner/unheard-of", revision="v9")
    with pytest.raises(ModelError) as caught:
        place_of(config)
    told = str(caught.value)
    assert all(word in told for word in ("model.path='owner/unheard-of'", *words))
    others = {other[0] for _, other in ANSWERS} - {words[0]}
    assert not [other for other in others if other in told]
    resolved: Any = SimpleNamespace(model=SimpleNamespace(config=config, name="sd3"))
    assert not doctor._report("model", lambda: doctor._model(resolved))
    assert "FAIL  model" in capsys.readouterr().out


def test_a_model_that_is_here_says_so_and_one_without_weights_does_not(tmp_path):
    assert place_of(ModelConfig(path="tiny-sd3")) == "here, with weights for every part"
    folder = tmp_path / "model"
    (folder / "unet").mkdir(parents=True)
    (folder / "unet" / "config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    with pytest.raises(ModelError, match="here in part: unet has no weights"):
        place_of(ModelConfig(path=str(folder)))


def test_a_cached_model_is_found_where_the_hub_cannot_be_reached(tmp_path, monkeypatch):
    (tmp_path / "model_index.json").write_text("{}")
    answers(monkeypatch, LocalEntryNotFoundError("no connection"), str(tmp_path / "model_index.json"))
    assert "in the hub's cache here" in place_of(ModelConfig(path="owner/name"))


# ---- a plan


@pytest.fixture
def unplugged(monkeypatch) -> list[Any]:
    """Every way to the network fails, and is counted."""
    asked: list[Any] = []

    def refuse(*words: Any, **_: Any) -> Any:
        asked.append(words)
        raise AssertionError(f"a plan asked the network: {words}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # or nothing would be tried
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    return asked


@pytest.mark.parametrize("family", ["sd", "sd3", "sdxl"])
def test_recipes_on_data_of_the_hub_are_planned_without_it(family, unplugged):
    resolved = resolve(load_config(ROOT / "configs" / family / "diffusion_dpo-pickapic.yaml"), offline=True)
    told = "\n".join(data_here(resolved).lines)
    assert "data.pairs.path='hf:yuvalkirstain/pickapic_v2" in told
    assert "asks the network for nothing" in told
    assert "number of pairs: not known" in told
    assert not unplugged


def test_a_whole_plan_asks_nothing(unplugged, monkeypatch, capsys):
    recipe = str(ROOT / "configs" / "quickstart.yaml")
    code, printed = command(monkeypatch, capsys, "plan", recipe, "data.prompts=hf:owner/name", "data.eval_prompts=null")
    assert code == 0, printed
    assert "number of training prompts: not known" in printed
    assert "embeddings are counted for the texts that are known" in printed
    assert not unplugged


def test_a_plan_of_an_unknown_model_names_the_way_without_the_network(unplugged, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    recipe = str(ROOT / "configs" / "quickstart.yaml")
    code, printed = command(monkeypatch, capsys, "plan", recipe, "model={path: owner/unheard-of}")
    assert code == 2, printed
    assert "a plan sends no request to the hub" in printed
    assert "set model.name to one of" in printed
    assert not unplugged


def test_the_version_is_told(monkeypatch, capsys):
    from flowrl import __version__

    assert command(monkeypatch, capsys, "--version") == (0, f"flowrl {__version__}\n")


def test_pages_that_messages_name_are_there():
    for kind in ("models", "samplers", "algorithms", "rewards"):
        for name in registry.names(kind):
            assert (ROOT / _listed.page(kind, name)).is_file(), (kind, name)
    assert (ROOT / _listed.page("credits", "")).is_file()
    for file in Path(ROOT / "flowrl").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for word in text.replace("(", " ").replace(")", " ").replace('"', " ").replace("`", " ").split():
            page = word.rstrip(".,;:")
            # A name in braces is filled in when the message is made: those are the pages above.
            if page.startswith("docs/") and page.endswith(".md") and "{" not in page:
                assert (ROOT / page).is_file(), f"{file}: {page}"
