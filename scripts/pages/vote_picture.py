"""The picture of docs/votes.md, from a run of the tests.

    python -m scripts.pages vote-picture          docs/votes/page.png
    python -m scripts.pages vote-picture OUT      OUT/*.png

Votes are taken on a small synthetic run, that of the tests of the gallery. Needs Chromium and the extra browser. With
a folder, the page is shown wide, on a phone and in the dark, to be looked at. Then two voters throw dice over every
pair, and the lines of the terminal are printed.
"""

from __future__ import annotations

import argparse
import io
import random
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
Shot = tuple[str, dict[str, int], str]
PAGE: tuple[Shot, ...] = (("page", {"width": 760, "height": 540}, "light"),)
LOOK: tuple[Shot, ...] = (
    ("wide", {"width": 1440, "height": 900}, "light"),
    ("phone", {"width": 360, "height": 780}, "light"),
    ("dark", {"width": 1280, "height": 800}, "dark"),
)


def shoot(server: Any, out: Path, shots: tuple[Shot, ...]) -> None:
    """Write a picture of the page after three votes for each shot."""
    from tests.apps.gallery.browser import launched

    with launched() as browser:
        for done, (name, size, scheme) in enumerate(shots):
            with browser.new_context(viewport=size, color_scheme=scheme) as session:
                page = session.new_page()
                page.goto(server.address)
                for key in "12s" if not done else "":
                    page.locator("body[data-state=pair]").wait_for()
                    before = page.locator("#progress").text_content()
                    page.keyboard.press(key)
                    page.wait_for_function("p => document.getElementById('progress').textContent !== p", arg=before)
                page.locator("body[data-state=pair]").wait_for()
                shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                shot.quantize(128).save(out / f"{name}.png", optimize=True)


def main(words: list[str]) -> None:
    """Make the run, vote and shoot."""
    from flowrl.apps.voting.result import result
    from tests.apps.folders import make_run
    from tests.apps.voting.test_vote import voting

    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages vote-picture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, nargs="?", help="folder of pictures to be looked at")
    look = parser.parse_args(words).out
    out = look or ROOT / "docs" / "votes"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        run = make_run(Path(place) / "run", num_prompts=6, size=128, iterations=20)
        with voting(run) as server:
            shoot(server, out, LOOK if look else PAGE)
            dice = random.Random(0)
            for voter in ("ann", "bob"):
                while (pair := server.ballot.ask(voter)["pair"]) is not None:
                    server.ballot.vote(voter, pair["token"], dice.choice(["left", "right", "tie"]))
            print("\n".join(result(server.ballot.of_present_images()).lines()))
