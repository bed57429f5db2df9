"""clip_score on tiny random CLIPs of both libraries, against straight-line computations on the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flowrl.rewards._vision import clips, open_clips
from flowrl.rewards._vision.pixels import Pixels
from flowrl.rewards.clip_score import Config, build
from torch.testing import assert_close

from flowrl.reward import RewardError
from tests import toy_clip
from tests.tiny_rewards import PROMPTS, scored, smooth_images, uint8

BACKENDS = ("transformers", "open_clip")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    hugging, opened = tmp_path_factory.mktemp("transformers"), tmp_path_factory.mktemp("open_clip")
    return {"transformers": toy_clip.save(hugging), "open_clip": toy_clip.save_open_clip(opened)}


@pytest.fixture(scope="module")
def rewards(folders):
    return {backend: build(Config(model=folder, device="cpu")) for backend, folder in folders.items()}


def pil(image: torch.Tensor):
    from PIL import Image

    return Image.fromarray(uint8(image).numpy())


def embeddings(backend: str, folder: str, images, prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit embeddings of pictures and prompts, [B, D] both, one at a time, with the library's own preprocessing."""
    from transformers import CLIPTokenizer

    of = _transformers if backend == "transformers" else _opened
    see, say = of(folder)
    tokenizer, seen, said = CLIPTokenizer.from_pretrained(folder), [], []
    for image, prompt in zip(images, prompts, strict=True):
        tokens = tokenizer(prompt).input_ids
        tokens = tokens[: toy_clip.TEXT_LENGTH - 1] + tokens[-1:] if len(tokens) > toy_clip.TEXT_LENGTH else tokens
        with torch.no_grad():
            seen.append(see(pil(image)))
            said.append(say(tokens))
    seen, said = torch.stack(seen), torch.stack(said)
    return seen / seen.square().sum(1, keepdim=True).sqrt(), said / said.square().sum(1, keepdim=True).sqrt()


def _transformers(folder: str):
    from transformers import CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = toy_clip.IMAGE_SIZE
    processor = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    model = CLIPModel.from_pretrained(folder).eval()

    def see(image):
        pixels = torch.as_tensor(processor(images=[image], return_tensors="pt")["pixel_values"])
        return model.vision_model(pixels).pooler_output[0] @ model.visual_projection.weight.T

    return (
        see,
        lambda tokens: model.text_model(torch.tensor([tokens])).pooler_output[0] @ model.text_projection.weight.T,
    )


