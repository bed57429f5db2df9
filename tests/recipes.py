"""What the tests of the real models' recipes share."""

from __future__ import annotations

from functools import cache
from typing import Any

from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.planning import memory
from tests import tiny_sd3

FOLDER = tiny_sd3.ROOT / "configs"
EVERY = {
    f"{file.parent.name}/{file.stem}": "pairs:" in file.read_text(encoding="ascii")
    for file in sorted(FOLDER.glob("*/*.yaml"))
    if file.parent.name not in ("lab", "proxy")
}
RECIPES = [name for name, paired in EVERY.items() if not paired]
"""`<model>/<method>-<reward>` of the real models."""
PAIRED = [name for name, paired in EVERY.items() if paired]
"""`<model>/<method>-<data>`: those that learn from given pairs."""

# yifan123/flow_grpo:config/base.py, and its common part of config/grpo.py. grpo_family sheet 1.2.
ADAMW = {"optim.betas": [0.9, 0.999], "optim.eps": 1e-8, "optim.weight_decay": 1e-4, "optim.schedule": "constant"} | {
    "optim.max_grad_norm": 1.0
}
EMA = {"optim.ema": {"decay": 0.9, "every": 8, "warmup": True}}
NO_EMA = {"optim.ema": None}


def saved(evaluations: int, checkpoints: int) -> dict[str, Any]:
    """Evaluations and checkpoints every so many iterations; Flow-GRPO keeps five, by its config/base.py."""
    return {"eval.every": evaluations, "checkpoint": {"every": checkpoints, "keep": 5}}


def advantages(name: str, std: str, eps: float = 1e-4, ddof: int = 0) -> dict[str, Any]:
    values = {"name": name, "std": std, "eps": eps, "ddof": ddof, "clip": 5.0, "trimmed_ratio": 0.0, "select": None}
    return {f"algorithm.advantages.{key}": value for key, value in values.items()}


def at(tree: Any, key: str) -> Any:
    """The value at `a.b.c`; the tree itself at ``."""
    for part in filter(None, key.split(".")):
        tree = tree[part]
    return tree


def check_values(tree: dict, expected: dict[str, Any]) -> None:
    assert {key: at(tree, key) for key in expected} == expected


@cache
def recipe(name: str) -> Resolved:
    return resolve(load_config(FOLDER / f"{name}.yaml"))


@cache
def _skeleton(path: str) -> Any:
    """The model without its weights, which takes seconds, for the first recipe of it."""
    return memory.skeleton(next(run for run in map(recipe, RECIPES) if run.model.config.path == path))


def adapter(run: Resolved) -> Any:
    """The run's adapter on the meta device; recipes of one model share its pipeline."""
    first = _skeleton(run.model.config.path)
    family = vars(run.model.module).get("FAMILY")  # the generic adapter has none
    make = type(first) if family is None else family.adapter
    return make(first.pipeline, run.model.config)
