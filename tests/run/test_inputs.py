"""The contents of the user's files are a part of a run: recorded, copied, and refused when they change."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError
from flowrl.data import contents
from flowrl.data.prompts import Prompt
from flowrl.run import inputs
from flowrl.run.changes import Accepted
from flowrl.run.folder import RunFolder
from tests.remedies import follows

SCORE = (
    "import flowrl, helper_of_mine, sys, numpy.linalg\nCARD = flowrl.Card(outputs=('mine',), modality='any')\n\n"
    "def score(images, prompts, metadata):\n    return images.mean(dim=(1, 2, 3))\n"
)
SAMPLER = "from flowrl.samplers.flow_sde import Config, build  # noqa: F401\n\nLEVEL = 'experimental'\n"
TREE = {
    "name": "run",
    "iterations": 4,
    "model": {"name": "sd3", "path": "tiny-sd3"},
    "data": {"prompts": "train.txt", "eval_prompts": "held.txt"},
    "rollout": {"prompts_per_iteration": 2, "group_size": 4, "sampler": {"path": "steps.py", "noise_level": 0.7}},
    "rewards": [{"path": "mine.py"}],
    "eval": {"rewards": [{"name": "vlm_judge", "rubric": "mine.yaml", "weight": 0.0}]},
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with all files of a run, which is the working directory and on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "helper_of_mine", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TREE))
    for name, text in (
        ("train.txt", "a\nb\nc\n"),
        ("held.txt", "d\ne\n"),
        ("mine.py", SCORE),
        ("helper_of_mine.py", "value = 1\n"),
        ("steps.py", SAMPLER),
        ("mine.yaml", "scale: yes_no\nquestion: Is this {prompt}?\n"),
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


def read(*words: str, config: str = "run.yaml") -> Resolved:
    return resolve(load_config(config, list(words)))


def begin(resolved: Resolved, *, resume: bool = True, accept: bool = False) -> RunFolder:
    folder = RunFolder(resolved.run.folder)
    folder.begin(resolved, resume, Accepted(files=accept))
    return folder


def started(*words: str) -> Path:
    """A run folder that holds a base evaluation and nothing else."""
    folder = begin(read(*words), resume=False)
    evaluation = {"tag": "base", "iteration": 0, "prompts": [], "seeds": [], "scores": {}}
    (folder.path / "eval").mkdir(exist_ok=True)
    (folder.path / "eval/base.json").write_text(json.dumps(evaluation))
    return folder.path


def refusal(*words: str, config: str = "run.yaml", resume: bool = True) -> str:
    with pytest.raises(ConfigError) as caught:
        begin(read(*words, config=config), resume=resume)
    return str(caught.value)


def test_every_file_is_recorded_with_its_hash_and_code_and_lists_are_copied(project):
    run = started()
    record = contents.read(run)
    assert record is not None
    assert {one.place: one.kind for one in record.inputs} == {
        ("rollout.sampler.path", "steps.py"): "code",
        ("rewards.0.path", "mine.py"): "code",
        ("rewards.0.path", "helper_of_mine.py"): "code",
        ("data.prompts", ""): "prompts",
        ("data.eval_prompts", ""): "prompts",
        ("eval.rewards.0.rubric", ""): "text",
    }
    for one in record.inputs:
        assert one.copy is not None
        assert (run / one.copy).read_bytes() == (project / one.name).read_bytes()


@follows("flowrl/run/folder.py:RunFolder.begin")
def test_a_run_that_has_only_its_base_is_a_run(project):
    """What was killed between the base evaluation and the first row took any configuration, and kept the old base."""
    started()
    assert "another configuration: seed was 0, now 1" in refusal("seed=1")
    assert "give --resume" in refusal(resume=False)
    begin(read())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("mine.py", SCORE.replace("mean", "amax"), ("rewards.0.path", "had 5 lines then, 5 now", "line 5", "amax")),
        (
            "helper_of_mine.py",
            "value = 1\nmore = 2\n",
            ("rewards.0.path", "helper_of_mine.py", "line 2 was missing then"),
        ),
        ("steps.py", SAMPLER + "\n", ("rollout.sampler.path", "steps.py")),
        ("train.txt", "a\nc\nb\n", ("data.prompts", "line 2 was 'b' then and is 'c' now")),
        ("held.txt", "", ("data.eval_prompts", "had 2 lines then, 0 now")),
        ("mine.yaml", "scale: yes_no\nquestion: Is it {prompt}?\n", ("eval.rewards.0.rubric",)),
        ("train.txt", b"\xff", ("data.prompts", "bytes then")),
        ("train.txt", "a\nb\nc", ("data.prompts", "line break")),
    ],
)
def test_a_changed_file_is_refused_with_what_differs_and_the_option_that_accepts_it(project, name, text, words):
    run = started()
    (project / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refusal()
    assert all(word in message for word in (*words, name, "--accept-changes", str(run))), message
    begin(read(), accept=True)
    begin(read())  # accepted once, it is what the run has
    record = contents.read(run)
    assert record is not None
    assert name in str(record.changes[0]["what"])
    (project / name).write_bytes(b"# third\n" + ((project / name).read_bytes() if name != "train.txt" else b""))
    assert "--accept-changes" in refusal()


def test_files_that_were_moved_are_the_same_run_and_other_ones_are_not(project):
    run = started()
    (project / "deep").mkdir()
    for name in ("train.txt", "mine.py", "steps.py"):
        shutil.move(project / name, project / "deep" / name)
    moved = ("data.prompts=deep/train.txt", "rewards.0.path=deep/mine.py", "rollout.sampler.path=deep/steps.py")
    begin(read(*moved))
    recorded = contents.read(run)
    assert recorded is not None
    assert recorded.by_place()["data.prompts", ""].path == str(project / "deep/train.txt")
    (project / "other.txt").write_text("other\n")
    message = refusal(*moved, "data.prompts=other.txt")
    assert "another configuration: data.prompts was" in message


def test_a_file_that_is_gone_is_replaced_by_its_copy_where_the_run_folder_is_named(project, caplog):
    run = started()
    for name in ("train.txt", "mine.py", "mine.yaml", "steps.py"):
        (project / name).unlink()
    shutil.move(run, "elsewhere")
    found = read(config="elsewhere")
    assert Path(str(found.run.data.prompts)).read_text() == "a\nb\nc\n"
    assert found.rewards[0].name == "mine"
    begin(found)
    begin(read(config="elsewhere"))
    Path("elsewhere/config.yaml").touch()
    assert "no such file" in refusal(f"output={project}", "name=elsewhere")


def test_a_copy_that_was_cut_off_does_not_stand_in_for_the_file(project, monkeypatch):
    def cut(source: Path, target: Path) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:3])
        raise OSError("no space")

    monkeypatch.setattr("flowrl.run.inputs.shutil.copyfile", cut)
    with pytest.raises(OSError, match="no space"):
        started()
    monkeypatch.undo()
    monkeypatch.chdir(project)
    run = started()
    record = contents.read(run)
    assert record is not None
    assert {(run / str(one.copy)).read_bytes() == (project / one.name).read_bytes() for one in record.inputs} == {True}


def test_a_run_folder_without_a_record_goes_on_and_is_recorded_from_then_on(project):
    run = started()
    (run / contents.FILE).unlink()
    (project / "train.txt").write_text("x\n")
    begin(read())
    assert contents.read(run) is not None
    (project / "train.txt").write_text("y\n")
    assert "data.prompts" in refusal()


def test_a_record_that_is_damaged_is_told_with_the_remedy(project):
    run = started()
    (run / contents.FILE).write_text('{"inputs": [{}], "changes": []}')
    message = refusal()
    assert contents.FILE in message
    assert "delete it" in message


def test_what_an_evaluation_is_made_with_follows_contents_and_options_and_not_places(project):
    prompts = [Prompt("a"), Prompt("b", {"images": ["/x/1.png"]})]

    def marks(*words: str, prompts=prompts) -> dict[str, str]:
        return inputs.made_with(read(*words), prompts, [("mine",), ("judge",)])

    first = marks()
    assert set(first) == {"model", "prompts", "score mine", "score judge"}
    (project / "deep").mkdir()
    shutil.copy(project / "mine.py", project / "deep/mine.py")
    assert marks("rewards.0.path=deep/mine.py", "seed=3", "rewards.0.weight=2.0", "model.shard=true") == first
    assert marks(prompts=[Prompt("a"), Prompt("b", {"images": ["/y/1.png"]})]) == first
    video, judge = "model={name: wan, path: x", "eval.rewards=[{name: motion}]"
    shown = marks(f"{video}}}", judge)
    assert shown == marks(f"{video}, fps: 8}}", judge) != marks(f"{video}, num_frames: 5}}", judge), "no pixel changes"

    def changed(*words: str, prompts=prompts) -> set[str]:
        return {name for name, mark in marks(*words, prompts=prompts).items() if mark != first[name]}

    assert changed("model.max_sequence_length=9") == {"model"}
    assert changed(prompts=prompts[:1]) == {"prompts"}
    assert changed("eval.rewards.0.max_tokens=9") == {"score judge"}
    (project / "mine.py").write_text(SCORE + "# edited\n")
    assert changed() == {"score mine"}


def test_a_token_is_never_read(project):
    (project / "token").write_text("secret\n")
    words = "eval.rewards=[{name: remote, reward: x, servers: ['http://localhost:1'], token_file: token, weight: 0.0}]"
    found = read(words)
    assert found.run.eval.rewards[0]["token_file"] == str(project / "token")
    assert not [one for one in inputs.collect(found) if one.name == "token"]
