"""Pushing: only by the word, only the exported folder, and never half-told."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from flowrl.apps.publish import publish
from flowrl.commands.export import command
from flowrl.core.errors import ConfigError, UploadError
from tests import tiny_sd3 as tiny
from tests.apps.publish.test_card import finish
from tests.apps.publish.test_export import write_run


class FakeHub:
    """Records every call."""

    def __init__(self, *, there: bool | None = None, fails: str = "") -> None:
        self.there, self.fails, self.calls = there, fails, list[tuple[str, Any]]()

    def _called(self, name: str, given: Any) -> None:
        self.calls.append((name, given))
        if name == self.fails:
            raise ConnectionError("no route to host")

    def whoami(self) -> Any:
        self._called("whoami", None)

    def repo_exists(self, repo_id: str) -> bool:
        return self.there is not None

    def model_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=self.there)

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        self._called("create_repo", {"repo_id": repo_id, "private": private, "exist_ok": exist_ok})

    def upload_folder(self, **given: Any) -> Any:
        self._called("upload_folder", given)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tiny.save(tmp_path_factory.mktemp("models") / "base", tiny.pipeline(sd35=True))
    return finish(write_run(tmp_path_factory.mktemp("runs") / "tuned", base, tiny.LORA))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub that can be reached, with a token."""
    fake = FakeHub()
    monkeypatch.setattr(publish, "hub", lambda: fake)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_test")
    return fake


def test_only_the_exported_folder_is_uploaded(run, api, tmp_path, capsys):
    command(run, tmp_path / "out", push="ann/my-lora", private=True)
    names = [name for name, _ in api.calls]
    assert names == ["whoami", "create_repo", "upload_folder"]
    assert api.calls[1][1] == {"repo_id": "ann/my-lora", "private": True, "exist_ok": True}
    upload = api.calls[2][1]
    assert (upload["repo_id"], upload["folder_path"]) == ("ann/my-lora", str(tmp_path / "out"))
    assert sorted(upload["allow_patterns"]) == ["README.md", "pytorch_lora_weights.safetensors"]
    assert "https://huggingface.co/ann/my-lora" in capsys.readouterr().out


def test_without_the_word_nothing_is_sent(run, api, tmp_path):
    command(run, tmp_path / "out")
    assert api.calls == []


def test_a_dry_run_shows_files_repository_and_card_and_opens_no_socket(run, tmp_path, monkeypatch, capsys):
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(publish, "hub", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = sorted(run.iterdir())
    command(run, push="ann/my-lora", dry_run=True, private=True)
    told = capsys.readouterr().out
    assert "To ann/my-lora (private)" in told
    assert "pytorch_lora_weights.safetensors" in told
    assert "kB" in told
    assert "library_name: diffusers" in told
    assert "## Limits" in told
    assert sorted(run.iterdir()) == before


@pytest.mark.parametrize("missing", ["network", "token"])
def test_offline_or_without_a_token_the_export_is_kept_and_nothing_is_sent(run, api, tmp_path, monkeypatch, missing):
    if missing == "network":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    out = tmp_path / "out"
    reason = "HF_HUB_OFFLINE is set" if missing == "network" else "no token of the hub; run hf auth login"
    with pytest.raises(ConfigError, match=f"{reason}.*the export is in .*hf upload ann/my-lora"):
        command(run, out, push="ann/my-lora")
    assert api.calls == []
    assert (out / "pytorch_lora_weights.safetensors").is_file()


@pytest.mark.parametrize(
    ("call", "state"),
    [("whoami", "nothing was sent"), ("create_repo", "may be incomplete"), ("upload_folder", "may be incomplete")],
)
def test_a_broken_connection_is_told_with_what_is_kept(run, api, tmp_path, call, state):
    api.fails = call
    with pytest.raises(UploadError, match=f"no route to host; .*{state}.*the export is in"):
        command(run, tmp_path / "out", push="ann/my-lora")
    assert api.calls[-1][0] == call


def test_a_private_push_to_a_public_repository_is_refused(run, api, tmp_path):
    api.there = False
    with pytest.raises(ConfigError, match="is there and is public"):
        command(run, tmp_path / "out", push="ann/my-lora", private=True)
    assert [name for name, _ in api.calls] == ["whoami"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"push": "my-lora"}, "the owner is missing; give OWNER/NAME"),
        ({"push": "a/b/c"}, "give OWNER/NAME"),
        ({"private": True}, "--private: for --push alone; leave out --private"),
        ({"dry_run": True}, "--dry-run: for --push alone; leave out --dry-run"),
        ({}, "--out is missing"),
    ],
)
def test_words_that_do_not_fit_are_refused_before_anything_is_written(run, options, reason):
    with pytest.raises(ConfigError, match=reason):
        command(run, **options)
