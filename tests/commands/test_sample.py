"""`flowrl sample`: runs draw as they were evaluated; pictures beside the prompt; clips."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch.testing import assert_close

from flowrl.apps import selection
from flowrl.commands.sample import provenance, stem
from flowrl.core.errors import ConfigError, ModelError, RewardFailure
from flowrl.data.prompts import Prompt
from flowrl.media import media
from flowrl.models.generic import options as guidance
from flowrl.models.generic.adapter import Config, Generic
from flowrl.run.origin import origin
from tests import native, tiny_sd3
from tests import tiny_pipelines as tiny
from tests.e2e.test_bad_input import command
from tests.tables import table

LAB, PROMPT = Path(__file__).resolve().parents[2] / "configs" / "lab", Prompt("a red circle", {})
# family, tiny pipeline, options of the adapter: each of them shows in the pipeline's own call.
RUNS: list[tuple[str, str, dict[str, Any]]] = [
    ("flux", "flux", {}),
    ("flux", "flux", {"shift": 2.0, "true_cfg_scale": 2.0, "negative_prompt": "blue"}),
    ("qwen_image", "qwen_image", {"shift": 2.0, "negative_prompt": "blue"}),
    ("wan", "wan", {"num_frames": 5, "shift": 5.0, "negative_prompt": "blue"}),
    ("wan", "wan_2_2", {"num_frames": 5, "guidance_scale_2": 2.0}),
    ("sd3", "", {}),
    ("generic", "qwen_image", {"call": {"max_sequence_length": tiny.TOKENS}}),
]


@pytest.mark.parametrize(("family", "case", "options"), RUNS)
def test_a_run_is_drawn_as_it_was_evaluated(family, case, options):
    """The pipeline's own call with the arguments that the adapter gives draws what an evaluation draws."""
    if family == "sd3":
        model: Any = tiny_sd3.adapter(tiny_sd3.pipeline(shift=3.0))
    elif family == "generic":
        model = Generic(tiny.make(case), Config(path="tiny", height=16, width=16, **options))
    else:
        model = native.adapter(family, tiny.make(case), (16, 16), **options)
    noise, x0 = native.drawn(model, 1, 3.0, 3)
    expected = model.decode(x0)
    call = model.own_call(3, 3.0) | {"latents": noise, "output_type": "pt", "return_dict": False}
    images = model.pipeline(prompt=native.PROMPTS[0], **call)[0]
    assert_close(images.reshape(expected.shape), expected, atol=1e-4, rtol=0)


