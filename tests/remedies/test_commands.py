"""Remedies of the command line: a word to leave out or to give, or another command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.remedies import follows
from tests.remedies.following import command_fault, goes_further, numbered, provoked, with_remedy

CASES = [
    # place, command line that provokes the fault; what follows the fault in the command may fail elsewhere
    ("commands/_arguments.py:showing 1 2", "train nowhere --quiet --json"),
    ("apps/suites/running/procedure.py:evaluate", "eval tiny-sd3 --suite hpdv2 --compat"),
    (
        "apps/suites/running/options.py:require_results_alone",
        "eval a --suite geneval --results r.jsonl --judge a --export x",
    ),
    ("apps/suites/running/pairs.py:pair_plan", "eval tiny-sd3 --suite geneval --pair-set a=1 --limit 1"),
    ("apps/suites/running/pairs.py:pair_plan 2", "eval tiny-sd3 --suite geneval --pair-judge vlm_judge --pair-set a=1"),
    ("commands/ask.py:_checked", "ask nowhere stop --seed 1 --prompt 'a red circle'"),
    ("commands/convert_config.py:command", "convert-config ddpo.yaml --from trl --gpus 1 --strict"),
    ("commands/doctor.py:command 1 2", "doctor --check nowhere.py --model nowhere"),
    ("commands/eval.py:_require_fit", "eval nowhere --limit 3 --lora x.safetensors --guidance 0"),
    ("commands/eval.py:_require_fit 2 3", "eval nowhere a.b=1 c.d=2 --suite geneval --accept-changes --json --limit 2"),
    ("commands/export.py:command", "export nowhere --out x --private --dry-run"),
    ("commands/list.py:command 1 2", "list recipes sd3/flow_grpo-ocr"),
    ("commands/list.py:command 3", "list suites geneval --json"),
    ("commands/score.py:command", "score --check jpeg --out scored"),
    ("commands/serve.py:_token 1 2", "serve --reward jpeg --token-file nowhere --token-env NOWHERE --port 1"),
]  # fmt: skip


@pytest.mark.slow  # they go on to plans, models and servers
@pytest.mark.parametrize(("place", "line"), CASES, ids=[case[0] for case in CASES])
@follows(*(place for case in CASES for place in numbered(case[0])))
def test_a_command_goes_on_with_each_remedy(place, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ddpo.yaml").write_text("num_epochs: 200\ntrain_batch_size: 2\nsample_batch_size: 2\n")
    fault = provoked(lambda: command_fault(shlex.split(line)), numbered(place))
    for remedy in fault.remedies:
        assert goes_further(with_remedy(shlex.split(line), remedy), fault), f"{fault}: {remedy} does not end it"
