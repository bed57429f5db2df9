"""Iterations of a run on a pretended CUDA card: the code of the product from the prompts to the optimizer step.

One case for each kind of training data (flowrl/training/kinds.py) and each family of models, in bfloat16. A tensor on
the wrong device or a dtype that attention refuses raises; waits of the host for the card are counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flowrl.config.load import load_config, resolve
from flowrl.models import _native
from flowrl.models.memory import savings
from flowrl.run.session import Session
from flowrl.training.world import World
from tests import tiny_pipelines
from tests.e2e.conftest import BASE
from tests.e2e.test_preferences import make_pairs
from tests.gpu_rules import Card, Wait, card
from tests.native import halved
from tests.tables import table

SMALL = (
    *("model.dtype=bfloat16", "model.lora={rank: 2, alpha: 4}", "data.max_prompts=1", "data.max_eval_prompts=1"),
    *("rollout.prompts_per_iteration=1", "rollout.group_size=4", "rollout.batch_size=4"),
    *("rollout.num_inference_steps=3", "rollout.guidance_scale=3.0"),
    *("optim.updates_per_iteration=1", "optim.batch_size=4", "eval.batch_size=2"),
)
REWARD = (
    "import flowrl\nCARD = flowrl.Card(outputs=('brightness',), modality='any')\n"
    "def score(images, prompts, metadata):\n    return images.flatten(1).mean(dim=1)\n"
)


@dataclass(frozen=True)
class Case:
    """An iteration."""

    words: list[str]
    """Of the configuration."""
    pipeline: str = ""
    """A random pipeline of tests/tiny_pipelines; empty: the embedded one that the words name."""
    pairs: bool = False
    """The data are pairs of pictures."""


CASES = {name: Case(**given) for name, given in table(__file__, "on_card").items()}


def prepared(folder: Path, case: Case) -> None:
    """The files of a case in `folder`."""
    (folder / "run.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "brightness.py").write_text(REWARD)
    if case.pairs:
        make_pairs(folder / "pairs", 8)


def network(gpu: Card, predict: Callable[..., Any]) -> Callable[..., Any]:
    """`predict`, every call of which is marked, and whose attention takes bfloat16 alone, as flash does."""

    def marked(*args: Any, **options: Any) -> Any:
        gpu.mark("step")
        gpu.half = torch.bfloat16
        try:
            return predict(*args, **options)
        finally:
            gpu.half = None

    return marked


def marking(gpu: Card, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, every call of which is marked."""

    def marked(*args: Any, **options: Any) -> Any:
        gpu.mark(name)
        return work(*args, **options)

    return marked


def loading(gpu: Card, case: Case) -> Callable[..., Any]:
    """`load_pipeline`, on the host; of a random pipeline that one."""
    load = _native.load_pipeline

    def loaded(*args: Any, **options: Any) -> Any:
        with gpu.unseen():
            return halved(tiny_pipelines.make(case.pipeline)) if case.pipeline else load(*args, **options)

    return loaded


def iterated(words: list[str], gpu: Card) -> tuple[dict[str, Any], list[list[Wait]], list[list[Wait]]]:
    """One iteration on the card: (its row of metrics, waits of each step inside a batch, of each microbatch)."""
    resolved = resolve(load_config("run.yaml", [*SMALL, *words]))
    session: Any = Session(resolved, world=World(0, 1, torch.device("cuda")))
    adapter, method, work = session.model, session.method, session.parts.learner
    adapter.predict = network(gpu, adapter.predict)
    rollout = session.roll_out(1)
    steps = gpu.between("step")
    credit = session.credit(rollout)
    work.method.loss = marking(gpu, "microbatch", method.loss)
    row = session.update(rollout, credit)
    per_batch = len(rollout.plan)
    inside = [waits for place, waits in enumerate(steps, start=1) if place % per_batch]
    return row, inside, gpu.between("microbatch")


def most(parts: list[list[Wait]]) -> list[Wait]:
    """The part with the most waits."""
    return max(parts, key=len, default=[])


@pytest.mark.parametrize("name", CASES)
def test_an_iteration_runs_on_cuda_and_seldom_waits_for_it(name, tmp_path, monkeypatch):
    case = CASES[name]
    prepared(tmp_path, case)
    monkeypatch.chdir(tmp_path)
    # Operations are counted on fake tensors of the host: tests/rollout/test_flop.py.
    monkeypatch.setattr(Session, "row_flop", lambda *_: None)
    # Tensors without values cannot be compared: tests/gpu has the attention of a real card.
    monkeypatch.setattr(savings, "same_with_gradients", lambda device, dtype: True)
    with card() as gpu:
        monkeypatch.setattr(_native, "load_pipeline", loading(gpu, case))
        row, steps, microbatches = iterated(case.words, gpu)
    assert row["grad/norm"] > 0
    assert microbatches
    assert steps or case.pairs
    assert len(most(steps)) <= 3, "\n".join(map(str, most(steps)))
    assert len(most(microbatches)) <= 6, "\n".join(map(str, most(microbatches)))
