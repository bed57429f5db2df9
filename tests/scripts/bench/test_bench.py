"""The command `python -m scripts.bench`, and what its benches count."""

import time
from types import SimpleNamespace

import pytest
import torch
import typer.main

from flowrl.reward import Card, Reward
from scripts.bench import reentry, trees
from scripts.bench.__main__ import app, main
from scripts.bench.overhead import Stopwatch, overhead_share, report, watched
from scripts.bench.page import MARKS, put_between
from scripts.bench.timing import median_interval, paired


@pytest.mark.parametrize("name", ["", *sorted(vars(typer.main.get_command(app))["commands"])])
def test_a_help_text_fits_a_screen(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.argv", ["bench", *([name] if name else []), "--help"])
    with pytest.raises(SystemExit) as left:
        main()
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert left.value.code == 0
    assert lines[0].startswith("Usage: python -m scripts.bench") or lines[1].startswith(" Usage:")
    assert len(lines) <= 40
    assert not [line for line in lines[1:] if line.endswith("...")]


def test_a_fault_is_one_message_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "exploration", "lab/awm"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert "rollout.exploration=null: there is nothing to measure" in capsys.readouterr().err


def wait(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_time_is_added_up_by_name_and_taken_once_and_a_part_that_fails_is_timed_too():
    def fail() -> None:
        wait(0.02)
        raise RuntimeError("broken")

    watch = Stopwatch()
    first, second = watch.timed("a", wait), watch.timed("a", fail)
    first(0.01)
    with pytest.raises(RuntimeError, match="broken"):
        second()
    taken = watch.take()
    assert taken.keys() == {"a"}
    assert taken["a"] >= 0.03
    assert watch.take() == {}


class Clock:
    """Time that moves where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_call_inside_another_counts_once():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    inner = watch.timed("inner", clock.wait)
    watch.timed("outer", lambda: (clock.wait(1.0), inner(5.0), clock.wait(0.5)))()
    assert watch.take() == {"inner": 5.0, "outer": 1.5}


def test_work_is_timed_where_it_begins_and_everything_is_put_back():
    clock = Clock()

    class Network(torch.nn.Linear):
        def forward(self, input):
            clock.wait(8.0)
            return torch.nn.Linear.forward(self, input)

    class Model:
        pipeline = None
        network = Network(2, 1)

        def decode(self):
            clock.wait(4.0)

        def encode(self):
            clock.wait(2.0)

    def raw():
        clock.wait(0.5)
        return reward.score([], [], [])

    def score(images, prompts, metadata):
        clock.wait(1.0)
        return torch.zeros(0)

    reward = Reward(score, Card(outputs=("a",)))
    scorer = SimpleNamespace(distinct=[SimpleNamespace(reward=reward)], raw=raw)
    session = SimpleNamespace(model=Model(), rewards=scorer, optimizer=SimpleNamespace(step=lambda: clock.wait(0.25)))
    kept, watch = (reward.score, torch.Tensor.backward, raw), Stopwatch(clock=clock)
    with watched(session, watch):
        session.model.network(torch.ones(1, 2)).sum().backward()
        session.model.encode()
        session.model.decode()
        session.rewards.raw()
        session.optimizer.step()
    assert session.model.network.weight.grad is not None
    work = {"network": 8.0, "VAE": 4.0, "text encoder": 2.0, "reward": 1.0}
    assert watch.take() == work | {"around the reward": 0.5, "optimizer and averages": 0.25}
    assert (reward.score, torch.Tensor.backward, session.rewards.raw) == kept
    assert not {"decode", "encode", "forward"} & {*vars(session.model), *vars(session.model.network)}


def test_overhead_is_what_is_left_of_an_iteration():
    row = {"iteration": 0.1, "network": 1.0, "VAE": 0.2, "text encoder": 0.1, "reward": 0.4, "noise": 0.2}
    assert overhead_share(row) == pytest.approx(0.15)
    assert overhead_share({"iteration": 1.0}) == 1.0
    text = report([row], "quickstart", "a machine")
    assert "| everything else | 0.1000 | 5.0% |" in text
    assert "15.0% of an iteration of quickstart" in text
    assert "missed" in text


# ---- re-entry


def test_pairs_keep_their_order_while_the_calls_take_turns():
    called: list[str] = []
    rows = paired(lambda: called.append("a"), lambda: (called.append("b"), wait(0.002)), 6)
    assert len(rows) == 6
    assert all(second > first for first, second in rows)
    assert "".join(called[:4]) == "baab"


def test_the_interval_of_a_median_holds_it():
    middle, low, high = median_interval([3.0, 1.0, 2.0, 9.0, 4.0] * 20)
    assert low <= middle <= high
    assert (low, high) != (1.0, 9.0)
    assert median_interval([float(k) for k in range(101)]) == (50.0, 40.0, 60.0)


@pytest.mark.slow
def test_native_and_generic_are_timed_on_the_same_prediction_and_the_result_is_put_in_its_place(tmp_path):
    found = reentry.cost(10, 1, 4.5)
    assert set(found) == {"rollout", "training, forward"}
    assert all(len(rows) == 10 and min(min(row) for row in rows) > 0 for rows in found.values())
    text = reentry.report(found, 1, 4.5, 1)
    assert "Medians of 10 pairs, batch 1, guidance 4.5" in text
    file, first = tmp_path / "performance.md", MARKS[0].format("reentry")
    file.write_text(f"before\n{first}\nold\n{MARKS[1]}\nafter\n")
    put_between(file, "reentry", text)
    assert file.read_text() == f"before\n{first}\n{text}\n{MARKS[1]}\nafter\n"
    with pytest.raises(SystemExit, match="has no place for the result"):
        put_between(file, "trees", text)


# ---- trees


def test_methods_on_trees_and_chains_are_counted_and_timed_in_turn():
    """Evaluations are exact; what took how long is for people to judge."""
    small = [f"rollout.{key}={value}" for key, value in {"num_inference_steps": 6, "prompts_per_iteration": 2}.items()]
    small += ["rollout.group_size=4", "algorithm.splits=[0, 1]"]
    methods = {name: trees.METHODS[name] for name in (trees.DENSE, trees.MIX)}
    costs = trees.measure(small, 1, methods)
    dense, mix = costs.values()
    assert dense.rollout == mix.rollout == [19 / 4], "1 + 2 + 4 x 4 nodes for 4 leaves"
    assert (dense.train, mix.train) == ([15 / 4], [11 / 4]), "steps 0 to 4, or splits and window: 0 to 3"
    assert dense.dead == [0.0]
    assert min(dense.seconds + mix.cpu_s + mix.rollout_s + mix.update_s) > 0


def test_the_report_takes_ratios_within_a_round():
    costs = {name: trees.Cost([20.0] * 3, [19.0] * 3, [0.0] * 3, [1.0, 2.0, 4.0]) for name in trees.METHODS}
    costs[trees.DENSE].rollout = [203 / 16] * 3
    costs[trees.MIX].seconds = [0.9, 0.2, 1.0]
    for cost in costs.values():
        cost.rollout_s, cost.update_s, cost.cpu_s = cost.seconds, cost.seconds, [1.0] * 3
    text = trees.report(costs, "a machine")
    assert "0.250 (0.100 to 0.900)" in text, "0.450 is the ratio of the medians"
    assert "0.634, target 0.65: met" in text
    assert "0.250, target 0.4: met" in text
    assert "Dead groups: at most 0%" in text


@pytest.mark.slow
def test_a_look_at_pairs_is_compared_with_decoding_their_files():
    from scripts.bench.pair_check import report

    lines = report(pairs=4, sources=2, rounds=1).splitlines()
    assert lines[0] == "4 JPEG pairs of 512 x 512 that share 2 sources, 10 files"
    assert "extrapolated to 50000 pairs" in lines[-2]
