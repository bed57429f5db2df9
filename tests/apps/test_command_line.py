"""The arguments that commands give to a pipeline's call: what --set refuses, before anything is drawn."""

from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.apps.command_line import call_of
from flowrl.core.errors import ConfigError
from tests import tiny_pipelines as tiny

OWN = {"height": 16, "width": 16}


@pytest.fixture(scope="module")
def wan() -> Any:
    return tiny.make("wan")


@pytest.mark.parametrize("name", ["height", "width", "max_sequence_length", "num_frames", "num_inference_steps"])
@pytest.mark.parametrize("value", ["0", "-32", "abc", "true", "16.5", "null"])
def test_counts_sides_and_lengths_are_whole_numbers_of_at_least_1(wan, name, value):
    with pytest.raises(ConfigError, match=rf"^--set {name}=\S+: must be a whole number, at least 1$"):
        call_of(wan, OWN, None, None, [f"{name}={value}"])


@pytest.mark.parametrize("value", ["abc", "true", ".inf", "[1]"])
def test_a_guidance_scale_is_a_finite_number(wan, value):
    with pytest.raises(ConfigError, match=r"^--set guidance_scale=\S+: must be a finite number$"):
        call_of(wan, OWN, None, None, [f"guidance_scale={value}"])
    assert call_of(wan, OWN, None, None, ["guidance_scale=3", "guidance_scale_2=null"])["guidance_scale_2"] is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *[(name, "the command sets it by itself") for name in ("generator", "output_type", "return_dict")],
        *[(f"num_{kind}_per_prompt", "for more of each prompt give --count") for kind in ("images", "videos")],
        *[
            (name, "it takes a tensor or a function, which no option can give; leave it out")
            for name in ("latents", "prompt_embeds", "negative_prompt_embeds", "callback_on_step_end")
        ],
    ],
)
def test_what_no_option_can_give_is_refused_with_what_to_do(wan, name, reason):
    with pytest.raises(ConfigError, match=f"^--set {name}: .*{reason}"):
        call_of(wan, OWN, None, None, [f"{name}=2"])


def test_frames_that_a_pipeline_would_round_are_refused_with_the_nearest(wan):
    step = wan.vae_scale_factor_temporal
    assert step > 1
    near = 4 * step + 1
    with pytest.raises(
        ConfigError,
        match=f"^--set num_frames={near + 1}: must be one more than a multiple of {step}; give .*={near}$",
    ):
        call_of(wan, OWN, None, None, [f"num_frames={near + 1}"])
    for frames in (1, near):
        assert call_of(wan, OWN, None, None, [f"num_frames={frames}"])["num_frames"] == frames


def stub(default: int | None, vae: str = "AutoencoderKL", **factors: int) -> Any:
    """A pipeline with a temporal factor, whose call has `default` frames."""
    kind = type("Stub", (SimpleNamespace,), {"__call__": lambda self, num_frames=default: None})
    return kind(vae=type(vae, (SimpleNamespace,), {})(), transformer=None, **factors)


@pytest.mark.parametrize("default", [161, None])
def test_ltx_has_its_factor_under_another_name(default):
    pipeline = stub(default, vae_temporal_compression_ratio=8)
    with pytest.raises(
        ConfigError, match="num_frames=10: must be one more than a multiple of 8; give --set num_frames=9"
    ):
        call_of(pipeline, {}, None, None, ["num_frames=10"])
    assert call_of(pipeline, {}, None, None, ["num_frames=9"]) == {"num_frames": 9}


@pytest.mark.parametrize(
    ("default", "vae"), [(132, "AutoencoderKLWan"), (None, "AutoencoderKLAllegro"), (49, "AutoencoderKLCogVideoX")]
)
def test_pipelines_that_count_frames_otherwise_take_what_they_are_told(default, vae):
    pipeline = stub(default, vae, vae_scale_factor_temporal=4)
    assert call_of(pipeline, {}, None, None, ["num_frames=48"]) == {"num_frames": 48}
