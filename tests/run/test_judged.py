"""Runs, folders, single files and LoRAs from elsewhere become pipelines that draw what their weights say."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from flowrl.apps.publish.export import export
from flowrl.commands.sample import command as sample
from flowrl.core.errors import ConfigError, ModelError
from flowrl.run import judged
from flowrl.run.foreign_lora import LoraFile, attach
from tests import tiny_pipelines
from tests import tiny_sd3 as tiny
from tests.apps.publish.test_export import trained, wrapped, write_run

ASSETS = Path(__file__).resolve().parents[2] / "assets"
FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("base"), tiny.pipeline(sd35=True))


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tuned", base, tiny.LORA)


@pytest.fixture(scope="module")
def tuned() -> Tensor:
    return tiny.output(trained()[0], 3.0)


@pytest.fixture(scope="module")
def plain(base: Path) -> Tensor:
    return tiny.output(wrapped(judged.load(str(base)).pipeline), 3.0)


def output(pipe: Any) -> Tensor:
    return tiny.output(wrapped(pipe), 3.0)


def drawn(pipe: Any) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    call: dict[str, Any] = {"num_inference_steps": 2, "output_type": "pt", "return_dict": False}
    return pipe(prompt="a red circle", generator=generator, **call)[0]


def lora_file(run: Path, layout: Any, out: Path) -> Path:
    return export(run, layout, out)


# ---- runs and folders


def test_a_run_is_its_tuned_weights_and_with_base_the_model_that_it_began_with(run, base, tuned, plain):
    loaded = judged.load(str(run))
    assert_close(output(loaded.pipeline), tuned, atol=1e-5, rtol=0)
    assert loaded.call["guidance_scale"] == 5.0
    before = judged.load(str(run), base=True)
    assert torch.equal(output(before.pipeline), plain)
    assert before.call == loaded.call
    made, other = loaded.origin(), before.origin()
    assert (made["model"], made["run"], other["run"], other["base"]) == (str(base), str(run), str(run), True)
    assert made["adapter"] is not None
    assert other["adapter"] is None
    json.dumps([made, other])


def test_an_asset_and_a_folder_are_loaded_with_their_origin(base):
    assert judged.load("tiny-sd").call == {}
    made = judged.load(str(base)).origin({"num_inference_steps": 4}, 2.0)
    assert (made["model"], made["steps"], made["guidance"], made["run"]) == (str(base), 4, 2.0, None)
    assert len(made["model_files"]) == 64


# ---- LoRAs from elsewhere


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_a_lora_in_either_layout_gives_the_trained_function(run, base, tuned, tmp_path, layout):
    file = lora_file(run, layout, tmp_path / "out")
    for given in (str(file), str(file.parent)):
        loaded = judged.load(str(base), loras=[given])
        assert_close(output(loaded.pipeline), tuned, atol=1e-5, rtol=0)
    (facts,) = loaded.origin()["lora"]
    assert facts["bound"] == facts["modules"] > 0
    assert (facts["scale"], facts["path"]) == (1.0, str(file))


def test_a_scale_of_0_is_the_base_and_two_files_add_up(run, base, plain, tmp_path):
    file = lora_file(run, "diffusers", tmp_path / "out")
    assert_close(output(judged.load(str(base), loras=[f"{file}:0"]).pipeline), plain, atol=1e-6, rtol=0)
    halves = judged.load(str(base), loras=[f"{file}:0.5", f"{file}:0.5"])
    whole = judged.load(str(base), loras=[str(file)])
    assert_close(output(halves.pipeline), output(whole.pipeline), atol=1e-5, rtol=0)


def test_a_lora_is_added_to_the_runs_own(run, base, tuned, tmp_path):
    file = lora_file(run, "diffusers", tmp_path / "out")
    both = judged.load(str(run), loras=[f"{file}:-1"])
    # The run's update and its opposite.
    assert_close(output(both.pipeline), output(judged.load(str(base)).pipeline), atol=1e-5, rtol=0)


def partial_copy(file: Path, target: Path) -> Path:
    """A LoRA of which one module has another name."""
    tensors = load_file(file)
    name = sorted(key for key in tensors if key.endswith("attn.to_q.lora_A.weight"))[0].removesuffix(".lora_A.weight")
    for part in ("lora_A", "lora_B"):
        tensors["transformer.nowhere.to_q." + part + ".weight"] = tensors.pop(f"{name}.{part}.weight")
    save_file(tensors, target, metadata={"format": "pt"})
    return target


def test_a_lora_that_binds_to_a_part_is_reported_by_name_and_count(run, base, tmp_path, caplog):
    file = partial_copy(lora_file(run, "diffusers", tmp_path / "out"), tmp_path / "part.safetensors")
    (facts,) = judged.load(str(base), loras=[str(file)]).origin()["lora"]
    assert facts["bound"] == facts["modules"] - 1
    assert f"only {facts['bound']} of its {facts['modules']} modules are bound" in caplog.text
    assert "transformer.nowhere.to_q" in caplog.text


ONES, LEFT, RIGHT = torch.ones(2, 24), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.arange(144.0).reshape(12, 12)


@pytest.mark.parametrize(
    ("module", "tensors", "update"),
    [
        ("diffusion_model.blocks.0.self_attn.q", {"lora_A.weight": ONES, "lora_B.weight": ONES.T}, ONES.T @ ONES),
        ("transformer.blocks.0.attn1.to_q", {"lokr_w1": LEFT, "lokr_w2": RIGHT}, torch.kron(LEFT, RIGHT)),
    ],
    ids=["lora", "lokr"],
)
def test_a_file_of_one_of_two_experts_is_added_to_that_one(tmp_path, caplog, module, tensors, update):
    pipe, adapted = tiny_pipelines.make("wan_2_2"), {}
    for number, stem in enumerate(("my_high_noise", "my_low_noise", "other")):
        file, name = tmp_path / f"{stem}.safetensors", f"lora_{number}"
        save_file({f"{module}.{key}": tensor.contiguous() for key, tensor in tensors.items()}, file)
        caplog.clear()
        attach(pipe, LoraFile.parse(str(file)), name)
        networks: dict[str, Any] = {"transformer": pipe.transformer, "transformer_2": pipe.transformer_2}
        adapted[stem] = [k for k, v in networks.items() if name in getattr(v, "peft_config", {})]
        layer = networks[adapted[stem][0]].blocks[0].attn1.to_q
        assert_close(layer.get_delta_weight(name), update)
        assert ("of high noise alone has it" in caplog.text) is (stem == "other")
    assert adapted == {"my_high_noise": ["transformer"], "my_low_noise": ["transformer_2"], "other": ["transformer"]}


def test_a_lora_of_another_family_is_refused(run, tmp_path):
    file = lora_file(run, "diffusers", tmp_path / "out")
    with pytest.raises(ModelError, match=r"binds to none of the modules of StableDiffusionPipeline|does not fit"):
        judged.load("tiny-sd", loras=[str(file)])
    kohya = lora_file(run, "kohya", tmp_path / "kohya")
    with pytest.raises(ModelError, match="does not fit StableDiffusionPipeline"):
        judged.load("tiny-sd", loras=[str(kohya)])


def kohya_sd(unet: UNet2DConditionModel, file: Path) -> int:
    """A LoRA of Stable Diffusion in kohya's layout, with diffusers' names of the UNet; the number of its modules."""
    torch.manual_seed(0)
    tensors, names = {}, [name for name, _ in unet.named_modules() if name.endswith(("attn2.to_q", "attn2.to_v"))]
    for name in names:
        linear: Any = unet.get_submodule(name)
        key = "lora_unet_" + name.replace(".", "_")
        tensors[f"{key}.lora_down.weight"] = 0.1 * torch.randn(2, linear.in_features)
        tensors[f"{key}.lora_up.weight"] = torch.randn(linear.out_features, 2)
        tensors[f"{key}.alpha"] = torch.tensor(1.0)
    save_file(tensors, file)
    return len(names)


def test_kohyas_layout_of_stable_diffusion_is_bound_as_a_whole(tmp_path):
    pipe = judged.load("tiny-sd").pipeline
    count = kohya_sd(pipe.unet, tmp_path / "style.safetensors")
    loaded = judged.load("tiny-sd", loras=[f"{tmp_path / 'style.safetensors'}:0.8"])
    (facts,) = loaded.origin()["lora"]
    assert (facts["modules"], facts["bound"], facts["scale"]) == (count, count, 0.8)
    assert not torch.allclose(drawn(loaded.pipeline), drawn(pipe), atol=1e-3)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("missing.safetensors", "no such file or folder; a hub id is not downloaded here: hf download"),
        ("owner/name", "no such file or folder"),
        ("old.bin", "pickles are not read; convert it to .safetensors"),
        ("run", r"it is a run folder; give its LoRA, --lora run/adapter"),
        ("empty", "a folder with one LoRA file is needed, and this has no .safetensors"),
        ("two", "this has 2 of them: a.safetensors, b.safetensors"),
        ("cut.safetensors", r"is damaged .*; copy or download it again"),
        ("model.safetensors", "holds no LoRA: 1 tensors, such as weight; a whole model is the MODEL itself"),
        ("model.safetensors:nan", "the scale must be a finite number"),
    ],
)
def test_a_wrong_lora_is_named_with_the_remedy(tmp_path, monkeypatch, word, reason):
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "empty", "two"):
        Path(folder).mkdir()
    Path("run", "config.yaml").write_text("model: {path: tiny-sd}\n")
    Path("old.bin").touch()
    Path("cut.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    for file in ("model.safetensors", "two/a.safetensors", "two/b.safetensors"):
        save_file({"weight": torch.zeros(2)}, file)
    with pytest.raises((ConfigError, ModelError), match=reason) as error:
        judged.load("tiny-sd", loras=[word])
    assert word.partition(":")[0] in str(error.value)


# ---- single files


def ldm_names(unet: UNet2DConditionModel) -> dict[str, str]:
    """diffusers' names of a UNet's tensors -> those of the original Stable Diffusion."""
    blocks, layers = len(unet.config["block_out_channels"]), unet.config["layers_per_block"]
    places: dict[str, str] = {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
    places["mid_block.resnets.1"] = "middle_block.2"
    for i in range(blocks):
        for j in range(layers):
            number = i * (layers + 1) + j + 1
            places[f"down_blocks.{i}.resnets.{j}"] = f"input_blocks.{number}.0"
            places[f"down_blocks.{i}.attentions.{j}"] = f"input_blocks.{number}.1"
        places[f"down_blocks.{i}.downsamplers.0.conv"] = f"input_blocks.{(i + 1) * (layers + 1)}.0.op"
        for j in range(layers + 1):
            number = i * (layers + 1) + j
            places[f"up_blocks.{i}.resnets.{j}"] = f"output_blocks.{number}.0"
            places[f"up_blocks.{i}.attentions.{j}"] = f"output_blocks.{number}.1"
        second = 2 if "CrossAttn" in unet.config["up_block_types"][i] else 1
        places[f"up_blocks.{i}.upsamplers.0"] = f"output_blocks.{i * (layers + 1) + layers}.{second}"
    places |= {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2"}
    places |= {"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"}
    inside = {"norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3"}
    inside |= {"time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection"}
    result = {}
    for name in unet.state_dict():
        start = max((place for place in places if name.startswith(f"{place}.")), key=len)
        rest = name.removeprefix(f"{start}.")
        if ".resnets." in name:
            rest = re.sub(r"^\w+", lambda match: inside[match.group()], rest)
        result[name] = f"model.diffusion_model.{places[start]}.{rest}"
    return result


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The UNet of tiny-sd with another last bias, as Stable Diffusion's authors name its tensors."""
    unet: Any = UNet2DConditionModel.from_pretrained(ASSETS / "tiny-sd" / "unet")
    unet.conv_out.bias.data += 0.1
    file = tmp_path_factory.mktemp("single") / "tuned.safetensors"
    names = ldm_names(unet)
    save_file({names[name]: value.contiguous() for name, value in unet.state_dict().items()}, file)
    return file


