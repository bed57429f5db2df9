"""The pictures of the live page in docs/watching/, from a finished run.

    python -m scripts.pages watch-pictures RUN [--iteration 30 | --guarded]

A copy of a finished run is shown as it was after an iteration: without what came later, and with its lock held. With
`--guarded` it is shown as its guard ended it. Needs Chromium and the packages of the extra browser.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import shutil
import tempfile
import threading
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "watching"
Shot = tuple[str, dict[str, int], str, str]
SHOTS: tuple[Shot, ...] = (
    ("live-wide", {"width": 1280, "height": 1010}, "light", "#run-0-head"),
    ("live-phone", {"width": 390, "height": 844}, "light", "#run-0-head"),
    ("live-dark", {"width": 1280, "height": 900}, "dark", "#run-0-curves"),
)
GUARDED = (("guarded", {"width": 1280, "height": 1010}, "light", "#run-0-head"),)


def rewind(run: Path, iteration: int) -> None:
    """Make a copy of a finished run what it was after an iteration."""
    rows = (run / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in rows if json.loads(line)["iteration"] <= iteration]
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    for file in (run / "eval").glob("*.json"):
        if file.stem == "tuned" or (json.loads(file.read_text()).get("iteration") or 0) > iteration:
            file.unlink()
    summary = json.loads((run / "summary.json").read_text())
    known = ("evaluated_on", "held_out", "primary", "lower_is_better")
    (run / "summary.json").write_text(json.dumps({"status": "running"} | {key: summary[key] for key in known}))


def shoot(run: Path, shots: tuple[Shot, ...], state: str) -> None:
    """Write the pictures of a run folder's live page, once the page says that the run is in this state."""
    from flowrl.apps.gallery.server import Server
    from tests.apps.gallery.browser import launched

    with Server([run], 0) as server, launched() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, size, scheme, place in shots:
            with browser.new_context(viewport=size, color_scheme=scheme) as session:
                page = session.new_page()
                page.goto(server.address)
                page.locator(f".live[data-state={state}]").wait_for()
                if place != "#run-0-head":
                    page.locator(place).evaluate("e => e.scrollIntoView({block: 'start', behavior: 'instant'})")
                page.wait_for_timeout(500)
                shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                shot.save(OUT / f"{name}.png", optimize=True)
                print(OUT / f"{name}.png", (OUT / f"{name}.png").stat().st_size)
        server.shutdown()


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages watch-pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a finished run folder; it is copied")
    parser.add_argument("--iteration", type=int, default=30)
    parser.add_argument("--guarded", action="store_true", help="the run as its guard ended it")
    options = parser.parse_args(words)
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / options.run.name
        shutil.copytree(options.run, run, ignore=shutil.ignore_patterns("checkpoints", "adapter", "gallery"))
        if options.guarded:
            shoot(run, GUARDED, "ended")
            return
        rewind(run, options.iteration)
        with (run / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            shoot(run, SHOTS, "live")
