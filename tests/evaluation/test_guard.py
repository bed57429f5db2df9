"""The guard on simulated evaluations: no alarm on noise, one on a loss, in the metric's direction; its memory."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.config.schema import GuardConfig
from flowrl.data.prompts import Prompt
from flowrl.evaluation.guard import KL, NORM_RATIO, Guard, Look, State, widened
from flowrl.evaluation.held_out import guards_half
from flowrl.evaluation.signs import WORDS, Signs, edge_density, repeated_tiles, signs_of
from flowrl.media import media
from tests import toys

PROMPTS = 60


def evaluated(iteration: int, table: np.ndarray, signs: Signs | None = None) -> Look:
    texts = tuple(f"prompt {p}" for p in range(len(table)))
    return Look(toys.evaluation("x", iteration, 1.0, 4, texts, table.shape[1], {"gold": table}), signs)


def scores(seed: int, shift: float = 0.0, spread: float = 0.3) -> np.ndarray:
    """[PROMPTS, 2]: the base's scores, moved, with the noise of an evaluation."""
    base = np.random.default_rng(0).normal(size=(PROMPTS, 2))
    return base + shift + spread * np.random.default_rng(seed).normal(size=base.shape)


BASE = evaluated(0, scores(0, spread=0.0))


def guard(**options: object) -> Guard:
    higher = bool(options.pop("higher_is_better", True))
    return Guard(GuardConfig(**options), "gold", higher_is_better=higher)  # pyright: ignore[reportArgumentType]


def names(verdict: object) -> list[str]:
    return [alarm.name for alarm in verdict.alarms]  # pyright: ignore[reportAttributeAccessIssue]


def test_pure_noise_is_an_alarm_at_the_nominal_rate_and_no_more():
    runs = 150
    alarms = sum(
        bool(guard(patience=1).look(BASE, evaluated(1, scores(seed)), {}).alarms) for seed in range(1, runs + 1)
    )
    # One side of a 95 % interval: 2.5 %; the bound is the binomial's at 1e-4.
    assert alarms <= 13


@pytest.mark.slow
def test_noise_after_a_rise_does_not_look_like_a_loss_against_the_best():
    stopped = 0
    for run in range(25):
        judge = guard()
        looks = [judge.look(BASE, evaluated(i, scores(1000 * run + i, 1.0)), {}) for i in range(1, 7)]
        stopped += any(look.alarms for look in looks)
    assert stopped <= 3


def test_a_loss_against_the_base_is_said_with_its_numbers():
    judge = guard(patience=1)
    assert not judge.look(BASE, evaluated(10, scores(1, 0.5)), {}).alarms
    verdict = judge.look(BASE, evaluated(20, scores(2, -0.5)), {})
    assert names(verdict)[0] == "below base"
    alarm = verdict.alarms[0]
    assert alarm.numbers["high"] < 0
    assert alarm.numbers["n"] == PROMPTS
    assert "iteration 20" in alarm.sentence
    assert "base" in alarm.sentence
    assert "60 prompts" in alarm.sentence
    assert verdict.best == 10
    assert judge.state.beat


def test_where_lower_is_better_a_rise_is_the_loss():
    fell = guard(higher_is_better=False, patience=1).look(BASE, evaluated(1, scores(1, -0.5)), {})
    rose = guard(higher_is_better=False, patience=1).look(BASE, evaluated(1, scores(1, 0.5)), {})
    assert not fell.alarms
    assert names(rose) == ["below base"]
    judge = guard(higher_is_better=False)
    judge.look(BASE, evaluated(1, scores(1, -0.5)), {})
    judge.look(BASE, evaluated(2, scores(2, -1.0)), {})
    assert judge.state.best == 2
    assert judge.state.beat


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_loss_against_the_best_one_needs_patience(patience: int):
    judge = guard(patience=patience)
    judge.look(BASE, evaluated(1, scores(1, 2.0)), {})
    found = [bool(judge.look(BASE, evaluated(i, scores(i, 1.0)), {}).alarms) for i in range(2, 6)]
    assert found == [i >= patience for i in range(1, 5)]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_dip_below_the_base_passes_and_a_lasting_loss_does_not(patience: int):
    judge = guard(patience=patience)
    # Two dips of one evaluation, then a loss that stays.
    shifts = [-0.5, 0.0, -0.5, 0.0, -0.5, -0.5, -0.5, -0.5]
    found = [names(judge.look(BASE, evaluated(i, scores(i, s)), {})) for i, s in enumerate(shifts, 1)]
    lost = [0, 2, *range(4, 8)] if patience == 1 else range(3 + patience, 8)
    assert [i for i, said in enumerate(found) if "below base" in said] == list(lost)
    if patience > 1:
        assert f"in {patience} evaluations in a row" in judge.state.alarms[0]["sentence"]


