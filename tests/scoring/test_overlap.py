"""Scoring beside sampling: the same scores, tries and masks, and really at the same time."""

import math
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from flowrl.commands._scored import scored
from flowrl.config.schema import EvalConfig
from flowrl.core.errors import Abandoned, ConfigError
from flowrl.core.types import SampleId
from flowrl.data.prompts import Prompt
from flowrl.diffusion.plan import solver_plan
from flowrl.evaluation.evaluator import Evaluator, Setting
from flowrl.media import media
from flowrl.media.eight_bits import EightBitImages
from flowrl.reward import Card, Reward, RewardError
from flowrl.rollout.noise import Noise
from flowrl.scoring import overlap
from flowrl.scoring.entries import check_plans, reward_plan
from flowrl.scoring.overlap import Ahead, Beside
from flowrl.scoring.scorer import Scorer, Scores
from flowrl.scoring.surroundings import Batch
from flowrl.scoring.weighted import WeightedReward
from flowrl.training.metrics import Timer
from flowrl.training.sampling import Drawing, Share
from flowrl.training.signals import Stop
from tests.toys import SHAPE, ToyAdapter, sampling_of

B, GROUP = 12, 4
PROMPTS = [Prompt(f"prompt {k}", {"k": k}) for k in range(B // GROUP)]
WAIT_S = 60.0


def brightness(images, prompts, metadata):
    # Picture by picture: a mean over a batch may differ in its last bit with the size of the batch.
    return torch.stack([image.mean() + 10 * record["k"] for image, record in zip(images, metadata, strict=True)])


def of_groups(images, prompts, metadata):
    assert len(prompts) == B, "a part of the groups"
    return {"spread": images.mean(dim=(1, 2, 3)) - images.mean()}


def entry(score, name="mine", **card) -> WeightedReward:
    return WeightedReward(name, Reward(score, Card(**{"outputs": (name,), **card})))


def draw(scorer: Scorer, stop=lambda: False, adapter=None, iteration: int = 1, **options):
    """Three batches of three forwards each; `stop` is asked before each."""
    sampling = sampling_of(adapter or ToyAdapter(), PROMPTS, **options)
    wanted = Share(
        when=f"iteration {iteration}",
        prompts=PROMPTS,
        ids=[SampleId(k // GROUP, k % GROUP) for k in range(B)],
        plan=solver_plan(sampling.schedule),
        noise=Noise(0, "rollout", iteration, SHAPE),
        batch_size=4,
        trained=iteration > 1,
    )
    return Drawing(sampling, scorer, wanted, Timer(), Stop(in_step=stop))()


def noise_in_8_bits(count: int, seed: int = 0) -> EightBitImages:
    levels = torch.randint(256, (count, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return EightBitImages(levels, torch.ones(count, dtype=torch.bool))


def same(first, second) -> bool:
    raw = first.scores.raw.keys() == second.scores.raw.keys() and all(
        torch.equal(value.nan_to_num(-1e9), second.scores.raw[name].nan_to_num(-1e9))
        for name, value in first.scores.raw.items()
    )
    same_images = torch.equal(first.images.levels, second.images.levels)
    return raw and same_images and torch.equal(first.scores.weights, second.scores.weights)


def test_scores_pictures_and_their_order_are_those_of_scoring_afterwards():
    def both(overlap: bool):
        entries = [
            entry(of_groups, "spread", needs_groups=True, overlap=overlap),
            entry(brightness, overlap=overlap),
            entry(lambda images, prompts, metadata: 2 * brightness(images, prompts, metadata), "late"),
        ]
        return draw(Scorer(entries))

    beside, afterwards = both(True), both(False)
    assert same(beside, afterwards)
    assert list(beside.scores.raw) == ["spread", "mine", "late"]
    assert beside.scores.raw["mine"].unique().numel() == B


def test_a_batch_is_scored_while_the_next_one_is_sampled():
    """The second batch is not sampled before the first is being scored: one after the other would wait for ever."""
    scoring, sampled = threading.Event(), []

    def tells(images, prompts, metadata):
        scoring.set()
        return brightness(images, prompts, metadata)

    def stop() -> bool:
        sampled.append(len(sampled) >= 3 and scoring.wait(WAIT_S))
        return False

    draw(Scorer([entry(tells, overlap=True)]), stop)
    assert sampled == [False] * 3 + [True] * 6


def test_without_such_a_reward_everything_is_scored_at_the_end_in_one_piece():
    sizes = []

    def counts(images, prompts, metadata):
        sizes.append(len(images))
        return brightness(images, prompts, metadata)

    draw(Scorer([entry(counts)]))
    assert sizes == [B]
    draw(Scorer([entry(counts, overlap=True)]))
    assert sizes == [B, 4, 4, 4]


def test_tries_and_masks_are_those_of_the_scorer():
    def odd(images, prompts, metadata):
        if any(record["k"] == 1 for record in metadata):
            raise ConnectionError("server is away")
        return brightness(images, prompts, metadata)

    told = []
    found = draw(Scorer([entry(odd, overlap=True)], on_error=told.append))
    assert found.scores.raw["mine"].isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert found.scores.failures == 4
    assert any("ConnectionError: server is away (test_overlap.py:" in t and "), try 3 of 3" in t for t in told)


def test_too_many_failures_and_a_broken_contract_end_the_rollout():
    def raises(images, prompts, metadata):
        raise ConnectionError("server is away")

    with pytest.raises(RewardError, match=r"12 of 12 samples could not be scored.*server is away"):
        draw(Scorer([entry(raises, overlap=True)]))
    with pytest.raises(RewardError, match="returned shape"):
        draw(Scorer([entry(lambda images, prompts, metadata: torch.zeros(1), overlap=True)]))


def test_a_signal_leaves_the_rollout_without_waiting_for_a_slow_reward():
    release, calls = threading.Event(), []

    def slow(images, prompts, metadata):
        calls.append(len(images))
        assert release.wait(WAIT_S)
        return brightness(images, prompts, metadata)

    asked = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) == 5

    with pytest.raises(Abandoned):
        draw(Scorer([entry(slow, overlap=True)]), stop)
    release.set()
    assert len(calls) <= 1, "what waited is not scored"


def test_rewards_that_overlap_do_not_wait_for_each_other():
    both = threading.Barrier(2)

    def meets(images, prompts, metadata):
        both.wait(WAIT_S)
        return brightness(images, prompts, metadata)

    entries = [entry(meets, "first", overlap=True), entry(meets, "second", overlap=True)]
    assert not draw(Scorer(entries)).scores.total.isnan().any()


def test_the_pieces_do_not_depend_on_how_fast_a_reward_is():
    scorer = Scorer([entry(brightness, overlap=True)])
    images = noise_in_8_bits(6)
    ahead = Ahead(scorer, [""] * 6, [{"k": k} for k in range(6)])
    for start, stop in ((0, 1), (1, 5), (5, 6)):
        ahead.add(images[start:stop])
    found = ahead.scores(images)
    ahead.close()
    assert torch.equal(found.raw["mine"], scorer.score(images, [""] * 6, [{"k": k} for k in range(6)]).raw["mine"])
    assert math.isfinite(float(found.total.sum()))


# ---- next to a GPU


class FakeStream:
    """Notes what is asked of a stream, and by which thread."""

    told: ClassVar[list[tuple[str, bool]]] = []

    def __init__(self, device) -> None:
        assert device == GPU
        self.note("made")

    def note(self, what: str) -> None:
        self.told.append((what, threading.current_thread() is threading.main_thread()))

    def mark(self) -> str:
        self.note("mark")
        return "decoded"

    @contextmanager
    def after(self, mark: str):
        self.note(f"after {mark}")
        yield
        self.note("idle")


GPU = torch.device("cuda")


def test_next_to_a_gpu_a_reward_on_it_has_a_stream_that_waits_for_the_decoded_images(monkeypatch):
    """Its scores are those without; rewards of a server have no stream, those that say nothing score at the end."""
    monkeypatch.setattr(overlap, "SideStream", FakeStream)
    monkeypatch.setattr(FakeStream, "told", [])
    entries = [
        entry(brightness, overlap_on_gpu=True),
        entry(brightness, "server", overlap=True),
        entry(brightness, "late"),
        entry(of_groups, "spread", needs_groups=True, overlap_on_gpu=True),
    ]
    images, told = noise_in_8_bits(B), [{"k": k // GROUP} for k in range(B)]
    plain = Scorer(entries).score(images, [""] * B, told)

    def scored(device) -> tuple[list[str], Scores]:
        ahead = Ahead(Scorer(entries), [""] * B, told, device)
        for start in range(0, B, GROUP):
            ahead.add(images[start : start + GROUP])
        names, found = [e.name for e, _ in ahead.lanes.pools], ahead.scores(images)
        ahead.close()
        return names, found

    for device, lanes in ((GPU, ["mine", "server"]), (torch.device("cpu"), ["server"])):
        names, found = scored(device)
        assert names == lanes
        assert all(torch.equal(found.raw[name], plain.raw[name]) for name in plain.raw)
    by_main = [what for what, main in FakeStream.told if main]
    by_thread = [what for what, main in FakeStream.told if not main]
    assert by_main == ["made", "mark", "mark", "mark"], "a batch is marked before its thread may wait for it"
    assert by_thread == ["after decoded", "idle"] * 3


def test_the_next_batch_is_decoded_once_no_reward_is_at_work_on_the_gpu(monkeypatch):
    """The decoder sets cuDNN's switches for the whole process. A server is not waited for."""
    monkeypatch.setattr(overlap, "SideStream", FakeStream)
    monkeypatch.setattr(FakeStream, "told", [])
    began, release, waits = threading.Event(), threading.Event(), Waits()

    def on_gpu(images, prompts, metadata):
        began.set()
        assert release.wait(WAIT_S)
        return means(images, prompts, metadata)

    scorer = Scorer([entry(on_gpu, overlap_on_gpu=True), entry(waits, "server", overlap=True)])
    ahead = Ahead(scorer, [""] * 2, [{}] * 2, GPU)
    ahead.add(noise_in_8_bits(2))
    assert began.wait(WAIT_S)
    scorer.stop = lambda: True
    with pytest.raises(Abandoned):
        ahead.quiet()
    scorer.stop = lambda: False
    release.set()
    ahead.quiet()
    assert FakeStream.told[-1][0] == "idle"
    assert not waits.event.is_set()
    waits.event.set()
    ahead.close()


def test_an_entry_without_overlap_scores_at_the_end(tmp_path):
    """Two entries of one reward cannot differ in it."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from flowrl.reward import Card, Reward\nfrom dataclasses import dataclass\n"
        "CARD = Card(outputs=('mine',), overlap=True, overlap_on_gpu=True)\n"
        "@dataclass(frozen=True)\nclass Config:\n    pass\n"
        "def build(config):\n    return Reward(lambda images, prompts, metadata: images.mean((1, 2, 3)), CARD)\n"
    )
    plans = [reward_plan({"path": str(file), "overlap": value}, "rewards.0") for value in (True, False)]
    assert [(p.build().reward.card.overlap, p.build().reward.card.overlap_on_gpu) for p in plans] == [
        (True, True),
        (False, False),
    ]
    with pytest.raises(ConfigError, match=r"rewards\.1\.overlap=False.*there it is True"):
        check_plans([("rewards.0", plans[0]), ("rewards.1", plans[1])])


# ---- batches that are complete in themselves


def test_beside_gives_each_batch_its_own_scores_in_order_and_holds_two_at_most():
    """Also of rewards that need whole groups: a batch holds whole ones."""
    held: list[int] = []

    def run(overlap: bool):
        entries = [entry(brightness, overlap=overlap), entry(brightness, "late")]
        entries.append(entry(spread, "s", needs_groups=True, overlap=overlap))
        found = []
        with Beside(Scorer(entries)) as beside:
            for k in range(4):
                images = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(k))
                found += beside.add(k, Batch(images, [""] * 3, [{"k": k}] * 3))
                held.append(k + 1 - len(found))
            return found + beside.rest()

    def spread(images, prompts, metadata):
        return images.mean(dim=(1, 2, 3)) - images.mean()

    beside, plain = run(True), run(False)
    assert [key for key, _ in beside] == [key for key, _ in plain] == [0, 1, 2, 3]
    assert held == [1, 1, 1, 1, 0, 0, 0, 0]
    for (_, one), (_, other) in zip(beside, plain, strict=True):
        assert list(one.raw) == list(other.raw) == ["mine", "late", "s"]
        assert all(torch.equal(one.raw[name], other.raw[name]) for name in one.raw)
        assert torch.equal(one.values, other.values)


def test_beside_stops_where_a_batch_by_itself_has_too_many_failures():
    def fails(images, prompts, metadata):
        if metadata[0]["k"] == 1:
            raise ConnectionError("server is away")
        return brightness(images, prompts, metadata)

    with Beside(Scorer([entry(fails, overlap=True)])) as beside:
        assert beside.add(0, Batch(torch.rand(2, 3, 4, 4), [""] * 2, [{"k": 0}] * 2)) == []
        assert [key for key, _ in beside.add(1, Batch(torch.rand(2, 3, 4, 4), [""] * 2, [{"k": 1}] * 2))] == [0]
        with pytest.raises(RewardError, match=r"2 of 2 samples.*server is away"):
            beside.rest()


def means(images, prompts, metadata):
    return torch.stack([image.mean() for image in images])


class Waits:
    """Scores its first batch only once `event` is set: what must happen first is for the test to say."""

    def __init__(self) -> None:
        self.event, self.came = threading.Event(), []

    def __call__(self, images, prompts, metadata):
        if not self.came:
            self.came.append(self.event.wait(WAIT_S))
        return means(images, prompts, metadata)


def evaluator(folder, adapter, scorer: Scorer) -> Evaluator:
    """Of six prompts, two a batch."""
    prompts = tuple(Prompt(f"prompt {k}", {}) for k in range(6))
    return Evaluator(
        sampling=sampling_of(adapter, prompts),
        scorer=scorer,
        folder=folder,
        prompts=prompts,
        options=EvalConfig(batch_size=2, save_images=0),
        seed=3,
    )


def test_an_evaluation_samples_the_next_prompts_while_a_reward_scores(tmp_path):
    """The first batch has no scores before the second is in the network: one after the other would wait for ever."""

    def run(overlap: bool, reward):
        adapter, steps = ToyAdapter(), 4
        forwards: list[int] = []

        def seen(*_: object) -> None:
            forwards.append(len(forwards))
            if len(forwards) > steps and isinstance(reward, Waits):
                reward.event.set()

        adapter.network.register_forward_pre_hook(seen)
        evaluate = evaluator(tmp_path, adapter, Scorer([entry(reward, overlap=overlap)]))
        return evaluate(Setting("base", 0, 1.0, steps, save=False)).scores["mine"]

    waits = Waits()
    beside = run(True, waits)
    assert waits.came == [True]
    assert (beside == run(False, means)).all()


def test_an_evaluation_that_is_stopped_waits_for_no_reward(tmp_path):
    waits, done = Waits(), []
    evaluate = evaluator(tmp_path, ToyAdapter(), Scorer([entry(waits, overlap=True)]))
    with pytest.raises(Abandoned):
        evaluate(Setting("base", 0, 1.0, 2), progress=done.append, stop=Stop(in_step=lambda: len(done) == 1))
    assert not waits.event.is_set()
    assert waits.came == []
    waits.event.set()


def test_flowrl_score_reads_the_next_files_while_a_reward_scores(tmp_path, monkeypatch):
    waits, read = Waits(), media.read_levels

    def reads(file):
        if file.name == "2.png":
            waits.event.set()
        return read(file)

    for number in range(4):
        media.write(torch.full((3, 8, 8), number / 5), tmp_path / f"{number}")
    samples = [(file, "", {}) for file in sorted(tmp_path.iterdir())]
    plain = list(scored(Scorer([entry(means)]), [samples[:2], samples[2:]]))
    monkeypatch.setattr(media, "read_levels", reads)
    beside = list(scored(Scorer([entry(waits, overlap=True)]), [samples[:2], samples[2:]]))
    assert waits.came == [True]
    assert beside == plain
    assert [Path(str(file)).name for (file, _, _), _ in beside] == ["0.png", "1.png", "2.png", "3.png"]
