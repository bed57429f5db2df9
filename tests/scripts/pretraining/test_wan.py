"""tiny-wan: a stopped stage goes on to the same weights, and its result is a plain folder."""

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from flowrl import moving_shapes
from flowrl.apps.command_line import call_of
from flowrl.core.errors import ConfigError, ModelError
from scripts.pretraining import wan
from scripts.pretraining import wan_stages as stages
from scripts.pretraining.__main__ import parse, wan_settings
from tests import native


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def short(folder: Path) -> Any:
    """Settings of a few steps, with a change of frames and of pools on the way."""
    parsed = parse(["tiny-wan", "--processes", "1", "--work", str(folder / "work"), "--seed", "3"])
    phase = type(wan_settings(parsed).vae[0])
    return replace(
        wan_settings(parsed),
        output=folder / "tiny-wan",
        vae=(phase(frames=1, batch=2, steps=2), phase(frames=5, batch=1, steps=1), phase(frames=9, batch=1, steps=1)),
        steps=4,
        batch_size=2,
        videos=4,
        moments=4,
        check=1,
        save_every=2,
        look_every=2,
        look=1,
    )


def test_a_stopped_stage_goes_on_bitwise_and_the_folder_loads_in_diffusers_and_flowrl(
    alone, tmp_path: Path, monkeypatch, capsys
):
    """Each stage is stopped after its third of four steps, a step after its checkpoint."""
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline

    update = stages.Stage.update

    def stopping(self: Any, loss: torch.Tensor, step: int, share: float) -> None:
        update(self, loss, step, share)
        if step == 3:
            raise KeyboardInterrupt

    whole, stopped = (short(tmp_path / name) for name in ("whole", "stopped"))
    whole = replace(whole, look_every=0)
    with pytest.raises(SystemExit, match=r"tiny-wan holds no VAE; run .*--stage vae"):
        stages.train_denoiser(whole, 0)
    for train in (stages.train_vae, stages.train_denoiser):
        train(whole, 0)
        assert ", strict of 1 " not in capsys.readouterr().out
        with monkeypatch.context() as patch:
            patch.setattr(stages.Stage, "update", stopping)
            with pytest.raises(KeyboardInterrupt):
                train(stopped, 0)
        train(stopped, 0)
        # A look in the middle, and no weight knows of it.
        assert capsys.readouterr().out.count(" 2, strict of 1 ") == 1
    files = sorted(path.relative_to(whole.output) for path in whole.output.rglob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        first, second = load_file(whole.output / file), load_file(stopped.output / file)
        assert all(torch.equal(first[key], second[key]) for key in first)

    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".safetensors"}
    assert sum(path.stat().st_size for path in whole.output.rglob("*")) <= 12e6
    pipe: Any = WanPipeline.from_pretrained(whole.output, torch_dtype=torch.float32)
    assert min(pipe.vae.config.latents_std) > 0
    assert pipe.vae.config.latents_std != [1.0] * wan.CHANNELS
    call = next(iter(wan.MODEL.calls.values()))[0] | {"num_inference_steps": 1}
    pipe.set_progress_bar_config(disable=True)
    assert pipe("a red circle moves left", output_type="np", **call).frames.shape == (1, 9, 32, 32, 3)

    with pytest.raises(SystemExit, match="its seed=3, but seed=4 is asked for"):
        stages.train_vae(replace(whole, seed=4), 0)

    # Another try of the denoiser keeps the pools, and its record says how each was trained; the VAE's checkpoint is not
    # needed any more.
    (whole.work / "vae.safetensors").unlink()
    again = replace(whole, rate=1e-3, steps=1, pools=1)
    (whole.work / "denoiser.safetensors").unlink()
    pool = (whole.work / "latents-0-0.safetensors").stat().st_mtime_ns
    stages.train_denoiser(again, 0)
    assert (whole.work / "latents-0-0.safetensors").stat().st_mtime_ns == pool
    monkeypatch.setattr(stages, "strict_accuracy", lambda *args, **call: {"all": 0.0})
    stages.record(again.output, replace(again, two_share=0.0, vae=()), count=1)
    told = json.loads((again.output / "pretraining.json").read_text())["settings"]
    assert (told["denoiser"]["rate"], told["denoiser"]["two_share"], told["vae"]["two_share"]) == (1e-3, 0.0, 0.25)
    assert told["vae"]["phases"] == [[phase.frames, phase.batch, phase.steps] for phase in whole.vae]

    # With another VAE neither its latents nor its steps count, and without its denoiser the folder is no pipeline.
    assert (whole.output / "model_index.json").exists()
    stages.train_vae(replace(whole, work=tmp_path / "other", seed=4), 0)
    assert not (whole.output / "model_index.json").exists()
    config = whole.output / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"latents_mean": [1.0] * 4}))
    with pytest.raises(SystemExit, match=r"denoiser\.safetensors: its latents_mean=.* is asked for"):
        stages.train_denoiser(again, 0)


