"""Exported weights compute what the trained ones computed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from flowrl.apps.publish.export import export, renamed
from flowrl.commands.export import command
from flowrl.core.errors import ConfigError, ModelError, WriteError
from flowrl.core.files import fsync_all
from flowrl.models.base import LoraSettings
from flowrl.models.lora_formats.families import BY_PIPELINE
from flowrl.models.sd3 import LORA_TARGETS, Sd3
from flowrl.models.weights.roles import Weights, read_lora
from flowrl.run.trained import load_run_model
from tests import tiny_sd3 as tiny

FILE = "pytorch_lora_weights.safetensors"
BLOCK_TARGETS = [*LORA_TARGETS, "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0"]
BLOCK_TARGETS += ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "norm1.linear"]
OUTSIDE_TARGETS = ["context_embedder", "proj_out"]
OUTSIDE_TARGETS += [f"time_text_embed.{part}_embedder.linear_{n}" for part in ("timestep", "text") for n in (1, 2)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("base"), tiny.pipeline(sd35=True))


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as a trainer leaves it, with a LoRA whose alpha is not its rank."""
    return write_run(tmp_path_factory.mktemp("runs") / "tuned", base, tiny.LORA)


def write_run(folder: Path, base: Path, settings: LoraSettings | None, **model_options: object) -> Path:
    model = trained(settings)
    lora = None if settings is None else {"rank": settings.rank, "alpha": settings.alpha, "targets": settings.targets}
    if lora is not None and settings is not None and settings.kind != "lora":
        lora["kind"] = settings.kind
    tree = {
        "model": {"name": "sd3", "path": str(base), "lora": lora, "max_sequence_length": tiny.TOKENS, "height": 32}
        | model_options,
        "rollout": {"num_inference_steps": 3, "guidance_scale": 2.0},
        "eval": {"num_inference_steps": None, "guidance_scale": 5.0},
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    model[1].save(folder / "adapter", StableDiffusion3Pipeline)
    return folder


def trained(settings: LoraSettings | None = tiny.LORA) -> tuple[Sd3, Weights]:
    """The pipeline of `base` with a random update; the same every time."""
    model = tiny.adapter(tiny.pipeline(sd35=True))
    if settings is not None:
        return model, tiny.lora(model, settings, noise=0.1)
    weights = Weights(model.network, None, (), seed=0)
    torch.manual_seed(4)
    for p in weights.parameters.values():
        p.data += 0.01 * torch.randn_like(p)
    return model, weights


def wrapped(pipe: StableDiffusion3Pipeline) -> Sd3:
    pipe.set_progress_bar_config(disable=True)
    return tiny.adapter(pipe)


# ---- diffusers


def test_the_diffusers_lora_gives_the_trained_function_and_keeps_its_alpha(run, base, tmp_path):
    file = export(run, "diffusers", tmp_path / "out")
    assert file == tmp_path / "out" / FILE
    tensors, settings = read_lora(file)
    assert (settings["r"], settings["lora_alpha"]) == (tiny.LORA.rank, tiny.LORA.alpha)
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    pipe = StableDiffusion3Pipeline.from_pretrained(base)
    untouched = tiny.output(wrapped(pipe), 3.0)
    pipe.load_lora_weights(str(file.parent))
    expected = tiny.output(trained()[0], 3.0)
    assert not torch.allclose(untouched, expected, atol=1e-2)
    assert_close(tiny.output(wrapped(pipe), 3.0), expected, atol=1e-5, rtol=0)


# ---- merged


@pytest.mark.parametrize("settings", [tiny.LORA, None])
def test_the_merged_pipeline_gives_the_trained_function(base, tmp_path, settings):
    run = write_run(tmp_path / "run", base, settings)
    folder = export(run, "merged", tmp_path / "out")
    pipe = StableDiffusion3Pipeline.from_pretrained(folder)
    assert not [name for name in pipe.transformer.state_dict() if "lora" in name]
    expected = trained(settings)[0]
    assert_close(tiny.output(wrapped(pipe), 3.0), tiny.output(expected, 3.0), atol=1e-5, rtol=0)
    assert json.loads((folder / "model_index.json").read_text())["text_encoder_3"] == ["transformers", "T5EncoderModel"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_merged_pipeline_in_half_precision_runs_as_the_page_loads_it(base, tmp_path, dtype):
    """Without a type in float32, with the type that the files have; each weight is the rounded sum."""
    run, half = write_run(tmp_path / "run", base, tiny.LORA, dtype=dtype), getattr(torch, dtype)
    folder = export(run, "merged", tmp_path / "out")
    expected, plain = trained()[0].network, load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    key = "transformer_blocks.0.attn.to_q"
    layer: Any = expected.get_submodule(key)
    for options, found in (({}, torch.float32), ({"dtype": half}, half)):
        pipe = StableDiffusion3Pipeline.from_pretrained(folder, **options)
        pipe.set_progress_bar_config(disable=True)
        parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
        assert {part.dtype for part in parts} == {found}
        call: Any = {"num_inference_steps": 1, "height": 32, "width": 32, "output_type": "pt"}
        drawn: Any = pipe("a red circle", max_sequence_length=tiny.TOKENS, **call)
        assert drawn.images.isfinite().all()
        # Two roundings: of the frozen weight, and of the sum.
        right = plain[f"{key}.weight"].to(half).float() + layer.get_delta_weight("default")
        merged = pipe.transformer.get_parameter(f"{key}.weight").float()
        assert_close(merged, right, rtol=torch.finfo(half).eps, atol=float(right.abs().max()) * torch.finfo(half).eps)
    with safe_open(folder / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as source:
        assert source.get_tensor(f"{key}.weight").dtype == half


# ---- kohya


def original_deltas(file: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weight changes by the original names, as ComfyUI reads a LoRA: lora_unet_ and the name with underscores."""
    lora, deltas = load_file(file), {}
    for name, shape in shapes.items():
        key = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
        deltas[name] = torch.zeros(shape)
        if f"{key}.lora_up.weight" in lora:
            up, down = lora.pop(f"{key}.lora_up.weight"), lora.pop(f"{key}.lora_down.weight")
            deltas[name] += lora.pop(f"{key}.alpha").item() / down.shape[0] * up @ down
    assert not lora, f"keys that no module of the original network has: {sorted(lora)}"
    return deltas


def original_shapes(network: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the original MMDiT of a diffusers network, all that diffusers' converter asks for."""
    d, c = network.inner_dim, network.config
    shapes: dict[str, tuple[int, ...]] = {"pos_embed": (1, 64, d)}

    def linear(name: str, out: int, into: int) -> None:
        shapes.update({f"{name}.weight": (out, into), f"{name}.bias": (out,)})

    shapes.update({"x_embedder.proj.weight": (d, c.in_channels, 2, 2), "x_embedder.proj.bias": (d,)})
    linear("t_embedder.mlp.0", d, 256)
    linear("y_embedder.mlp.0", d, c.pooled_projection_dim)
    for name in ("t_embedder.mlp.2", "y_embedder.mlp.2"):
        linear(name, d, d)
    linear("context_embedder", d, c.joint_attention_dim)
    linear("final_layer.linear", 4 * c.out_channels, d)
    linear("final_layer.adaLN_modulation.1", 2 * d, d)
    for i in range(c.num_layers):
        last, dual = i == c.num_layers - 1, i in c.dual_attention_layers
        for side in ("x_block", "context_block"):
            block = f"joint_blocks.{i}.{side}"
            slim = last and side == "context_block"
            attentions = ["attn", "attn2"] if dual and side == "x_block" else ["attn"]
            for attention in attentions:
                linear(f"{block}.{attention}.qkv", 3 * d, d)
                shapes.update({f"{block}.{attention}.ln_{x}.weight": (c.attention_head_dim,) for x in "qk"})
                if not slim:
                    linear(f"{block}.{attention}.proj", d, d)
            linear(f"{block}.adaLN_modulation.1", (9 if len(attentions) > 1 else 2 if slim else 6) * d, d)
            if not slim:
                linear(f"{block}.mlp.fc1", 4 * d, d)
                linear(f"{block}.mlp.fc2", d, 4 * d)
    return shapes


def deltas_of(file: Path, network: torch.nn.Module) -> dict[str, Tensor]:
    """Weight changes by diffusers' names, through diffusers' own converter from the original names."""
    return convert_sd3_transformer_checkpoint_to_diffusers(original_deltas(file, original_shapes(network)))


@pytest.mark.parametrize("targets", [None, BLOCK_TARGETS, ["attn.to_k", "attn.add_v_proj"], OUTSIDE_TARGETS])
def test_the_kohya_file_holds_the_same_change_of_every_weight(base, tmp_path, targets):
    settings = LoraSettings(rank=3, alpha=7, targets=targets)
    run = write_run(tmp_path / "run", base, settings)
    model, weights = trained(settings)
    changes = deltas_of(export(run, "kohya", tmp_path / "out"), model.network)
    adapted = {name.partition(".lora_")[0] for name in weights.parameters}
    for name, change in changes.items():
        module = name.removesuffix(".weight")
        if module in adapted:
            part: Any = model.network.get_submodule(module)
            expected = 7 / 3 * part.lora_B["default"].weight @ part.lora_A["default"].weight
            assert expected.abs().max() > 0.01
            assert_close(change, expected.detach(), atol=1e-5, rtol=0)
        else:
            assert not change.any(), f"{name} was not trained"
    assert adapted <= {name.removesuffix(".weight") for name in changes}


def test_the_kohya_file_is_named_after_the_run_and_says_what_it_is(run, tmp_path):
    file = export(run, "kohya", tmp_path / "out")
    assert file.name == "tuned.safetensors"
    with safe_open(file, framework="pt") as source:
        about = source.metadata()
        names = set(source.keys())
    assert (about["ss_network_dim"], about["ss_network_alpha"]) == ("4", "10")
    # The names that kohya-ss/sd-scripts writes and ComfyUI looks for.
    block = "lora_unet_joint_blocks_0_x_block_attn"
    assert {f"{block}_qkv.lora_down.weight", f"{block}_qkv.alpha", f"{block}_proj.lora_up.weight"} <= names
    assert "lora_unet_joint_blocks_0_context_block_attn_qkv.lora_up.weight" in names


def test_a_module_without_a_kohya_name_is_refused():
    pair = {"norm_out.linear.lora_A.weight": torch.ones(2, 4), "norm_out.linear.lora_B.weight": torch.ones(4, 2)}
    with pytest.raises(ModelError, match=r"norm_out\.linear is not in the table of SD3 for the layout kohya"):
        renamed(pair, 1.0, BY_PIPELINE["StableDiffusion3Pipeline"], "kohya")


def foreign_run(folder: Path, model: dict) -> Path:
    """A run whose LoRA has module names that SD3's blocks have too."""
    (folder / "adapter").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    name = "transformer.transformer_blocks.0.attn.to_q.lora_"
    tensors = {f"{name}A.weight": torch.ones(2, 4), f"{name}B.weight": torch.ones(4, 2)}
    packed = json.dumps({"transformer.r": 2, "transformer.lora_alpha": 2})
    save_file(tensors, folder / "adapter" / FILE, metadata={"lora_adapter_metadata": packed})
    return folder


def test_a_qwen_lora_never_gets_the_names_of_sd3(tmp_path):
    run = foreign_run(tmp_path / "run", {"name": "qwen_image", "path": "somebody/something"})
    assert set(load_file(export(run, "kohya", tmp_path / "out"))) == {
        f"lora_unet_transformer_blocks_0_attn_to_q.{end}" for end in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    dotted = load_file(export(run, "comfyui", tmp_path / "dotted"))
    module = "diffusion_model.transformer_blocks.0.attn.to_q"
    assert set(dotted) == {f"{module}.lora_A.weight", f"{module}.lora_B.weight", f"{module}.alpha"}


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        ("comfyui", "diffusion_model.blocks.0.self_attn.q.lora_A.weight"),
        ("kohya", "lora_unet_blocks_0_self_attn_q.lora_down.weight"),
    ],
)
def test_two_experts_become_two_files_and_are_not_swapped(tmp_path, layout, key):
    run = foreign_run(tmp_path / "run", {"name": "wan", "path": "somebody/something"})
    packed = json.dumps({"transformer.r": 2, "transformer.lora_alpha": 4})
    for number, folder in ((1.0, run / "adapter"), (2.0, run / "adapter" / "transformer_2")):
        folder.mkdir(exist_ok=True)
        name = "transformer.blocks.0.attn1.to_q.lora_"
        tensors = {f"{name}A.weight": torch.full((2, 4), number), f"{name}B.weight": torch.full((4, 2), number)}
        save_file(tensors, folder / FILE, metadata={"lora_adapter_metadata": packed})
    folder = export(run, layout, tmp_path / "out")
    for suffix, number in (("high", 1.0), ("low", 2.0)):
        assert torch.equal(load_file(folder / f"run_{suffix}_noise.safetensors")[key], torch.full((2, 4), number))


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("StableDiffusion3Pipeline", None),
        ("SanaPipeline", "trained a SanaPipeline, and original names are known for Stable"),
        (["own", "StableDiffusion9Pipeline"], "trained a .*Pipeline, and original names"),
        (None, "of a class that is not known here"),  # the model's folder is gone
    ],
)
def test_of_the_generic_adapter_the_pipelines_class_decides(tmp_path, kind, refusal):
    if kind is not None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    run = foreign_run(tmp_path / "run", {"name": "generic", "path": str(tmp_path / "model")})
    if refusal is None:
        assert "lora_unet_joint_blocks_0_x_block_attn_qkv.alpha" in load_file(export(run, "kohya", tmp_path / "out"))
    else:
        with pytest.raises(ConfigError, match=refusal):
            export(run, "kohya", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert export(run, "diffusers", tmp_path / "out").is_file()


# ---- what can go wrong


@pytest.mark.parametrize("layout", ["diffusers", "kohya", "merged"])
@pytest.mark.parametrize("size", [0, 40, -20])
def test_a_truncated_adapter_is_named_and_nothing_is_written(base, run, tmp_path, layout, size):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    file = copy / "adapter" / FILE
    file.write_bytes(file.read_bytes()[:size])
    for work in (lambda: export(copy, layout, tmp_path / "out"), lambda: load_run_model(copy)):
        with pytest.raises(ConfigError, match=rf"{FILE} is damaged .*; the run's checkpoints are files of their own"):
            work()
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told(run, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowrl.apps.publish.export.shutil.copy", full)
        with pytest.raises(WriteError, match=r"out could not be written \(No space left on device\)"):
            export(run, "diffusers", tmp_path / "out")


def test_a_result_that_was_cut_off_is_removed_so_that_the_same_command_goes(run, tmp_path, monkeypatch):
    def cut(tensors: object, file: Path, **_: object) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", cut)
        with pytest.raises(WriteError, match="the run is as it was"):
            export(run, "kohya", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    assert export(run, "kohya", tmp_path / "out").is_file()


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_a_killed_export_leaves_nothing_that_looks_whole_and_the_same_command_goes(run, tmp_path, monkeypatch, layout):
    """A kill runs no clean-up: what is in the folder while files are written is what it leaves."""
    out, seen = tmp_path / "out", list[list[str]]()

    def watched(folder: Path) -> None:
        seen.append([entry.name for entry in out.iterdir()])
        fsync_all(folder)

    monkeypatch.setattr("flowrl.apps.publish.export.fsync_all", watched)
    (out / ".unfinished").mkdir(parents=True)
    (out / ".unfinished" / "half.safetensors").write_bytes(b"half")
    export(run, layout, out)
    assert seen == [[".unfinished"]]
    made = FILE if layout == "diffusers" else f"{run.name}.safetensors"
    assert {entry.name for entry in out.iterdir()} == {made}


def test_what_another_put_there_while_a_model_was_loaded_is_left_alone(run, tmp_path, monkeypatch):
    from flowrl.apps.publish import export as module

    convert = module.renamed

    def slow(*words: Any) -> Any:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "own.txt").write_text("mine")
        return convert(*words)

    monkeypatch.setattr(module, "renamed", slow)
    with pytest.raises(ConfigError, match="is not empty; name a new folder"):
        export(run, "kohya", tmp_path / "out")
    assert (tmp_path / "out" / "own.txt").read_text() == "mine"


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_out_is_a_new_folder(run, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("kept")
    for out, words in ((file, "it is a file; give a folder"), (tmp_path, "is not empty; name a new folder")):
        with pytest.raises(ConfigError, match=words):
            export(run, "diffusers", out)
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["kept"]


def test_full_weights_are_no_lora(base, tmp_path):
    run = write_run(tmp_path / "run", base, None)
    with pytest.raises(ConfigError, match=r"trained full weights: .* use --format merged"):
        export(run, "kohya", tmp_path / "out")


def test_a_folder_that_is_no_run_or_has_no_weights_is_named(run, tmp_path):
    with pytest.raises(ConfigError, match=r"no trained weights yet"):
        export(tmp_path, "diffusers", tmp_path / "out")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "pytorch_lora_weights.safetensors").touch()
    with pytest.raises(ConfigError, match=r"is not a run folder: there is no .*config\.yaml"):
        export(tmp_path, "diffusers", tmp_path / "out")


def test_the_command_prints_what_to_load(run, tmp_path, capsys):
    command(run, tmp_path / "out", "kohya")
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "tuned.safetensors")


# ---- the pipeline of a run, for `flowrl sample`


def test_the_pipeline_of_a_run_has_its_weights_and_settings(run):
    model, options = load_run_model(run)
    assert options == {
        "num_inference_steps": 3,
        "guidance_scale": 5.0,
        "height": 32,
        "width": 32,
        "max_sequence_length": tiny.TOKENS,
    }
    assert_close(tiny.output(wrapped(model.pipeline), 3.0), tiny.output(trained()[0], 3.0), atol=1e-5, rtol=0)


def test_a_run_without_t5_samples_without_it_and_is_merged_with_it(base, tmp_path):
    run = write_run(tmp_path / "run", base, tiny.LORA, load_t5=False)
    assert load_run_model(run)[0].pipeline.text_encoder_3 is None
    assert StableDiffusion3Pipeline.from_pretrained(export(run, "merged", tmp_path / "out")).text_encoder_3 is not None
