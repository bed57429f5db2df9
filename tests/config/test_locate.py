"""What paths in a configuration are relative to: its file, and the working directory for the command line."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.config.load import load_config, resolve
from flowrl.core.assets import embedded_prompts
from flowrl.core.errors import ConfigError
from flowrl.data.prompt_sources import load_prompts

BASE: dict[str, Any] = {
    "name": "run",
    "iterations": 1,
    "model": {"name": "sd3", "path": "tiny-sd3"},
    "data": {"prompts": "shapes:train"},
    "rollout": {"prompts_per_iteration": 2, "group_size": 4},
    "rewards": [{"name": "jpeg"}],
}
SCORE = "def score(images, prompts, metadata):\n    return images.mean(dim=(1, 2, 3))\n"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """(folder of the configuration, working directory)."""
    own, here = tmp_path / "own", tmp_path / "here"
    own.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    return own, here


def read(folder: Path, *words: str, **changes):
    (folder / "run.yaml").write_text(yaml.safe_dump(BASE | changes))
    return load_config(os.path.relpath(folder / "run.yaml"), list(words))


def refusal(*args, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(read(*args, **changes))
    return str(caught.value)


def test_files_are_those_beside_the_configuration_and_on_the_command_line_those_here(places):
    own, here = places
    for folder in places:
        (folder / "prompts.txt").write_text(f"from {folder.name}\n")
        (folder / "mine.py").write_text(SCORE)
    changes = {
        "data": {"prompts": "prompts.txt", "eval_prompts": "./prompts.txt"},
        "rewards": [{"path": "mine.py", "cache": "scores"}],
        "eval": {"rewards": [{"path": "mine.py", "cache": "memory"}]},
        "output": "results",
    }
    run = read(own, "data.eval_prompts=prompts.txt", **changes)
    assert (run.data.prompts, run.data.eval_prompts) == (str(own / "prompts.txt"), str(here / "prompts.txt"))
    assert run.rewards == [{"path": str(own / "mine.py"), "cache": str(own / "scores")}]
    assert run.eval.rewards == [{"path": str(own / "mine.py"), "cache": "memory"}]
    assert run.folder == Path("results/run")
    assert resolve(run).rewards[0].module.__file__ == str(own / "mine.py")
    # A whole mapping from the command line is from here, its items too.
    assert read(own, "rewards=[{path: mine.py}]", **changes).rewards == [{"path": str(here / "mine.py")}]
    assert read(own, "rewards.0.path=mine.py", **changes).rewards[0]["path"] == str(here / "mine.py")


@pytest.mark.parametrize(
    ("place", "options"),
    [
        (("model", "path"), {"name": "sd3", "path": "THERE"}),
        (("model", "vae"), {"name": "sd3", "path": "tiny-sd3", "vae": "THERE"}),
        (("model", "init_lora"), {"path": "tiny-sd3", "init_lora": "THERE"}),
        (("algorithm", "name"), {"name": "there.py"}),
        (("rollout", "sampler", "name"), BASE["rollout"] | {"sampler": {"name": "there.py"}}),
        (("data", "pairs", "path"), {"pairs": {"path": "THERE"}}),
        (("data", "pairs", "path"), {"pairs": {"path": "hf:THERE:train[:2]"}}),
        (("rewards", 0, "rubric"), [{"name": "vlm_judge", "rubric": "there.py"}]),
        (("rewards", 0, "local", "model"), [{"name": "vlm_judge", "local": {"model": "THERE"}}]),
        (("rewards", 0, "token_file"), [{"name": "remote", "reward": "x", "token_file": "there.py"}]),
        (("rewards", 0, "table"), [{"path": "mine.py", "table": "./there.py"}]),
    ],
)
def test_every_option_that_says_it_is_a_file_is_found_beside_the_configuration(places, place, options):
    own, _ = places
    (own / "there.py").write_text(SCORE)
    (own / "mine.py").write_text(SCORE)
    (own / "THERE").mkdir()
    run = read(own, **{place[0]: options})
    value, given = getattr(run, place[0]), options
    for key in place[1:]:
        value = value[key] if isinstance(value, dict | list) else getattr(value, key)
        given = given[key]
    expected = {"THERE": str(own / "THERE"), "hf:THERE:train[:2]": f"hf:{own}/THERE:train[:2]"}
    assert value == expected.get(given, str(own / "there.py"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "sd3", "path": "owner/name"}},
        {"data": {"prompts": "sd3-general-train.txt", "eval_prompts": "hf:owner/name:train"}},
        {"rewards": [{"name": "aesthetic", "head": "owner/head"}, {"name": "remote", "servers": ["http://x/y.json"]}]},
        {"rewards": [{"name": "flowrl.rewards.shapes", "word": "plain"}]},
    ],
)
def test_names_that_are_no_files_stay_as_they_are(places, changes):
    run = read(places[0], **changes)
    for key, value in changes.items():
        found = getattr(run, key)
        told = {name: getattr(found, name) for name in value} if key == "data" else found
        assert told == value


def test_a_file_beside_the_configuration_wins_over_an_embedded_name_and_one_here_does_not(places):
    own, here = places
    (here / "shapes-train.txt").write_text("here\n")
    run = read(own, data={"prompts": "shapes-train.txt"})
    assert run.data.prompts == "shapes-train.txt"
    assert len(load_prompts(run.data.prompts, "data.prompts")) > 1
    assert read(own, "data.prompts=shapes-train.txt").data.prompts == str(here / "shapes-train.txt")
    (own / "shapes-train.txt").write_text("own\n")
    assert read(own, data={"prompts": "shapes-train.txt"}).data.prompts == str(own / "shapes-train.txt")
    assert embedded_prompts("shapes-train.txt") is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"prompts": "list.txt"}}, ("data.prompts='list.txt'", "own/list.txt", "'../here/list.txt'")),
        ({"rewards": [{"path": "mine.py"}]}, ("rewards.0.path='mine.py'", "own/mine.py", "rewards.0.path=mine.py")),
        ({"model": {"name": "sd3", "path": "folder/model"}}, ("model.path='folder/model'", "own/folder/model")),
        ({"data": {"pairs": {"path": "part-*.parquet"}}}, ("data.pairs.path=", "own/part-*.parquet")),
    ],
)
def test_what_is_only_in_the_working_directory_is_refused_with_both_remedies(places, changes, words):
    own, here = places
    for name in ("list.txt", "mine.py", "part-0.parquet"):
        (here / name).write_text(SCORE)
    (here / "folder/model").mkdir(parents=True)
    message = refusal(own, **changes)
    assert all(word in message for word in (*words, "relative to its folder", "; try ")), message


@pytest.mark.parametrize(
    ("key", "value"),
    [("rewards", [{"path": "gone.py"}]), ("rewards", [{"name": "gone.py"}]), ("algorithm", {"name": "gone.py"})],
)
def test_a_missing_file_is_refused_with_the_place_where_it_was_looked_for(places, key, value):
    assert re.search("own/gone.py.*no such file|no such file.*own/gone.py", refusal(places[0], **{key: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "sd3", "path": "made/nope"}},
        {"data": {"prompts": "hf:made/nope:train"}},
        {"rewards": [{"name": "aesthetic", "head": "made/nope"}]},
    ],
)
@pytest.mark.parametrize("given", ["file", "words"])
def test_a_missing_path_in_a_folder_that_is_here_is_no_hub_id(places, changes, given):
    own, here = places
    folder = (own if given == "file" else here) / "made"
    folder.mkdir()
    (folder / "other").mkdir()
    if given == "file":
        message = refusal(own, **changes)
    else:
        words = {"model": "model.path=made/nope", "data": "data.prompts=hf:made/nope:train"}
        own_reward = ["rewards.0.name=aesthetic", "rewards.0.head=made/nope"]
        message = refusal(own, *([words[key] for key in changes if key in words] or own_reward))
    assert "nope" in message
    assert "no id of the hub, since the folder" in message
    assert "it has: other" in message


def test_home_and_variables_are_filled_in_and_a_missing_variable_is_an_error(places, monkeypatch):
    own, here = places
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("LISTS", str(own))
    (own / "a.txt").write_text("a\n")
    (here / "b.txt").write_text("b\n")
    run = read(own, data={"prompts": "${LISTS}/a.txt", "eval_prompts": "~/b.txt"}, output="~/runs")
    assert (run.data.prompts, run.data.eval_prompts) == (str(own / "a.txt"), str(here / "b.txt"))
    assert run.folder == here / "runs" / "run"
    monkeypatch.delenv("LISTS")
    message = refusal(own, data={"prompts": "${LISTS}/a.txt"})
    assert "data.prompts='${LISTS}/a.txt'" in message
    assert "'LISTS' is not set" in message
    # A dollar sign elsewhere is a dollar sign.
    assert read(own, model={"name": "sd3", "path": "tiny-sd3", "negative_prompt": "${LISTS}"}).model["negative_prompt"]


def test_a_link_on_the_way_leads_where_the_system_says(places, tmp_path):
    own, _ = places
    (tmp_path / "far/deep").mkdir(parents=True)
    (tmp_path / "far/list.txt").write_text("far\n")
    (own / "link").symlink_to(tmp_path / "far/deep")
    told = read(own, data={"prompts": "link/../list.txt"}).data.prompts
    assert Path(str(told)).read_text() == "far\n"
