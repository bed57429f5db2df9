"""The documentation site: every page has its place, every link leads somewhere, nothing is loaded from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"rewards/notes.md"}  # pasted into the page that a script writes


def entries(nav: object) -> list[str]:
    """Pages below an entry of `nav`, in order."""
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []
    return [page for part in below for page in entries(part)]


def test_every_page_of_docs_stands_in_the_navigation_once():
    listed = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - PARTS
    assert sorted(pages - set(listed)) == [], "add them to nav in mkdocs.yml"
    assert sorted(set(listed) - pages) == [], "no such page"
    assert len(listed) == len(set(listed))


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_another_host(tmp_path: Path):
    pytest.importorskip("material", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 50
    loaded = r"""<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]*)"""
    found = {page.name: re.findall(loaded, page.read_text(encoding="utf-8")) for page in pages}
    assert {name: hosts for name, hosts in found.items() if hosts} == {}
