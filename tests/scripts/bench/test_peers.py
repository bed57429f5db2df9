"""`scripts.bench peers`: both sides do the same work, and the page receives the table. Who is faster is for people."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.bench import peers as bench
from scripts.bench.__main__ import peers
from scripts.bench.floors import BareLoop, Watch, recorded
from scripts.bench.page import MARKS

SMALL = [f"rollout.{key}={value}" for key, value in {"num_inference_steps": 3, "prompts_per_iteration": 2}.items()]
SMALL += ["rollout.group_size=3", "rollout.batch_size=4", "optim.batch_size=4"]


def test_both_sides_make_the_same_forwards_and_the_ratios_are_finite():
    words = {"diffusion_nft": bench.METHODS["diffusion_nft"]}
    rows, setting = bench.measure(bench.CONFIG, SMALL, 1, words)
    assert [row.name for row in rows][:3] == ["rollout, ODE", "rollout, flow_sde", "updates, diffusion_nft"]
    assert all(math.isfinite(ratio) and ratio > 0 for row in rows for ratio in row.ratios)
    assert all(len(row.pairs) == 1 and row.work[0] == row.work[1] for row in rows)
    assert rows[0].work[0] == rows[1].work[0] == Counter({4: 3, 2: 3}), "6 samples in batches of 4, 3 steps"
    # Two updates of 6 terms each, in microbatches of 4 and 2; the policy and `old`.
    assert rows[2].work[0] == Counter({4: 4, 2: 4})
    assert "tiny-sd3 (full weights, float32), 6 samples in batches of 4, 3 steps" in setting


def test_a_bare_loop_repeats_an_updates_forwards_and_leaves_the_weights():
    words = ("algorithm={name: awm, times: {name: subset, count: 1}, kl: {coef: 0.0}}", "rollout.sampler=null")
    with bench._opened(bench.CONFIG, [*SMALL, *words]) as session:
        rollout = session.roll_out(1)
        scores = torch.rand(rollout.rewards.shape, generator=torch.Generator().manual_seed(0))
        rollout = replace(rollout, rewards=scores)
        credit = session.credit(rollout)
        with recorded(session) as calls:
            session.update(rollout, credit)
        made = [call for call in calls if call is not None]
        assert calls.count(None) == 2, "an update each"
        aimed = [call for call in made if call.target is not None]
        # Each update trains 3 terms in one forward; the average and the second one's old log-probs have no backward.
        assert (len(aimed), len(made)) == (2, 5)
        assert all(call.with_gradient for call in aimed)

        kept = {name: value.clone() for name, value in session.weights.values.items()}
        watch, loop = Watch(session), BareLoop(session, calls)
        loop()
        assert watch.take() == Counter({3: 5})
        assert all(torch.equal(kept[name], value) for name, value in session.weights.values.items())
        moments = [loop.adam.state[p]["exp_avg"].abs().sum() for p in loop.parameters]
        assert sum(moment > 0 for moment in moments) > len(moments) / 2, "its gradients reach the weights"
        assert all(p.grad is None for p in loop.parameters)


def test_sides_that_do_different_work_are_not_compared():
    done = Counter({8: 1})
    watch: Any = SimpleNamespace(take=lambda: Counter(done))
    with pytest.raises(AssertionError, match="x: the floor gives its network 8 rows, flowrl 16"):
        bench._compared(
            "x", None, (lambda: done.update({8: 1 - done[8]}), lambda: done.update({8: 2 - done[8]})), watch, 1
        )


def test_the_whole_interval_decides_and_the_page_has_the_table(tmp_path, monkeypatch):
    def row(name: str, floor: float, own: float) -> bench.Row:
        return bench.Row(name, 0.95, [(floor, own)] * 5, (Counter({64: 6}), Counter({64: 6})))

    rows = [row("rollout, ODE", 1000.0, 1000.0), row("updates", 900.0, 1000.0)]
    rows.append(bench.Row("wide", 0.95, [(9.0, 10.0)] * 8 + [(10.0, 10.0)] * 8, (Counter({2: 1}), Counter({1: 2}))))
    monkeypatch.setattr(bench, "measure", lambda *_: (rows, "a setting"))
    file = tmp_path / "performance.md"
    file.write_text(f"before\n{MARKS[0].format('peers')}\nold\n{MARKS[1]}\nafter\n")
    peers(page=file)
    text = file.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{MARKS[1]}\nafter\n")
    assert "old" not in text
    assert "| rollout, ODE | 6 x 64 rows | 1.000 | 1.000 | 1.000 (1.000 to 1.000) | 0.95: met |" in text
    assert "0.900 (0.900 to 0.900) | 0.95: missed |" in text
    assert "| wide | 1 x 2 rows; 2 x 1 rows |" in text
    assert "0.95: not settled by this run |" in text
    assert "Medians of 5 pairs in turn" in text
