"""Paired tables of a base and a tuned model."""

import math

import numpy as np
import pytest

from flowrl.apps.suites._points import mean_of_parts
from flowrl.apps.suites.geneval import TASKS
from flowrl.apps.suites.running.report import compare, markdown, plain, shares, table_text
from flowrl.evaluation.suite import Row, Table, line, score
from flowrl.evaluation.suite_intervals import Part, stratified


def rows(values, name="s"):
    return [
        Row(f"{prompt:03d}", f"prompt {prompt}", k, scores={name: None if value is None else float(value)})
        for prompt, own in enumerate(values)
        for k, value in enumerate(own)
    ]


def table(groups, name="s"):
    made = [rows(values, name) for values in groups]
    for number, group in enumerate(made):
        for row in group:
            row.prompt = f"{number} {row.prompt}"
    lines = [line(f"task {number}", [group], score(name), output=name) for number, group in enumerate(made)]
    return Table((*lines, line("overall", made, score(name), output=name)), "overall")


def test_the_change_of_a_mean_of_means_is_that_of_its_parts():
    base = table([[(0, 0), (1, 0)], [(1, 1), (0, 0), (0, 1)]])
    tuned = table([[(1, 0), (1, 1)], [(1, 0), (0, 0), (0, 1)]])
    changes = {change.name: change for change in compare(base, tuned)}
    assert changes["task 0"].mean == pytest.approx(0.5)
    assert changes["task 1"].mean == pytest.approx(-1 / 6)
    assert changes["overall"].mean == pytest.approx((0.5 - 1 / 6) / 2)
    assert changes["task 0"].win_rate == pytest.approx(0.75)
    assert changes["task 1"].win_rate == pytest.approx((0.5 * 5 + 0) / 6)
    assert changes["overall"].win_rate == pytest.approx((0.75 + 2.5 / 6) / 2)
    backward = {change.name: change for change in compare(tuned, base)}
    for name, change in changes.items():
        assert backward[name].mean == pytest.approx(-change.mean)
        assert backward[name].win_rate == pytest.approx(1 - change.win_rate)
        assert backward[name].p == pytest.approx(change.p)


def test_a_value_that_one_of_the_models_lacks_is_in_no_difference():
    base, tuned = table([[(0, None), (2, 2)]]), table([[(1, 9), (None, 3)]])
    change = compare(base, tuned)[0]
    assert change.mean == pytest.approx(1.0)


def test_less_may_be_better_and_more_lines_cost_more():
    rng = np.random.default_rng(0)
    before = [tuple(row) for row in rng.normal(size=(60, 2))]
    after = [(a - 0.4, b - 0.4) for a, b in before]
    one = compare(table([before]), table([after]), {"s"})[0]
    assert one.win_rate == 1.0
    assert one.high < 0
    assert one.p < 0.001
    assert one.p_holm == pytest.approx(2 * one.p)  # two lines that are one: the line and the overall
    assert compare(table([before]), table([after]))[0].win_rate == 0.0


def test_a_tie_of_a_line_is_a_share_of_the_std_of_its_values():
    """Of 0 and 10 the std is 5, and a twentieth of it 0.25: 0.2 more is a tie, 0.3 more is not."""
    base, tuned = table([[(0, 10), (0, 10)]]), table([[(0.2, 10.2), (0.3, 10)]])
    change = compare(base, tuned)[0]
    assert change.win_rate == pytest.approx((0.5 + (1 + 0.5) / 2) / 2)
    assert change.mean == pytest.approx(0.7 / 4)


def test_the_shares_of_prompts_add_up_to_the_mean():
    parts = (Part({"a": (1.0, 0.0), "b": (1.0,)}, 0.4), Part({"c": (0.25,), "a": (0.75,)}, 0.6))
    assert sum(shares(parts).values()) == pytest.approx(stratified(parts)[0])
    assert stratified(parts)[0] == pytest.approx(0.4 * 2 / 3 + 0.6 * 0.5)


def test_the_interval_of_a_mean_of_tasks_draws_inside_each():
    """Tasks of very different means: an interval that drew tasks too would be as wide as their spread."""
    groups = [[(float(number), float(number))] * 12 for number in range(len(TASKS))]
    overall = table(groups).lines[-1]
    assert (overall.low, overall.mean, overall.high) == pytest.approx((2.5, 2.5, 2.5))


@pytest.mark.parametrize("count", [20, 80])
def test_the_change_of_parts_that_share_their_prompts_draws_a_prompt_once(count):
    """Nine dimensions of the same values say what two say, not twice as exactly."""
    values = np.random.default_rng(0).normal(size=count)

    def overall(scale, kinds):
        part = Part({f"p{n}": (float(scale * value),) for n, value in enumerate(values)})
        return Table((mean_of_parts("overall", [part] * kinds, count, count),), "overall")

    two, nine = (compare(overall(0.0, kinds), overall(1.0, kinds))[0] for kinds in (2, 9))
    assert (nine.mean, nine.win_rate, nine.p) == pytest.approx((two.mean, two.win_rate, two.p))
    assert nine.high - nine.low == pytest.approx(two.high - two.low)
    assert nine.win_high - nine.win_low == pytest.approx(two.win_high - two.win_low)
    assert nine.high - nine.low == pytest.approx(4 * values.std(ddof=1) / count**0.5, rel=0.1)


def test_a_mean_that_does_not_exist_is_not_tested():
    """A task of which the base has no score leaves no overall difference, and so none that is significant."""
    gains = [(float(number),) for number in range(20)]
    base, tuned = table([[(0.0,)] * 20, [(None,)]]), table([gains, [(1.0,)]])
    changes = {change.name: change for change in compare(base, tuned)}
    assert changes["task 0"].p < 0.001
    assert math.isnan(changes["overall"].mean)
    assert changes["overall"].p == 1.0


def test_a_task_of_one_prompt_leaves_no_interval_however_many_the_others_have():
    overall = table([[(float(number % 7),) for number in range(60)], [(1.0,)]]).lines[-1]
    assert (overall.mean, math.isnan(overall.low), math.isnan(overall.high)) == (pytest.approx(1.95), True, True)


def test_tables_show_what_is_missing():
    made = table([[(0.5, None)], [(None,)]])
    text = table_text(made)
    assert "| task 0      | 0.5000 | -             | 1       | 1/2    |" in text
    assert "| task 1      | -      | -             | 1       | 0/1    |" in text
    assert plain(made)["lines"][1]["n_scored"] == 0
    from flowrl.evaluation.suite import load_suite

    page = markdown(load_suite("geneval"), {"model: x": made}, [], "2 prompts.")
    assert page.startswith("# GenEval\n\n## model: x\n")
    assert "Differs from the official protocol: noise by (prompt, k)" in page
