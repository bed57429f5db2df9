"""Teachers: frozen roles from files, beside a LoRA or full weights; what is trained goes by the adapter's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor
from torch.testing import assert_close

from flowrl.core.errors import ModelError
from flowrl.models.base import LoraSettings
from flowrl.models.weights.roles import Weights
from flowrl.models.weights.teachers import read_teacher, with_teachers
from tests import tiny_sd3 as tiny

FILE = "pytorch_lora_weights.safetensors"
KEY = "algorithm.teachers.colour"


def moved(weights: Weights, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in weights.parameters.values():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)


def saved(folder: Path, lora: LoraSettings | None, seed: int) -> Tensor:
    """Trained weights in a folder; the output of the network that has them."""
    model = tiny.adapter()
    weights = Weights(model.network, lora, model.lora_targets, seed)
    moved(weights, seed)
    weights.save(folder, type(model.pipeline))
    return tiny.output(model)


def student(lora: LoraSettings | None, **paths: Path) -> tuple[Any, Weights]:
    model = tiny.adapter(lora=lora)
    named = {role: (f"algorithm.teachers.{role}", str(path)) for role, path in paths.items()}
    return model, with_teachers(model, model.config, 0, named)[0]


OTHER = LoraSettings(rank=2, alpha=3, targets=["attn.to_q", "ff.net.2"])
"""Of another rank, with another scale and a module that the student does not adapt."""


@pytest.mark.parametrize("own", [LoraSettings(rank=4, alpha=10), LoraSettings(rank=4, alpha=10, kind="dora"), None])
@pytest.mark.parametrize("theirs", [OTHER, LoraSettings(rank=4, alpha=6, kind="rslora"), None])
def test_a_role_is_the_network_of_its_file_whatever_is_trained(tmp_path, own, theirs):
    expected = saved(tmp_path / "teacher", theirs, 3)
    model, weights = student(own, teacher=tmp_path / "teacher")
    base, names = tiny.output(tiny.adapter()), set(weights.parameters)
    assert torch.equal(tiny.output(model), base), "the student begins as the base"
    moved(weights, 8)
    weights.snapshot("reference")
    out = tiny.output(model)
    for _ in range(2):
        with weights.using("teacher"):
            assert_close(tiny.output(model), expected, atol=2e-5, rtol=0)
        assert torch.equal(tiny.output(model), out), "the student is active again"
    if own is not None:
        with weights.using("reference"):
            assert torch.equal(tiny.output(model), base)
    trained = {name for name, p in model.network.named_parameters() if p.requires_grad}
    assert trained == names
    assert names == set(Weights(tiny.adapter().network, own, model.lora_targets, 0).parameters)
    assert not any("teacher" in name for name in weights.state())
    tiny.backward(model, weights)
    assert all(p.grad is None for name, p in model.network.named_parameters() if name not in names)


def test_two_teachers_stand_beside_each_other_and_an_export_has_the_student_alone(tmp_path):
    one = saved(tmp_path / "one", OTHER, 3)
    other = saved(tmp_path / "other", LoraSettings(rank=8, alpha=8), 4)
    model, weights = student(tiny.LORA, one=tmp_path / "one", other=tmp_path / "other")
    moved(weights, 8)
    for role, expected in (("one", one), ("other", other), ("one", one)):
        with weights.using(role):
            assert_close(tiny.output(model), expected, atol=2e-5, rtol=0)
    weights.save(tmp_path / "own", type(model.pipeline))
    plain = tiny.pipeline()
    plain.load_lora_weights(str(tmp_path / "own"))
    assert_close(tiny.output(tiny.adapter(plain)), tiny.output(model), atol=2e-5, rtol=0)
    with safe_open(tmp_path / "own" / FILE, "pt") as file:
        assert not [name for name in file.keys() if "one" in name.split(".") or "other" in name.split(".")]  # noqa: SIM118
        assert json.loads(file.metadata()["lora_adapter_metadata"])["transformer.r"] == tiny.LORA.rank


def test_the_teacher_s_forward_keeps_the_graph_of_the_student_that_was_made_before(tmp_path):
    saved(tmp_path / "teacher", OTHER, 3)
    model, weights = student(tiny.LORA, teacher=tmp_path / "teacher")
    moved(weights, 8)

    def gradient(between: bool) -> dict[str, Tensor]:
        out = model.predict(x, torch.tensor([900.0, 300.0]), cond, 1.0)
        if between:
            with torch.no_grad(), weights.using("teacher"):
                model.predict(x, torch.tensor([900.0, 300.0]), cond, 1.0)
        out.square().sum().backward()
        return {name: p.grad.clone() for name, p in weights.parameters.items() if p.grad is not None}

    torch.manual_seed(3)
    x, cond = torch.randn(2, *model.latent_shape()), model.encode(tiny.PROMPTS)
    first = gradient(False)
    for p in weights.parameters.values():
        p.grad = None
    second = gradient(True)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- what would silently teach nothing


def spoil(folder: Path, change: Any) -> None:
    """Write the file anew with `change(tensors)`, under the same header."""
    file = folder / FILE
    with safe_open(file, "pt") as source:
        about = source.metadata()
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, about)


def module_of(tensors: dict[str, Tensor]) -> str:
    return sorted(name for name in tensors if "to_q.lora_B" in name)[0].removesuffix(".lora_B.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{module_of(t)}.lora_B.weight"), "half of a pair: .*to_q lacks its B"),
        (lambda t: [t.pop(f"{module_of(t)}.lora_{half}.weight") for half in "AB"], "was trained at .*to_q, as it says"),
        (lambda t: t[f"{module_of(t)}.lora_B.weight"].zero_(), "B of .*to_q is 0 everywhere"),
        (lambda t: t[f"{module_of(t)}.lora_A.weight"].zero_(), "A of .*to_q is 0 everywhere"),
        (lambda t: t[f"{module_of(t)}.lora_A.weight"].fill_(torch.nan), "are NaN or inf"),
    ],
)
def test_a_tensor_that_is_missing_or_zero_is_refused_by_its_name(tmp_path, change, message):
    saved(tmp_path, OTHER, 3)
    assert read_teacher(KEY, str(tmp_path), tiny.adapter()).pairs
    spoil(tmp_path, change)
    with pytest.raises(ModelError, match=message) as caught:
        read_teacher(KEY, str(tmp_path), tiny.adapter())
    assert KEY in str(caught.value)


def test_what_a_family_declares_dead_may_be_zero(tmp_path):
    """The last block of SD3 throws some outputs away, whose adapters no training moves."""
    model = tiny.adapter()
    weights = tiny.lora(model)
    tiny.backward(model, weights)
    for p in weights.parameters.values():
        if p.grad is not None:
            p.data -= 0.1 * p.grad.sign()
    weights.save(tmp_path, type(model.pipeline))
    ends = [part for name, part in safetensors.torch.load_file(tmp_path / FILE).items() if ".lora_B." in name]
    assert not all(bool(part.any()) for part in ends)
    assert read_teacher(KEY, str(tmp_path), tiny.adapter()).pairs


def test_a_run_is_named_by_its_folder_and_one_without_weights_or_of_another_model_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ModelError, match="is a run without trained weights"):
        read_teacher(KEY, str(tmp_path), tiny.adapter())
    saved(tmp_path / "adapter", None, 3)
    full = read_teacher(KEY, str(tmp_path), tiny.adapter())
    saved(tmp_path / "again", None, 4)
    assert full.digest != read_teacher(KEY, str(tmp_path / "again"), tiny.adapter()).digest
    with pytest.raises(ModelError, match="is of another model"):
        read_teacher(KEY, str(tmp_path), tiny.adapter(tiny.pipeline(sd35=True)))
    shared = tiny.adapter(lora=None, shard=True)
    with pytest.raises(ModelError, match=r"model\.shard=true"):
        with_teachers(shared, shared.config, 0, {"teacher": (KEY, str(tmp_path))})
