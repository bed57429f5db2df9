"""A fault of a configuration is named before torch is imported, by every command that reads one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.config.test_config import TREE

FAULTS: dict[str, tuple[str | dict[str, Any], str]] = {
    # what run.yaml holds: text, or changes of TREE -> beginning of the message
    "syntax": ("name: x\n  b: [\n", "run.yaml: not valid YAML: mapping values are not allowed here"),
    "twice": ("name: x\nname: y\n", "run.yaml, line 2: the key 'name' is there twice, first in line 1; keep one of"),
    "no mapping": ("- a\n", "run.yaml: a configuration is a mapping of keys to values"),
    "required": ("name: x\n", "model: is required\ndata: is required\niterations: is required"),
    "type": ({"optim": {"learning_rate": "high"}}, "optim.learning_rate = 'high': must be a number"),
    "range": ({"optim": {"learning_rate": -1.0}}, "optim: learning_rate=-1.0 must be positive"),
    "geometry": ({"optim": {"updates_per_iteration": 5}}, "configuration: optim.updates_per_iteration=5 does not div"),
    "run": ({"iteration": 1}, "iteration: unknown key (value 1); did you mean 'iterations'? valid keys: algorithm, "),
    "data": ({"data": {"prompt": "x"}}, "data.prompt: unknown key (value 'x'); did you mean "),
    "pairs": ({"data": {"pairs": {"records": {"chosn": "a"}}}}, "data.pairs.records.chosn: unknown key (value 'a'); d"),
    "rollout": ({"rollout": {"groupsize": 4}}, "rollout.groupsize: unknown key (value 4); did you mean 'group_size'?"),
    "exploration": ({"rollout": {"exploration": {"pol": 4}}}, "rollout.exploration.pol: unknown key (value 4); did yo"),
    "optim": (
        {"optim": {"lr": 1}},
        "optim.lr: unknown key (value 1); did you mean 'learning_rate'? valid keys: batch_",
    ),
    "ema": ({"optim": {"ema": {"dcay": 1}}}, "optim.ema.dcay: unknown key (value 1); did you mean 'decay'?"),
    "eval": ({"eval": {"evry": 1}}, "eval.evry: unknown key (value 1); did you mean 'every'? valid keys: batch_size, "),
    "guard": ({"guard": {"mod": 1}}, "guard.mod: unknown key (value 1); did you mean 'mode'? valid keys: degeneracy, "),
    "checkpoint": ({"checkpoint": {"kep": 1}}, "checkpoint.kep: unknown key (value 1); did you mean 'keep'?"),
    "tracker": (
        {"trackers": ["wandbb"]},
        "configuration: trackers.0 = 'wandbb': accelerate knows no tracker of this n",
    ),
    "method's": (
        {"optim": {"clip_range": 1}},
        "optim.clip_range: unknown key (value 1); did you mean 'algorithm.clip_",
    ),
    "sampler's": (
        {"noise_level": 0.5},
        "noise_level: unknown key (value 0.5); did you mean 'rollout.sampler.noise_lev",
    ),
    "model's": ({"rank": 4}, "rank: unknown key (value 4); did you mean 'model.lora.rank'? valid keys: algorithm, "),
    "model": ({"model": {"name": "sd4", "path": "x"}}, "model: model name='sd4' is unknown; did you mean 'sd'? there"),
    "method": ({"algorithm": {"name": "grpo"}}, "algorithm: algorithm name='grpo' is unknown; did you mean 'flow_grpo"),
    "case": (
        {"algorithm": {"name": "Flow_GRPO"}},
        "algorithm: algorithm name='Flow_GRPO' is unknown; did you mean 'fl",
    ),
    "sampler": (
        {"rollout": {"sampler": {"name": "sde"}}},
        "rollout.sampler: sampler name='sde' is unknown; did you me",
    ),
    "reward": ({"rewards": [{"name": "shape"}]}, "rewards.0: reward name='shape' is unknown; did you mean 'shapes'?"),
    "held out": ({"eval": {"rewards": [{"name": "x"}]}}, "eval.rewards.0: reward name='x' is unknown; there are: "),
    "extends": ("extends: base.yaml\nname: x\n", "optim.learning_rat: unknown key (value 1); did you mean 'learning_r"),
    "circle": (
        "extends: run.yaml\n",
        "run.yaml: extends='run.yaml' closes a circle: run.yaml -> ",
    ),
    "lost": ("extends: quikstart\n", "run.yaml: extends='quikstart': there is no "),
}
WORDS = {
    "train": ["train", "run.yaml"],
    "processes": ["train", "run.yaml", "--processes", "2"],
    "json": ["train", "run.yaml", "--json"],
    "pairs": ["pairs", "run.yaml", "--out", "out"],
    **{name: [name, "run.yaml"] for name in ("plan", "eval", "doctor", "sweep")},
}
CODE = """
import contextlib, io, json, sys
from flowrl.cli import app, main
for words, text in json.load(sys.stdin):
    open("run.yaml", "w").write(text)
    sys.argv, said, app.registered_commands = ["flowrl", *words], io.StringIO(), []
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue(), "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[tuple[str, str], list]:
    """(command, fault) -> [exit code, message, whether torch is there], all in one process."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "base.yaml").write_text(yaml.safe_dump(TREE | {"optim": {"learning_rat": 1}}))
    texts = {name: held if isinstance(held, str) else yaml.safe_dump(TREE | held) for name, (held, _) in FAULTS.items()}
    cases = [("train", fault) for fault in FAULTS] + [
        (command, fault) for command in WORDS for fault in ("optim", "twice")
    ]
    done = subprocess.run(
        [sys.executable, "-c", CODE], input=json.dumps([(WORDS[command], texts[fault]) for command, fault in cases]),
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_kind_of_fault(told, fault):
    code, message, torch = told["train", fault]
    assert (code, torch) == (2, False)
    assert message.startswith(f"flowrl: {FAULTS[fault][1]}"), message
    assert fault != "extends" or message.endswith("/base.yaml)\n")


@pytest.mark.parametrize("command", WORDS)
def test_by_each_command(told, command):
    for fault in ("optim", "twice"):
        assert told[command, fault] == told["train", fault]
