"""`flowrl serve` as a process: killed and started again in mid-run, and ended by a signal."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from flowrl.rewards import jpeg, remote
from flowrl.run.launch import free_port

pytestmark = pytest.mark.slow


def start(port: int, *words: str) -> subprocess.Popen:
    """A server that answers."""
    command = [sys.executable, "-m", "flowrl", "serve", "--reward", "jpeg", "--port", str(port), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"serving jpeg on http://127.0.0.1:{port}\n"
    return process


def pictures(iteration: int) -> torch.Tensor:
    """[12, 3, 24, 24] of 8 bits, other ones each time."""
    generator = torch.Generator().manual_seed(iteration)
    return torch.randint(0, 256, (12, 3, 24, 24), generator=generator) / 255


def test_a_server_killed_and_started_again_in_mid_run_gives_no_wrong_score_and_loses_no_sample():
    here: Any = jpeg.build(jpeg.Config())  # gives a tensor, a remote one values by name
    port = free_port()
    process = start(port)
    config = remote.Config(servers=[f"http://127.0.0.1:{port}"], reward="jpeg", max_items=3, concurrency=3)
    reward: Any = remote.build(config)
    found, under_way = {}, threading.Event()

    def train() -> None:
        for iteration in range(30):
            found[iteration] = reward.score(pictures(iteration), [""] * 12, [{}] * 12)["jpeg_kb"]
            if iteration >= 4:
                under_way.set()

    training = threading.Thread(target=train)
    training.start()
    assert under_way.wait(300)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    again = start(port)
    try:
        training.join(600)
        assert not training.is_alive()
    finally:
        again.terminate()
        assert again.wait(60) == 128 + signal.SIGTERM
    assert len(found) == 30
    for iteration, scores in found.items():
        assert scores.tolist() == here.score(pictures(iteration), [""] * 12, [{}] * 12).tolist()


def test_a_signal_ends_the_server_after_what_it_has_and_its_workers_with_it(tmp_path: Path):
    (tmp_path / "slow.py").write_text(
        "import os, time, torch\n"
        "def score(images, prompts, metadata):\n"
        "    open(os.environ['STARTED'], 'w').write(str(os.getpid()))\n"
        "    time.sleep(2)\n"
        "    return torch.ones(len(prompts))\n"
    )
    port, started = free_port(), tmp_path / "started"
    words = ["serve", "--reward", str(tmp_path / "slow.py"), "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", *words], stdout=subprocess.PIPE, env=os.environ | {"STARTED": str(started)}
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    url, found = f"http://127.0.0.1:{port}", []
    reward: Any = remote.build(remote.Config(servers=[url], reward="slow"))
    asking = threading.Thread(target=lambda: found.append(reward.score(pictures(0)[:1], [""], [{}])["slow"].tolist()))
    asking.start()
    while not (started.is_file() and started.read_text()):
        asking.join(0.02)
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGTERM
    asking.join(60)
    assert found == [[1.0]]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_what_the_user_can_mend_ends_the_command_with_2():
    for words, text in (
        (["--reward", "jpeg", "--set", "quality=200"], "quality=200 must be from 1 to 95"),
        (["--reward", "tests/toy_latent.py"], "only images are at hand here"),
        (["--reward", "jpeg", "--host", "0.0.0.0"], "give a token with --token-file or --token-env"),
    ):
        command = [sys.executable, "-m", "flowrl", "serve", "--port", "0", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2
        assert text in done.stderr
