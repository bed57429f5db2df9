"""Noise by identity, shared work, interruption and the header of a suite's folder."""

import json
from dataclasses import dataclass

import pytest
import torch

from flowrl.apps.suites.running.drawing import Drawing, seed_of
from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.apps.suites.running.runner import PATIENCE, Judgement, Task, fill, limited, rows_of
from flowrl.core.errors import ConfigError, ModelError, RewardFailure
from flowrl.evaluation import suite as base
from flowrl.media import media
from flowrl.training.world import World
from tests import tiny_sd3
from tests.tiny_suites import StandIn

SUITE = base.load_suite("geneval")
ITEMS = SUITE.items(None)


@dataclass(frozen=True)
class Share(World):
    """One of several processes that take their turns here: at the start there was no line."""

    def gather(self, value):
        return [{}]

    def any(self, flag):
        return flag


def noise(samples):
    """Images of their seeds alone, [B, 3, 8, 8]."""
    return torch.stack(
        [torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed_of(0, item.id, k))) for item, k in samples]
    )


def task(items=ITEMS[:5], samples=2, batch_size=3):
    return Task(suite=SUITE, items=items, samples=samples, batch_size=batch_size)


def begun(path, **made_with):
    folder = ResultsFolder(path)
    folder.begin({"model": "tiny", **made_with}, {}, {})
    return folder


def test_noise_depends_on_the_prompts_id_and_the_samples_number_alone():
    """The latents that a pipeline begins with, for batches of 1, 3 and 8, in another order."""
    pipeline = tiny_sd3.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    seen: dict[tuple[str, int], list[torch.Tensor]] = {}
    inner = pipeline.prepare_latents
    call = {"num_inference_steps": 1, "guidance_scale": 1.0, "height": 32, "width": 32}
    draw, images = Drawing(pipeline, call), dict[tuple[str, int], list[torch.Tensor]]()
    samples = [(item, k) for item in ITEMS[:3] for k in range(3)]

    for size, order in ((1, samples), (3, samples[::-1]), (8, samples)):
        for start in range(0, len(order), size):
            batch = order[start : start + size]

            def watched(*args, batch=batch, **kwargs):
                latents = inner(*args, **kwargs)
                for (item, k), one in zip(batch, latents, strict=True):
                    seen.setdefault((item.id, k), []).append(one.clone())
                return latents

            pipeline.prepare_latents = watched
            for (item, k), image in zip(batch, draw(batch), strict=True):
                images.setdefault((item.id, k), []).append(image)
    assert all(torch.equal(first, other) for first, *rest in seen.values() for other in rest)
    # Larger matrices are multiplied in another order: float32 rounding through one step and the decoder.
    assert all(torch.allclose(first, other, atol=1e-4) for first, *rest in images.values() for other in rest)
    different = {one[0].numpy().tobytes() for one in seen.values()}
    assert len(different) == len(samples)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_share_the_samples_each_once(tmp_path, size):
    whole, parts = begun(tmp_path / "whole"), begun(tmp_path / "parts")
    fill(task(), whole, noise, StandIn(SUITE))
    judges = [StandIn(SUITE) for _ in range(size)]
    worlds = [Share(rank, size, torch.device("cpu")) for rank in range(size)]
    for world, judge in [*zip(worlds[1:], judges[1:], strict=True), (worlds[0], judges[0])]:
        fill(task(), parts, noise, judge, world)
    assert sum(judge.seen for judge in judges) == 10
    mine, other = (rows_of(task(), folder) for folder in (parts, whole))
    assert mine == other
    for row in other:
        assert (parts.path / row.file).read_bytes() == (whole.path / row.file).read_bytes()
    assert [(row.id, row.k) for row in mine] == [(item.id, k) for item in ITEMS[:5] for k in range(2)]
    assert len({row.seed for row in mine}) == 10


def test_a_call_that_was_killed_goes_on_without_its_torn_line(tmp_path):
    folder, judge = begun(tmp_path), StandIn(SUITE)
    with pytest.raises(KeyboardInterrupt):
        fill(task(), folder, stopping(noise, after=2), judge)
    lines = folder.path / "samples-0.jsonl"
    assert len(lines.read_text().splitlines()) == 6
    lines.write_text(lines.read_text()[:-20])
    left = folder.path / "images" / f".{ITEMS[4].id}-000-part.png"
    left.write_bytes(b"half")
    again = StandIn(SUITE)
    fill(task(), folder, noise, again)
    assert again.seen == 5  # one of them for the torn line
    rows = rows_of(task(), folder)
    assert len(rows) == 10
    assert all(row.scores["stand_in"] is not None for row in rows)
    text = (folder.path / "samples.jsonl").read_text()
    assert [(json.loads(line)["id"], json.loads(line)["k"]) for line in text.splitlines()] == [
        (item.id, k) for item in ITEMS[:5] for k in range(2)
    ]


def stopping(draw, after):
    calls = []

    def drawn(samples):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return draw(samples)

    return drawn


