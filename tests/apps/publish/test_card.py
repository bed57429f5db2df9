"""The model card says what the run folder says, its front matter is YAML, and its code loads the weights."""

from __future__ import annotations

import ast
import html
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from flowrl.apps.plain_text import Named, escaped
from flowrl.apps.publish import card
from flowrl.apps.publish.card_loading import Base
from flowrl.apps.publish.export import export
from flowrl.commands.export import command
from flowrl.models import sd3
from flowrl.rollout.learned_noise import LearnedNoise
from flowrl.run import judged
from tests import tiny_sd3 as tiny
from tests.apps import folders
from tests.apps.publish.test_export import write_run

NASTY = "![x](http://evil) <script>alert(1)</script> | a\n# head `code` ---"
SUMMARY = json.loads((Path(__file__).parent / "summary.json").read_text())


def finish(run: Path, **changes: Any) -> Path:
    """What a run folder holds at its end, next to the weights."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree |= {"name": "tuned", "seed": 0, "iterations": 3, "algorithm": {"name": "flow_grpo"}}
    tree |= {"rewards": [{"path": "/home/ann/brightness.py", "weight": 1.0}, {"name": "jpeg", "weight": 0.5}]}
    tree |= {"data": {"prompts": "/home/ann/prompts.txt"}, "optim": {"learning_rate": 1e-4, "ema": None}}
    tree["eval"] = tree.get("eval", {}) | {"rewards": [{"name": "clip_score"}]}
    for key, value in changes.pop("config", {}).items():
        tree[key] = (tree.get(key) or {}) | value if isinstance(value, dict) else value
    known = {"hardware": "one card", "flowrl": "0.1.0", "commit": "a" * 40, "command": "flowrl train /home/ann/x.yaml"}
    files = {"summary": SUMMARY | changes.pop("summary", {}), "provenance": known | changes.pop("provenance", {})}
    folders.write_run(run, tree, [{"iteration": 3}], **files)
    told = {"prompts": ["a red circle", NASTY], "guidance_scale": 5.0, "iteration": 3, "num_inference_steps": 3}
    for tag, shift in (("base", 0.0), ("tuned", 0.5)):
        clip = np.full((2, 2), 0.5 - shift / 2)
        scores = {"brightness": np.asarray([[0.2 + shift, 0.3 + shift]] * 2), "clip": clip}
        folders.write_scores(run, tag, scores, **told)
    assert not changes
    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "base", tiny.pipeline(sd35=True))


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(write_run(tmp_path_factory.mktemp("runs") / "tuned", base, tiny.LORA))


def read(file: Path) -> tuple[dict[str, Any], str]:
    """(front matter, body) of a card."""
    return ModelCard.load(file).data.to_dict(), ModelCard.load(file).text


def carded(run: Path) -> tuple[dict[str, Any], str]:
    """(front matter, body) of the card of a run's own weights."""
    return read(card.write_card(run, run / "adapter", "adapter"))