def test_patience_begins_again_after_an_evaluation_that_does_not_lose():
    judge = guard()
    shifts = [2.0, 1.0, 2.0, 1.0, 1.0]
    found = [bool(judge.look(BASE, evaluated(i, scores(i, s)), {}).alarms) for i, s in enumerate(shifts, 1)]
    assert found == [False, False, False, False, True]


def test_its_memory_goes_through_json_and_gives_the_same_verdicts():
    shifts = [0.1, 2.0, 1.0, 1.0, -1.0]
    whole, half = guard(), guard()
    said = [whole.look(BASE, evaluated(i, scores(i, s)), {}) for i, s in enumerate(shifts, 1)]
    again = []
    for i, s in enumerate(shifts, 1):
        table = scores(i, s)
        table[0, 0] = np.nan
        half = Guard(GuardConfig(), "gold", state=State(**json.loads(json.dumps(asdict(half.state)))))
        again.append(half.look(BASE, evaluated(i, table), {}))
    assert [names(v) for v in said] == [names(v) for v in again]
    assert whole.state.best == half.state.best == 2
    with pytest.raises(ValueError, match="judged already"):
        half.look(BASE, evaluated(5, scores(5)), {})


def test_the_best_one_is_compared_with_a_wider_interval_the_more_it_was_picked_from():
    change = {"mean": -1.0, "low": -2.0, "high": 0.0, "n": 9.0}
    highs = [widened(change, among)["high"] for among in (1, 2, 10)]
    assert highs[0] == 0.0 < highs[1] < highs[2]
    # Bonferroni of two: the 98.75 % quantile over the 97.5 % one.
    assert highs[1] == pytest.approx(2.2414027 / 1.9599640 - 1.0, rel=1e-6)


def test_a_sure_rise_of_the_copy_index_is_said():
    def copying(iteration: int, copies: int) -> Look:
        seen = evaluated(iteration, scores(iteration, 0.5))
        distance = np.where(np.arange(PROMPTS) < copies, 1.0, 5.0)[:, None].repeat(2, axis=1)
        return Look(replace(seen.scores, source_distance=distance))

    base, judge = copying(0, 6), guard()
    assert names(judge.look(base, copying(1, 11), {})) == [], "8 points, which may be chance"
    verdict = judge.look(base, copying(2, 40), {})
    assert names(verdict) == ["copying"]
    assert "leave the place of their edit as it was has moved from the base's by +0.5667" in verdict.alarms[0].sentence
    assert names(guard(copying=None).look(base, copying(3, 40), {})) == []
    assert names(guard(copying=0).look(base, evaluated(4, scores(4, 0.5)), {})) == []
    with pytest.raises(ValueError, match=r"copying=1\.0 must be below 1: it is a share of the images"):
        GuardConfig(copying=1.0)


def test_limits_of_the_row():
    judge = guard(kl_budget=0.1, norm_ratio=1.2)
    assert not judge.look(BASE, evaluated(1, scores(1, 0.5)), {KL: 0.1, NORM_RATIO: 1.1}).alarms
    assert names(judge.look(BASE, evaluated(2, scores(2, 0.5)), {KL: 0.2, NORM_RATIO: None})) == ["kl budget"]
    assert names(judge.look(BASE, evaluated(3, scores(3, 0.5)), {NORM_RATIO: 1.3})) == ["norm ratio"]


