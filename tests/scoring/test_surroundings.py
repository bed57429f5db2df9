"""A reward that works in place, changes the process or leaves it: nobody else sees it, and it is named."""

import logging
import os
import random
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.contracts.rewards import RewardTrial, trial_batch
from flowrl.core.errors import ConfigError, RewardError, RewardFailure
from flowrl.data.prompts import Prompt
from flowrl.reward import Card, Reward
from flowrl.scoring.cache import Memory, ScoreCache
from flowrl.scoring.entries import reward_plan
from flowrl.scoring.one_call import score_once
from flowrl.scoring.overlap import Ahead
from flowrl.scoring.probing import probe
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import OF_A_THREAD, OF_THE_PROCESS, Batch, Conduct, Numbers, Settings
from flowrl.scoring.weighted import WeightedReward

B = 4
IMAGES = torch.rand(B, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = [Prompt(f"prompt {k}", {"k": k, "parts": [k]}) for k in range(B)]


@pytest.fixture(autouse=True)
def _as_before():
    """A test that fails leaves the others the process that they expect."""
    settings, numbers = Settings((*OF_A_THREAD, *OF_THE_PROCESS)), Numbers()
    yield
    settings.put_back()
    numbers.move_on()


@pytest.fixture
def told(caplog):
    """What the log says."""
    caplog.set_level(logging.DEBUG, "flowrl")
    return caplog


def means(images, prompts=(), metadata=()):
    return torch.stack([image.mean() for image in images])


def entry(score, name="mine", **options) -> WeightedReward:
    card = {"overlap": options.pop("overlap", False), "differentiable": options.pop("differentiable", False)}
    return WeightedReward(name, Reward(score, Card(outputs=(name,), modality="any", **card)), **options)


def batch() -> tuple:
    numbers = [p.metadata["k"] for p in PROMPTS]
    return IMAGES.clone(), [p.text for p in PROMPTS], [{"k": k, "parts": [k]} for k in numbers]


def broken_laws(score) -> dict[str, str]:
    """What the check measured of each law that does not hold."""
    reward = Reward(score, Card(outputs=("mine",), modality="any"))
    return {f.law: f.measured for f in RewardTrial("mine", reward, trial_batch(reward.card)).run() if not f.good}


def tried(*entries: WeightedReward) -> None:
    adapter: Any = SimpleNamespace(height=8, width=8, num_frames=1)
    probe(Scorer(entries), PROMPTS[:2], adapter)


# ---- what is handed out


def subtracts(images, prompts, metadata):
    images.sub_(images.mean(dim=(1, 2, 3), keepdim=True) / 2)
    return means(images)


def zeroes(images, prompts, metadata):
    for image in images:
        image.zero_()
    return means(images)


def through_numpy(images, prompts, metadata):
    np.asarray(images)[:] = 0
    return means(images)


def behind_autograd(images, prompts, metadata):
    images.data.fill_(1)
    return means(images)


def marks_records(images, prompts, metadata):
    for record in metadata:
        record["parts"].append("seen") if "parts" in record else record.update(seen=True)
    return means(images)


def takes_prompts(images, prompts, metadata):
    found = means(images)
    prompts.clear()
    return found


IN_PLACE = {
    subtracts: "images",
    zeroes: "images",
    through_numpy: "images",
    behind_autograd: "images",
    marks_records: "metadata",
    takes_prompts: "prompts",
}


@pytest.mark.parametrize("score", IN_PLACE, ids=lambda f: f.__name__)
def test_work_in_place_reaches_no_other_reward_no_retry_no_cache_and_not_what_is_saved(score):
    calls = []

    def stumbles(images, prompts, metadata):
        score(images, prompts, metadata)
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("once")
        return [0.0] * B

    seen: list = []

    def looks(images, prompts, metadata):
        seen.append((images.clone(), list(prompts), [dict(record) for record in metadata]))
        return means(images)

    images, prompts, metadata = batch()
    cache = ScoreCache(Memory(), "x")
    found = Scorer([entry(stumbles, "a", cache=cache), entry(looks, "b")]).score(images, prompts, metadata)
    assert torch.equal(images, IMAGES)
    assert torch.equal(seen[0][0], IMAGES)
    assert (prompts, metadata) == batch()[1:] == seen[0][1:]
    assert found.failures == 0, "the second try had what the first one had"
    assert cache.get(cache.key(*[part[0] for part in batch()]), ("a",)) == {"a": 0.0}


@pytest.mark.parametrize("score", IN_PLACE, ids=lambda f: f.__name__)
def test_the_probe_and_the_check_name_what_works_in_place(score, told):
    tried(entry(score))
    assert f"reward 'mine' works in place: it changes the {IN_PLACE[score]} that it is given" in told.text
    assert broken_laws(score)["leaves inputs alone"] == f"it changed {IN_PLACE[score]}"


def test_the_check_sees_what_happens_to_a_nan_picture_alone():
    def repairs(images, prompts, metadata):
        found = means(images)
        for image in images:
            image.nan_to_num_()
        return found

    assert "leaves inputs alone" in broken_laws(repairs)


def test_a_gradient_goes_through_the_copy_and_work_in_place_on_it_is_legal():
    images, weights = IMAGES.clone().requires_grad_(), torch.randn(3, 8, 8)
    found = []

    def score(given, prompts, metadata):
        given.mul_(weights)
        found.append(means(given))
        return found[0]

    score_once(entry(score, differentiable=True), Batch(images, *batch()[1:]))
    (gradient,) = torch.autograd.grad(found[0].sum(), images)
    assert torch.allclose(gradient, (weights / weights.numel()).expand(B, -1, -1, -1))


# ---- settings of the process

LEFT = {
    "the grad mode": lambda: torch.set_grad_enabled(False),
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the working directory": lambda: os.chdir("/"),
    "the number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "the default device": lambda: torch.set_default_device("meta"),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "the precision of matmul": lambda: torch.set_float32_matmul_precision("medium"),
    "numpy's errors": lambda: np.seterr(all="raise"),
    "cudnn's settings": lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    "the handlers of signals": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "the umask": lambda: os.umask(0o777 ^ os.umask(0)),
    "logging": lambda: logging.disable(logging.CRITICAL),
}


def leaving(change):
    def score(images, prompts, metadata):
        found = [float(value) for value in means(images)]
        change()
        return found

    return score


@pytest.mark.parametrize("name", LEFT)
def test_a_setting_that_is_left_changed_is_put_back_ends_the_run_at_the_probe_and_is_told_once_later(name):
    before, told = Settings((*OF_A_THREAD, *OF_THE_PROCESS)), []
    with pytest.raises(RewardError, match=f"reward 'mine' changes {name} and leaves it so.*nothing was trained"):
        tried(entry(leaving(LEFT[name])))
    assert before.put_back() == []
    scorer = Scorer([entry(leaving(LEFT[name]))], batch_size=2, on_error=told.append)
    for _ in range(2):
        assert scorer.score(*batch()).failures == 0
    assert before.put_back() == []
    assert len(told) == 1
    assert f"reward 'mine' changed {name}, which is put back" in told[0]


def test_it_is_put_back_where_the_reward_raises():
    def score(images, prompts, metadata):
        torch.set_grad_enabled(False)
        raise ValueError

    with pytest.raises(RewardFailure):
        Scorer([entry(score)]).score(*batch())
    assert torch.is_grad_enabled()


def test_a_reward_beside_sampling_leaves_the_process_alone_until_nobody_works():
    """Its thread puts back what is the thread's; what is everybody's is put back when the scores are fetched."""
    release, changed, told = threading.Event(), threading.Event(), []

    def score(images, prompts, metadata):
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        changed.set()
        assert release.wait(60)
        return [0.0] * len(prompts)

    images, prompts, metadata = batch()
    ahead = Ahead(Scorer([entry(score, overlap=True)], on_error=told.append), prompts, metadata)
    try:
        ahead.add(images)
        assert changed.wait(60)
        assert torch.is_grad_enabled(), "of this thread"
        drawn = torch.get_rng_state()
        release.set()
        ahead.scores(images)
    finally:
        release.set()
        ahead.close()
    assert torch.equal(drawn, torch.get_rng_state()), "the thread puts no random numbers back under our hands"
    assert torch.get_default_dtype() == torch.float32
    assert any("reward 'mine' changed the default dtype" in text for text in told)


@pytest.mark.parametrize(("where", "words"), [("import", "when it is imported"), ("build", r"its build\(config\)")])
def test_a_file_that_changes_the_process_when_it_is_imported_or_built_is_refused(tmp_path, where, words):
    left = "torch.set_grad_enabled(False)"
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom dataclasses import dataclass\nfrom flowrl.reward import Card, Reward\n"
        f"@dataclass\nclass Config:\n    pass\n{left if where == 'import' else ''}\n"
        f"def build(config):\n    {left}\n    return Reward(None, Card(outputs=('a',)))\n"
    )
    with pytest.raises(ConfigError, match=f"mine.*{words}.*changes the grad mode"):
        reward_plan({"path": str(tmp_path / "mine.py")}, "rewards.0").build()
    assert torch.is_grad_enabled()


