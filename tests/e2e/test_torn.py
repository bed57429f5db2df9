"""A run that was killed, or whose disk filled, while it wrote its weights: a resumed run has the uncut run's."""

import hashlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import WriteError
from flowrl.run import handover
from flowrl.run.session import Session
from flowrl.run.state import load, mend_adapter
from tests.e2e.conftest import inside, train

SMALL = (
    *("iterations=2", "rollout.num_inference_steps=2", "rollout.group_size=2", "optim.updates_per_iteration=1"),
    "data.max_eval_prompts=1",
)
KINDS = {
    "lora": ("model.lora={rank: 2, alpha: 4}", "checkpoint.every=9"),  # one checkpoint, the last
    "full": ("model.lora=null", "checkpoint.every=1"),  # an older adapter lies there
}
CALLS = ((io, "open"), (os, "open"), (os, "replace"), (os, "rename"), (os, "unlink"), (os, "mkdir"), (os, "fsync"))


def files(folder: Path) -> dict[str, str]:
    """Digest of each file of the weights; the card next to them tells times."""
    found = {file.relative_to(folder): file for file in folder.rglob("*") if file.is_file() and file.suffix != ".md"}
    return {str(name): hashlib.sha256(file.read_bytes()).hexdigest() for name, file in found.items()}


class Places:
    """Copies of a run folder before each call that touches a file while its last adapter is written."""

    def __init__(self, run: Path, to: Path) -> None:
        self.run, self.to, self.seen, self.copies = run, to, set[str](), list[Path]()
        self.writes = self.busy = False

    def __call__(self) -> None:
        if not self.writes or self.busy:
            return
        self.busy = True  # the copy makes such calls too
        state = str(files(self.run / "adapter")) if (self.run / "adapter").is_dir() else ""
        if state not in self.seen:
            self.seen.add(state)
            self.copies.append(self.to / str(len(self.copies)))
            shutil.copytree(self.run, self.copies[-1])
        self.busy = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        write = handover.write

        def watching(run: Path, iteration: int, save: Any) -> None:
            self.writes = iteration == 2
            write(run, iteration, save)
            self.writes = False

        def told(function: Any) -> Any:
            def call(*given: Any, **options: Any) -> Any:
                self()
                return function(*given, **options)

            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handover, "write", watching)
            for owner, name in CALLS:
                patch.setattr(owner, name, told(getattr(owner, name)))
            yield

    def torn(self) -> list[Path]:
        """The copies, and each once more with its newest file cut in the middle: a kill comes inside a write too."""
        result = list(self.copies)
        for copy in self.copies[1:]:
            written = [file for file in copy.glob("adapter/**/*") if file.is_file()]
            if not written:
                continue
            newest = max(written, key=lambda file: file.stat().st_mtime_ns)
            half = copy.with_name(f"{copy.name}-half")
            shutil.copytree(copy, half)
            os.truncate(half / newest.relative_to(copy), newest.stat().st_size // 2)
            result.append(half)
        return result


@pytest.fixture(scope="module", params=KINDS)
def uncut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Places]]:
    """A run of a kind, and its places."""
    folder = tmp_path_factory.mktemp(request.param)
    with inside(folder):
        places = Places(Path("runs/run"), folder / "places")
        with places.watched():
            train(*SMALL, *KINDS[request.param])
        yield folder, places


def words(folder: Path) -> tuple[str, ...]:
    """Overrides of the runs of a folder, which has the name of their kind."""
    return *SMALL, *KINDS[folder.name.rstrip("0123456789")]


def test_a_kill_at_any_place_between_the_first_byte_of_the_weights_and_their_stamp_leaves_torn_ones(uncut):
    folder, places = uncut
    whole, torn = files(folder / "runs/run/adapter"), places.torn()
    gone = shutil.copytree(torn[-1], folder / "gone")
    shutil.rmtree(gone / "adapter")  # as a message about damaged weights tells
    # Of one file: before it, with it as the library wrote it, in order, with the stamp's temporary file; and halves.
    assert len(torn) >= 5
    assert handover.outdated(folder / "runs/run") is None
    with Session(resolve(load_config("run.yaml", [*words(folder)])), training=True) as session:
        load(session, folder / "runs/run/checkpoints", 2)
        for copy in (*torn, gone):
            left = files(copy / "adapter")
            if left == whole:  # between the stamp and the end of its call
                continue
            assert handover.outdated(copy) == 2, left
            mend_adapter(session, copy)
            assert files(copy / "adapter") == whole
            assert handover.outdated(copy) is None


def resumed(folder: Path, name: str) -> dict[str, str]:
    result = train(f"name={name}", *words(folder), resume=True)
    assert result["status"] == "finished"
    return files(Path("runs") / name / "adapter")


@contextmanager
def disk_fills(fill: Callable[[], object]) -> Iterator[None]:
    """Fill the disk when the weights of the last iteration are about to be written."""
    write = handover.write

    def on_full_disk(run: Path, iteration: int, save: Callable[[Path], object]) -> None:
        write(run, iteration, lambda to: [fill() if iteration == 2 else None, save(to)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "write", on_full_disk)
        yield


def half_of_the_weights() -> int:
    """Bytes of half a file of weights."""
    return max(file.stat().st_size for file in Path("runs/run/adapter").rglob("*.safetensors")) // 2


def test_a_disk_that_is_full_inside_the_weights_ends_the_run_and_a_resumed_one_has_them(uncut):
    """A limit on the size of files stands for the disk: it needs no mount."""
    folder, _ = uncut
    size, before = half_of_the_weights(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        told = pytest.raises(WriteError, match=r"adapter could not be written .*; the checkpoint of iteration 2")
        with disk_fills(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))), told:
            train("name=limited", *words(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not Path("runs/limited/adapter", handover.STAMP).exists()
    assert resumed(folder, "limited") == files(Path("runs/run/adapter"))


@pytest.mark.slow
def test_a_small_disk_that_fills_up(uncut, tmp_path):
    folder, _ = uncut
    disk, size = tmp_path / "disk", half_of_the_weights()
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(disk)], capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here")

    def fill() -> None:
        free = os.statvfs(disk)
        (disk / "filler").write_bytes(b"\0" * (free.f_bavail * free.f_frsize - size))

    try:
        with disk_fills(fill), pytest.raises(WriteError, match="No space left"):
            train(f"output={disk}", *words(folder))
        (disk / "filler").unlink()
        train(f"output={disk}", *words(folder), resume=True)
        assert files(disk / "run/adapter") == files(Path("runs/run/adapter"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


KILLED = """
import os, sys
from flowrl.run import handover
from flowrl.cli import main

def killed(run, iteration):
    file = max((run / "adapter").rglob("*.safetensors"))
    os.truncate(file, file.stat().st_size // 2)
    os.kill(os.getpid(), 9)

handover.complete = killed
sys.exit(main())
"""


@pytest.mark.slow
def test_a_run_that_is_killed_there_goes_on(uncut):
    folder, _ = uncut
    call = [sys.executable, "-c", KILLED, "train", "run.yaml", "name=killed", *words(folder)]
    assert subprocess.run(call, capture_output=True).returncode == -signal.SIGKILL
    assert resumed(folder, "killed") == files(Path("runs/run/adapter"))