# ---- the command


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """`flowrl sample` of a tiny pipeline saved as `model`: (exit code, what it printed)."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (20, 12), (200, 30, 30)).save("red.png")
    Image.new("RGB", (20, 12), (30, 30, 200)).save("blue.png")

    def run(case: str, *words: str, tokens: int = tiny.TOKENS) -> tuple[int, str]:
        if not Path("model").is_dir():
            tiny.make(case).save_pretrained("model")
        small = ("height=16", "width=16", f"max_sequence_length={tokens}")
        settings = [word for setting in small for word in ("--set", setting)]
        return command(monkeypatch, capsys, "sample", "model", "--steps", "2", *settings, *words)

    return run


def drawn(number: str, suffix: str = "png", folder: str = "samples") -> Path:
    """The one file of a prompt and a sample."""
    (file,) = Path(folder).glob(f"{number}-*.{suffix}")
    return file


def test_a_text_file_and_a_prompt_are_drawn_as_pictures(draw):
    Path("prompts.txt").write_text("a red circle\ntwo blue squares\n")
    code, printed = draw("flux", "prompts.txt", "a circle", "--count", "2")
    assert code == 0, printed
    assert len(list(Path("samples").glob("*.png"))) == 6
    assert media.read(drawn("00002-1")).shape == (3, 16, 16)


def test_words_of_sample_are_prompts_or_files_of_any_form(tmp_path, monkeypatch):
    from flowrl.commands.sample import _records

    monkeypatch.chdir(tmp_path)
    Path("p.csv").write_text("prompt,tag\na cat,1\n")
    Path("p.json").write_text('["a dog"]')
    long = "no. 5 of " * 60
    found = _records(["p.csv", "p.json", "2.5 cats", long], [])
    assert [record.text for record in found] == ["a cat", "a dog", "2.5 cats", long]


def test_a_record_of_prompts_gives_each_its_picture(draw):
    lines = [{"prompt": "a", "image": "red.png"}, {"prompt": "a", "images": ["blue.png"]}]
    Path("edits.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, printed = draw("flux_kontext", "edits.jsonl", "--set", "_auto_resize=false", "--set", "max_area=256")
    assert code == 0, printed
    red, blue = (media.read(drawn(f"0000{k}-0")) for k in (0, 1))
    assert not torch.allclose(red, blue)


def test_a_video_begins_with_the_image_of_the_option_and_has_its_note_beside_it(draw):
    code, printed = draw("wan_image", "a", "--image", "red.png", "--set", "num_frames=5", tokens=512)
    assert code == 0, printed
    video = drawn("00000-0", "webp")
    assert media.read(video).shape == (5, 3, 16, 16)
    assert video.with_suffix(".json").is_file()
    note = media.read_note(video)
    assert (note["prompt"], note["seed"], note["images"][0]["file"], note["fps"]) == ("a", 0, "red.png", 16)
    assert media.facts(video) == (5, 16)


def test_a_video_is_written_as_mp4_at_a_rate_of_the_options(draw):
    pytest.importorskip("av", reason="needs the extra video")
    code, printed = draw("wan", "a", "--set", "num_frames=5", "--format", "mp4", "--fps", "24")
    assert code == 0, printed
    video = drawn("00000-0", "mp4")
    frames, fps = media.decode_video(video)
    assert (frames.shape, frames.dtype, fps) == ((5, 3, 16, 16), torch.uint8, 24)
    assert media.read_note(video)["fps"] == 24
    code, printed = draw("wan", "a", "--set", "num_frames=1", "--format", "mp4", "--out", "other")
    assert (code, list(Path("other").glob("*.*"))) == (2, [])
    assert "--format mp4: it is for videos, and WanPipeline made an image" in printed


@pytest.mark.parametrize(
    ("case", "words", "reason"),
    table(__file__, "refused_pictures"),
)
def test_pictures_that_do_not_fit_are_refused_with_the_reason(draw, case, words, reason):
    Path("set.xlsx").write_text("a prompt\n")
    Path("cut.png").write_bytes(Path("red.png").read_bytes()[:60])
    Path("own.jsonl").write_text(json.dumps({"prompt": "a", "image": "blue.png"}))
    code, printed = draw(case, *words)
    assert code == 2, printed
    assert reason in printed
    assert not list(Path("samples").glob("*"))


def test_a_folder_used_again_keeps_what_another_call_drew_and_the_same_call_draws_the_same_file(draw):
    for words in (["a red circle"], ["a red circle"], ["a red circle!"]):
        assert draw("flux", *words)[0] == 0
    files = sorted(Path("samples").iterdir(), key=os.path.getmtime)
    assert [media.read_note(file)["prompt"] for file in files] == ["a red circle", "a red circle!"]


def test_the_best_of_n_are_kept_with_all_scores_and_are_named_where_they_are_scored(draw, monkeypatch, capsys):
    """A judge by the red channel; the second one calls all equal, and the third one has no score of the first image."""
    red = "def score(images, prompts, metadata):\n    return [{} for image in images]\n"
    Path("red.py").write_text(red.format("float(image[0].mean())"))
    Path("same.py").write_text(red.format("1.0"))
    assert draw("flux", "a", "b", "--count", "4", "--seed", "7", "--out", "all")[0] == 0
    reds = [float(media.read(drawn(f"00001-{k}", folder="all"))[0].mean()) for k in range(4)]
    code, printed = draw("flux", "a", "b", "--best-of", "4", "--keep", "2", "--seed", "7", "--reward", "red.py")
    assert code == 0, printed
    best = sorted(range(4), key=lambda k: -reds[k])[:2]
    kept = sorted(Path("samples").glob("00001-*.png"))
    assert {int(file.name.split("-")[1]) for file in kept} == set(best)
    for file in kept:
        number = file.name.split("-")[1]
        assert torch.equal(media.read(file), media.read(drawn(f"00001-{number}", folder="all")))
        note = media.read_note(file)
        assert note["seed"] == 7 + int(number)
        told = note["selected"]
        assert (told["how"], told["keep"], told["seeds"]) == ("best of 4 by red", 2, [7, 8, 9, 10])
        assert told["chosen_by"] == told["scores"]["red"] == pytest.approx(reds)
    assert len(list(Path("samples").glob("*.png"))) == 4
    assert draw("flux", "a", "--best-of", "3", "--reward", "same.py", "--out", "ties")[0] == 0
    assert [file.name[:7] for file in Path("ties").glob("*.png")] == ["00000-0"]

    code, printed = command(monkeypatch, capsys, "score", "samples", "--reward", "red.py")
    assert code == 0, printed
    assert json.loads(printed.splitlines()[0])["selected"] == "best of 4 by red"
    assert "4 of 4 files were selected (best of 4 by red): their mean is not that of a model" in printed
    code, printed = command(monkeypatch, capsys, "score", "all", "--reward", "red.py")
    assert "selected" not in printed


def test_an_image_without_a_score_is_not_chosen_and_too_few_of_them_are_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "def score(images, prompts, metadata):\n    return [float(x.mean()) or float('nan') for x in images]\n"
    Path("bright.py").write_text(text)
    levels = [torch.full((3, 2, 2), value, dtype=torch.uint8) for value in (0, 51, 102, 0)]
    chooser = selection.best_of(4, 2, "bright.py", "model", [PROMPT], 1)
    assert chooser is not None
    kept = chooser(levels, PROMPT, 5)
    assert list(kept) == [2, 1]
    assert kept[1]["selected"]["chosen_by"] == [None, pytest.approx(0.2), pytest.approx(0.4), None]
    with pytest.raises(RewardFailure, match="1 of 2 images of 'a red circle' have a score"):
        chooser(levels[:2], PROMPT, 5)


def test_a_run_chooses_by_those_of_its_own_rewards_that_count(tmp_path):
    tree = yaml.safe_load((LAB / "flow_grpo.yaml").read_text())
    for names in (["shapes"], ["shapes", "brightness.py"]):
        (tmp_path / "brightness.py").write_text(
            "def score(images, prompts, metadata):\n    return [0.0 for _ in images]\n"
        )
        rewards = [{"path": str(tmp_path / name)} if name.endswith(".py") else {"name": name} for name in names]
        tree["rewards"] = [{"name": "jpeg", "weight": 0.0}, *rewards]
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        chooser = selection.best_of(4, None, None, str(tmp_path), [PROMPT], 1)
        assert chooser is not None
        assert [entry.name for entry in chooser.scorer.entries] == [name.removesuffix(".py") for name in names]
        how = "best of 2 by " + " + ".join(name.removesuffix(".py") for name in names)
        (note,) = chooser([torch.zeros(3, 16, 16, dtype=torch.uint8)] * 2, PROMPT, 0).values()
        assert note["selected"]["how"] == how


@pytest.mark.parametrize(("count", "keep", "reward", "drawn", "reason"), table(__file__, "refused_choices"))
def test_a_choice_that_is_none_is_refused_with_the_reason(count, keep, reward, drawn, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        selection.best_of(count, keep, reward, "model", [PROMPT], drawn)


CALL = {"num_inference_steps": 4, "height": 8}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("seed", 1), ("prompt", "b"), ("guidance", 2.0), ("model", "other"), ("weights", "2"), ("image", "blue.png")),
        *(("call", CALL | other) for other in ({"num_inference_steps": 5}, {"height": 16})),
    ],
)
def test_whatever_decides_an_image_is_in_its_name(tmp_path, monkeypatch, key, value):
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "other"):
        Path(folder).mkdir()
        Path(folder, "model_index.json").write_text("{}")
    for file, colour in (("red.png", "red"), ("blue.png", "blue")):
        Image.new("RGB", (2, 2), colour).save(file)

    def name(*, prompt="a", seed=0, call=CALL, guidance=None, model="model", weights="bytes", image="red.png"):
        (Path(model) / "weights.safetensors").write_text(weights)
        return stem(0, 0, provenance(origin(model, SimpleNamespace(), call, guidance), prompt, [image], seed))

    assert name() != name(**{key: value})


def test_other_weights_of_a_run_have_another_name(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "config.yaml").write_text("model: {name: sd3, path: tiny-sd3}\n")
    names = []
    for weights in ("one", "one", "two"):
        (tmp_path / "adapter" / "pytorch_lora_weights.safetensors").write_text(weights)
        made = origin(str(tmp_path), SimpleNamespace(), {}, None)
        names.append(stem(0, 0, provenance(made, "a", [], 0)))
    assert names[0] == names[1] != names[2]
    assert (made["model"], made["run"]) == ("tiny-sd3", str(tmp_path))


def test_a_picture_says_how_it_was_drawn_and_is_scored_by_its_prompt(draw, monkeypatch, capsys):
    Path("words.py").write_text("def score(images, prompts, metadata):\n    return [float(len(p)) for p in prompts]\n")
    assert draw("flux", "a red circle \u2013 one", "--seed", "5", "--guidance", "2.5")[0] == 0
    told = media.read_note(drawn("00000-0"))
    assert (told["prompt"], told["seed"], told["model"]) == ("a red circle \u2013 one", 5, "model")
    assert (told["steps"], told["guidance"], told["adapter"], told["run"]) == (2, 2.5, None, None)
    assert told["arguments"]["height"] == 16
    code, printed = command(monkeypatch, capsys, "score", "samples", "--reward", "words.py")
    assert code == 0, printed
    assert json.loads(printed.splitlines()[0])["words"] == 18


def test_without_memory_the_command_says_so(draw, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("flowrl.commands.sample._draw", fail)
    code, printed = draw("flux", "a red circle")
    assert code == 1
    assert "flowrl: out of memory in the phase sampling: CUDA out of memory. Tried to allocate 2.00 GiB; s" in printed


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n"])
def test_of_a_foreign_or_broken_file_nothing_is_told(tmp_path, content):
    file = tmp_path / "a.png"
    file.write_bytes(content)
    assert media.read_note(file) == {}
    file.with_suffix(".webp").write_bytes(content)
    file.with_suffix(".json").write_text("[1]")
    assert media.read_note(file.with_suffix(".webp")) == {}


def test_guidance_is_set_in_the_pipelines_own_units_and_refused_where_it_has_none(monkeypatch):
    scales = {name: guidance.guidance_arguments(tiny.make(name), 2.0, {}) for name in ("sd3", "flux", "qwen_image")}
    assert scales["sd3"] == scales["flux"] == {"guidance_scale": 2.0}
    assert scales["qwen_image"] == {"true_cfg_scale": 2.0, "negative_prompt": ""}
    guider = tiny.make("hunyuan_video_1_5")
    assert guidance.guidance_arguments(guider, 2.0, {}) == {}
    assert guider.guider.guidance_scale == 2.0
    monkeypatch.setattr(guidance, "guidance_of", lambda *_: "none")
    with pytest.raises(ModelError, match="FluxPipeline takes no guidance scale; leave out --guidance"):
        guidance.guidance_arguments(tiny.make("flux"), 2.0, {})