# ---- random numbers

SEEDS = {
    "torch's": (lambda: torch.manual_seed(0), lambda: float(torch.rand(()))),
    "Python's": (lambda: random.seed(0), random.random),
    "numpy's": (lambda: np.random.seed(0), lambda: float(np.random.random())),
}


@pytest.mark.parametrize("whose", SEEDS)
def test_a_seed_that_a_reward_sets_reaches_nobody_and_is_told_at_the_probe(whose, told):
    seed, draw = SEEDS[whose]
    drawn = []

    def noisy(images, prompts, metadata):
        drawn.append(draw())
        return [0.0] * len(prompts)

    scorer = Scorer([entry(leaving(seed), "seeds"), entry(noisy, "draws")])
    for _ in range(3):
        scorer.score(*batch())
        drawn.append(draw())
    assert len(set(drawn)) == 6, "other numbers every time, in a reward and outside of it"
    tried(entry(leaving(seed)))
    assert f"reward 'mine' seeds or draws {whose} random numbers" in told.text


def test_a_reward_without_random_numbers_leaves_every_generator_where_it_was():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    conduct = Conduct()
    score_once(entry(means), Batch(*batch()), conduct)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist())
    assert conduct == Conduct()


# ---- sys.exit, and why there is no score


def leaves(images, prompts, metadata):
    sys.exit(0)


