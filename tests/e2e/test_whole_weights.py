"""Weights that are not whole: the file and the tensor are named, with exit code 2, and no image is written of NaN."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.core import assets
from flowrl.core.errors import Diverged, ModelError
from flowrl.media.eight_bits import eight_bit
from flowrl.run import judged
from tests import tiny_sd3 as tiny
from tests.apps.publish.test_export import write_run
from tests.e2e.test_bad_input import command

Command = Callable[..., tuple[int, str]]
PARTS = {
    "transformer": ("diffusion_pytorch_model.safetensors", "transformer_blocks.0.attn.to_q.weight", 128, 128),
    "text_encoder": ("model.safetensors", "text_model.encoder.layers.0.mlp.fc2.weight", 64, 192),
}


def damage(file: Path, name: str, kind: str) -> None:
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-100])
        return
    tensors = load_file(file)
    value = tensors.pop(name)
    if kind == "another shape":
        tensors[name] = torch.zeros(value.shape[0] + 1, value.shape[1])
    elif kind == "NaN":
        tensors[name] = value.index_fill(0, torch.tensor([0]), math.nan)
    save_file(tensors, file, metadata={"format": "pt"})


def model(tmp_path: Path, part: str, kind: str) -> Path:
    source = assets.asset_folder("tiny-sd3", "model_index.json")
    assert source is not None
    shutil.copytree(source, tmp_path / "model")
    file, name, *_ = PARTS[part]
    damage(tmp_path / "model" / part / file, name, kind)
    return tmp_path / "model" / part / file


@pytest.fixture
def flowrl(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *words: command(monkeypatch, capsys, *words)


def words_of(part: str, kind: str, file: Path) -> list[str]:
    _, name, rows, columns = PARTS[part]
    if kind == "cut":
        return [f"{file} is damaged"]
    if kind == "missing":
        return [f"{file} lacks the tensor {name}"]
    if kind == "another shape":
        return [f"{file}: the tensor {name} is [{rows + 1}, {columns}]", f"asks for [{rows}, {columns}]"]
    return [f"{columns} of the {rows * columns} values of {part}.{name} ({file})"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["missing", "another shape", "cut", "NaN"])
def test_a_models_weights_are_named_before_anything_else_is_blamed(tmp_path, flowrl, part, kind):
    file = model(tmp_path, part, kind)
    train = ["train", "run.yaml", "model.path=model", "iterations=1"]
    for words in (["sample", "model", "a red circle", "--steps", "1", "--out", "out"], train):
        code, printed = flowrl(*words)
        assert code == 2, printed
        for each in words_of(part, kind, file.relative_to(tmp_path)):
            assert each in printed.replace(f"{tmp_path}/", "")
        assert "Traceback" not in printed
        assert "dtype" not in printed
    assert not [*tmp_path.rglob("*.png")]


@pytest.mark.parametrize("kind", ["missing", "another shape", "cut"])
def test_full_weights_of_a_run_are_whole_or_refused(tmp_path, kind):
    run = write_run(tmp_path / "run", tiny.save(tmp_path / "base", tiny.pipeline(sd35=True)), None)
    file, name, *_ = PARTS["transformer"]
    damage(run / "adapter" / "transformer" / file, name, kind)
    with pytest.raises(ValueError, match=rf"adapter/transformer/{file}.*{'damaged' if kind == 'cut' else name}"):
        judged.load(str(run))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_level_stands_for_what_is_no_number(value):
    with pytest.raises(Diverged, match="holds NaN or inf, and is not written"):
        eight_bit(torch.tensor([0.5, value]))


def test_a_model_whose_weights_are_finite_is_told_otherwise(monkeypatch, tmp_path, flowrl):
    from flowrl.models.weights import whole

    monkeypatch.setattr(whole, "not_finite", lambda value: 0)
    model(tmp_path, "transformer", "NaN")
    code, printed = flowrl("sample", "model", "a red circle", "--steps", "1", "--out", "out")
    assert code == 2
    assert "its weights are finite; give it another dtype" in printed
    assert not [*tmp_path.rglob("*.png")]


def test_a_lora_of_a_run_is_looked_at_too(tmp_path):
    run = write_run(tmp_path / "run", tiny.save(tmp_path / "base", tiny.pipeline(sd35=True)), tiny.LORA)
    file = run / "adapter" / "pytorch_lora_weights.safetensors"
    tensors = load_file(file)
    key = sorted(tensors)[0]
    tensors[key][0] = math.nan
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"values of {key} in {file.name} are NaN or inf"):
        judged.load(str(run))