def wan_card(folder: Path, **model: Any) -> tuple[dict[str, Any], str]:
    """The card of a run of a video model with these options."""
    base = folder / "wan"
    base.mkdir()
    (base / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    return carded(finish(write_run(folder / "run", base, tiny.LORA), config={"model": {"path": str(base), **model}}))


def code_of(text: str) -> str:
    """The card's Python."""
    return text.split("```python\n")[1].split("\n```")[0] + "\n"


def test_the_front_matter_has_what_the_hub_shows(run):
    front, _ = carded(run)
    assert front["library_name"] == "diffusers"
    assert front["pipeline_tag"] == "text-to-image"
    assert {"lora", "flow-grpo", "arxiv:2505.05470"} <= set(front["tags"])
    assert "base_model" not in front  # a folder of the user's is none of the hub
    (result,) = front["model-index"]
    numbers = {metric["type"]: metric for one in result["results"] for metric in one["metrics"]}
    assert numbers["brightness"]["value"] == 0.75
    assert numbers["brightness"]["args"]["difference_interval_95"] == [0.45, 0.55]
    assert (numbers["clip"]["args"]["base"], numbers["clip"]["args"]["seeds"]) == (0.5, 2)


def test_the_body_has_method_data_rewards_numbers_and_limits(run):
    _, text = carded(run)
    for words in (
        "Flow-GRPO: online clipped policy gradient on flow models (arXiv 2505.05470",
        "a LoRA of rank 4, alpha 10",
        "7 prompts of prompts.txt; 2 prompts held out (data.eval_prompts=held.txt)",
        "| brightness.py | 1 | trained on | not declared |",
        "| jpeg | 0.5 | trained on |",
        "| clip_score |  | watched |",
        "brightness, higher is better | 0.25",
        "Clip got worse",
        "2 evaluated prompts are few",
        "trained on 7 prompts alone",
        "Nobody checked what it generates for safety",
        "The licence is that of the base model, which is not known here",
        "| Hardware | one card |",
        "1 min 15 s",
        "commit aaaaaaaaaaaa",
    ):
        assert words in text, words


def test_texts_of_users_stay_text_and_no_folder_is_told(run, base, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    tree = yaml.safe_load((copy / "config.yaml").read_text())
    tree |= {"name": NASTY, "data": {"prompts": f"/home/ann/{NASTY}.txt"}}
    (copy / "config.yaml").write_text(yaml.safe_dump(tree))
    file = card.write_card(copy, copy / "adapter", "adapter")
    _, text = read(file)
    whole = file.read_text()
    assert "<script>" not in text
    assert "](http" not in text
    assert "/home/ann" not in whole
    assert str(base.parent) not in whole
    assert str(tmp_path) not in whole
    heads = ["Results", "How to load it", "Training", "Rewards", "Limits", "Versions"]
    assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## {head}" for head in heads]
    assert len([line for line in text.splitlines() if line.startswith("# ")]) == 1
    # The words of the table have not become columns.
    assert all(line.count("|") == 3 for line in text.splitlines() if line.startswith("| Data"))
    yaml.safe_load(whole.split("---\n")[1])


@pytest.mark.parametrize(
    "text", ["a_b _c_ *d* [e](f) <g> `h` | #i @j &amp; \\k ~~l~~ !m", "- a", "1\n# 2", "www.a.org"]
)
def test_escaped_text_shows_itself(text):
    shown = escaped(text)
    assert html.unescape(shown) == " ".join(text.split())
    assert not re.search(r"[*\[\]<>`|@\\~!]|&(?!#\d+;)", shown)


def test_paths_with_spaces_are_named_too():
    named = Named({"data": {"prompts": "/srv/my files/a b.txt"}, "list": ["~/x/y.txt"]})
    assert named("of /srv/my files/a b.txt and ~/x/y.txt; hf:owner/name") == "of a b.txt and y.txt; hf:owner/name"


# ---- its code


def called(text: str, folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Run the card's Python in the folder of the weights, next to the base model; the image that it saves."""
    code = code_of(text)
    parts = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [name.name for node in parts for name in node.names]
    assert all(len(re.findall(rf"\b{name}\b", code)) > 1 for name in names), f"imported and not used: {code}"
    place = folder / base.name
    if not place.exists():
        place.symlink_to(base)
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    exec(compile(code, "card", "exec"), {})
    with Image.open("image.png") as image:
        return pil_to_tensor(image.convert("RGB"))


@pytest.mark.parametrize(
    "layout", ["adapter", "kohya", *(pytest.param(name, marks=pytest.mark.slow) for name in ("diffusers", "merged"))]
)
def test_the_code_of_a_lora_samples_with_it_in_every_layout(run, base, layout, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    if layout == "adapter":
        shutil.copytree(run / "adapter", folder)
        card.write_card(run, folder, "adapter")
    else:
        export(run, layout, folder)
        card.write_card(run, folder, layout)
    front, text = read(folder / "README.md")
    image = called(text, folder, base, monkeypatch)
    assert image.shape == (3, 32, 32)
    code = code_of(text)
    assert "num_inference_steps=3, guidance_scale=5.0" in code
    assert ("load_lora_weights" in code) == (layout in ("adapter", "diffusers"))
    assert ("lora" in front["tags"]) == (layout != "merged")
    assert ("ComfyUI" in text) == (layout == "kohya")
    # All four are the same function.
    torch.manual_seed(0)
    expected = reference(run)
    assert (image.int() - expected.int()).abs().max() <= 2


@pytest.mark.parametrize("layout", ["merged", "kohya", "diffusers"])
def test_the_code_for_an_asset_imports_flowrl_where_nothing_else_has_the_base(layout, tmp_path, monkeypatch):
    model = sd3.build(sd3.Config(path="tiny-sd3", max_sequence_length=tiny.TOKENS))
    run = finish(write_run(tmp_path / "run", Path("tiny-sd3"), tiny.LORA))
    tiny.lora(model, noise=0.1).save(run / "adapter", type(model.pipeline))
    export(run, layout, tmp_path / "out")
    card.write_card(run, tmp_path / "out", layout)
    _, text = read(tmp_path / "out" / "README.md")
    called(text, tmp_path / "out", run, monkeypatch)
    assert ("flowrl" in code_of(text)) == (layout != "merged")


def reference(run: Path) -> Tensor:
    loaded = judged.load(str(run))
    loaded.pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(0)
    return pil_to_tensor(loaded.pipeline("a red circle", **loaded.call).images[0])


def test_full_weights_are_loaded_as_a_network(base, tmp_path, monkeypatch):
    run = finish(write_run(tmp_path / "run", base, None))
    front, text = carded(run)
    assert "lora" not in front["tags"]
    assert "All weights of the denoiser" in text
    assert "SD3Transformer2DModel.from_pretrained" in text
    image = called(text, run / "adapter", base, monkeypatch)
    assert (image.int() - reference(run).int()).abs().max() <= 2


def test_learned_noise_is_drawn_for_its_own_prompts(base, tmp_path, monkeypatch):
    config = {"algorithm": {"name": "find"}, "model": {"lora": {"rank": 1, "alpha": 1}}}
    run = finish(
        write_run(tmp_path / "run", base, tiny.LORA), config=config, summary={"evaluated_on": "its own prompts"}
    )
    shutil.rmtree(run / "adapter")
    LearnedNoise([("a red circle", ())], (4, 8, 8)).save(run / "adapter")
    front, text = carded(run)
    assert "lora" not in front["tags"]
    assert "initial noise of the run's own prompts" in text
    assert "noise for the run's own prompts alone" in text
    assert "LearnedNoise.load" in text
    torch.manual_seed(0)
    assert called(text, run / "adapter", base, monkeypatch).shape == (3, 32, 32)


def test_preference_pairs_and_no_reward_are_told(base, tmp_path):
    config = {
        "algorithm": {"name": "diffusion_dpo"},
        "rewards": [],
        "data": {"pairs": {"path": "/data/votes"}, "prompts": None},
    }
    summary = {
        "held_out": None,
        "evaluated_on": "no prompts",
        "implicit_accuracy": {"mean": 0.7, "low": 0.6, "high": 0.8, "n": 50},
    }
    run = finish(
        write_run(tmp_path / "run", base, tiny.LORA),
        config=config,
        summary=summary,
        provenance={"data": {"pairs": {"usable": 480, "rows": 500}}},
    )
    _, text = carded(run)
    assert "480 preference records of votes" in text
    assert "It was trained on no reward: it learned from given pairs or labels" in text
    assert "Of 50 held-out pairs the tuned model prefers 70.0 % as the data do" in text


@pytest.mark.parametrize(
    ("model", "task", "words"),
    [
        (
            {"num_frames": 9, "fps": 24},
            "text-to-video",
            ("export_to_gif(pipe(", "num_frames=9", '"video.gif", fps=24)'),
        ),
        (
            {"pipeline": "WanImageToVideoPipeline", "call": {"num_frames": 9}},
            "image-to-video",
            (
                "from diffusers import WanImageToVideoPipeline",
                "pipe = WanImageToVideoPipeline.from_pretrained(",
                'image=load_image("input.png")',
            ),
        ),
    ],
    ids=["a video model", "a class that the configuration names"],
)
def test_a_video_model_is_loaded_and_called_as_one(tmp_path, model, task, words):
    front, text = wan_card(tmp_path, **model)
    assert front["pipeline_tag"] == task
    assert [each for each in words if each not in text] == []
    compile(code_of(text), "card", "exec")


@pytest.mark.parametrize("value", ["", "blue", "a \"quoted\" 'word'", "back\\slash", NASTY, "\U0001f600 \u00fc"])
def test_the_code_gives_the_very_value_of_a_text(tmp_path, value):
    _, text = wan_card(tmp_path, negative_prompt=value)
    code = ast.parse(code_of(text))
    keywords = [keyword for node in ast.walk(code) if isinstance(node, ast.Call) for keyword in node.keywords]
    (given,) = [ast.literal_eval(word.value) for word in keywords if word.arg == "negative_prompt"]
    assert given == value
    (rate,) = [ast.literal_eval(word.value) for word in keywords if word.arg == "fps"]
    assert rate == 16


def test_a_card_says_that_its_base_is_distilled_and_how_it_is_called(tmp_path):
    base = tiny.student(tmp_path / "base")
    text = carded(finish(write_run(tmp_path / "run", base, tiny.LORA)))[1]
    shown = html.unescape(" ".join(text.split()))
    assert "is distilled on fixed noise levels 1, 0.75, 0.5, 0.25" in shown
    assert "take 4 steps and no classifier-free guidance" in shown


def test_a_base_of_the_hub_is_named_in_the_front_matter_without_a_connection(base, tmp_path):
    config = {"model": {"path": "stabilityai/stable-diffusion-3.5-medium"}}
    run = finish(write_run(tmp_path / "run", base, tiny.LORA), config=config)
    front, text = carded(run)
    assert front["base_model"] == "stabilityai/stable-diffusion-3.5-medium"
    assert front["base_model_relation"] == "adapter"
    assert 'from_pretrained("stabilityai/stable-diffusion-3.5-medium")' in text


def test_unfinished_runs_and_training_prompts_have_no_results_on_the_hub_or_say_so(base, tmp_path):
    run = finish(write_run(tmp_path / "run", base, tiny.LORA), summary={"status": "stopped", "iterations": 2})
    front, text = carded(run)
    assert "model-index" not in front
    assert "The run has not finished: 2 of 3 iterations" in text
    told = finish(
        write_run(tmp_path / "other", base, tiny.LORA),
        summary={"evaluated_on": "training prompts", "held_out": None},
        config={"eval": {"rewards": []}},
    )
    front, text = carded(told)
    assert front["model-index"][0]["results"][0]["dataset"]["type"] == "training-prompts"
    assert "Every number is of prompts that it was trained on" in text
    assert "All numbers are of rewards that it was trained on" in text


def test_the_licence_is_that_of_the_base_where_its_card_says_it(tmp_path):
    assert card.licence("tiny-sd3") == "apache-2.0"
    (tmp_path / "model_index.json").write_text("{}")
    assert card.licence(str(tmp_path)) is None
    (tmp_path / "README.md").write_text("---\nlicense: openrail++\n---\n# A model\n")
    assert card.licence(str(tmp_path)) == "openrail++"


def test_a_card_that_fails_is_told_and_nothing_else_is_lost(run, tmp_path, caplog):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "adapter" / "README.md").unlink(missing_ok=True)
    (copy / "eval" / "tuned.json").write_text("{")
    assert card.try_card(copy, copy / "adapter", "adapter") is None
    assert "README.md could not be written" in caplog.text
    assert "the weights are not affected" in caplog.text
    command(copy, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["pytorch_lora_weights.safetensors"]


@pytest.mark.parametrize(
    ("name", "kind", "task"),
    [("flux", "FluxPipeline", "text-to-image"), ("wan", "WanPipeline", "text-to-video"), ("generic", "", None)],
)
def test_a_base_out_of_reach_has_the_class_of_its_native_adapter(name, kind, task, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tree = {"model": {"path": "nobody/nothing", "name": name}}
    facts: Any = SimpleNamespace(at=lambda *keys: tree.get(keys[0], {}).get(keys[1]))
    base = Base.of(facts)
    assert base.kind == kind
    assert base.task == (task or base.task)