def test_a_single_file_in_the_original_layout_is_read_with_the_parts_of_its_family(checkpoint):
    expected: Any = StableDiffusionPipeline.from_pretrained(ASSETS / "tiny-sd")
    untouched = drawn(expected)
    expected.unet.conv_out.bias.data += 0.1
    loaded = judged.load(str(checkpoint), config="tiny-sd")
    assert type(loaded.pipeline) is StableDiffusionPipeline
    assert torch.equal(drawn(loaded.pipeline), drawn(expected))
    assert not torch.allclose(drawn(expected), untouched, atol=1e-3)
    made = loaded.origin()
    assert (len(made["file_sha256"]), made["config"], made["model"]) == (64, "tiny-sd", str(checkpoint))


def test_a_single_file_of_a_denoiser_with_diffusers_names_is_read_too(base, tuned, run, tmp_path):
    merged = export(run, "merged", tmp_path / "merged")
    file = Path(
        shutil.copy(merged / "transformer" / "diffusion_pytorch_model.safetensors", tmp_path / "one.safetensors")
    )
    loaded = judged.load(str(file), config=str(base))
    assert_close(output(loaded.pipeline), tuned, atol=1e-5, rtol=0)


def test_a_family_that_is_known_by_its_keys_and_out_of_reach_is_named(checkpoint, tmp_path):
    """Stable Diffusion 1's own key; its tokenizer is on the hub alone."""
    file = tmp_path / "sd15.safetensors"
    save_file({"model.diffusion_model.output_blocks.11.0.skip_connection.weight": torch.zeros(2)}, file)
    with pytest.raises(
        ModelError, match=r"as StableDiffusionPipeline with the parts of stable-diffusion-v1-5.*--config"
    ):
        judged.load(str(file))
    # The tiny one has fewer blocks, so its keys are those of no family.
    with pytest.raises(ModelError, match=r"family of this checkpoint is not known.*--config"):
        judged.load(str(checkpoint))


