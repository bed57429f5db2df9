"""A session that evaluates a run under the strength dial (run/dial.py)."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.config.load import run_tree
from flowrl.core.errors import ConfigError
from flowrl.run import handover
from flowrl.run.dial import RUN, Dial, mixed
from flowrl.run.session import Session
from flowrl.run.state import load_newest, read


def load_newest_dialled(session: Session, dial: Dial, accept_changes: bool = False) -> None:
    """`load_newest` of the dial's run; from then on the session's predictions are under the dial.

    The base is the session's network as it is now, before the update. Guided predictions are added, each with the
    evaluation's own guidance scale. Fingerprints of later evaluations name the dial.

    Raises ConfigError: a run of the mix without a checkpoint, or a distilled model.
    """
    weights, adapter = session.weights, session.model
    dial.require(adapter)
    for _, name, run in dial.parts:
        if run is None:
            weights.snapshot(name)
        elif name != RUN:
            weights.copies[name] = _values(session, run)
    load_newest(session, dial.run, accept_changes)
    if dial.lora_scale != 1:
        for layer in weights.layers:
            layer.scale_layer(dial.lora_scale)
    predict = adapter.predict

    def under(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Tensor:
            with weights.using(session.optimizer.role if name == RUN else name):
                return predict(*args)

        return call

    vars(adapter)["predict"] = mixed([(factor, under(name)) for factor, name, _ in dial.parts])
    evaluator = session.parts.evaluator
    made_with = {**evaluator.made_with, "dial": json.dumps(dial.facts)}
    session.parts = replace(session.parts, evaluator=replace(evaluator, made_with=made_with))


def _values(session: Session, run: Path) -> dict[str, Tensor]:
    """The trained values of a run's result, by the session's names of parameters."""
    iteration = handover.chosen(run)
    if iteration is None:
        raise ConfigError(f"--mix {run}: it holds no checkpoint to evaluate")
    tensors, averaged = read(session, run / "checkpoints", iteration).tensors, run_tree(run, "optim.ema")
    role = "policy" if averaged["optim"]["ema"] is None else "ema"
    values = session.weights.values.items()
    return {name: tensors[f"weights/{role}/{name}"].to(value.device).clone() for name, value in values}
