"""A run with compiled blocks: the numbers of a plain one, graphs that stay, plain files, and bitwise resume."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.testing import assert_close

from tests.e2e.conftest import BASE, digest, train

pytestmark = pytest.mark.slow

OPTIONS = (
    *("model.lora={rank: 4, alpha: 8}", "iterations=2", "optim.eps=1e-3"),
    # One batch size everywhere: each shape costs the C++ compiler seconds.
    *("rollout.group_size=4", "eval.batch_size=4", "data.max_eval_prompts=2", "eval.samples_per_prompt=2"),
)
COMPILED = ("model.compile=blocks", *OPTIONS)


def rows(run: str) -> list[dict]:
    return [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]


def test_a_compiled_run_trains_what_a_plain_one_trains_and_resumes_bitwise(place: Path):
    torch.compiler.reset()
    counters.clear()
    train("name=plain", *OPTIONS)
    train("name=parts", *COMPILED, "iterations=1")
    made = counters["stats"]["unique_graphs"]
    assert 0 < made <= 3  # kinds of blocks: rollout, gate, update and evaluation share their graphs
    train("name=parts", *COMPILED, resume=True)
    train("name=whole", *COMPILED)
    assert counters["stats"]["unique_graphs"] == made
    assert digest("whole", 2) == digest("parts", 2)
    plain, compiled = (load_file(f"runs/{run}/adapter/pytorch_lora_weights.safetensors") for run in ("plain", "whole"))
    assert compiled.keys() == plain.keys()
    for name, value in plain.items():
        assert_close(compiled[name], value, rtol=1e-3, atol=1e-2 * BASE["optim"]["learning_rate"])
    for mine, theirs in zip(rows("whole"), rows("plain"), strict=True):
        assert mine["reward/total_mean"] == pytest.approx(theirs["reward/total_mean"], abs=1e-5)
        assert mine["grad/norm"] == pytest.approx(theirs["grad/norm"], rel=1e-3)
    assert ", and 0.00e+00 at the rollout's own batches" in Path("runs/whole/train.log").read_text()
