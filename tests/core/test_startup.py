"""Imports without looks for cycles: in flowrl's own processes only, and put back whatever happens."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_a_program_that_uses_flowrl_keeps_its_collector():
    # In a process of its own: another test may have called the command line here.
    code = (
        "import gc\nfrom flowrl.core.startup import imports\n"
        "with imports():\n    assert gc.isenabled()\n    kept = [[] for _ in range(1000)]\n"
        "assert gc.isenabled() and gc.get_freeze_count() == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_command_collects_again_after_its_imports():
    code = (
        "import gc\nfrom flowrl.core.startup import imports, own_process\nown_process()\n"
        "before = gc.get_freeze_count()\n"
        "try:\n    with imports():\n        assert not gc.isenabled()\n        kept = [[] for _ in range(1000)]\n"
        "        with imports():\n            assert not gc.isenabled()\n        assert not gc.isenabled()\n"
        "        raise ImportError\nexcept ImportError:\n    pass\n"
        "assert gc.isenabled() and gc.get_freeze_count() >= before + 1000\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_start_of_a_run_is_measured_next_to_its_imports(capsys):
    from flowrl.commands._start_bench import PARTS, report

    text = report("quickstart", ["data.max_eval_prompts=2"], 1, "some CPU")
    assert all(f"| {name} | " in text for name in (*PARTS, "whole start"))
    seconds = {
        line.split(" | ")[0][2:]: float(line.split(" | ")[1][:-2]) for line in text.splitlines()[2:] if "|" in line
    }
    assert seconds["imports of the command"] > 0.3
    assert seconds["model"] > 0.3
    assert seconds["everything else"] >= 0
