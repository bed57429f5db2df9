"""One whole iteration of a method on every tiny pipeline, from the configuration to the saved result.

Nothing here knows a pipeline: how it is called stands in its case, everything else in the table of families.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowrl.algorithms.base import EdgeMethod
from flowrl.config.schema import RunConfig
from flowrl.core import registry
from flowrl.core.strict import validate
from flowrl.models import _native, generic
from flowrl.models._schedulers import path_of
from flowrl.models.generic.options import find_networks
from flowrl.run.trainer import Trainer
from tests import tiny_pipelines as tiny

METHODS: dict[str, dict[str, Any]] = {
    "flow_grpo": {"clip_range": 1e-3},
    "diffusion_nft": {"times": {"name": "permutation", "count": 2}, "solver": "ode"},
}
"""Method -> its options: one line more tries one method more on everything."""
NATIVE = {"sd": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "qwen_image": "qwen_image", "wan": "wan"}
"""Native adapter -> tiny pipeline of its family."""
EVERY = [("generic", name) for name in tiny.CASES | tiny.IMAGED] + list(NATIVE.items())
FAST = {("generic", name) for name in ("sd", "sana", "ltx", "ltx_image", "wan_2_2_frame")} | {("sd3", "sd3")}
"""One for each code path: noise prediction, flow, packed clips, a held first frame, a masked one, native."""
GUIDED = 3.0


def records(folder: Path, case: tiny.Case) -> str:
    """A file of prompts, each with its own pictures where the case wants some."""
    lines = []
    for k, prompt in enumerate(tiny.PROMPTS):
        names = [f"{k}-{place}.png" for place in range(case.images)]
        for place, name in enumerate(names):
            pixels = torch.rand(
                12 + case.enlarged, 20 + case.enlarged, 3, generator=torch.Generator().manual_seed(10 * k + place)
            )
            Image.fromarray((255 * pixels).byte().numpy(), "RGB").save(folder / name)
        lines.append(json.dumps({"prompt": prompt} | ({"images": names} if names else {})))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return str(folder / "prompts.jsonl")


def configured(folder: Path, adapter: str, name: str, method: str, pipe: Any) -> RunConfig:
    """A run of one iteration on the pipeline, with the sampler that fits its process."""
    case = (tiny.CASES | tiny.IMAGED)[name]
    height, width = case.sizes[0]
    call = {"call": case.call} if adapter == "generic" else case.call
    takes_lora = all(hasattr(network, "add_adapter") for network in find_networks(pipe).values())
    module = registry.load("algorithms", method)
    sampler = None
    if isinstance(module.build(module.Config()), EdgeMethod):
        sampler = {"name": "flow_sde"} if path_of(pipe.scheduler).is_flow else {"name": "ddim", "eta": 1.0}
    tree = {
        "name": "run",
        "output": str(folder),
        "iterations": 1,
        "model": {"name": adapter, "path": f"tiny/{name}", "height": height, "width": width, **call}
        | {"lora": {"rank": 2, "alpha": 4} if takes_lora else None},
        "data": {"prompts": records(folder, case)},
        "rollout": {"sampler": sampler, "num_inference_steps": 3, "guidance_scale": GUIDED, "batch_size": 2}
        | {"prompts_per_iteration": 2, "group_size": 2},
        "algorithm": {"name": method, **METHODS[method]},
        "rewards": [{"name": "jpeg"}],
        "optim": {"learning_rate": 1e-3, "batch_size": 2, "updates_per_iteration": 1},
        "eval": {"batch_size": 2, "num_inference_steps": 2, "save_images": 0},
    }
    return validate(RunConfig, tree, "")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("adapter", "name"), [pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow) for pair in EVERY]
)
def test_one_iteration_trains_and_saves(adapter, name, method, tmp_path, monkeypatch):
    pipe = tiny.make(name)
    # Larger language models are stubs, which no folder holds; a pipeline from a folder: tests/models/test_models_*.py.
    loads = generic if adapter == "generic" else _native
    monkeypatch.setattr(loads, "load_pipeline", lambda *_, **__: pipe)
    trainer = Trainer(configured(tmp_path, adapter, name, method, pipe))
    summary = trainer.fit()
    assert summary["status"] == "finished"
    assert all(math.isfinite(summary[when]["jpeg_kb"]["mean"]) for when in ("base", "tuned"))
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["reward/masked"] == row["reward/jpeg_kb_masked"] == row["reward/jpeg_kb_failures"] == 0
    assert row["reward/jpeg_kb_calls"] == 1, "one batch of the iteration's samples; evaluations are not in it"
    assert row["advantage/dead_group_share"] < 1
    assert row["grad/norm"] > 0
    assert row["optim/skipped"] == 0
    assert list((tmp_path / "run" / "adapter").rglob("*.safetensors"))