def test_sys_exit_is_an_exception_like_any_other_and_never_a_good_end():
    with pytest.raises(RewardFailure, match=r"4 of 4.*'mine' raised SystemExit: 0 \(test_surroundings.py:") as left:
        Scorer([entry(leaves)]).score(*batch())
    assert left.value.exit_code == 1
    with pytest.raises(RewardError, match=r"'mine' fails on a probe.*SystemExit: 0 \(.*nothing was trained") as left:
        tried(entry(leaves))
    assert left.value.exit_code == 2
    assert "SystemExit: 0" in broken_laws(leaves)["scores"]


def test_sys_exit_of_one_sample_masks_it_alone():
    def score(images, prompts, metadata):
        if "prompt 2" in prompts:
            sys.exit()
        return [0.0] * len(prompts)

    assert Scorer([entry(score)]).score(*batch()).raw["mine"].isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("error", ["sys.exit(0)", "raise FileNotFoundError('weights.pt')"])
def test_a_build_that_raises_names_the_reward_and_its_line(tmp_path: Path, error: str):
    start = "import sys\nfrom dataclasses import dataclass\n@dataclass\nclass Config:\n    pass\n"
    (tmp_path / "mine.py").write_text(f"{start}def build(config):\n    {error}\n")
    with pytest.raises(RewardError, match=r"reward 'mine' cannot be built: .*\(mine.py:7\)") as left:
        reward_plan({"path": str(tmp_path / "mine.py")}, "rewards.0").build()
    assert left.value.exit_code == 2


def test_a_broken_contract_is_exit_code_2_before_training_and_1_in_it():
    with pytest.raises(RewardError) as early:
        tried(entry(lambda *given: [0.0]))
    with pytest.raises(RewardError) as late:
        Scorer([entry(lambda *given: [0.0])]).score(*batch())
    assert (early.value.exit_code, late.value.exit_code) == (2, 1)


def test_an_infinite_score_is_called_inf():
    with pytest.raises(RewardFailure, match=r"4 of 4 values of 'mine' are inf"):
        Scorer([entry(lambda *given: [float("inf")] * B)]).score(*batch())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("cached", [False, True])
def test_a_picture_that_is_not_finite_is_shown_to_no_reward_and_blamed_on_none(value, cached):
    sizes, told = [], []

    def score(images, prompts, metadata):
        sizes.append(len(prompts))
        assert all(bool(image.isfinite().all()) for image in images)
        return means(images)

    images, prompts, metadata = batch()
    images[1, 2, 3, 4] = value
    cache = ScoreCache(Memory(), "x") if cached else None
    for given in (images, list(images)):
        scorer = Scorer([entry(score, cache=cache)], on_error=told.append)
        found = scorer.score(given, prompts, metadata).raw["mine"]
        assert found.isnan().tolist() == [False, True, False, False]
        assert torch.equal(found[[0, 2, 3]], means(IMAGES[[0, 2, 3]]))
    assert sizes == ([3] if cached else [3, 3])
    assert scorer.take_counts()["mine_failures"] == 0
    assert told == ["1 of 4 samples hold NaN or inf, so they have no score"] * 2


def test_neither_doctor_nor_the_list_ends_well_by_a_rewards_sys_exit(tmp_path, capsys):
    from flowrl.commands.doctor import _report
    from flowrl.commands.list import command

    assert not _report("reward mine", lambda: leaves((), (), ()))
    assert "FAIL  reward mine: SystemExit: 0 (test_surroundings.py:" in capsys.readouterr().out
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"mine.py cannot be imported: SystemExit: 0 \(mine.py:2\)"):
        command("rewards", str(tmp_path / "mine.py"))
