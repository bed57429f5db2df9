"""Bad input and bad luck: one clear message, the right exit code, and nothing saved is lost."""

import errno
import json
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import digest, train
from tests.tables import table


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str]:
    """`flowrl WORDS` in this process: (exit code, what it printed)."""
    from flowrl.cli import main

    monkeypatch.setattr(sys, "argv", ["flowrl", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    return int(caught.value.code or 0), printed.out + printed.err


@pytest.mark.parametrize(
    ("override", "words"),
    table(__file__, "refused"),
)
def test_what_the_user_can_mend_is_named_with_exit_code_2(place, monkeypatch, capsys, override: str, words: list[str]):
    (place / "empty.txt").write_text("\n\n")
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", override)
    assert code == 2, printed
    for word in words:
        assert word in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("words", [("train", "run.yaml"), ("pairs", "run.yaml", "--out", "out")], ids=lambda w: w[0])
def test_a_model_that_is_not_entered_as_it_calls_itself_draws_nothing(place, monkeypatch, capsys, words):
    from flowrl.models.generic import own_call

    monkeypatch.setattr(own_call, "known", lambda model: False)
    monkeypatch.setattr(own_call, "compare", lambda model, scale: own_call.Difference(0.5 * scale, 1.0, 1.5))
    model = "model={name: generic, path: tiny-sd3, call: {max_sequence_length: 9}}"
    code, printed = command(monkeypatch, capsys, *words, model, "rollout.guidance_scale=3.0")
    assert code == 2, printed
    assert "predicts 1 by its own call and 1.5 when flowrl enters it" in " ".join(printed.split())
    assert "guidance_scale=3 is 1.5e+00 of the largest value (allowed 1e-03)" in " ".join(printed.split())
    assert not list(place.rglob("*.png"))


REWARDS = {
    "wrong_length": ("return images.mean(dim=(1, 2, 3))[:1]", ["wrong_length", "shape (1,)", "4 samples"]),
    "centred": (
        "m = images.mean(dim=(1, 2, 3))\n    return m - m.mean()",
        ["'centred' depends on its batch", " among 4 and 0 alone", "needs_groups", "nothing was trained"],
    ),
    "raising": ("raise RuntimeError('no such server')", ["raising", "no such server", "nothing was trained"]),
    "no_function": ("pass\nscore = None", ["no_function", "score(images, prompts, metadata)"]),
}


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_a_broken_reward_ends_the_run_at_the_probe_batch(place, monkeypatch, capsys, name: str):
    body, words = REWARDS[name]
    (place / f"{name}.py").write_text(f"def score(images, prompts, metadata):\n    {body}\n")
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", f"rewards=[{{path: {name}.py}}]")
    assert code == 2, printed
    for word in words:
        assert word in printed


def test_a_nan_reward_masks_its_sample_and_is_counted(place: Path):
    (place / "sometimes.py").write_text(
        "def score(images, prompts, metadata):\n"
        "    value = images.mean(dim=(1, 2, 3))\n"
        "    if len(value) == 8:\n"
        "        value[0] = float('nan')\n"
        "    return value\n"
    )
    train("iterations=1", "rewards=[{path: sometimes.py}]")
    row = json.loads(Path("runs/run/metrics.jsonl").read_text())
    assert row["reward/masked"] == 1
    assert row["reward/sometimes_mean"] > 0


def test_a_run_folder_with_a_run_is_never_overwritten(place, monkeypatch, capsys):
    train("iterations=1")
    before = digest("run", 1)
    for words in ((), ("rollout.group_size=8", "--resume"), ("optim.learning_rate=1e-5",)):
        code, printed = command(monkeypatch, capsys, "train", "run.yaml", "iterations=1", *words)
        assert code == 2
        assert "runs/run" in printed
    assert "optim.learning_rate was 0.001, now 1e-05" in printed
    assert digest("run", 1) == before


@pytest.mark.parametrize(
    "damage", ["flip", *(pytest.param(name, marks=pytest.mark.slow) for name in ("truncate", "no_manifest"))]
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_still_works(place, monkeypatch, capsys, damage: str):
    train("iterations=2")
    newest = Path("runs/run/checkpoints/iteration-000002")
    file = newest / "state.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "flip":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
    else:
        (newest / "manifest.json").unlink()
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", "iterations=2", "--resume")
    assert code == 2
    assert "iteration-000002" in printed
    assert "iteration 1" in printed
    for part in newest.iterdir():
        part.unlink()
    newest.rmdir()
    train("iterations=2", resume=True)
    assert file.is_file()


def test_a_full_disk_while_saving_keeps_what_was_saved_and_the_run_can_go_on(place, monkeypatch, capsys):
    import safetensors.torch

    train("name=whole", "iterations=3")
    write = safetensors.torch.save_file

    def full_at_two(tensors, file, **options):
        if "000002" in str(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(tensors, file, **options)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full_at_two)
        code, printed = command(monkeypatch, capsys, "train", "run.yaml", "iterations=3")
    assert code == 1
    assert "No space left" in printed
    assert "iteration 1 is safe" in printed
    train("iterations=3", resume=True)
    assert digest("run", 3) == digest("whole", 3)


def test_the_run_folder_has_one_writer(place, monkeypatch, capsys):
    from flowrl.run.folder import RunFolder

    holder = RunFolder(Path("runs/run"))
    holder.lock()
    monkeypatch.setattr(RunFolder.lock, "__defaults__", (0.1,))
    code, printed = command(monkeypatch, capsys, "train", "run.yaml")
    holder.unlock()
    assert code == 2
    assert "in use by another process" in printed


def test_world_size_must_be_what_accelerate_sees(monkeypatch):
    from types import SimpleNamespace

    import accelerate

    from flowrl.core.errors import LaunchError
    from flowrl.training.world import join

    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(num_processes=1, process_index=0, device="cpu")
    monkeypatch.setattr(accelerate, "PartialState", lambda **options: alone)
    with pytest.raises(LaunchError, match="WORLD_SIZE=2"):
        join()
