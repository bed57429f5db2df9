"""scripts/install.py and scripts/_environment.sh: what is asked of uv and pip, repairs, and when nothing is done.

Nothing is downloaded: a fake interpreter stands for the environment's, and writes down what it is asked.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import install
from tests.tiny_sd3 import ROOT

FAKE = """#!/bin/bash
echo "$(basename "$0") $*" >> "$FLOWRL_TEST_LOG"
case "$*" in
    *"config list"*) echo "global.index-url='file:///nowhere'" ;;
    *--target*) [ -z "$NO_UV" ] && mkdir -p .venv/uv/bin && cp "$0" .venv/uv/bin/uv || exit 1 ;;
    "cache dir") echo "$PWD/uv-cache" ;;
    "pip install --python"*) echo "index $UV_DEFAULT_INDEX" >> "$FLOWRL_TEST_LOG"; exit "${UV_FAILS:-0}" ;;
    "-m pip install --constraint"*) exit "${PIP_FAILS:-0}" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """A folder with the scripts, pins, and an environment whose interpreter is FAKE."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/install.py", "scripts/_environment.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(FAKE)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    monkeypatch.setenv("FLOWRL_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FLOWRL_DISK_GB", "0")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    return tmp_path


def environment(checkout: Path, words: str = "") -> tuple[int, list[str], str]:
    """Exit code of `environment WORDS`, the lines that FAKE wrote, and what was printed."""
    (checkout / "log").unlink(missing_ok=True)
    script = f"source scripts/_environment.sh; environment {words}"
    done = subprocess.run(["bash", "-c", script], cwd=checkout, capture_output=True, text=True)
    log = (checkout / "log").read_text().splitlines() if (checkout / "log").exists() else []
    return done.returncode, log, done.stdout + done.stderr


def test_uv_installs_once_for_each_set_and_the_larger_set_holds_for_the_smaller(checkout, monkeypatch):
    code, log, printed = environment(checkout)
    assert code == 0, printed
    what = "--constraint constraints.txt --editable"
    assert f"uv pip install --python .venv/bin/python --upgrade-package pip {what} . pip" in log
    assert "index file:///nowhere" in log, "pip's own index"
    assert environment(checkout)[1:] == ([], ""), "nothing is asked of anyone again"
    log = environment(checkout, "dev")[1]
    assert f"uv pip install --python .venv/bin/python --upgrade-package pip {what} .[dev] pip" in log
    assert not [line for line in log if "--target" in line], "uv is there"
    assert environment(checkout)[1:] == environment(checkout, "dev")[1:] == ([], "")
    (checkout / "constraints.txt").write_text("rich==14\n")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    log = environment(checkout)[1]
    assert [line for line in log if "--compile-bytecode" in line], "other pins; no import will compile the libraries"


@pytest.mark.parametrize("why", ["NO_UV", "UV_FAILS"])
def test_pip_takes_over_where_uv_cannot_be_had_or_fails(checkout, why, monkeypatch):
    monkeypatch.setenv(why, "1")
    code, log, printed = environment(checkout, "dev")
    assert code == 0, printed
    assert log[-1] == "python -m pip install --constraint constraints.txt --editable .[dev] pip"
    assert "uv" in printed.split("[3/3]")[-2].splitlines()[-1]
    assert environment(checkout, "dev")[1] == []


def test_what_failed_is_tried_again(checkout, monkeypatch):
    monkeypatch.setenv("UV_FAILS", "1")
    monkeypatch.setenv("PIP_FAILS", "1")
    code, _, printed = environment(checkout)
    assert code == 1
    assert "the next call goes on" in printed
    monkeypatch.delenv("UV_FAILS")
    assert environment(checkout)[0] == 0


def package(site: Path, name: str, files: dict[str, int], *, record: bool = True) -> Path:
    """A package in a folder of installed ones: file -> size that its RECORD lists; on the disk it has three bytes."""
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    for file in files:
        (site / file).write_text("abc")
    lines = [f'"{file}",sha256=x,{size}' for file, size in files.items()]
    if record:
        (folder / "RECORD").write_text("\n".join([*lines, f"{folder.name}/RECORD,,"]))
    return folder


def test_packages_that_an_interruption_left_incomplete_are_taken_for_missing(checkout):
    site = checkout / ".venv/lib/python3.11/site-packages"
    whole = package(site, "whole", {"a.py": 3, "b,c.py": 3, "a.pyc": 9})
    cut = package(site, "cut", {"d.py": 4})
    gone = package(site, "gone", {"e.py": 3})
    (site / "e.py").unlink()
    unlisted = package(site, "unlisted", {"f.py": 3}, record=False)
    assert [complete for _, _, complete in install.distributions(site)] == [False, False, False, True]
    assert "uv cache clean cut gone unlisted" in environment(checkout)[1], "the files are one with the cache's"
    assert whole.is_dir()
    assert not [each for each in (cut, gone, unlisted) if each.exists()]


def test_a_small_disk_is_named_before_anything_is_written(checkout, monkeypatch):
    monkeypatch.setenv("FLOWRL_DISK_GB", "1e9")
    code, log, printed = environment(checkout)
    assert (code, log) == (2, [])
    for part in ("the disk is too small", f"{1e9:.1f} GB more in {checkout}/.venv", "GB are free", "FLOWRL_DISK_GB=2"):
        assert part in printed
    monkeypatch.delenv("FLOWRL_DISK_GB")
    asked: list[float] = []
    monkeypatch.setattr(install, "require_room", lambda folder, needed: asked.append(needed))
    monkeypatch.setattr(install, "_fails", lambda *command: False)
    monkeypatch.setattr(install.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "", ""))
    package(tmp := checkout / ".venv/lib/python3.11/site-packages", "large", {"x": 3})
    os.truncate(tmp / "x", 10**9)
    (tmp / "large-1.0.dist-info/RECORD").write_text(f"x,sha256=x,{10**9}\n")
    for extras in (".", ".[dev]"):
        assert install.main([str(checkout / ".venv"), "constraints.txt", extras]) == 0
    assert asked == [6e9, 7e9], "what is there already is not asked for again"


def test_pip_s_settings_are_uv_s_and_the_environment_wins():
    listed = (
        "global.extra-index-url='a\\nb'\nglobal.index-url='f'\ninstall.index-url='i'\n:env:.find-links='/x /y'\n"
        "global.timeout='9'\n"
    )
    assert install.pip_settings(listed) == {
        "UV_INDEX": "a b",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "i",
        "UV_FIND_LINKS": "/x,/y",
    }


@pytest.mark.parametrize(
    ("script", "words"), [("scripts/quickstart.sh", ""), ("scripts/test.sh", "dev"), (".ci/run", "dev")]
)
def test_the_quickstart_installs_no_extras_and_tests_do(script, words):
    lines = (ROOT / script).read_text().splitlines()
    assert [line for line in lines if line.startswith("environment")] == [f"environment {words}".strip()]


def test_the_lowest_versions_are_installed_in_the_same_way_and_once(checkout, monkeypatch):
    shutil.copy(ROOT / "scripts/lowest.sh", checkout / "scripts")
    python = checkout / "python"
    python.write_text(
        f'#!/bin/bash\necho "$*" >> "$FLOWRL_TEST_LOG"\ncase "$*" in\n    -) exec {sys.executable} - ;;\n'
        '    "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;\n    *install.py*) cat "$3" >&2 ;;\nesac\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    for again in (False, True):
        (checkout / "log").unlink(missing_ok=True)
        done = subprocess.run(["bash", "scripts/lowest.sh", "low"], cwd=checkout, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        log = (checkout / "log").read_text()
        assert ("scripts/install.py low low/constraints .[data," in log) is ("torch==" in done.stderr) is not again
        assert "torch==" in done.stdout, "the versions are shown"
        assert "-m pytest --numprocesses" in log