def test_tiny_wans_loss_reads_the_vae_and_the_text_as_the_pipeline_does():
    """What the VAE's loss decodes is what the VAE decodes, and embeddings are the pipeline's; captions are those of
    pretraining alone."""

    pipe = wan.build_pipeline(1)
    latents = torch.randn(1, 4, 5, 8, 8, generator=torch.Generator().manual_seed(0))
    captions = wan.caption_rows()
    with torch.no_grad():
        found = wan.decode(pipe.vae, latents).clamp(-1, 1)
        assert torch.equal(found, pipe.vae.decode(latents).sample)
        rows = torch.tensor([0, 5, len(captions) - 1])
        texts = [captions[row] for row in rows]
        wanted = pipe.encode_prompt(texts, do_classifier_free_guidance=False, max_sequence_length=12)[0]
        assert torch.equal(wan.FlowMatching(pipe).embed(rows), wanted)
    for frames, message in (
        (8, "one more than a multiple of 2; try model.num_frames=9"),
        (5, "makes 3 latent frames, .* 5 at a time"),
    ):
        with pytest.raises(ModelError, match=f"model.num_frames={frames} .*{message}"):
            native.adapter("wan", pipe, (32, 32), num_frames=frames, max_sequence_length=12)
    for words in ([], ["height=32"]):
        with pytest.raises(
            ConfigError, match=rf"{'width=832' if words else 'height=480'}: .* positions for 256 pixels"
        ):
            call_of(pipe, {}, None, None, words)
    with pytest.raises(
        ConfigError, match=r"num_frames=7: it makes 4 latent frames, .* 5 at a time; give --set num_frames=9"
    ):
        call_of(pipe, {}, None, None, ["num_frames=7"])
    assert call_of(pipe, {"height": 32, "width": 32}, None, None, ["num_frames=9"])["num_frames"] == 9
    assert set(captions[:-1]).isdisjoint(moving_shapes.prompts("heldout") + moving_shapes.prompts("train"))


def test_a_perfect_denoiser_has_no_loss_and_wan_pipeline_makes_the_videos_of_the_pool_with_it(
    tmp_path: Path, monkeypatch
):
    """Noise levels in the network's units, the sign of the velocity, the latents' mean and std, the decoder's clamp."""

    settings = replace(short(tmp_path), videos=2)
    pipe: Any = wan.build_pipeline(1)
    pipe.vae.register_to_config(latents_mean=[0.3, -0.2, 0.1, 0.0], latents_std=[0.5, 2.0, 1.5, 0.8])
    latents, rows = stages._pool(pipe.vae, settings, 0, 0)

    def perfect(hidden_states: torch.Tensor, timestep: torch.Tensor, **other: Any) -> tuple[torch.Tensor]:
        x0 = latents[:1].float() if len(hidden_states) == 1 else latents.float()
        return ((hidden_states - x0) / (timestep.view(-1, 1, 1, 1, 1) / 1000),)

    monkeypatch.setattr(pipe.transformer, "forward", perfect)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        objective = wan.FlowMatching(pipe)
        assert float(objective.loss(latents[:1], rows[:1], 1, generator)) < 1e-8
        videos, texts = wan.draw_batch(stages._rng(settings, stages._POOL, 0, 0), 2, settings.weights)
        assert [wan.caption_rows()[row] for row in rows] == texts
        wanted = wan.decode(pipe.vae, pipe.vae.encode(videos).latent_dist.mean).clamp(-1, 1)
        pipe.set_progress_bar_config(disable=True)
        call = wan.MODEL.calls["10 steps, CFG 3"][0]
        found = pipe(texts, output_type="pt", **call).frames.transpose(1, 2) * 2 - 1
    assert wanted.std() > 0.01
    torch.testing.assert_close(found, wanted, atol=5e-3, rtol=0)  # the pool is in half precision
