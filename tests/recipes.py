"""What the tests of the real models' recipes share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

# yifan123/flow_grpo:config/base.py, and its common part of config/grpo.py. grpo_family sheet 1.2.
ADAMW = {"optim.betas": [0.9, 0.999], "optim.eps": 1e-8, "optim.weight_decay": 1e-4, "optim.schedule": "constant"} | {
    "optim.max_grad_norm": 1.0
}
EMA = {"optim.ema": {"decay": 0.9, "every": 8, "warmup": True}}
NO_EMA = {"optim.ema": None}


def advantages(name: str, std: str, eps: float = 1e-4, ddof: int = 0) -> dict[str, Any]:
    values = {"name": name, "std": std, "eps": eps, "ddof": ddof, "clip": 5.0, "trimmed_ratio": 0.0, "select": None}
    return {f"algorithm.advantages.{key}": value for key, value in values.items()}


def at(tree: Any, key: str) -> Any:
    """The value at `a.b.c`."""
    for part in key.split("."):
        tree = tree[part]
    return tree


def check_values(tree: dict, expected: dict[str, Any]) -> None:
    assert {key: at(tree, key) for key in expected} == expected
    # The same forwards in rollout and training: half precision depends on the batch.
    assert tree["rollout"]["batch_size"] == tree["optim"]["batch_size"]


def check_text(file: Path, source: str) -> None:
    """It names its source and what departs, its own commands, and no number of devices as a key."""
    text = file.read_text(encoding="ascii")
    assert max(map(len, text.splitlines())) <= 120
    assert source in text
    assert "departs" in text.lower()
    keys = re.findall(r"([A-Za-z_]+):", yaml.safe_dump(yaml.safe_load(text)))
    assert not {key for key in keys if re.search("gpu|process|world|device|nproc", key)}
    assert f"torchrun --nproc-per-node gpu -m flowrl train configs/{file.parent.name}/{file.name}" in text
    assert f"flowrl plan configs/{file.parent.name}/{file.name}" in text