def signs(seed: int, **moved: float) -> Signs:
    rng = np.random.default_rng(seed)
    values = {name: 0.3 + 0.05 * rng.normal(size=2 * PROMPTS) + moved.get(name, 0.0) for name in WORDS}
    for name in ("degeneracy_black", "degeneracy_flat"):
        values[name] = (rng.random(2 * PROMPTS) < moved.get(name, 0.0)).astype(float)
    return Signs(values, (0.1 + 0.01 * rng.normal(size=PROMPTS)) * moved.get("image_std", 1.0))


@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        ({}, []),
        ({"degeneracy_black": 0.3}, ["degeneracy"]),
        ({"degeneracy_flat": 0.3}, ["degeneracy"]),
        ({"degeneracy_saturation": 0.4}, ["degeneracy"]),
        ({"edge_density": -0.25}, ["degeneracy"]),
        ({"repeated_tiles": 0.4}, ["degeneracy"]),
        ({"repeated_tiles": -0.25}, []),
        ({"image_std": 0.85}, []),
        ({"image_std": 0.5}, ["diversity"]),
    ],
)
def test_signs_of_the_images(moved: dict[str, float], expected: list[str]):
    base = evaluated(0, scores(0, spread=0.0), signs(1))
    now = evaluated(1, scores(1, 0.5), signs(2, **moved))
    assert names(guard().look(base, now, {})) == expected
    assert not guard(diversity=None, degeneracy=None).look(base, now, {}).alarms


def test_a_guard_of_videos_speaks_of_videos():
    table = scores(0)
    judge = Guard(GuardConfig(), "gold", noun="video")
    alarms = judge.look(evaluated(0, table, signs(0)), evaluated(1, table, signs(0, image_std=0.1)), {}).alarms
    assert alarms
    assert all("videos" in alarm.sentence and "image" not in alarm.sentence for alarm in alarms)


def test_signs_are_those_of_the_kept_images(tmp_path: Path):
    noise = torch.rand(3, 24, 24, generator=torch.Generator().manual_seed(0))
    tiled = noise[:, :12, :12].repeat(1, 2, 2)
    media.write(noise, tmp_path / "00003-0")
    media.write(tiled, tmp_path / "00003-1")
    media.write(torch.zeros(3, 24, 24), tmp_path / "00005-0")
    result = signs_of(tmp_path, [3, 4, 5], 2)
    assert result is not None
    assert signs_of(tmp_path, [1, 4], 2) is None
    assert result.values["degeneracy_black"].tolist() == [0, 0, 1]
    assert result.values["repeated_tiles"][1] > 0.99
    assert result.values["repeated_tiles"][0] < 0.5
    assert result.image_std[0] > 0.1
    assert np.isnan(result.image_std[1:]).all()


def test_tiles_and_edges_of_plain_images():
    assert np.isnan(repeated_tiles(torch.full((8, 8), 0.5)))
    assert edge_density(torch.full((8, 8), 0.5)) == 0
    board = torch.arange(8)[:, None].add(torch.arange(8)[None]).remainder(2).float()
    assert repeated_tiles(board) == pytest.approx(1.0)
    assert edge_density(board) == 1.0


def test_the_half_is_of_identities_and_does_not_depend_on_their_order():
    prompts = [Prompt(f"prompt {i % 20}") for i in range(30)]
    half = guards_half(prompts, 7)
    own = {p.text for p, kept in zip(prompts, half, strict=True) if kept}
    assert len(own) == 10
    assert not own & {p.text for p, kept in zip(prompts, half, strict=True) if not kept}
    turned = guards_half(prompts[::-1], 7)
    assert (turned[::-1] == half).all()
    assert (guards_half(prompts, 8) != half).any()
