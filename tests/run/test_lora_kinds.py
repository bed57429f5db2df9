"""DoRA and LoKr of a run: merged, as a file for `--lora`, and such files from elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close

from flowrl.apps.publish.export import export
from flowrl.core.errors import ConfigError, ModelError
from flowrl.models.base import LoraSettings
from flowrl.run.foreign_lora import LoraFile, attach
from tests import tiny_sd3 as tiny
from tests.apps.publish.test_export import wrapped, write_run

KINDS: list[Any] = ["rslora", "dora", "lokr"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("base"), tiny.pipeline(sd35=True))


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tensor]:
    """A run folder and the output of what it trained."""
    settings = LoraSettings(rank=4, alpha=10, kind=request.param)
    run = write_run(tmp_path_factory.mktemp("runs") / request.param, base, settings)
    model = tiny.adapter(tiny.pipeline(sd35=True))
    weights = tiny.lora(model, settings)
    generator = torch.Generator().manual_seed(5)
    for p in weights.parameters.values():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    weights.save(run / "adapter", StableDiffusion3Pipeline)
    return run, tiny.output(model, 3.0)


def test_merged_and_attached_it_gives_the_trained_function(trained, base, tmp_path):
    run, expected = trained
    pipe = StableDiffusion3Pipeline.from_pretrained(base)
    assert not torch.allclose(tiny.output(wrapped(pipe), 3.0), expected, atol=1e-2)
    facts = attach(pipe, LoraFile.parse(str(run / "adapter")), "given")
    assert facts["bound"] == facts["modules"] > 0
    assert_close(tiny.output(wrapped(pipe), 3.0), expected, atol=1e-5, rtol=0)
    merged = StableDiffusion3Pipeline.from_pretrained(export(run, "merged", tmp_path / "merged"))
    assert not [name for name in merged.transformer.state_dict() if "lora" in name or "lokr" in name]
    assert_close(tiny.output(wrapped(merged), 3.0), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
def test_other_layouts_than_those_that_have_the_kind_are_refused(trained, tmp_path, layout):
    run, _ = trained
    if run.name == "rslora":
        assert export(run, layout, tmp_path / "out").is_file()
        return
    with pytest.raises(ConfigError, match=r"trained a (DoRA|LoKr), .*--format merged"):
        export(run, layout, tmp_path / "out")


@pytest.mark.parametrize(
    "key",
    [
        "unet.down_blocks.0.to_q.lokr_w1",
        "lora_unet_joint_blocks_0_x_block_attn_qkv.lokr_w1",
        "lycoris_transformer_blocks_0_attn_to_q.lokr_w1",
    ],
)
def test_a_lokr_that_does_not_fit_is_refused_by_its_file(base, tmp_path, key):
    save_file({key: torch.ones(2, 2), key.replace("w1", "w2"): torch.ones(2, 2)}, tmp_path / "other.safetensors")
    pipe = StableDiffusion3Pipeline.from_pretrained(base)
    with pytest.raises(ModelError, match=r"--lora .*other\.safetensors.*(LoKr|binds to none)"):
        attach(pipe, LoraFile.parse(str(tmp_path / "other.safetensors")), "given")