@pytest.mark.parametrize("anew", [False, True], ids=["first", "rejudged"])
def test_a_judge_that_goes_away_leaves_what_was_judged_and_is_asked_again(tmp_path, anew):
    folder, many = begun(tmp_path), task(ITEMS[:8])
    words = rf"failed on {PATIENCE} images in a row \(the server does not answer\)"
    if anew:
        folder.begin({"model": "tiny"}, {"stand_in": {"version": "1"}}, {})
        fill(many, folder, noise, StandIn(SUITE))
        folder.forget_judge()
        folder.begin({"model": "tiny"}, {"stand_in": {"version": "1"}}, {})
        words = r"give the same command again without --rejudge to go on"
    with pytest.raises(RewardFailure, match=words):
        fill(many, folder, noise, StandIn(SUITE, fails=range(7, 99)))
    assert anew or len(folder.rows()) == 6
    back = StandIn(SUITE)
    fill(many, folder, noise, back)
    assert back.seen == 10
    assert all(row.scores["stand_in"] is not None for row in rows_of(many, folder))


class Halting(StandIn):
    """A judge by questions of which one fails on every image."""

    def __call__(self, images, items):
        return [Judgement({"stand_in": None}, [1.0, None], "one question failed") for _ in items]


def test_a_judge_that_fails_on_one_question_of_every_image_is_not_away(tmp_path):
    folder, many = begun(tmp_path), task(ITEMS[:PATIENCE])
    fill(many, folder, noise, Halting(SUITE))
    assert [row.answers for row in rows_of(many, folder)] == [[1.0, None]] * 2 * PATIENCE


def test_a_few_images_that_fail_are_null_and_tried_again_by_the_next_call(tmp_path):
    folder = begun(tmp_path)
    fill(task(), folder, noise, StandIn(SUITE, fails=(2, 3)))
    rows = rows_of(task(), folder)
    assert [row.scores["stand_in"] is None for row in rows] == [False, True, True] + [False] * 7
    assert rows[1].error == "the server does not answer"
    judge = StandIn(SUITE)
    fill(task(), folder, noise, judge)
    assert judge.seen == 2


def test_another_model_setting_or_list_is_refused_by_name(tmp_path):
    folder = begun(tmp_path, prompts="abc", steps=4)
    folder.begin({"model": "tiny", "prompts": "abc", "steps": 4}, {"a": {"version": "1"}}, {})
    for changed, words in (
        ({"steps": 8}, "steps was 4, now 8"),
        ({"prompts": "xyz"}, "prompts was 'abc', now 'xyz'"),
        ({"model": "other"}, "model was 'tiny', now 'other'"),
    ):
        with pytest.raises(ConfigError, match=rf"{words}.*another folder with --out"):
            folder.begin({"model": "tiny", "prompts": "abc", "steps": 4} | changed, {}, {})
    with pytest.raises(ConfigError, match=r"a.version was '1', now '2'.*--rejudge"):
        folder.begin({"model": "tiny", "prompts": "abc", "steps": 4}, {"a": {"version": "2"}}, {})
    folder.forget_judge()
    folder.begin({"model": "tiny", "prompts": "abc", "steps": 4}, {"a": {"version": "2"}}, {})


def test_more_prompts_or_images_keep_what_is_there(tmp_path):
    folder = begun(tmp_path)
    few = task(limited(ITEMS, 2), samples=1)
    fill(few, folder, noise, StandIn(SUITE))
    judge = StandIn(SUITE)
    fill(task(limited(ITEMS, 3)), folder, noise, judge)
    assert judge.seen == 4
    assert {item.id for item in limited(ITEMS, 40)} > {item.id for item in limited(ITEMS, 20)}
    assert len({item.tags for item in limited(ITEMS, 40)}) == 6


def test_images_are_saved_rounded_with_their_identity(tmp_path):
    folder = begun(tmp_path)
    fill(task(ITEMS[:1], samples=1), folder, noise, None)
    file = folder.image(ITEMS[0], 0)
    given = noise([(ITEMS[0], 0)])[0]
    assert (media.read(file) - given).abs().max() <= 0.5 / 255 + 1e-6
    assert media.read_note(file) == {"prompt": ITEMS[0].text, "id": "00000", "k": 0, "seed": seed_of(0, "00000", 0)}


def test_a_model_without_a_prompt_or_with_nan_is_refused(tmp_path):
    class Unconditional:
        def __call__(self, batch_size=1, generator=None):
            raise AssertionError

    with pytest.raises(ConfigError, match="Unconditional takes no prompt"):
        Drawing(Unconditional(), {}).require_inputs([])

    class Diverged:
        def __init__(self) -> None:
            self.components: dict[str, object] = {}

        def __call__(self, prompt, generator, output_type, return_dict):
            return [torch.full((len(prompt), 3, 8, 8), torch.nan)]

    with pytest.raises(ModelError, match="NaN for the prompt 'a photo of a bench': its weights are finite"):
        fill(task(ITEMS[:1]), begun(tmp_path), Drawing(Diverged(), {}), None)
    assert not [*tmp_path.rglob("*.png")]
