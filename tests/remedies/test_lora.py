"""What a LoRA file that does not fit `model.lora` tells, done to the letter: the file is then taken."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from safetensors.torch import save_file

from flowrl.core.errors import ModelError
from flowrl.models.base import LoraSettings
from flowrl.models.weights.roles import Weights
from tests import tiny_sd3 as tiny
from tests.remedies import follows


def started(path: str, **settings: Any) -> Weights:
    weights = Weights(tiny.pipeline().transformer, LoraSettings(**settings), ("attn.to_q", "attn.to_k"), seed=0)
    weights.load_lora(path)
    return weights


def told(path: str, **settings: Any) -> dict[str, Any]:
    with pytest.raises(ModelError) as error:
        started(path, **settings)
    (remedy,) = error.value.remedies
    assert str(error.value).endswith(str(remedy))
    return {key.rpartition(".")[2]: value for key, value in remedy.settings.items()}


@follows("flowrl/models/lora_formats/start.py:_Reader._require_settings")
@pytest.mark.parametrize("stabilised", [False, True])
def test_one_remedy_makes_a_peft_folder_of_other_settings_fit(tmp_path: Path, stabilised: bool) -> None:
    tensors = {}
    for block in range(5):
        for part in ("attn.to_v", "ff.net.2"):
            wide = 512 if part == "ff.net.2" else 128
            key = f"base_model.model.transformer_blocks.{block}.{part}"
            tensors |= {f"{key}.lora_A.weight": torch.randn(8, wide), f"{key}.lora_B.weight": torch.randn(128, 8)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "use_rslora": stabilised}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    given = {"rank": 4, "alpha": 3.0}
    settings = given | told(str(tmp_path), **given)
    kind = {"kind": "rslora"} if stabilised else {}
    assert settings == {"rank": 8, "alpha": 16, "targets": ["attn.to_v", "ff.net.2"]} | kind
    started(str(tmp_path), **settings)


@follows("flowrl/models/lora_formats/start.py:_files")
@pytest.mark.parametrize("inner", ["adapter", "lora"])
def test_the_lora_of_a_runs_folder_is_named(tmp_path: Path, inner: str) -> None:
    """`lora` is where flow_grpo's checkpoints have it."""
    settings: dict[str, Any] = {"rank": 2, "alpha": 2}
    tiny.lora(tiny.adapter(), LoraSettings(**settings, targets=["attn.to_q", "attn.to_k"])).save(
        tmp_path / inner, StableDiffusion3Pipeline
    )
    started(told(str(tmp_path), **settings)["init_lora"], **settings)
