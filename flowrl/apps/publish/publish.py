"""An exported folder on the Hugging Face hub. Nothing is sent but by `push`, and nothing but the folder's files."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.filesize import decimal

from flowrl.core.errors import ConfigError, UploadError


class Hub(Protocol):
    """The part of `huggingface_hub.HfApi` that is used."""

    def whoami(self) -> Any: ...
    def repo_exists(self, repo_id: str) -> bool: ...
    def model_info(self, repo_id: str) -> Any: ...
    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...
    def upload_folder(
        self, *, repo_id: str, folder_path: str, allow_patterns: list[str], commit_message: str
    ) -> Any: ...


def hub() -> Hub:
    """The hub's API; no connection is made before a call."""
    from huggingface_hub import HfApi

    api: Any = HfApi()
    return api


def require_name(repository: str) -> None:
    """Raise ConfigError for what is no OWNER/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        if repository.count("/") == 1:
            return
        reason = "the owner is missing"
    except HFValidationError as error:
        reason = str(error).splitlines()[0]
    raise ConfigError(f"--push {repository!r}: {reason}; give OWNER/NAME, such as your-name/my-lora")


def files(folder: Path) -> list[tuple[str, int]]:
    """(name inside the folder, bytes) of every file, sorted."""
    return [
        (file.relative_to(folder).as_posix(), file.stat().st_size)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]


def listing(found: Sequence[tuple[str, int]]) -> str:
    """Files with their sizes, a line each.

    >>> print(listing([("README.md", 900), ("a.safetensors", 2_500_000)]))
    README.md      900 B
    a.safetensors  2.5 MB
    """
    width = max((len(name) for name, _ in found), default=0)
    return "\n".join(f"{name:<{width}}  {re.sub('bytes?', 'B', decimal(count))}" for name, count in found)


def push(folder: Path, repository: str, message: str, *, private: bool, api: Hub) -> str:
    """Upload the files of a folder to a model repository, which is made if it is missing; returns its address. All
    files of the folder are uploaded, and no others; the repository is OWNER/NAME, `message` that of the commit.
    `private` is a new repository; one that is there must be private then.

    Raises ConfigError: offline, without a token, or a public repository where a private one is asked for; nothing was
    sent. UploadError: the hub cannot be reached or refuses.
    """
    from huggingface_hub import constants, get_token

    kept = f"the export is in {folder}; later: hf upload {repository} {folder}"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--push {repository}: HF_HUB_OFFLINE is set, so nothing is sent; {kept}")
    if get_token() is None:
        remedy = "run hf auth login, or set HF_TOKEN"
        raise ConfigError(f"--push {repository}: there is no token of the hub; {remedy}; {kept}")
    with _told(repository, "nothing was sent", kept):
        api.whoami()
        is_public = private and api.repo_exists(repository) and not api.model_info(repository).private
    if is_public:
        raise ConfigError(f"--push {repository} --private: that repository is there and is public; {kept}")
    with _told(repository, "the upload may be incomplete", kept):
        api.create_repo(repository, private=private, exist_ok=True)
        names = [name for name, _ in files(folder)]
        api.upload_folder(repo_id=repository, folder_path=str(folder), allow_patterns=names, commit_message=message)
    return f"{constants.ENDPOINT}/{repository}"


@contextmanager
def _told(repository: str, state: str, kept: str) -> Iterator[None]:
    """One UploadError for the failures of a connection and the hub's refusals."""
    try:
        yield
    # The errors of a connection are of whichever HTTP library the hub's client stands on.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UploadError(f"--push {repository}: {type(error).__name__}: {reason}; {state}; {kept}") from error
