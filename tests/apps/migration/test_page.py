"""docs/migration.md, and the command."""

import sys
import tempfile
from pathlib import Path

import pytest

from flowrl.apps.migration.tools import TOOLS
from flowrl.cli import main
from flowrl.config.load import load_config
from scripts.pages import migration as page

PUBLISHED = Path(__file__).parent / "published"


def test_the_page_has_every_key():
    text = page.FILE.read_text(encoding="ascii")
    assert all(f"| `{key}` |" in text for tool in TOOLS.values() for key in tool.keys)


def test_every_key_has_an_option_or_a_reason():
    without = [f"{tool.name}: {k}" for tool in TOOLS.values() for k, e in tool.keys.items() if not (e.options or e.how)]
    assert without == []


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["flowrl", "convert-config", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code if isinstance(caught.value.code, int) else 0


def test_the_command_writes_a_recipe_and_tells_what_it_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "config").mkdir()
    prompts = tmp_path / "dataset" / "ocr"
    prompts.mkdir(parents=True)
    for part in ("train", "test"):
        (prompts / f"{part}.txt").write_text('a sign that says "open"\n', encoding="ascii")
    for name in ("grpo.py", "base.py"):
        (tmp_path / "config" / name).write_bytes((PUBLISHED / f"{name}.txt").read_bytes())
    file, out = tmp_path / "config" / "grpo.py", tmp_path / "mine" / "recipe.yaml"
    out.parent.mkdir()
    assert run(monkeypatch, f"{file}:general_ocr_sd3", "--out", str(out), "--strict") == 0
    assert "not converted, harmless: sample.batch_size=8: their scripts do not read it" in capsys.readouterr().err
    assert load_config(out).data.prompts == str(prompts / "train.txt")
    assert run(monkeypatch, f"{file}:general_ocr_sd3", "--out", str(out)) == 2
    assert "it exists" in capsys.readouterr().err
    strict = tmp_path / "strict.yaml"
    assert run(monkeypatch, f"{file}:misspelt", "--out", str(strict), "--strict") == 2
    assert "1 without a counterpart change results: sample.guidence_scale" in capsys.readouterr().err
    assert not strict.exists()
    assert run(monkeypatch, f"{file}:misspelt") == 0
    assert "# Not converted, changes results: sample.guidence_scale=3" in capsys.readouterr().out


def test_paths_start_in_the_folder_of_the_recipe_wherever_that_is(tmp_path, monkeypatch, capsys):
    """On the output stream that is the working directory, also one below the system's temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for folder in ("theirs/config", "theirs/dataset/ocr", "a/clone", "lora"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "theirs" / "dataset" / "ocr" / "train.txt").write_text("a sign\n", encoding="ascii")
    (tmp_path / "a" / "clone" / "start.safetensors").write_bytes(b"")
    text = (PUBLISHED / "grpo.py.txt").read_text(encoding="ascii")
    own = "\ndef own():\n    config = general_ocr_sd3()\n    gpu_number = 32\n"
    own += "    config.train.lora_path = 'start.safetensors'\n    return config\n"
    (tmp_path / "theirs" / "config" / "grpo.py").write_text(text + own, encoding="ascii")
    monkeypatch.chdir(tmp_path / "a" / "clone")
    for words in ([], ["--out", "../../other/recipe.yaml"]):
        assert run(monkeypatch, "../../theirs/config/grpo.py:own", *words) == 0
        made = Path(words[1] if words else "recipe.yaml")
        if not words:
            made.write_text(capsys.readouterr().out, encoding="ascii")
        data = load_config(made).data
        assert data.prompts == str(tmp_path / "theirs" / "dataset" / "ocr" / "train.txt")
        assert load_config(made).model["init_lora"] == str(tmp_path / "a" / "clone" / "start.safetensors")
        # The file that is not there yet keeps their name, and its comment says so.
        assert data.eval_prompts == str(made.resolve().parent / "dataset" / "ocr" / "test.txt")
        comments = [line for line in made.read_text(encoding="ascii").splitlines() if "relative to this file" in line]
        assert sum("not found" in line for line in comments) == 1 < len(comments)


def test_a_file_with_letters_beyond_ascii_gives_a_recipe_that_is_read_again(tmp_path, monkeypatch, capsys):
    file, out = tmp_path / "d\u00e9mo.sh", tmp_path / "recipe.yaml"
    text = (PUBLISHED / "sd15.sh").read_text(encoding="ascii").replace("/data/pairs/", "/data/\u00e9/")
    file.write_text(text, encoding="utf-8")
    assert run(monkeypatch, str(file), "--gpus", "16", "--out", str(out)) == 0
    assert load_config(out).iterations == 2000
    assert "cache_dir" in capsys.readouterr().err


def test_a_file_taken_for_another_tools_by_its_ending_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "ddpo.sh").write_text("accelerate launch examples/scripts/ddpo.py --sample_num_steps=50\n")
    assert run(monkeypatch, str(tmp_path / "ddpo.sh"), "--gpus", "1") == 2
    assert (
        "(read as diffusion_dpo's, by its ending; --from names another tool of flow_grpo, " in capsys.readouterr().err
    )
    assert run(monkeypatch, str(tmp_path / "ddpo.sh"), "--gpus", "1", "--from", "diffusion_dpo") == 2
    assert "by its ending" not in capsys.readouterr().err
