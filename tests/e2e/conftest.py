"""A small run on the embedded model: seconds long, with a reward that needs no verifier."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.tables import table

ROOT = Path(__file__).resolve().parents[2]
BASE = table(__file__, "run")
BRIGHTNESS = "def score(images, prompts, metadata):\n    return images.mean(dim=(1, 2, 3))\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `run.yaml` and `brightness.py`, made the working directory."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "brightness.py").write_text(BRIGHTNESS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def with_images(place: Path, file: str, height: int, width: int, reward: str) -> Path:
    """The folder of a run, with two prompts that have an image each, listed in a file, and a reward."""
    lines = []
    for k, name in enumerate(("red", "blue")):
        pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(k))
        Image.fromarray(pixels.to(torch.uint8).numpy(), "RGB").save(place / f"{name}.png")
        lines.append(json.dumps({"prompt": name, "image": f"{name}.png"}))
    (place / file).write_text("\n".join(lines))
    (place / "brightness.py").write_text(reward)
    return place


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """That folder, with `run.yaml` and `brightness.py`, as the working directory, here and in the processes started."""
    (folder / "run.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "brightness.py").write_text(BRIGHTNESS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        yield


def train(*overrides: str, resume: bool = False, accept: Sequence[str] = (), after: Sequence[Callable] = ()) -> dict:
    """Train in this process; `accept`: what `--accept-changes` names; `after`: what comes after the run."""
    from flowrl.config.load import load_config, resolve
    from flowrl.run.trainer import Trainer

    trainer = Trainer(resolve(load_config("run.yaml", list(overrides))))
    return trainer.fit(resume=resume, accept_changes=accept, after=after)


def start(*words: str) -> subprocess.Popen:
    """`flowrl WORDS` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "flowrl", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


def finish(process: subprocess.Popen, timeout_s: float = 300) -> tuple[int, str]:
    """(exit code, everything it printed)."""
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def digest(run: str | Path, iteration: int) -> str:
    """Of the tensors of a checkpoint: weights of every role, and the optimizer's moments."""
    file = Path("runs") / run / "checkpoints" / f"iteration-{iteration:06d}" / "state.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def assert_same_gradient(one: str, other: str, iteration: int = 1) -> None:
    """Of two runs after one update; their processes may differ, so it is not bitwise."""
    from safetensors.torch import load_file

    # Adam turns the gradient's last digits into signs where it is tiny; its first moment is the gradient itself.
    states = [
        load_file(f"runs/{name}/checkpoints/iteration-{iteration:06d}/state.safetensors") for name in (one, other)
    ]
    moments = [name for name in states[0] if name.startswith("optim/") and name.endswith("/exp_avg")]
    largest = max(float(states[0][name].abs().max()) for name in moments)
    assert largest > 0
    for name in moments:
        np.testing.assert_allclose(states[1][name], states[0][name], rtol=1e-3, atol=1e-4 * largest)
