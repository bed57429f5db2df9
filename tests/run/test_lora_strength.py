"""A LoRA of any program acts with the factor that its program wrote, or is refused with both numbers.

The right value is arithmetic on the tensors that a row writes: a weight changes by s * B @ A, with s = alpha / rank, or
alpha / sqrt(rank) of a rank-stabilised LoRA.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flowrl.commands.eval import command as evaluate
from flowrl.commands.sample import command as sample
from flowrl.core.errors import ModelError
from flowrl.models.base import LoraSettings
from flowrl.models.weights.roles import Weights
from flowrl.run.foreign_lora import LoraFile, attach
from tests import tiny_sd3 as tiny

RANK = 4
BLOCKS = tuple(f"transformer_blocks.{number}" for number in range(5))
NAMES = tuple(f"{block}.attn.{part}" for block in BLOCKS for part in ("to_k", "to_q", "to_v"))


@dataclasses.dataclass
class Written:
    """Matrices of each module, and where they are written to."""

    folder: Path
    pairs: dict[str, tuple[Tensor, Tensor]]

    def save(
        self,
        name: str = "mine.safetensors",
        form: str = "transformer.{}.lora_{}.weight",
        halves: str = "AB",
        alpha: float | None = None,
        header: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        change: Callable[[dict[str, Tensor]], None] | None = None,
        under: str = ".",
    ) -> Path:
        """Write a file; `config` is PEFT's and makes the folder the path."""
        ends = dict(zip("AB", ("down", "up") if halves == "du" else "AB", strict=True))
        tensors: dict[str, Tensor] = {}
        for module, pair in self.pairs.items():
            spelled = module.replace(".", "_") if under == "_" else module
            for half, value in zip("AB", pair, strict=True):
                tensors[form.format(spelled, ends[half])] = value.contiguous()
            if alpha is not None:
                stem = form.partition(".lora_")[0].format(spelled)
                tensors[f"{stem}.alpha"] = torch.tensor(alpha)
        if change is not None:
            change(tensors)
        plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in (header or {}).items()}
        save_file(tensors, self.folder / name, metadata=plain or None)
        if config is None:
            return self.folder / name
        (self.folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "bias": "none"} | config))
        return self.folder


def peft(written: Written, **config: Any) -> Path:
    """A folder as PEFT's `save_pretrained` writes it."""
    config = {"r": RANK, "lora_alpha": 8, "init_lora_weights": "gaussian", "modules_to_save": None} | config
    return written.save("adapter_model.safetensors", "base_model.model.{}.lora_{}.weight", config=config)


def metadata(written: Written, **config: Any) -> Path:
    """diffusers' file, whose settings stand in the header."""
    settings = {f"transformer.{key}": value for key, value in ({"r": RANK, "lora_alpha": 6} | config).items()}
    return written.save(header={"lora_adapter_metadata": settings})


def fused(written: Written, alpha: float | None, **header: str) -> Path:
    """kohya's SD3: query, key and value in one matrix, of three times the rank, with three times the alpha."""
    tensors: dict[str, Tensor] = {}
    for block, prefix in enumerate(BLOCKS):
        parts = [written.pairs[f"{prefix}.attn.to_{name}"] for name in "qkv"]
        key = f"lora_unet_joint_blocks_{block}_x_block_attn_qkv"
        tensors[f"{key}.lora_down.weight"] = torch.cat([down for down, _ in parts])
        tensors[f"{key}.lora_up.weight"] = torch.block_diag(*[up for _, up in parts])
        if alpha is not None:
            tensors[f"{key}.alpha"] = torch.tensor(3 * alpha)
    save_file(tensors, written.folder / "kohya.safetensors", metadata=header or None)
    return written.folder / "kohya.safetensors"


def without(key: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors.pop(key)].clear()


