"""The pages of docs/: links, files, and the options of the methods' pages."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from flowrl.apps.diagnosis import CHECKS
from flowrl.core import registry

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
METHODS = ROOT / "docs" / "algorithms"
SECTIONS = ["Algorithm", "Options", "Recipes and results", "What goes wrong", "Source"]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    text = re.sub(r"^(#+ .*)$", lambda line: re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line[1]), text, flags=re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in re.findall(r"^#+ (.*)$", text, re.M))
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path):
    # The notes on rewards are a part of a page in docs/.
    base = page.parent.parent if page.parts[-2:] == ("rewards", "notes.md") else page.parent
    for file, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        target = base / file if file else page
        assert target.exists(), file
        assert not heading or heading in anchors(target), f"{file}#{heading}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_recipes_and_pages_that_a_page_names_are_there(page: Path):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.:])(?:configs|flowrl|scripts|tests|docs)/[a-z0-9_/-]+\.(?:yaml|py|sh|md)\b", text)
    base = [ROOT, page.parent] if page.name == "rewards.md" else [ROOT]
    assert [file for file in named if not any((folder / file).exists() for folder in base)] == []


@pytest.mark.parametrize("name", registry.names("algorithms"))
def test_a_methods_page_has_its_sections_in_order_and_names_its_options(name: str):
    text = (METHODS / f"{name}.md").read_text(encoding="utf-8")
    headings = [h for h in re.findall(r"^## (.*)$", text, re.M) if h in SECTIONS]
    assert headings == SECTIONS
    assert "Choose" in text.split("\n\n")[1], "the page begins with what the method is for"
    recipes = re.findall(r"configs/lab/([\w-]+)\.yaml", text.split("\n## Recipes and results\n")[1].split("\n## ")[0])
    method = importlib.import_module(f"flowrl.algorithms.{name}")
    missing = [recipe for recipe in recipes if f"](../lab/curves/{recipe}.svg)" not in text]
    assert not missing or method.LEVEL == "experimental", "its runs in the lab are not shown"
    config = method.Config
    options = {field.name for field in fields(config)}
    own = vars(config).get("__annotations__", {}).keys() & options
    assert not [option for option in own if f"`algorithm.{option}" not in text]
    assert set(re.findall(r"^\| `algorithm\.(\w+)", text, re.M)) <= options


def test_every_finding_has_one_heading_below_a_symptom():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert sorted(heading.lower() for heading in re.findall(r"^### (.*)$", text, re.M)) == sorted(
        check.name for check in CHECKS
    )
    assert "\n## " in text.split("\n### ")[0]


def test_the_slurm_script_and_the_pages_give_a_signalled_run_the_time_to_save(monkeypatch):
    """torchrun kills 30 s after a signal; it must wait longer, and less long than Slurm waits for the job."""
    from torch.distributed.launcher.api import LaunchConfig

    page, scaling = ((ROOT / "docs" / name).read_text() for name in ("tutorials/cluster.md", "scaling.md"))
    script = page.split('title="train.sbatch"')[1].split("```")[0]
    (before_end,) = map(int, re.findall(r"--signal=TERM@(\d+)", script))
    ((variable, seconds),) = re.findall(r"export (TORCH_ELASTIC_\w+)=(\d+)", script)
    usual = LaunchConfig(1, 1, 1).shutdown_timeout
    monkeypatch.setenv(variable, seconds)
    assert LaunchConfig(1, 1, 1).shutdown_timeout == int(seconds)
    assert usual is not None
    assert usual < int(seconds) < before_end
    assert all(f"{number} seconds" in page for number in (usual, int(seconds), before_end))
    assert f"{variable}={seconds}" in scaling
    assert f"{usual} seconds" in scaling
