"""tiny-kontext: its loss sees what the pipeline sees, and a stopped training goes on to the same weights."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from flowrl.models.generic.adapter import Config, Generic
from scripts.pretraining import kontext
from scripts.pretraining import kontext_stages as stages
from scripts.pretraining.__main__ import kontext_settings, parse
from scripts.pretraining.edit_prompts import as_image


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def short(folder: Path) -> kontext.Settings:
    """Settings of a few steps, with a change of pools on the way."""
    words = ["tiny-kontext", "--work", str(folder / "work"), "--output", str(folder / "tiny-kontext"), "--seed", "3"]
    counts = {"steps": 4, "batch_size": 2, "pairs": 4, "pools": 2, "save_every": 2, "look_every": 2, "look": 2}
    return replace(kontext_settings(parse(words)), **counts)


@pytest.fixture(scope="module")
def untrained() -> tuple[Any, kontext.FlowMatching]:
    """(pipeline, what is minimised on it)."""
    settings = short(Path())
    pipe = kontext.build_pipeline(0, settings.vae_from)
    return stages.quiet(pipe), kontext.FlowMatching(pipe, settings)


def test_sizes_and_words(untrained):
    pipe, _ = untrained
    assert 2.2e6 < sum(p.numel() for p in pipe.transformer.parameters()) < 2.6e6
    for pair in stages.held_out(70, kontext.edited_shapes.OPERATIONS):
        words = pair.edit.instruction.split()
        assert len(pipe.tokenizer.tokenize(pair.edit.instruction)) == len(words) <= kontext.LENGTH - 2
        assert len(pipe.tokenizer_2.tokenize(pair.edit.instruction)) == len(words)


@torch.no_grad()
def test_training_predicts_what_the_pipeline_predicts(untrained, monkeypatch):
    """The first step of a plain call: same tokens, places, text and source."""
    pipe, objective = untrained
    seen = []
    monkeypatch.setattr(pipe.scheduler, "step", lambda velocity, t, x, **_: seen.append((velocity, t, x)) or (x,))
    sources, _, texts = kontext.draw_batch(np.random.default_rng(0), 3, kontext.edited_shapes.OPERATIONS)
    images = [as_image(source) for source in sources.numpy()]
    pipe(images, texts, output_type="latent", **kontext.CALL, num_inference_steps=1)
    ((velocity, t, x),) = seen
    exact = torch.stack([torch.from_numpy(np.array(image)) for image in images]).permute(0, 3, 1, 2) / 127.5 - 1
    latents = pipe.vae.encode(exact).latent_dist.mean
    source = kontext.packed((latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor)
    embeds = objective.embed(*objective.read(texts), kontext.LENGTH)
    own = objective.predict(x, source, t.expand(3) / 1000, *embeds)
    assert own.std() > 0.01
    torch.testing.assert_close(own, velocity, atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_flowrl_predicts_edits_of_several_sources_at_once_as_one_by_one(untrained):
    call = {"_auto_resize": False, "max_sequence_length": kontext.LENGTH}
    model = Generic(untrained[0], Config(path="tiny-kontext", height=32, width=32, call=call))
    sources, _, texts = kontext.draw_batch(np.random.default_rng(1), 5, kontext.edited_shapes.OPERATIONS)
    cond = model.encode(texts, [[as_image(source)] for source in sources.numpy()])
    x = torch.randn(5, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    t = model.schedule(10).timesteps[3].repeat(5)
    together = model.predict(x, t, cond, 1.0)
    alone = [model.predict(x[k : k + 1], t[:1], cond.index(torch.tensor([k])), 1.0) for k in range(5)]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-6, rtol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


def test_a_stopped_training_goes_on_bitwise_and_ends_at_its_checkpoint_when_asked(alone, tmp_path, monkeypatch, capsys):
    from diffusers.pipelines.flux.pipeline_flux_kontext import FluxKontextPipeline

    update = stages.Stage.update

    def stopping(self: Any, loss: torch.Tensor, step: int, share: float) -> None:
        update(self, loss, step, share)
        if step == 3:
            raise KeyboardInterrupt

    whole, stopped = replace(short(tmp_path / "whole"), look_every=0), short(tmp_path / "stopped")
    stages.train(whole, 0)
    assert " held-out pairs: " not in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(stages.Stage, "update", stopping)
        with pytest.raises(KeyboardInterrupt):
            stages.train(stopped, 0)
    assert stages.train(stopped, 0, finish=True) == 2
    early = load_file(stopped.output / "text_encoder" / "model.safetensors")
    stages.train(stopped, 0)
    assert capsys.readouterr().out.count(" held-out pairs: ") == 1
    files = sorted(path.relative_to(whole.output) for path in whole.output.rglob("*.safetensors"))
    assert len(files) == 4
    for file in files:
        first, second = load_file(whole.output / file), load_file(stopped.output / file)
        assert all(torch.equal(first[key], second[key]) for key in first)
    late = load_file(stopped.output / "text_encoder" / "model.safetensors")
    assert any(not torch.equal(value, late[key]) for key, value in early.items())
    with pytest.raises(SystemExit, match=r"its seed=3, but seed=4 is asked for"):
        stages.train(replace(whole, seed=4), 0)

    assert {path.suffix for path in whole.output.rglob("*") if path.is_file()} <= {".json", ".safetensors"}
    assert sum(path.stat().st_size for path in whole.output.rglob("*")) <= 9e6
    pipe: Any = FluxKontextPipeline.from_pretrained(whole.output, torch_dtype=torch.float32)
    shares = stages.strict_accuracy(stages.quiet(pipe), 7, whole.operations, **kontext.CALL, num_inference_steps=1)
    assert set(whole.operations) < set(shares)
