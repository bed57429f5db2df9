"""`scripts.bench start`: the parts of a start, in a process of its own."""

import pytest

from scripts.bench.start import PARTS, report, watched


def test_each_function_whose_seconds_are_counted_is_where_the_bench_looks():
    assert {name for owner, attribute, name in watched() if callable(getattr(owner, attribute))} == set(PARTS[1:])


@pytest.mark.slow
def test_the_start_of_a_run_is_measured_next_to_its_imports(capsys):
    text = report("quickstart", ["data.max_eval_prompts=2"], 1, "some CPU")
    assert all(f"| {name} | " in text for name in (*PARTS, "whole start"))
    seconds = {
        line.split(" | ")[0][2:]: float(line.split(" | ")[1][:-2]) for line in text.splitlines()[2:] if "|" in line
    }
    assert seconds["imports of the command"] > 0.3
    assert seconds["model"] > 0.3
    assert seconds["everything else"] >= 0