def first_row(key: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: [tensors[key][0].fill_(value)].clear()


def instead(key: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({key: torch.ones(shape)})


def infinite(written: Written) -> Path:
    written.pairs[NAMES[1]][1][3, 1] = math.inf
    return peft(written)


ONE_TRAINER: dict[str, Any] = {"form": "lora_transformer_{}.lora_{}.weight", "halves": "du", "under": "_"}

# name -> (what writes it, s)
READ: dict[str, tuple[Callable[[Written], Path], float]] = {
    "nowhere": (lambda w: w.save(), 1.0),
    "alpha in the tensors": (lambda w: w.save(alpha=6.0), 6 / RANK),
    "OneTrainer": (lambda w: w.save(alpha=1.0, **ONE_TRAINER), 1 / RANK),
    "bare names": (lambda w: w.save(form="{}.lora_{}.weight", header={"lora_alpha": "6"}), 6 / RANK),
    "diffusers": (metadata, 6 / RANK),
    "diffusers, rank-stabilised": (lambda w: metadata(w, use_rslora=True), 6 / math.sqrt(RANK)),
    "header: lora_alpha": (lambda w: w.save(header={"lora_alpha": "12"}), 12 / RANK),
    "header: network_alpha": (lambda w: w.save(header={"network_alpha": "2.0"}), 2 / RANK),
    "header: alpha and rank": (lambda w: w.save(header={"alpha": "8", "rank": str(RANK)}), 8 / RANK),
    "header: ss_network_alpha": (
        lambda w: w.save(header={"ss_network_alpha": "16.0", "ss_network_dim": str(RANK)}), 16 / RANK),
    "header says Dynamic": (lambda w: w.save(alpha=2.0, header={"ss_network_alpha": "Dynamic"}), 2 / RANK),
    "header and tensors agree": (lambda w: w.save(alpha=8.0, header={"ss_network_alpha": "8"}), 8 / RANK),
    "PEFT": (peft, 8 / RANK),
    "PEFT, the file itself": (lambda w: peft(w) / "adapter_model.safetensors", 8 / RANK),
    "PEFT, rank-stabilised": (lambda w: peft(w, use_rslora=True), 8 / math.sqrt(RANK)),
    "PEFT, patterns of all": (lambda w: peft(w, r=8, rank_pattern={"attn.to_[kqv]": RANK}), 8 / RANK),
    "a state of PEFT": (
        lambda w: w.save("adapter_model.safetensors", "base_model.model.{}.lora_{}.default.weight",
                         config={"r": RANK, "lora_alpha": 2}), 2 / RANK),
    "kohya, fused": (lambda w: fused(w, 6.0), 6 / RANK),
    "kohya, fused, noted": (lambda w: fused(w, 6.0, ss_network_dim=str(RANK), ss_network_alpha="6"), 6 / RANK),
    "half precision": (
        lambda w: w.save(alpha=3.0, change=lambda t: t.update({k: v.half() for k, v in t.items()})), 3 / RANK),
}  # fmt: skip

KEY = f"transformer.{NAMES[0]}"
# name -> (what writes it, the message); numbers that contradict each other are both in it
REFUSED: dict[str, tuple[Callable[[Written], Path], str]] = {
    "header against tensors": (lambda w: w.save(alpha=4.0, header={"lora_alpha": "8"}),
                               r"alpha 4 in its tensors \(scale 1\), and alpha 8 .* in the header \(scale 2\)"),
    "header against header": (lambda w: w.save(header={"lora_alpha": "8", "ss_network_alpha": "4"}),
                              r"lora_alpha=8 and ss_network_alpha=4"),
    "rank of the header": (lambda w: w.save(header={"lora_alpha": "8", "rank": "8"}), "says rank 8, .* has rank 4"),
    "rank of PEFT": (lambda w: peft(w, r=8), "adapter_config.json says rank 8, .* has rank 4"),
    "split_qkv": (lambda w: w.save(header={"ss_network_args": '{"split_qkv": "True"}'}), "split_qkv=True"),
    "half of a pair": (lambda w: w.save(change=without(f"{KEY}.lora_B.weight")),
                       rf"half of a pair: {KEY} lacks its B"),
    "NaN": (lambda w: w.save(change=first_row(f"{KEY}.lora_A.weight", math.nan)),
            rf"128 of the 512 values of {KEY}\.lora_A\.weight in mine\.safetensors are NaN or inf"),
    "inf in PEFT": (infinite,
                    r"base_model\.model\..*to_q\.lora_B\.weight in adapter_model\.safetensors are NaN or inf"),
    "ranks that differ in a pair": (lambda w: w.save(change=instead(f"{KEY}.lora_B.weight", 128, 3)),
                                    r"A of .* of rank 4, and B \[128, 3\], of rank 3"),
    "of a wider model": (lambda w: w.save(change=instead(f"{KEY}.lora_B.weight", 160, RANK)),
                         r"160.*128"),
    "dora_scale": (lambda w: w.save(change=instead(f"{KEY}.dora_scale", 128, 1)), "is a DoRA"),
    "PEFT without its settings": (lambda w: w.save(form="base_model.model.{}.lora_{}.weight"), "copy the whole folder"),
    "PEFT, another kind": (lambda w: peft(w, peft_type="LOHA"), "is a LOHA by its adapter_config.json"),
    "PEFT, biases": (lambda w: peft(w, bias="all"), "bias='all'"),
    "PEFT, whole modules": (lambda w: peft(w, modules_to_save=["proj_out"]), r"modules_to_save=\['proj_out'\]"),
    "PEFT, transposed": (lambda w: peft(w, fan_in_fan_out=True), "fan_in_fan_out=True"),
    "PEFT, DoRA": (lambda w: peft(w, use_dora=True), r"is a DoRA by its adapter_config.json"),
    "PEFT, PiSSA": (lambda w: peft(w, init_lora_weights="pissa_niter_4"), "changes the frozen weights"),
    "PEFT, a new option": (lambda w: peft(w, use_bdlora={"n": 2}), "use_bdlora="),
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Written:
    torch.manual_seed(7)
    wide = tiny.pipeline().transformer.inner_dim
    return Written(tmp_path, {name: (torch.randn(RANK, wide), torch.randn(wide, RANK)) for name in NAMES})


def changes(network: nn.Module) -> dict[str, Tensor]:
    """Adapted module -> what its weight changes by, from its outputs of the unit vectors."""
    result: dict[str, Tensor] = {}
    for name, layer in network.named_modules():
        if hasattr(layer, "lora_A"):
            base: Any = layer.get_submodule("base_layer")
            units = torch.eye(base.in_features)
            with torch.no_grad():
                result[name] = (layer(units) - base(units)).T
    return result


def agree(found: dict[str, Tensor], written: Written, scale: float) -> None:
    assert sorted(found) == sorted(written.pairs)
    for name, (down, up) in written.pairs.items():
        torch.testing.assert_close(found[name], scale * up @ down, rtol=1e-4, atol=1e-3 * scale)


def weights(**settings: Any) -> Weights:
    lora = LoraSettings(**{"rank": RANK, "alpha": RANK, "targets": ["attn.to_q", "attn.to_k", "attn.to_v"], **settings})
    return Weights(tiny.pipeline().transformer, lora, (), seed=0)


@pytest.mark.parametrize("row", READ)
def test_the_update_has_the_factor_that_the_file_says(written: Written, row: str) -> None:
    write, scale = READ[row]
    path = write(written)
    if "half" in row:
        written.pairs = {name: (a.half().float(), b.half().float()) for name, (a, b) in written.pairs.items()}
    pipe = tiny.pipeline()
    facts = attach(pipe, LoraFile.parse(str(path)), "lora_0")
    assert facts["bound"] == facts["modules"] == len(NAMES)
    agree(changes(pipe.transformer), written, scale)

    kind = "rslora" if "stabilised" in row else "lora"
    own = weights(alpha=scale * (math.sqrt(RANK) if kind == "rslora" else RANK), kind=kind)
    own.load_lora(str(path))
    agree(changes(own.network), written, scale)
    with pytest.raises(ModelError) as error:
        weights(alpha=5 * RANK, kind=kind).load_lora(str(path))
    assert f"the scale {scale:g} (" in str(error.value)
    assert f"and model.lora has {5 * RANK / (math.sqrt(RANK) if kind == 'rslora' else RANK):g} (" in str(error.value)


@pytest.mark.parametrize("row", REFUSED)
def test_a_file_that_says_no_factor_or_two_is_refused(written: Written, row: str) -> None:
    write, message = REFUSED[row]
    path = str(write(written))
    with pytest.raises(ModelError, match=message):
        attach(tiny.pipeline(), LoraFile.parse(path), "lora_0")
    with pytest.raises(ModelError, match=message):
        weights().load_lora(path)


def test_each_module_has_its_own_factor(written: Written) -> None:
    """Ranks and alphas that differ, in PEFT's patterns; training has one rank and one factor, and says so."""
    other = f"{BLOCKS[0]}.attn.to_q"
    written.pairs[other] = (torch.randn(2, 128), torch.randn(128, 2))
    path = peft(written, rank_pattern={f"^{other}": 2}, alpha_pattern={f"^{other}": 5})
    attach(pipe := tiny.pipeline(), LoraFile.parse(str(path)), "lora_0")
    found = changes(pipe.transformer)
    down, up = written.pairs[other]
    torch.testing.assert_close(found.pop(other), 5 / 2 * up @ down, rtol=1e-4, atol=1e-3)
    del written.pairs[other]
    agree(found, written, 8 / RANK)
    with pytest.raises(ModelError, match=r"mixed alphas \(alpha / rank is 2 to 2\.5\)"):
        weights(alpha=8).load_lora(str(path))


@pytest.mark.parametrize("command", [sample, evaluate], ids=["sample", "eval"])
def test_the_commands_take_the_same_door(written: Written, command: Any, tmp_path: Path) -> None:
    path, out = REFUSED["NaN"][0](written), tmp_path / "out"
    (tmp_path / "judge.py").write_text("def score(images, prompts, metadata):\n    return images.mean(dim=(1, 2, 3))\n")
    own: dict[str, Any] = {"prompts": ["a red circle"]}
    if command is evaluate:
        own = {"suite": "geneval", "limit": 1, "samples": 1, "judge": [str(tmp_path / "judge.py")]}
    with pytest.raises(ModelError, match="are NaN or inf"):
        command("tiny-sd3", out=out, lora=[str(path)], steps=1, **own)
    assert not [*out.rglob("*.png")]
