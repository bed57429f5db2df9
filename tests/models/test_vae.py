"""The VAE at work: its type, its arithmetic and its memory format, for native and generic adapters."""

from functools import partial
from typing import Any

import pytest
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from flowrl.core.assets import asset_roots
from flowrl.core.errors import ModelError
from flowrl.models import generic, sd3
from flowrl.models._vae import cast_vae, decoded_pixels
from flowrl.models.memory.options import MemorySettings
from flowrl.models.pipelines.loading import meta_pipeline
from tests import native
from tests import tiny_pipelines as tiny

CASES = ("sd3", "qwen_image", "generic:flux")
CHANNELS_LAST = {"sdxl": MemorySettings(vae_channels_last=True), "generic:flux": {"vae_channels_last": True}}
"""As a Config holds it, and as a YAML file does."""
TYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def adapter(case: str, **options: Any) -> Any:
    """A native adapter, or `generic:NAME`, around a tiny pipeline as `load_pipeline` leaves it."""
    family, _, name = case.partition(":")
    pipe = tiny.make(name or family)
    cast_vae(pipe, options.get("vae_precision", "tf32"))
    if name:
        return native.entered(name, pipe=pipe, **options)
    return native.adapter(family, pipe, (16, 16), **options)


def latents(model: Any) -> torch.Tensor:
    return torch.randn(2, *model.latent_shape(), generator=torch.Generator().manual_seed(0))


def settings() -> tuple[bool, bool]:
    return torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark


@pytest.mark.parametrize("case", CASES)
def test_the_vae_has_its_own_type_and_arithmetic_and_leaves_that_of_others_alone(case):
    """On a CPU the two kinds of float32 give the same bits; bfloat16 has 8 bits of mantissa."""
    plain, before = adapter(case), settings()
    expected = plain.decode(latents(plain))
    for precision in ("float32", "bfloat16"):
        other, seen = adapter(case, vae_precision=precision), list[Any]()
        other.pipeline.vae.decoder.register_forward_hook(partial(note, seen))
        found = other.decode(latents(other))
        assert settings() == before
        assert {dtype for dtype, _ in seen} == {TYPES[precision]}
        # Half types are never computed in TF32, so that setting stays what it was.
        assert {made[0] for _, made in seen} == {precision != "float32" and before[0]}
        assert {made[1] for _, made in seen} == {False}, "kernels that are tried may take all memory of a card"
        assert found.dtype == torch.float32
        assert torch.equal(found, expected) == (precision == "float32")
        assert float((found - expected).abs().mean()) < 0.02


def note(seen: list[Any], _: Any, given: Any, out: torch.Tensor) -> None:
    seen.append((out.dtype, settings()))


def test_latents_of_given_images_have_the_types_arithmetic_too():
    plain, half = adapter("sd3"), adapter("sd3", vae_precision="bfloat16")
    given = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    found = half.encode_images(given)
    assert found.dtype == torch.float32
    assert_close(found, plain.encode_images(given), atol=0.05, rtol=0.05)


class TensorFloat32(TorchFunctionMode):
    """Convolutions as on CUDA under TF32: operands rounded to 10 bits of mantissa, sums in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            args = (*(rounded(value) for value in args[:2]), *args[2:])
        return func(*args, **(kwargs or {}))


def rounded(value: torch.Tensor) -> torch.Tensor:
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_tf32_moves_images_by_far_less_than_a_step_of_8_bits():
    """The reason for the default, on the lab's trained VAE: the mean and the largest error of a pixel."""
    folder = next(root / "tiny-sd3" for root in asset_roots() if (root / "tiny-sd3").is_dir())
    model = sd3.build(sd3.Config(path=str(folder)))
    given = 0.5 * latents(model)
    exact = model.decode(given)
    with TensorFloat32():
        found = model.decode(given)
    error = (found - exact).abs()
    assert 0 < float(error.mean()) < 0.1 / 255
    assert float(error.max()) < 1 / 255


@pytest.mark.parametrize("case", ["sdxl", "generic:flux"])
def test_channels_last_changes_the_format_and_not_the_images(case):
    plain, other = adapter(case), adapter(case, memory=CHANNELS_LAST[case])
    weight = other.pipeline.vae.decoder.conv_in.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    found = other.decode(latents(plain))
    assert found.is_contiguous()
    assert_close(found, plain.decode(latents(plain)), atol=1e-5, rtol=0)


def test_channels_last_of_a_vae_for_videos_is_refused():
    with pytest.raises(ModelError, match=r"vae_channels_last=true: AutoencoderKLWan has convolutions over time"):
        adapter("generic:wan", memory={"vae_channels_last": True})


def test_a_vae_that_is_known_to_overflow_is_refused_with_the_one_that_does_not():
    with pytest.raises(
        ModelError,
        match=r"model\.vae_precision=float16.*madebyollin/sdxl-vae-fp16-fix.*; try model\.vae_precision=bfloat16",
    ):
        adapter("sdxl", vae_precision="float16")
    pipe = tiny.make("sdxl")
    pipe.vae.register_to_config(force_upcast=False)
    native.adapter("sdxl", pipe, (16, 16), vae_precision="float16")
    assert adapter("sd3", vae_precision="float16").pipeline.vae.dtype == torch.float16


def test_a_generic_pipeline_which_clamps_by_itself_takes_no_float16():
    with pytest.raises(ValueError, match=r"vae_precision=float16.*in silence.*bfloat16"):
        generic.Config(path="tiny", vae_precision="float16")


def test_what_overflows_is_nan_and_not_white():
    vae = adapter("sd3", vae_precision="float16").pipeline.vae
    values = torch.tensor([[float("inf"), 0.5, -float("inf"), 3.0]], dtype=torch.float16)
    vae.decode = lambda given, return_dict: (values,)
    found = decoded_pixels(vae, torch.zeros(1), "float16")
    assert found.isnan().tolist() == [[True, False, True, False]]
    assert found[0, [1, 3]].tolist() == [0.75, 1.0]


def test_a_pipeline_that_hands_images_to_its_vae_in_its_own_type_says_what_to_set():
    size = tiny.IMAGED["flux_kontext"].sizes[0]
    for precision in ("tf32", "bfloat16"):
        pipe = native.halved(tiny.make("flux_kontext"))
        cast_vae(pipe, precision)
        config = generic.Config(path="tiny", height=size[0], width=size[1], dtype="bfloat16", vae_precision=precision)
        model, given = generic.Generic(pipe, config), [[Image.new("RGB", (size[1], size[0]))]]
        if precision == "tf32":
            with pytest.raises(ModelError, match=r"set model\.vae_precision to that type"):
                model.encode(["a cat"], given)
        else:
            cond = model.encode(["a cat"], given)
            assert model.decode(latents(model)[:1], cond).shape == (1, 3, *size)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_a_plan_counts_the_vae_by_its_type(precision):
    folder = next(root / "tiny-sd3" for root in asset_roots() if (root / "tiny-sd3").is_dir())
    made = meta_pipeline(folder, sd3.Config(path="x", dtype="float16", vae_precision=precision))
    assert {p.dtype for p in made.vae.parameters()} == {TYPES[precision]}
    assert {p.dtype for p in made.transformer.parameters()} == {torch.float16}


def test_memory_of_the_text_encoders_goes_back_to_the_device(monkeypatch):
    model, calls = adapter("sd3"), []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append(model.pipeline.text_encoder))
    model.free_text_encoders()
    assert calls == [None]
