"""The pictures of a comparison in docs/judging/, from finished runs.

    python -m scripts.pages comparison-pictures RUN RUN ...

The runs are copied without their weights, so their folders stay as they are. Needs Chromium and the packages of the
extra browser.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "judging"
SIZE = {"width": 1280, "height": 1880}
SHOTS = (("comparison", "#compare-head", 1880), ("comparison_images", "#compare-images", 900))
"""Name of a picture, what it begins with, its height in pixels."""


def shoot(file: Path) -> None:
    """Write the pictures of a comparison's page."""
    from tests.apps.gallery.browser import launched, opened

    with launched() as browser, opened(browser, file, viewport=SIZE) as page:
        for name, place, height in SHOTS:
            page.set_viewport_size(SIZE | {"height": height})
            page.locator(place).evaluate("e => e.scrollIntoView({block: 'start', behavior: 'instant'})")
            page.wait_for_timeout(1000)
            shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            shot.save(OUT / f"{name}.png", optimize=True)
            print(OUT / f"{name}.png", (OUT / f"{name}.png").stat().st_size)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages comparison-pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path, nargs="+", help="finished run folders")
    options = parser.parse_args(words)
    from flowrl.apps.gallery import build

    with tempfile.TemporaryDirectory() as temporary:
        runs = [Path(temporary) / run.name for run in options.runs]
        for source, copy in zip(options.runs, runs, strict=True):
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("checkpoints", "adapter", "gallery"))
        shoot(build(runs))
