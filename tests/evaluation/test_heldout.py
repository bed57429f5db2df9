"""Which prompts are held out, and what those of an evaluation are called where none are."""

import random
from pathlib import Path

import pytest
import yaml

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.data.prompts import Prompt, identity
from flowrl.evaluation.held_out import LEAST, RunPrompts, require_same_split, run_prompts, split
from flowrl.run.folder import RunFolder
from tests.e2e.test_bad_input import command

TREE = {
    "name": "test",
    "iterations": 1,
    "model": {"name": "sd3", "path": "tiny-sd3"},
    "rewards": [{"name": "jpeg"}],
    "rollout": {"prompts_per_iteration": 4, "group_size": 6},
}
TEXTS = [f"prompt {k}" for k in range(60)]


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Configuration with data `data`, its prompts in list.txt."""
    monkeypatch.chdir(tmp_path)

    def load(*overrides: str, texts: list[str] = TEXTS, **data: object):
        (tmp_path / "list.txt").write_text("\n".join(texts))
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(TREE | {"data": {"prompts": "list.txt"} | data}))
        return load_config("run.yaml", list(overrides))

    return load


def found(config, own: bool = False) -> RunPrompts:
    return run_prompts(config, own)


# ---- the split


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("share", "count"), [(0.1, 6), (0.5, 30), (0.001, 1), (0.999, 59)])
def test_a_share_of_the_prompts_is_on_one_side_and_the_rest_on_the_other(seed, share, count):
    prompts = [Prompt(text) for text in TEXTS]
    train, held_out = split(prompts, share, seed)
    assert len(held_out) == count
    assert sorted(p.text for p in (*train, *held_out)) == sorted(TEXTS)
    assert [p.text for p in train] == [text for text in TEXTS if text in {p.text for p in train}]  # the file's order


def test_what_is_held_out_depends_on_the_seed_and_the_set_and_not_on_the_order_of_the_list():
    prompts = [Prompt(text) for text in TEXTS]
    shuffled = random.Random(0).sample(prompts, len(prompts))
    assert split(prompts, 0.1, 3)[1] == split(shuffled, 0.1, 3)[1]
    assert len({tuple(p.text for p in split(prompts, 0.1, seed)[1]) for seed in range(5)}) == 5
    assert split(prompts, 0.1, 3)[1] == split(prompts, 0.3, 3)[1][:6]


def test_a_prompt_that_stands_in_the_list_twice_is_on_one_side_and_evaluated_once():
    prompts = [Prompt(text) for text in TEXTS * 3]
    for seed in range(5):
        train, held_out = split(prompts, 0.3, seed)
        assert not {identity(p) for p in train} & {identity(p) for p in held_out}
        assert (len(held_out), len(train)) == (18, 3 * 42)


def test_a_prompt_is_its_text_and_its_pictures_wherever_they_lie():
    """An edit of another image is another prompt; records of one prompt that differ are all kept, on one side."""
    records = [Prompt("make it red", {"tag": t}, (f"/here/{k}.png",)) for k in range(40) for t in (0, 1)]
    train, held_out = split(records, 0.1, 0)
    assert (len(held_out), len(train)) == (8, 72)
    moved = [Prompt(p.text, p.metadata, (p.images[0].replace("here", "there"),)) for p in records]
    assert [p.images[0][-8:] for p in split(moved, 0.1, 0)[1]] == [p.images[0][-8:] for p in held_out]


# ---- what a run makes of its configuration


def test_a_run_without_other_prompts_trains_on_nine_tenths_and_is_evaluated_on_the_rest(read):
    prompts = found(read())
    assert (prompts.name, len(prompts.train), len(prompts.evaluated)) == ("held-out prompts", 54, 6)
    assert not {p.text for p in prompts.train} & {p.text for p in prompts.evaluated}
    source = "data.eval_share=0.1 of data.prompts=list.txt, drawn by seed 0"
    assert prompts.facts()["held_out"] == {"source": source, "prompts": 6, "share": 0.1}
    assert found(read("seed=1")).evaluated != prompts.evaluated
    # Fewer to look at, and no other ones to train on.
    few = found(read(max_eval_prompts=2))
    assert (few.evaluated, few.train) == (prompts.evaluated[:2], prompts.train)


def test_the_share_is_taken_of_the_prompts_that_are_used(read):
    prompts = found(read(max_prompts=40))
    assert {p.text for p in (*prompts.train, *prompts.evaluated)} == set(TEXTS[:40])
    assert len(prompts.evaluated) == 4


@pytest.mark.parametrize(
    ("data", "texts", "why"),
    [
        ({"eval_share": 0}, TEXTS, "data.eval_share is 0"),
        ({"max_prompts": LEAST - 1}, TEXTS, "31 are fewer than 32 distinct prompts"),
        ({}, TEXTS[: LEAST - 1] * 2, "31 are fewer than 32 distinct prompts"),
        ({"eval_prompts": "list.txt", "max_eval_prompts": 60}, TEXTS, "all of data.eval_prompts are training prompts"),
    ],
    ids=["share 0", "max_prompts", "duplicates", "the same list"],
)
def test_where_none_are_held_out_the_numbers_are_of_training_prompts(read, data, texts, why):
    prompts = found(read(texts=texts, **data))
    assert (prompts.name, prompts.on, prompts.share) == ("training prompts", " on training prompts", None)
    assert prompts.train == prompts.listed == prompts.evaluated
    assert why in prompts.remark
    assert "no verdict" in prompts.remark
    assert prompts.facts() == {
        "evaluated_on": "training prompts",
        "held_out": None,
        "trained_prompts": len(prompts.train),
    }
    assert "held-out" not in prompts.describe()


def test_prompts_that_are_named_are_taken_as_before(read):
    prompts = found(read(prompts="shapes:train", eval_prompts="shapes:heldout", max_eval_prompts=5))
    whole = found(read(prompts="shapes:train"))
    assert prompts.name == whole.name == "held-out prompts"
    assert prompts.train == prompts.listed == whole.listed != whole.train
    assert (len(prompts.evaluated), prompts.remark) == (5, "")


def test_prompts_that_are_trained_on_after_all_are_counted(read, tmp_path):
    (tmp_path / "other.txt").write_text("prompt 1\nprompt 2\nanother\n")
    prompts = found(read(eval_prompts="other.txt"))
    assert prompts.name == "held-out prompts"
    assert prompts.remark == "2 of the 3 held-out prompts are training prompts too"


def test_a_method_that_learns_its_own_prompts_keeps_all_of_them(read):
    for data in ({}, {"eval_share": 0.5}, {"eval_prompts": "list.txt"}):
        prompts = found(read(**data), own=True)
        assert (prompts.name, len(prompts.train), len(prompts.evaluated)) == ("its own prompts", 60, 60)
        assert (prompts.counted(3), prompts.remark) == ("3 of its own prompts", "")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"eval_share": 1.0}, "eval_share=1.0 is a share"),
        ({"eval_share": -0.1}, "give 0 to below 1"),
        ({"prompts": None, "pairs": {"path": "set"}, "eval_share": 0.3}, "eval_share=0.3 has no meaning with pairs"),
    ],
)
def test_a_share_that_means_nothing_is_refused(read, data, words):
    with pytest.raises(ConfigError, match=words):
        read(**data)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.1, "54 train and 6 held-out prompts (data.eval_share=0.1 of"),
        (0, "60 training prompts, 60 of them evaluated and none held out"),
    ],
)
def test_a_plan_shows_what_is_trained_and_evaluated(read, monkeypatch, capsys, share, words):
    monkeypatch.setattr("flowrl.commands.plan.outline", lambda resolved: (None, "not measured here"))
    read(eval_share=share)
    code, printed = command(monkeypatch, capsys, "plan", "run.yaml")
    assert code == 0, printed
    assert words in printed


# ---- resumed runs, and evaluations of a run


def test_a_run_is_not_resumed_with_fewer_prompts_and_where_nothing_is_split_the_share_may_change(read):
    def folder(config) -> RunFolder:
        """The folder of a run with one row."""
        place = Path(config.output) / config.name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.yaml").write_text(yaml.safe_dump(resolve(config).tree()))
        (place / "metrics.jsonl").write_text('{"iteration": 1}\n')
        return RunFolder(place)

    run = folder(read(eval_share=0.0))
    with pytest.raises(ConfigError, match=r"data\.eval_share was 0\.0, now 0\.1"):
        run.begin(resolve(read()), True)
    run.begin(resolve(read(eval_share=0.0)), True)
    named = read(eval_prompts="shapes:heldout", eval_share=0.0)
    folder(named).begin(resolve(read(eval_prompts="shapes:heldout")), True)


def test_another_share_than_the_run_was_trained_without_is_not_called_held_out(read):
    trained = read()
    require_same_split(trained, read("eval.guidance_scale=3", max_eval_prompts=2), found(read()))
    for changed in (read("seed=1"), read(eval_share=0.5), read(max_prompts=50), read(prompts="shapes:train")):
        with pytest.raises(ConfigError, match=r"was .*, now .*name the prompts in data\.eval_prompts"):
            require_same_split(trained, changed, found(changed))
    with pytest.raises(ConfigError, match="eval_prompts was 'shapes:heldout', now None"):
        require_same_split(read(eval_prompts="shapes:heldout"), trained, found(trained))
    other = read("seed=1", eval_prompts="shapes:heldout")
    require_same_split(trained, other, found(other))