def _opened(folder: str):
    import open_clip
    from safetensors.torch import load_file

    model: Any = open_clip.CLIP(**toy_clip.open_clip_config()).eval()
    model.load_state_dict(load_file(Path(folder) / "open_clip_model.safetensors"))
    transform: Any = open_clip.image_transform(toy_clip.IMAGE_SIZE, False, mean=toy_clip.MEAN, std=toy_clip.STD)

    return lambda image: model.visual(transform(image)[None])[0], lambda tokens: toy_clip.read(model, tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_the_diagonal_of_all_cosines(backend, rewards, folders):
    images = smooth_images()
    seen, said = embeddings(backend, folders[backend], images, PROMPTS)
    expected = (seen @ said.T).diagonal()
    assert expected.std() > 0.02, "the pictures and prompts must tell apart for this to mean anything"
    assert_close(scored(rewards[backend], images), expected, rtol=0, atol=1e-5)


def test_conventions_are_named_by_their_output(folders, rewards):
    images = smooth_images(5, seed=3)
    cosine = scored(rewards["open_clip"], images)
    cosine, images = torch.cat([cosine, cosine]), torch.cat([images, 1 - images])
    cosine[5:] = scored(rewards["open_clip"], images[5:])
    for convention in ("clip_s", "percent"):
        output, factor = ("clip_s", 2.5) if convention == "clip_s" else ("clip_percent", 100.0)
        reward = build(Config(model=folders["open_clip"], device="cpu", convention=convention))
        assert (reward.card.outputs, reward.card.low, reward.card.high) == ((output,), 0.0, factor)
        expected = factor * torch.where(cosine > 0, cosine, 0.0)
        assert_close(scored(reward, images, PROMPTS * 2), expected, rtol=0, atol=1e-3)
    card = rewards["open_clip"].card
    assert (card.outputs, card.low, card.high, card.resolution[:7]) == (("clip_cos",), -1.0, 1.0, "32 x 32")


def test_it_is_torchmetrics_number_for_short_captions_and_keeps_the_end_token_of_long_ones(folders):
    """torchmetrics (functional/multimodal/clip_score.py) cuts ids and mask at the model's length."""
    from transformers import CLIPModel, CLIPTokenizer

    folder, length = folders["transformers"], toy_clip.TEXT_LENGTH
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    images = smooth_images(4)
    captions = ["a cat", "the sea", "a dog " * length, "red sea " * length]
    seen, _ = embeddings("transformers", folder, images, captions)
    tokens = tokenizer(captions, return_tensors="pt", padding=True)
    with torch.no_grad():
        said = clips.projected(
            model.get_text_features(tokens["input_ids"][:, :length], tokens["attention_mask"][:, :length])
        )
    said = said / said.norm(dim=1, keepdim=True)
    theirs = (seen * said).sum(dim=1)
    percent = scored(build(Config(model=folder, device="cpu", convention="percent")), images, captions)
    assert_close(percent[:2], 100 * theirs[:2].clamp(min=0), rtol=0, atol=1e-3)
    assert_close(said[2], said[3], rtol=0, atol=1e-6)  # of the start token, which sees no word of the caption
    ours = scored(build(Config(model=folder, device="cpu")), images, captions)
    assert (ours[2:] - theirs[2:]).abs().min() > 1e-3


# ---- preprocessing of open_clip


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (40, 57), (91, 33), (20, 31), (29, 24)])
def test_exact_preprocessing_equals_that_of_open_clip(mode, height, width):
    import open_clip

    image = torch.rand(3, height, width, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"mean": toy_clip.MEAN, "std": toy_clip.STD, "interpolation": "bilinear"}
    transform: Any = open_clip.image_transform(24, False, resize_mode=mode, fill_color=51, **options)
    ours = Pixels(size=24, fit=open_clips._FITS[mode], fill=51 / 255, half_even_crop=True, **options)
    assert_close(ours(image[None])[0], transform(pil(image)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["longest", "squash"])
def test_a_folder_says_how_its_pictures_are_resized(mode, tmp_path):
    clip = open_clips.load(
        toy_clip.save_open_clip(tmp_path, resize_mode=mode),
        None,
        quick_gelu=None,
        device="cpu",
        preprocess="fast",
        reward="clip_score",
    )
    assert (clip.pixels.fit, clip.pixels.mean, clip.pixels.size) == (open_clips._FITS[mode], toy_clip.MEAN, 32)


# ---- finding weights


def test_an_embedded_clip_goes_by_its_bare_name(folders, monkeypatch, rewards, tmp_path):
    monkeypatch.setenv("FLOWRL_ASSETS", str(Path(folders["open_clip"]).parent))
    name = Path(folders["open_clip"]).name
    monkeypatch.chdir(tmp_path)
    reward = build(Config(model=name, device="cpu"))
    assert torch.equal(scored(reward, smooth_images()), scored(rewards["open_clip"], smooth_images()))


@pytest.fixture
def named(monkeypatch, tmp_path) -> str:
    """A network with a name of open_clip's own, and a tag whose weights are QuickGELU's, as OpenAI's are."""
    import open_clip
    from safetensors.torch import save_file

    config = toy_clip.open_clip_config()
    config["text_cfg"] = {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    file = tmp_path / "open_clip_model.safetensors"
    save_file(toy_clip.drawn(lambda: open_clip.CLIP(**config), 0).state_dict(), file)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-named", config)
    tags = {"openai": {"file": str(file), "quick_gelu": True}, "laion": {"file": str(file)}}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "tiny-named", tags)
    return str(file)


def gelus(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if "GELU" in type(module).__name__}


def opened(pretrained: str | None, quick_gelu: bool | None = None, model: str = "tiny-named") -> open_clips.OpenClip:
    return open_clips.load(
        model, pretrained, quick_gelu=quick_gelu, device="cpu", preprocess="exact", reward="clip_score"
    )


def test_weights_run_with_the_activation_they_were_trained_with(named, recwarn):
    assert gelus(opened("openai").model) == {"QuickGELU"}
    assert gelus(opened("laion").model) == {"GELU"}
    assert not [warning for warning in recwarn if "QuickGELU mismatch" in str(warning.message)]
    with pytest.raises(RewardError, match=r"were trained with True; leave it out"):
        opened("openai", quick_gelu=False)
    for source in (named, str(Path(named).parent)):
        with pytest.raises(RewardError, match=r"set quick_gelu: true .* or false"):
            opened(source)
        assert gelus(opened(source, quick_gelu=True).model) == {"QuickGELU"}
        assert gelus(opened(source, quick_gelu=False).model) == {"GELU"}


@pytest.mark.parametrize(
    ("model", "tag", "quick_gelu"),
    [
        ("ViT-L-14", "openai", True),
        ("ViT-L-14-quickgelu", "openai", True),
        ("ViT-H-14-quickgelu", "dfn5b", True),
        ("ViT-L-14", "laion2b_s32b_b82k", False),
        ("ViT-H-14", "laion2b_s32b_b79k", False),
        ("roberta-ViT-B-32", "laion2b_s12b_b32k", True),
    ],
)
def test_the_activation_of_published_weights_is_known_by_their_tag(model, tag, quick_gelu):
    assert open_clips._source(model, tag, None, "reward 'clip_score'").quick_gelu is quick_gelu


def test_a_network_by_its_name_is_scored_with_open_clips_own_tokenizer(named):
    reward = build(Config(model="tiny-named", pretrained="laion", device="cpu"))
    scores = scored(reward, smooth_images())
    assert scores.isfinite().all()
    assert scores.std() > 1e-3


@pytest.mark.parametrize(
    ("model", "pretrained", "message"),
    [
        ("tiny-named", None, "network without weights; give pretrained"),
        ("tiny-named", "tag", "nor a tag of tiny-named; its tags: openai, laion"),
        ("./nowhere", None, "neither a folder, nor an embedded CLIP"),
        ("owner/name", "laion", "goes with the name of a network"),
    ],
)
def test_what_open_clip_cannot_load_is_refused(named, model, pretrained, message):
    with pytest.raises(RewardError, match=message):
        opened(pretrained, model=model)


def test_a_folder_that_is_incomplete_is_refused(tmp_path, folders):
    with pytest.raises(RewardError, match=r"has no open_clip_config\.json"):
        opened(None, model=str(tmp_path))
    with pytest.raises(RewardError, match="has none of open_clip_model"):
        open_clips._weights(str(tmp_path), "tiny-named", "reward 'clip_score'")
    config = json.loads((Path(folders["open_clip"]) / "open_clip_config.json").read_text())
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    # open_clip itself would go on with weights drawn at random.
    with pytest.raises(RewardError, match="cannot load open_clip's"):
        opened(None, model=str(tmp_path))
