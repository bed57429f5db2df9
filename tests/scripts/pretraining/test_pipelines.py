"""What the tiny pipelines learn from, and that a seed decides the rest."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flowrl.diffusion.process import VPProcess
from scripts.pretraining import pipelines, sd
from scripts.pretraining.__main__ import parse, settings_of
from scripts.pretraining.pipelines import MODELS
from scripts.pretraining.training import Settings
from tests.tiny_sd3 import ROOT


def test_the_record_of_tiny_sd3_is_of_the_scripts_settings():
    """Seed 0 on two processes, and the calls that the script reports; the lab's leaves something to learn."""
    model, folder = MODELS["tiny-sd3"], ROOT / "assets" / "tiny-sd3"
    record = json.loads((folder / "pretraining.json").read_text(encoding="utf-8"))
    settings = settings_of(parse(["tiny-sd3"]))
    assert record["settings"] == json.loads(json.dumps(settings.facts()))
    assert list(record["strict"]) == list(model.calls)
    assert 0.30 <= record["strict"][next(iter(model.calls))]["all"] <= 0.65


class Guess(torch.nn.Module):
    """A network that answers with a table's rows in turn, and keeps what it was asked."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor, timestep: Tensor, embeds: Tensor, return_dict: bool) -> tuple[Tensor]:
        self.x, self.timestep, self.embeds = x, timestep, embeds
        return (self.answer,)


def test_tiny_sds_loss_is_halfway_between_the_errors_of_eps_and_of_a_flows_velocity():
    """Worked out with flowrl's own VP process; each of n timesteps lies in its own stretch of the schedule."""

    count = 64
    torch.manual_seed(0)
    made = sd.build_pipeline(0)
    latents, rows = torch.randn(1, 4, 8, 8), torch.zeros(1, dtype=torch.long)
    unet = Guess(torch.randn(count, 4, 8, 8))
    stub = SimpleNamespace(
        unet=unet, text_encoder=made.text_encoder, tokenizer=made.tokenizer, scheduler=made.scheduler
    )
    settings: Any = None  # of the training, which a loss does not read
    objective = sd.Denoising(stub, settings, 0)
    found = objective.loss(latents, rows, count, torch.Generator().manual_seed(1))

    assert (unet.timestep * count // 1000 - torch.arange(count)).abs().max() <= 1
    sigma = (1 - made.scheduler.alphas_cumprod)[unet.timestep].sqrt()
    alpha = (1 - sigma.square()).sqrt()[:, None, None, None]
    eps = (unet.x - alpha * latents) / sigma[:, None, None, None]
    assert_close(eps.std(), torch.tensor(1.0), rtol=0, atol=0.02)
    guess = VPProcess().predict(unet.answer, unet.x, sigma, "eps")
    of_velocity = (guess.eps_hat - guess.x0_hat) - (eps - latents)
    of_eps = guess.eps_hat - eps
    assert_close(found, (of_velocity * of_eps).abs().mean(), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_a_seed_gives_the_same_weights_and_the_next_cycle_goes_on(tmp_path: Path, monkeypatch):
    """Two runs of two short cycles, one process each."""
    from safetensors.torch import load_file

    monkeypatch.setattr(pipelines, "record", lambda model, folder, settings: None)
    states = []
    for name in ("a", "b"):
        options = {
            "cycles": ((4, 1e-3, 0.5), (4, 1e-3, 0.5)),
            "vae_from": ROOT / "assets" / "tiny-sd3",
            "images": 500,
            "batch_size": 8,
        }
        settings = Settings(seed=3, processes=1, output=tmp_path / name, **options)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        pipelines.worker(0, MODELS["tiny-sd"], settings, port)
        states.append(load_file(tmp_path / name / "unet" / "diffusion_pytorch_model.safetensors"))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
