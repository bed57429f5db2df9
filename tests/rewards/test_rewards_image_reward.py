"""ImageReward on a tiny random BLIP in the published layout of weights, against BLIP written out in plain torch."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from flowrl.rewards.image_reward import Config, build, pixels, raw_score
from torch.testing import assert_close

from flowrl.reward import RewardError
from flowrl.rewards import image_reward
from tests.tiny_rewards import image_reward as tiny
from tests.tiny_rewards import scored, smooth_images, uint8
from tests.tiny_rewards.image_reward import LAYERS, PATCH, SIDE, TEXT_HEADS, WIDTH, configured, published_weights

# The second is longer than the model reads: the tokenizer's words are letters.
PROMPTS = ["a cat", " ".join("abcdefghijklmnopqrstuvwxyz" * 2), "a cat", "x", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("image_reward"))


@pytest.fixture(scope="module")
def reward(folder):
    return build(configured(folder))


def attention(query, key, value, heads, mask=None):
    """[L, D] of queries on keys, head by head; a masked key is 10,000 below."""
    parts = []
    for q, k, v in zip(query.chunk(heads, -1), key.chunk(heads, -1), value.chunk(heads, -1), strict=True):
        logits = q @ k.T / math.sqrt(q.shape[-1])
        logits = logits if mask is None else logits + (1 - mask) * -10000.0
        parts.append(logits.softmax(-1) @ v)
    return torch.cat(parts, -1)


def straight_line(weights: dict, picture: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """One sample of the published network: `picture` [3, 32, 32] as it enters the ViT, the tokens unpadded to 35."""

    def linear(name, x):
        return x @ weights[f"{name}.weight"].flatten(1).T + weights[f"{name}.bias"]

    def norm(name, x, eps):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    eye, book = "blip.visual_encoder", "blip.text_encoder"
    patches = [
        picture[:, PATCH * i : PATCH * (i + 1), PATCH * j : PATCH * (j + 1)].flatten()
        for i in range(SIDE)
        for j in range(SIDE)
    ]
    seen = linear(f"{eye}.patch_embed.proj", torch.stack(patches))
    seen = torch.cat([weights[f"{eye}.cls_token"][0], seen]) + weights[f"{eye}.pos_embed"][0]
    for n in range(LAYERS):
        block = f"{eye}.blocks.{n}"
        query, key, value = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", seen, 1e-6)).chunk(3, -1)
        seen = seen + linear(f"{block}.attn.proj", attention(query, key, value, WIDTH // 64))
        seen = seen + linear(f"{block}.mlp.fc2", F.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", seen, 1e-6))))
    seen = norm(f"{eye}.norm", seen, 1e-6)

    mask = torch.tensor([1.0] * len(tokens) + [0.0] * (35 - len(tokens)))
    ids = torch.tensor(tokens + [0] * (35 - len(tokens)))
    read = weights[f"{book}.embeddings.word_embeddings.weight"][ids]
    read = read + weights[f"{book}.embeddings.position_embeddings.weight"][:35]
    read = norm(f"{book}.embeddings.LayerNorm", read, 1e-12)
    for n in range(LAYERS):
        layer = f"{book}.encoder.layer.{n}"
        for part, source, visible in (("attention", None, mask), ("crossattention", seen, None)):
            keys = read if source is None else source
            inner = f"{layer}.{part}.self"
            mixed = attention(
                linear(f"{inner}.query", read),
                linear(f"{inner}.key", keys),
                linear(f"{inner}.value", keys),
                TEXT_HEADS,
                visible,
            )
            output = linear(f"{layer}.{part}.output.dense", mixed)
            read = norm(f"{layer}.{part}.output.LayerNorm", output + read, 1e-12)
        output = linear(f"{layer}.output.dense", F.gelu(linear(f"{layer}.intermediate.dense", read)))
        read = norm(f"{layer}.output.LayerNorm", output + read, 1e-12)
    head = read[0]
    for index in "02467":
        head = linear(f"mlp.layers.{index}", head)
    return (head[0] - 0.16717362830052426) / 1.0333394966054072


def published_pixels(picture: torch.Tensor, size: int) -> torch.Tensor:
    """The published preprocessing, by torchvision on PIL."""
    from PIL import Image
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    steps = [Resize(size, interpolation=InterpolationMode.BICUBIC), CenterCrop(size), ToTensor(), Normalize(mean, std)]
    return torch.as_tensor(Compose(steps)(Image.fromarray(uint8(picture).numpy())))


def test_scores_equal_blip_written_out_on_the_published_weights(reward, folder):
    from transformers import BertTokenizer

    weights, tokenizer = published_weights(), BertTokenizer.from_pretrained(folder)
    expected = []
    for image, prompt in zip(smooth_images(), PROMPTS, strict=True):
        tokens = tokenizer(prompt).input_ids
        assert (len(tokens) > 35) == (prompt == PROMPTS[1])
        tokens = tokens if len(tokens) <= 35 else tokens[:34] + tokens[-1:]
        expected.append(straight_line(weights, published_pixels(image, SIDE * PATCH), tokens))
    scores = scored(reward, smooth_images(), PROMPTS)
    assert_close(scores, torch.stack(expected), rtol=0, atol=1e-5)
    assert scores.std() > 0.1, "the samples must tell apart for the comparison to mean anything"


@pytest.mark.parametrize(("height", "width"), [(40, 53), (53, 40), (64, 64), (61, 97), (35, 32), (32, 32), (20, 27)])
def test_exact_preprocessing_is_torchvisions(height, width):
    image = smooth_images(1, height, width)[0]
    assert_close(pixels(image, 32, "exact"), published_pixels(image, 32), rtol=0, atol=1e-6)


def test_head_outputs_meet_the_published_scale():
    assert_close(raw_score(torch.tensor([0.167173628, 1.200513125])), torch.tensor([0.0, 1.0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("blip.visual_encoder.norm.bias"), r"1 missing \(vision.post_layernorm.bias\)"),
        (lambda w: w.update({"blip.itm_head.weight": torch.ones(2)}), r"1 not known \(blip.itm_head.weight\)"),
        (lambda w: w.update({"mlp.layers.6.bias": torch.ones(3)}), r"of another shape \(head.3.bias: \(3,\), not \(4,"),
        (lambda w: w.pop("mlp.layers.4.weight"), r"lacks 'head.2.weight'"),
    ],
)
def test_other_weights_than_the_published_ones_are_refused(folder, tmp_path, change, message):
    weights = published_weights()
    change(weights)
    torch.save(weights, tmp_path / "ImageReward.pt")
    (tmp_path / "med_config.json").write_text((folder / "med_config.json").read_text())
    with pytest.raises(RewardError, match=message):
        image_reward.load(configured(tmp_path))


def test_weights_that_cannot_be_found_or_read_are_named(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RewardError, match=r"the folder .* has no ImageReward.pt"):
        image_reward.load(configured(tmp_path))
    (tmp_path / "ImageReward.pt").write_bytes(b"not weights")
    (tmp_path / "med_config.json").write_text("{}")
    with pytest.raises(RewardError, match=r"cannot read the weights .*ImageReward.pt"):
        image_reward.load(configured(tmp_path))
    with pytest.raises(RewardError, match=r"cannot load the tokenizer '.*nowhere'"):
        build(Config(model=str(folder), tokenizer=str(tmp_path / "nowhere"), device="cpu"))
