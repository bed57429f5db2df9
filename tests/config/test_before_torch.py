"""A fault of a configuration is named before torch is imported, by every command that reads one."""

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.config.test_config import TREE
from tests.tables import table

FAULTS: dict[str, tuple[str | dict[str, Any], str]] = table(__file__, "before_torch")
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
