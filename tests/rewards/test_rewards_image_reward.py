"""ImageReward on a tiny random BLIP in the published layout of weights, against BLIP written out in plain torch."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from flowrl.rewards.image_reward import CARD, Config, build, pixels, raw_score, renamed
from torch.testing import assert_close

from flowrl.reward import RewardError
from flowrl.rewards import image_reward
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward

# The second is longer than the model reads: the tokenizer's words are letters.
PROMPTS = ["a cat", " ".join("abcdefghijklmnopqrstuvwxyz" * 2), "a cat", "x", ""]
WIDTH, LAYERS, PATCH, SIDE = 128, 2, 8, 4
TEXT, TEXT_HEADS, VOCABULARY = 24, 3, 34


def published_weights() -> dict[str, torch.Tensor]:
    """Random weights under the names of ImageReward.pt, with those that take no part in a score."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}

    def linear(name: str, outputs: int, inputs: int, std: float = 0.12) -> None:
        weights[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * std
        weights[f"{name}.bias"] = torch.randn(outputs, generator=generator) * 0.1

    def norm(name: str, width: int) -> None:
        weights[f"{name}.weight"] = 1 + torch.randn(width, generator=generator) * 0.1
        weights[f"{name}.bias"] = torch.randn(width, generator=generator) * 0.1

    eye, book = "blip.visual_encoder", "blip.text_encoder"
    weights[f"{eye}.cls_token"] = torch.randn(1, 1, WIDTH, generator=generator)
    weights[f"{eye}.pos_embed"] = torch.randn(1, SIDE**2 + 1, WIDTH, generator=generator)
    linear(f"{eye}.patch_embed.proj", WIDTH, 3 * PATCH**2)
    weights[f"{eye}.patch_embed.proj.weight"] = weights[f"{eye}.patch_embed.proj.weight"].view(WIDTH, 3, PATCH, PATCH)
    # Small enough that the first norm's epsilon matters.
    weights |= {name: value * 0.03 for name, value in weights.items()}
    for n in range(LAYERS):
        block = f"{eye}.blocks.{n}"
        norm(f"{block}.norm1", WIDTH)
        linear(f"{block}.attn.qkv", 3 * WIDTH, WIDTH)
        linear(f"{block}.attn.proj", WIDTH, WIDTH)
        norm(f"{block}.norm2", WIDTH)
        linear(f"{block}.mlp.fc1", 96, WIDTH)
        linear(f"{block}.mlp.fc2", WIDTH, 96)
    norm(f"{eye}.norm", WIDTH)
    weights[f"{book}.embeddings.word_embeddings.weight"] = torch.randn(VOCABULARY, TEXT, generator=generator)
    weights[f"{book}.embeddings.position_embeddings.weight"] = torch.randn(40, TEXT, generator=generator)
    weights[f"{book}.embeddings.position_ids"] = torch.arange(40)[None]
    norm(f"{book}.embeddings.LayerNorm", TEXT)
    for n in range(LAYERS):
        layer = f"{book}.encoder.layer.{n}"
        for part, source in (("attention", TEXT), ("crossattention", WIDTH)):
            linear(f"{layer}.{part}.self.query", TEXT, TEXT, 0.3)
            linear(f"{layer}.{part}.self.key", TEXT, source, 0.3)
            linear(f"{layer}.{part}.self.value", TEXT, source, 0.3)
            linear(f"{layer}.{part}.output.dense", TEXT, TEXT, 0.3)
            norm(f"{layer}.{part}.output.LayerNorm", TEXT)
        linear(f"{layer}.intermediate.dense", 40, TEXT, 0.3)
        linear(f"{layer}.output.dense", TEXT, 40, 0.3)
        norm(f"{layer}.output.LayerNorm", TEXT)
    for layer, (outputs, inputs) in zip("02467", ((32, TEXT), (16, 32), (8, 16), (4, 8), (1, 4)), strict=True):
        linear(f"mlp.layers.{layer}", outputs, inputs, 0.35)
    linear("blip.vision_proj", 5, WIDTH)
    linear("blip.text_proj", 5, TEXT)
    return weights


def save_tokenizer(folder: Path) -> None:
    """A BERT tokenizer whose words are single letters."""
    from transformers import BertTokenizer

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("image_reward")
    torch.save(published_weights(), folder / "ImageReward.pt")
    sizes = {
        "hidden_size": TEXT,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": TEXT_HEADS,
        "intermediate_size": 40,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 40,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "encoder_width": 768,
    }
    (folder / "med_config.json").write_text(json.dumps(sizes))
    save_tokenizer(folder)
    return folder


def configured(folder: Path, **options) -> Config:
    return Config(model=str(folder), tokenizer=str(folder), device="cpu", **options)


@pytest.fixture(scope="module")
def reward(folder):
    return build(configured(folder))


def pictures(count: int = 5, height: int = 40, width: int = 53, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.interpolate(torch.rand(count, 3, 4, 5, generator=generator), (height, width), mode="bilinear")


def scored(reward, images, prompts=PROMPTS) -> torch.Tensor:
    return reward.score(images, prompts, [{}] * len(prompts))


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

    eight_bit = (picture * 255).round().byte().permute(1, 2, 0).numpy()
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    steps = [Resize(size, interpolation=InterpolationMode.BICUBIC), CenterCrop(size), ToTensor(), Normalize(mean, std)]
    return Compose(steps)(Image.fromarray(eight_bit))


def test_scores_equal_blip_written_out_on_the_published_weights(reward, folder):
    from transformers import BertTokenizer

    weights, tokenizer = published_weights(), BertTokenizer.from_pretrained(folder)
    expected = []
    for image, prompt in zip(pictures(), PROMPTS, strict=True):
        tokens = tokenizer(prompt).input_ids
        assert (len(tokens) > 35) == (prompt == PROMPTS[1])
        tokens = tokens if len(tokens) <= 35 else tokens[:34] + tokens[-1:]
        expected.append(straight_line(weights, published_pixels(image, SIDE * PATCH), tokens))
    scores = scored(reward, pictures())
    assert_close(scores, torch.stack(expected), rtol=0, atol=1e-5)
    assert scores.std() > 0.1, "the samples must tell apart for the comparison to mean anything"


@pytest.mark.parametrize(("height", "width"), [(40, 53), (53, 40), (64, 64), (61, 97), (35, 32), (32, 32), (20, 27)])
def test_exact_preprocessing_is_torchvisions(height, width):
    image = pictures(1, height, width)[0]
    assert_close(pixels(image, 32, "exact"), published_pixels(image, 32), rtol=0, atol=1e-6)


def test_fast_preprocessing_is_close_to_the_exact_one():
    smooth = pictures(1, 91, 60)[0]
    # Eight bits are 1/255 apart, rounded twice; normalising divides by 0.26 at least.
    assert_close(pixels(smooth, 32, "fast"), pixels(smooth, 32, "exact"), rtol=0, atol=2.5 / 255 / 0.26)


def test_head_outputs_meet_the_published_scale():
    assert_close(raw_score(torch.tensor([0.167173628, 1.200513125])), torch.tensor([0.0, 1.0]), rtol=0, atol=1e-6)


def test_a_score_depends_on_its_own_picture_and_prompt_alone(reward):
    images = pictures()
    together = scored(reward, images)
    alone = torch.cat([scored(reward, images[i : i + 1], PROMPTS[i : i + 1]) for i in range(5)])
    assert_close(together, alone, rtol=0, atol=1e-5)
    assert_close(scored(reward, images.flip(0), PROMPTS[::-1]), together.flip(0), rtol=0, atol=1e-5)
    other = scored(reward, images, [PROMPTS[1], PROMPTS[0], *PROMPTS[2:]])
    assert (other[:2] - together[:2]).abs().min() > 0.001
    assert_close(other[2:], together[2:], rtol=0, atol=1e-5)


def test_pictures_of_different_sizes_come_as_a_list(reward):
    images = [pictures(1, 40, 52)[0], pictures(1, 33, 64, seed=1)[0]]
    alone = [scored(reward, [image], ["a cat"])[0] for image in images]
    assert_close(scored(reward, images, ["a cat"] * 2), torch.stack(alone), rtol=0, atol=1e-5)


def test_a_picture_with_nan_is_masked_and_no_other(reward):
    images = pictures()
    expected = scored(reward, images)
    images[1, 0, 3, 3] = math.nan
    masked = scored(reward, images)
    assert masked.isnan().tolist() == [False, True, False, False, False]
    assert_close(masked[[0, 2, 3, 4]], expected[[0, 2, 3, 4]], rtol=0, atol=1e-5)


def test_gradients_reach_the_pictures_only_where_the_card_says_so(reward, folder):
    fast = build(configured(folder, preprocess="fast"))
    assert (reward.card.differentiable, fast.card.differentiable) == (False, True)
    images = pictures().requires_grad_()
    assert not scored(reward, images).requires_grad
    scored(fast, images)[0].backward()
    assert images.grad[0].abs().max() > 0
    assert images.grad[1:].abs().max() == 0, "the first score pulls on the first picture alone"


def test_scoring_leaves_the_random_state_the_gradient_mode_and_autocast_alone(reward):
    images, state = pictures(), torch.get_rng_state()
    expected = scored(reward, images)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scored(reward, images), expected), "the network runs in float32 under autocast too"
        assert torch.is_autocast_enabled("cpu")


def test_loading_draws_no_random_numbers(folder):
    state = torch.get_rng_state()
    build(configured(folder))
    assert torch.equal(state, torch.get_rng_state())


def test_the_scorer_takes_it_with_its_card(reward):
    assert reward.card == CARD
    scores = Scorer([WeightedReward("image_reward", reward)], batch_size=2).score(pictures(), PROMPTS, [{}] * 5)
    assert scores.failures == 0


def test_every_published_name_has_its_place():
    assert renamed("blip.text_encoder.encoder.layer.0.crossattention.self.key.weight").startswith("text.encoder.layer.")
    assert [renamed(f"mlp.layers.{i}.bias") for i in (0, 2, 4, 6, 7)] == [f"head.{i}.bias" for i in range(5)]
    assert renamed("blip.text_encoder.embeddings.position_ids") is None


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
