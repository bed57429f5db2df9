"""flowrl as people have it: a wheel installed elsewhere, run in a folder whose file names are those of modules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flowrl import __version__
from tests.e2e.conftest import BASE, BRIGHTNESS

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = 'raise RuntimeError("a file of the user was imported in place of a module")\n'


def hostile(folder: Path) -> Path:
    """A working directory with files that have the names of modules of Python, of libraries and of this project."""
    for name in ("types.py", "yaml.py", "rewards.py", "tests.py", "data/__init__.py", "gallery/__init__.py"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(HOSTILE)
    (folder / "run.yaml").write_text(yaml.safe_dump(BASE))
    (folder / "brightness.py").write_text(BRIGHTNESS)
    return folder


def run(folder: Path, path: Path, *words: str) -> str:
    """What a command printed, with the packages of `path` found before any others."""
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "PYTHONSAFEPATH"):
        environment.pop(name, None)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_files_of_the_user_with_the_names_of_modules_are_left_alone(tmp_path):
    """With --processes, and by `python -m`, which itself fails over a types.py."""
    place, script = hostile(tmp_path), str(Path(sys.executable).with_name("flowrl"))
    few = ("iterations=1", "rewards.0.name=shapes", "rewards.0.path=null", "data.max_eval_prompts=2")
    run(place, ROOT, script, "train", "run.yaml", *few, "--processes", "2")
    assert json.loads((place / "runs/run/summary.json").read_text())["status"] == "finished"
    assert "all-reduce works" in run(place, ROOT, script, "doctor")
    (place / "types.py").unlink()
    assert "shapes_strict" in run(place, ROOT, sys.executable, "-m", "flowrl", "list", "rewards", "shapes")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder that a wheel is installed into, which was made from the sdist of this checkout."""
    built, target = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", built], cwd=ROOT, check=True)
    [sdist] = built.glob("*.tar.gz")
    assert sdist.name == f"flowrl-{__version__}.tar.gz"
    subprocess.run([*pip, "wheel", sdist, "--no-deps", "--no-build-isolation", "--wheel-dir", built], check=True)
    [wheel] = built.glob("*.whl")
    assert wheel.name.startswith(f"flowrl-{__version__}-")
    assert wheel.stat().st_size < 64 * 2**20
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True)
    return target


@pytest.mark.slow
def test_an_installed_wheel_has_one_name_and_trains_a_shipped_recipe_outside_the_checkout(site, tmp_path):
    assert {entry.name for entry in site.iterdir() if "dist-info" not in entry.name} == {"flowrl", "bin"}
    place = hostile(tmp_path)
    where = run(place, site, sys.executable, "-P", "-c", "import flowrl.rewards.ocr as m; print(m.__file__)")
    assert Path(where.strip()) == site / "flowrl" / "rewards" / "ocr.py"
    assert "jpeg_kb" in run(place, site, str(site / "bin" / "flowrl"), "list", "rewards", "jpeg")
    assert (site / "flowrl" / "core" / "components.json").is_file()
    few = ("iterations=1", "data.max_eval_prompts=2", "eval.best_guidance=[]", "rollout.prompts_per_iteration=2")
    more = ("rollout.group_size=4", "optim.updates_per_iteration=1")
    run(place, site, str(site / "bin" / "flowrl"), "train", "quickstart", *few, *more)
    summary = json.loads((place / "runs/quickstart/summary.json").read_text())
    assert summary["status"] == "finished"
    assert (place / "runs/quickstart/gallery/index.html").is_file()


def test_the_version_has_one_place():
    """Of the files that must state it too."""
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
