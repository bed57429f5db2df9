"""What HPSv3 and VideoAlign share: sizes, patches, prompts, names of weights, folded LoRA."""

import hashlib
import math

import numpy as np
import pytest
import torch
from flowrl.rewards._judges import folded_lora, qwen_vl
from flowrl.rewards._judges.qwen_vl import local_name, patches, read_prompt, smart_resize
from flowrl.rewards._vision import checkpoints
from flowrl.rewards.video_align import PROMPT_SHA256
from torch.testing import assert_close

from flowrl.reward import RewardError


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (512, 512, (448, 448)),
        (1024, 1024, (448, 448)),
        (720, 1280, (336, 588)),
        (1024, 768, (504, 364)),
        (256, 256, (448, 448)),
        (300, 500, (364, 588)),
    ],
)
def test_sizes_are_those_of_the_released_code(height, width, expected):
    assert smart_resize(height, width, min_pixels=200704, max_pixels=200704) == expected


def test_a_size_between_the_bounds_is_rounded_to_tokens_alone():
    assert smart_resize(480, 832, min_pixels=100352, max_pixels=500000) == (476, 840)
    assert smart_resize(480, 832, min_pixels=100352, max_pixels=200704) == (336, 588)
    # Half to even: 42 / 28 is 1.5 and 70 / 28 is 2.5, and both go to 2.
    assert smart_resize(42, 70, min_pixels=28, max_pixels=10**6) == (56, 56)
    with pytest.raises(ValueError, match="200 times"):
        smart_resize(2, 402, min_pixels=28, max_pixels=10**6)


def test_patches_are_those_of_the_processors_of_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 3, 84, 56), dtype=np.uint8))
    picture = frames[0].permute(1, 2, 0).numpy()
    expected = Qwen2VLImageProcessorPil()(images=[picture], do_resize=False, return_tensors="pt")
    values, grid = patches(frames[:1])
    assert grid.tolist() == expected["image_grid_thw"].tolist() == [[1, 6, 4]]
    assert_close(values, torch.as_tensor(expected["pixel_values"]), rtol=0, atol=1e-5)
    # Five frames: the last one stands twice.
    processor = Qwen2VLVideoProcessor(do_resize=False, cap_pixels_per_frame=False)
    expected = processor(videos=[frames], return_tensors="pt", do_sample_frames=False)
    values, grid = patches(frames)
    assert grid.tolist() == expected["video_grid_thw"].tolist() == [[3, 6, 4]]
    assert_close(values, expected["pixel_values_videos"], rtol=0, atol=1e-5)


def test_a_prompt_is_known_by_its_digest_and_found_among_a_files_strings(tmp_path):
    text = "\nRate it. {text_prompt}  \n<|Mark|>\n"
    digest = hashlib.sha256(text.replace("{text_prompt}", "a photo of a cat").encode()).hexdigest()
    (tmp_path / "plain.txt").write_bytes(text.encode())
    (tmp_path / "code.py").write_text(
        f"raise SystemExit('never run')\nOTHER = 'a {{text_prompt}}'\nPROMPT = {text!r}\n"
    )
    for name in ("plain.txt", "code.py"):
        assert read_prompt(tmp_path / name, digest, reward="x") == text
    (tmp_path / "plain.txt").write_bytes(text.replace("  \n", "\n").encode())
    with pytest.raises(RewardError, match=r"plain.txt does not hold the text"):
        read_prompt(tmp_path / "plain.txt", digest, reward="x")
    with pytest.raises(RewardError, match="cannot read its prompt"):
        read_prompt(tmp_path / "none.txt", digest, reward="x")


def test_the_text_of_video_align_is_known_by_the_published_digest():
    """Of the authors' text with the caption "a photo of a cat"; the text itself is not shipped."""
    assert PROMPT_SHA256 == "9d1d713c81a2a7bcce7f2c664b072885afe3320f7fcc000dde0fc9b19075543f"


@pytest.mark.parametrize(
    ("published", "here"),
    [
        ("visual.blocks.3.attn.qkv.weight", "visual.blocks.3.attn.qkv.weight"),
        ("model.visual.blocks.3.attn.qkv.weight", "visual.blocks.3.attn.qkv.weight"),
        ("model.embed_tokens.weight", "language_model.embed_tokens.weight"),
        ("model.language_model.norm.weight", "language_model.norm.weight"),
        ("base_model.model.model.norm.weight", "language_model.norm.weight"),
        ("base_model.model.rm_head.weight", "rm_head.weight"),
        ("rm_head.0.bias", "rm_head.0.bias"),
        ("lm_head.weight", None),
    ],
)
def test_published_names_have_their_place(published, here):
    assert local_name(published) == here


def test_folded_lora_gives_the_outputs_of_peft():
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)
        )
        config = LoraConfig(r=3, lora_alpha=5, target_modules=["0", "2"], modules_to_save=["3"], use_rslora=True)
        adapted = get_peft_model(plain, config).eval()
        for weight in adapted.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    tensors = {n.removeprefix("base_model.model."): t for n, t in adapted.state_dict().items()}
    network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    network.load_state_dict(folded_lora.merged_weights(tensors, scale=5 / math.sqrt(3), reward="x"), strict=True)
    inputs = torch.rand(7, 6, generator=torch.Generator().manual_seed(1))
    assert_close(network(inputs), adapted(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.weight", "a.lora_A.weight"], "adapter of a lacks one of its two factors"),
        (["a.lora_A.weight", "a.lora_B.weight"], "adapter of a lacks its weight"),
        (["a.weight", "a.lora_magnitude_vector"], "which is not of a LoRA on a linear layer"),
    ],
)
def test_an_adapter_that_cannot_be_folded_is_refused(names, message):
    with pytest.raises(RewardError, match=message):
        folded_lora.merged_weights({name: torch.ones(1, 1) for name in names}, scale=1.0, reward="x")


def test_a_file_that_would_run_code_is_not_read(tmp_path):
    torch.save({"a": torch.nn.Linear(1, 1)}, tmp_path / "code.pth")
    with pytest.raises(RewardError, match=r"cannot read the weights .*code.pth"):
        checkpoints.read(tmp_path / "code.pth", reward="x")
    torch.save({"a": {"b": 1}}, tmp_path / "nested.pth")
    with pytest.raises(RewardError, match="is not a file of weights"):
        checkpoints.read(tmp_path / "nested.pth", reward="x")
    assert qwen_vl.with_caption("{text_prompt}", "{text_prompt} {0}") == "{text_prompt} {0}"
