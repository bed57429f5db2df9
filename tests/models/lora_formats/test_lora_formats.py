"""LoRA files by original names: read by diffusers' importers and by ours, bit for bit."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import lora_pipeline
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.apps.publish.export import Layout, renamed
from flowrl.core.errors import ModelError
from flowrl.models.base import LoraSettings
from flowrl.models.lora_formats.families import Family, family_of
from flowrl.models.lora_formats.start import start_from
from flowrl.models.weights.precision import ADAPTER

CONFIGS = Path(__file__).resolve().parents[3] / "assets" / "model_configs"
QKVO = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT = [*QKVO, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
RANK = 4

# folder of the real config -> (part, class, targets, modules of peft, modules of kohya), section 1 of the survey
REAL = {
    "sd15": ("unet", "UNet2DConditionModel", QKVO, 128, 128),
    "sd21": ("unet", "UNet2DConditionModel", QKVO, 128, 128),
    "sdxl": ("unet", "UNet2DConditionModel", QKVO, 560, 560),
    "sd35-medium": ("transformer", "SD3Transformer2DModel", JOINT, 243, 121),
    "sd35-large": ("transformer", "SD3Transformer2DModel", JOINT, 303, 151),
    "flux1-dev": ("transformer", "FluxTransformer2DModel", JOINT, 266, 114),
    "qwen-image": ("transformer", "QwenImageTransformer2DModel", JOINT, 480, 480),
    "wan21-t2v-1.3b": ("transformer", "WanTransformer3DModel", QKVO, 240, 240),
}
# What makes the networks small, but for widths that diffusers' importer has built in.
SMALL: dict[str, dict[str, Any]] = {
    "sd15": {"block_out_channels": [32, 32, 32, 32], "cross_attention_dim": 8, "norm_num_groups": 8},
    "sdxl": {"block_out_channels": [64, 64, 64], "attention_head_dim": [2, 2, 2], "cross_attention_dim": 8}
    | {"transformer_layers_per_block": [1, 1, 2]},
    "sd35-medium": {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 8, "joint_attention_dim": 8}
    | {"dual_attention_layers": [0], "caption_projection_dim": 16},
    "flux1-dev": {"num_layers": 1, "num_single_layers": 1},
    "qwen-image": {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 128, "joint_attention_dim": 8},
    "wan21-t2v-1.3b": {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 128, "ffn_dim": 16},
}
MIXINS = {
    "sd15": "StableDiffusionLoraLoaderMixin",
    "sdxl": "StableDiffusionXLLoraLoaderMixin",
    "flux1-dev": "FluxLoraLoaderMixin",
    "qwen-image": "QwenImageLoraLoaderMixin",
    "wan21-t2v-1.3b": "WanLoraLoaderMixin",
}


def network(folder: str, targets: list[str] | None = None, alpha: float = RANK, **changes: object) -> Any:
    """The network of a real config without values, with an adapter; `changes` make it another."""
    part, kind = REAL[folder][:2]
    config = json.loads((CONFIGS / folder / part / "config.json").read_text()) | changes
    with torch.device("meta"):
        made = getattr(diffusers, kind).from_config(config)
        options: dict[str, Any] = {"lora_alpha": alpha}
        made.add_adapter(LoraConfig(r=RANK, target_modules=targets or REAL[folder][2], **options), adapter_name=ADAPTER)
    return made


def update(made: nn.Module, dtype: torch.dtype, *, zero: bool = False) -> dict[str, Tensor]:
    """Random tensors of its adapter, rounded to a dtype; `zero`: B is zero, as at the start."""
    torch.manual_seed(3)
    empty = get_peft_model_state_dict(made, adapter_name=ADAPTER)
    values = {name: torch.randn(value.shape).to(dtype).float() for name, value in sorted(empty.items())}
    return {name: value * 0 if zero and "lora_B" in name else value for name, value in values.items()}


def scaled(made: Any, tensors: dict[str, Tensor], alpha: float, layout: Layout) -> dict[str, Tensor]:
    family = family_of(made)
    assert family is not None
    return renamed(tensors, alpha / RANK, family, layout)


def started(made: Any, file: Path, alpha: float = RANK) -> dict[str, Tensor]:
    """The network's adapter after it started from a file."""
    for part in made.modules():
        for values in (getattr(part, "lora_A", None), getattr(part, "lora_B", None)):
            if values is not None and ADAPTER in values:
                values.to_empty(device="cpu")
    component = "unet" if "UNet" in type(made).__name__ else "transformer"
    start_from(str(file), {component: made}, LoraSettings(rank=RANK, alpha=alpha))
    return get_peft_model_state_dict(made, adapter_name=ADAPTER)