def test_a_single_file_that_is_no_model_is_named(run, checkpoint, tmp_path):
    lora = lora_file(run, "diffusers", tmp_path / "lora")
    with pytest.raises(ModelError, match=r"is a LoRA and no model: give its base model, with --lora"):
        judged.load(str(lora))
    (tmp_path / "cut.safetensors").write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"is damaged .*; copy or download it again"):
        judged.load(str(tmp_path / "cut.safetensors"))
    with pytest.raises(ModelError, match="--config"):
        judged.load(str(checkpoint), config="tiny-sd3")


# ---- wrong targets


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("./nothing", "no such file, folder or embedded asset"),
        ("nothing", "no such file, folder or embedded asset"),
        ("model.ckpt", "pickle checkpoints are not read"),
        ("bare", "it has no model_index.json; give the folder that save_pretrained"),
        ("lora", "it holds a LoRA: give its base model, with --lora lora"),
        ("pipe/unet", r"it holds one network \(UNet2DConditionModel\): give pipe"),
        ("run/adapter", "it is inside a run folder: give run"),
        ("pipe", "names 'vae', but there is no folder"),
    ],
)
def test_what_is_no_model_is_named_with_the_remedy(tmp_path, monkeypatch, target, reason):
    monkeypatch.chdir(tmp_path)
    for folder in ("bare", "lora", "pipe/unet", "run/adapter"):
        Path(folder).mkdir(parents=True)
    Path("run", "config.yaml").write_text("model: {path: tiny-sd}\n")
    Path("model.ckpt").touch()
    Path("lora", FILE).touch()
    Path("pipe", "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline", "vae": ["diffusers", "A"]}')
    Path("pipe", "unet", "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    with pytest.raises(ModelError, match=reason):
        judged.load(target)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"base": True}, "is no run folder, so it has no other base than itself"),
        ({"config": "tiny-sd"}, "belongs to a single .safetensors file"),
    ],
)
def test_options_that_do_not_belong_to_the_target_are_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        judged.load("tiny-sd", **options)


def test_a_revision_belongs_to_a_hub_id(base):
    with pytest.raises(ConfigError, match="--revision v1: it belongs to a hub id"):
        judged.load(str(base), revision="v1")


def test_sampling_takes_a_lora_and_its_file_is_in_the_names(run, base, tmp_path, capsys):
    file = lora_file(run, "diffusers", tmp_path / "lora")
    small = ["height=32", "width=32", f"max_sequence_length={tiny.TOKENS}"]
    names = []
    for loras in (None, [str(file)], [f"{file}:0.5"]):
        sample(str(base), ["a red circle"], out=tmp_path / "out", steps=1, options=small, lora=loras)
        names.append(capsys.readouterr().out.strip())
    assert len(set(names)) == 3