@pytest.mark.parametrize("folder", REAL)
def test_the_real_models_have_as_many_modules_as_the_trainers_write(folder):
    _, _, targets, ours, theirs = REAL[folder]
    made = network(folder, targets)
    names = {
        k.removesuffix(".lora_A.weight") for k in get_peft_model_state_dict(made, adapter_name=ADAPTER) if "_A" in k
    }
    family = family_of(made)
    assert family is not None
    places = [family.place(name) for name in names]
    assert len(names) == ours
    assert len({place.underscored for place in places if place is not None}) == theirs
    assert None not in places
    if folder == "sd35-medium":  # the last block has no text output
        assert "transformer_blocks.23.attn.to_add_out" not in names


@pytest.mark.parametrize("folder", SMALL)
@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
def test_what_is_written_comes_back_bitwise(folder, layout, tmp_path):
    """For alpha of rank, twice, half and 1.5 times the rank, in two dtypes and with B = 0; large ones in two cases."""
    made = network(folder, **SMALL[folder])
    cases = [(alpha, torch.float32, False) for alpha in (4, 8, 2, 6)] + [
        (6, torch.bfloat16, False),
        (8, torch.float32, True),
    ]
    for alpha, dtype, zero in cases[-2:] if folder in ("flux1-dev", "sdxl", "sd15") else cases:
        tensors = update(made, dtype, zero=zero)
        save_file(scaled(made, tensors, alpha, layout), tmp_path / "a.safetensors")
        back = started(made, tmp_path / "a.safetensors", alpha)
        assert set(back) == set(tensors)
        assert all(torch.equal(back[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("folder", MIXINS)
def test_diffusers_importer_reads_the_same_update(folder, tmp_path):
    """Bitwise at alpha = rank, and the same product at another alpha: it multiplies the scale into the tensors."""
    made = network(folder, **SMALL[folder])
    part = REAL[folder][0]
    layout: Layout = "comfyui" if folder.startswith(("wan", "qwen")) else "kohya"
    for alpha in (4,) if folder == "flux1-dev" else (4, 8, 2, 6):
        tensors = update(made, torch.float32)
        given = {k: v.clone() for k, v in scaled(made, tensors, alpha, layout).items()}
        options = {"unet_config": made.config} if part == "unet" else {}
        read: Any = getattr(lora_pipeline, MIXINS[folder]).lora_state_dict(given, return_alphas=True, **options)
        state, alphas = read if isinstance(read, tuple) else (read, None)
        if part == "unet":
            from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

            state = convert_unet_state_dict_to_peft(state)
        state = {k.removeprefix(f"{part}."): v for k, v in state.items() if v.any()}
        assert set(state) == set(tensors)
        factor = 1.0
        if alphas is not None and part == "unet":
            (factor,) = {float(v) / RANK for v in alphas.values()}
        for name in sorted(k for k in tensors if "lora_A" in k):
            b = name.replace("lora_A", "lora_B")
            if alpha == RANK:
                assert torch.equal(state[name], tensors[name])
                assert torch.equal(state[b], tensors[b])
            else:
                wanted = alpha / RANK * tensors[b] @ tensors[name]
                torch.testing.assert_close(factor * state[b] @ state[name], wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("folder", ["sd35-medium", pytest.param("flux1-dev", marks=pytest.mark.slow)])
def test_a_reader_of_original_names_sees_each_update_in_its_rows(folder):
    """Some slots alone: query and value, and of a single block of FLUX the MLP too."""
    targets = ["attn.to_q", "attn.to_v", "add_k_proj"] + ["proj_mlp"] * (folder == "flux1-dev")
    made = network(folder, targets, **SMALL[folder])
    tensors, family = update(made, torch.float32), family_of(made)
    assert family is not None
    file = scaled(made, tensors, 6, "kohya")
    wide = 3072 if folder == "flux1-dev" else 16
    rows: dict[str, list[tuple[int, Tensor]]] = {}
    order = {"to_q": 0, "to_k": 1, "to_v": 2, "add_k_proj": 1, "proj_mlp": 3}
    for name in (k.removesuffix(".lora_A.weight") for k in tensors if "lora_A" in k):
        place = family.place(name)
        assert place is not None
        change = 6 / RANK * tensors[f"{name}.lora_B.weight"][:, :] @ tensors[f"{name}.lora_A.weight"]
        rows.setdefault(place.underscored, []).append((order[name.rpartition(".")[2]] * wide, change))
    assert {key.partition(".")[0] for key in file} == set(rows)
    for key, changes in rows.items():
        down, up, alpha = (file[f"{key}.{end}"] for end in ("lora_down.weight", "lora_up.weight", "alpha"))
        whole = float(alpha) / len(down) * up @ down
        assert len(whole) == (7 if "linear1" in key else 3) * wide
        for first, change in changes:
            own = whole[first : first + len(change)]
            torch.testing.assert_close(own, change, rtol=1e-4, atol=1e-4)
            own.zero_()
        assert not whole.any(), "rows of a slot that was not trained"


def test_a_dense_file_of_another_trainer_is_cut_by_rows(tmp_path):
    made = network("sd35-medium", ["attn.to_q", "attn.to_k", "attn.to_v"], **SMALL["sd35-medium"])
    file: dict[str, Tensor] = {}
    for block in range(3):
        key = f"lora_unet_joint_blocks_{block}_x_block_attn_qkv"
        file |= {f"{key}.lora_down.weight": torch.randn(RANK, 16), f"{key}.lora_up.weight": torch.randn(48, RANK)}
    save_file(file, tmp_path / "a.safetensors")
    back = started(made, tmp_path / "a.safetensors")
    up = file["lora_unet_joint_blocks_1_x_block_attn_qkv.lora_up.weight"]
    assert torch.equal(back["transformer_blocks.1.attn.to_k.lora_B.weight"], up[16:32])
    down = file["lora_unet_joint_blocks_1_x_block_attn_qkv.lora_down.weight"]
    assert torch.equal(back["transformer_blocks.1.attn.to_v.lora_A.weight"], down)


KEY = "diffusion_model.blocks.0.self_attn.q"


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({f"{KEY}.dora_scale": 1}, "is a DoRA"),
        ({f"{KEY}.lora_magnitude_vector": 1}, "is a DoRA"),
        ({f"{KEY}.lokr_w1": 1}, "is a LoKr"),
        ({f"{KEY}.hada_w1_a": 1}, "is a LoHa"),
        ({f"{KEY}.oft_blocks": 1}, "is an OFT or BOFT"),
        ({f"{KEY}.a1.weight": 1}, "is a GLoRA"),
        ({f"{KEY}.lora_mid.weight": 1}, "is a LoCon"),
        ({f"{KEY}.diff_b": 1}, "whole changes of weights"),
        ({f"{KEY}.lora_B.bias": 1}, "trains biases of a LoRA"),
        ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": 1}, "adapts a text encoder"),
        ({"diffusion_model.transformer_1.blocks.0.self_attn.q.alpha": 1}, "both experts in one file"),
        ({f"{KEY}.alpha": 3}, "mixed alphas"),
        ({f"{KEY}.lora_A.weight": None}, "half of a pair"),
        ({f"{KEY}.lora_A.weight": torch.ones(2, 256), f"{KEY}.lora_B.weight": torch.ones(256, 2)}
         | {f"{KEY}.alpha": 2}, "mixed ranks"),
        ({f"{KEY}.lora_A.weight": torch.ones(4, 256, 1, 1)}, "a convolution"),
        ({f"{KEY}.lora_A.weight": None, f"{KEY}.lora_B.weight": None, f"{KEY}.alpha": None}, "7 of the 8 modules"),
        ({"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight": torch.ones(4, 4)}
         | {"lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight": torch.ones(4, 4)}, "has the names of SD3"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_plain_lora_of_this_model_is_refused_by_name(tmp_path, added, message):
    made = network("wan21-t2v-1.3b", **SMALL["wan21-t2v-1.3b"])
    tensors = scaled(made, update(made, torch.float32), RANK, "comfyui")
    for name, value in added.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=message):
        started(made, tmp_path / "a.safetensors")


def test_headers_suffixes_and_scales_that_do_not_fit_are_refused(tmp_path):
    made = network("wan21-t2v-1.3b", **SMALL["wan21-t2v-1.3b"])
    tensors, file = scaled(made, update(made, torch.float32), 8, "comfyui"), tmp_path / "a.safetensors"
    save_file(tensors, file, metadata={"ss_network_args": '{"split_qkv": "True"}'})
    with pytest.raises(ModelError, match="split_qkv=True"):
        started(made, file, 8)
    save_file(tensors, file, metadata={"lora_adapter_metadata": json.dumps({"transformer.use_rslora": True})})
    with pytest.raises(ModelError, match="rank-stabilized"):
        started(made, file, 8)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"the scale 2 .*, and model\.lora has 1 .*; try model\.lora\.alpha=8$"):
        started(made, file, 4)
    save_file({k: v for k, v in tensors.items() if "alpha" not in k}, file)
    with pytest.raises(
        ModelError, match=r"the scale 1 \(no alpha in the file means alpha = rank\), and model\.lora has 2"
    ):
        started(made, file, 8)
    (tmp_path / "a.pt").touch()
    with pytest.raises(ModelError, match="pickles are not read"):
        started(made, tmp_path / "a.pt")


def test_two_experts_are_read_from_their_own_files_and_never_from_one(tmp_path):
    made = {name: network("wan21-t2v-1.3b", **SMALL["wan21-t2v-1.3b"]) for name in ("transformer", "transformer_2")}
    files = {}
    for number, (name, part) in enumerate(made.items()):
        for module in part.modules():
            for values in (getattr(module, "lora_A", None), getattr(module, "lora_B", None)):
                if values is not None and ADAPTER in values:
                    values.to_empty(device="cpu")
        file = tmp_path / f"mine_{('high', 'low')[number]}_noise.safetensors"
        tensors = {k: v + number for k, v in update(part, torch.float32).items()}
        save_file(scaled(part, tensors, RANK, "comfyui"), file)
        files[name] = tensors
    settings = LoraSettings(rank=RANK, alpha=RANK)
    for path in (tmp_path, tmp_path / "mine_high_noise.safetensors"):
        start_from(str(path), made, settings)
        for name, part in made.items():
            back = get_peft_model_state_dict(part, adapter_name=ADAPTER)
            assert all(torch.equal(back[key], value) for key, value in files[name].items())
    with pytest.raises(ModelError, match="is one expert of two"):
        start_from(str(tmp_path / "mine_low_noise.safetensors"), made, settings)
    (tmp_path / "mine_low_noise.safetensors").unlink()
    with pytest.raises(ModelError, match="second expert"):
        start_from(str(tmp_path / "mine_high_noise.safetensors"), made, settings)
    assert load_file(tmp_path / "mine_high_noise.safetensors")


PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())["adapters"]


@pytest.mark.parametrize("adapter", PUBLISHED, ids=lambda adapter: adapter["source"].partition(" ")[0])
def test_each_key_of_a_published_adapter_has_a_module(adapter, tmp_path):
    """The key sets as their threads list them: one name for each module of these targets, and nothing left over."""
    folder = adapter["model"]
    made = network(folder, adapter["targets"], **SMALL[folder] | adapter.get("changes", {}))
    state = update(made, torch.float32)
    modules = sorted(k.removesuffix(".lora_A.weight") for k in state if "lora_A" in k)
    family = family_of(made)
    assert family is not None
    if adapter.get("only_names"):  # of a thread that shows a part of the keys
        dotted = {f"diffusion_model.{p.dotted}" for name in modules if (p := family.place(name)) is not None}
        assert {key.format(n=0) for key in adapter["keys"]} <= dotted
        return
    file: dict[str, Tensor] = {}
    for name in modules:
        key = _written(adapter, name, family)
        down, up = (state[f"{name}.lora_{half}.weight"] for half in "AB")
        values = {"down": down, "A": down, "up": up, "B": up, "alpha": torch.tensor(float(RANK))}
        file |= {f"{key}.{end}": values[end.removeprefix("lora_").partition(".")[0]] for end in adapter["ends"]}
    save_file(file, tmp_path / "a.safetensors")
    back = started(made, tmp_path / "a.safetensors")
    assert all(torch.equal(back[name], value) for name, value in state.items())


def _written(adapter: dict[str, Any], module: str, family: Family) -> str:
    """The published name of a module."""
    if "tail" in adapter:
        head, end = module.rsplit(".attn", 1)
        return f"{adapter['prefix']}{head}.{adapter['tail'][f'attn{end}']}"
    number = next(part for part in module.split(".") if part.isdigit())
    place = family.place(module) if adapter["model"] in ("wan21-t2v-1.3b", "sdxl") else None
    ending = (module if place is None else place.dotted).replace(".", "_")
    listed = [key.format(n=number) for key in adapter["keys"]]
    [found] = [key for key in listed if key.replace(".", "_").endswith(ending)]
    return found


@pytest.mark.parametrize(
    ("folder", "other", "message"),
    [
        ("sd35-medium", {"num_layers": 4, "dual_attention_layers": [0]}, "more blocks: .* this one has 3 of them"),
        ("wan21-t2v-1.3b", {"num_layers": 2}, "more blocks: .* this one has 1 of them"),
        ("sd15", {"cross_attention_dim": 12}, r"changes a matrix of 32 x 12, and here it has 32 x 8"),
    ],
)
def test_a_lora_of_another_size_is_refused_with_what_differs(folder, other, message, tmp_path):
    large = network(folder, **SMALL[folder] | other)
    save_file(scaled(large, update(large, torch.float32), RANK, "kohya"), tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=message):
        started(network(folder, **SMALL[folder]), tmp_path / "a.safetensors")
    key = "lora_unet_final_layer_adaLN_modulation_1"
    outside = {f"{key}.lora_down.weight": torch.ones(4, 8), f"{key}.lora_up.weight": torch.ones(8, 4)}
    save_file(outside, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match="outside the blocks"):
        started(network(folder, **SMALL[folder]), tmp_path / "b.safetensors")
