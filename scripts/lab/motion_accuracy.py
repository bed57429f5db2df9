"""Accuracy and speed of the verifier of moving shapes: the tables of docs/rewards/shapes_motion.md.

    python -m scripts.lab motion-accuracy --size 32 --count 4000
    python -m scripts.lab motion-accuracy --size 32 --count 1000 --kind bright_specks

The first draws COUNT true videos, COUNT near misses (shared evenly by their kinds) and as much junk per kind at a size,
a quarter of each again through WebP and with noise, prints the table and puts it on the page. The second draws COUNT of
one kind, as rendered and through each change, and only prints its row.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

import numpy as np
from flowrl.rewards.shapes_motion import score_video

from tests.rewards import moving_misses as misses

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards" / "shapes_motion.md"


def accepted(kind: str, count: int, size: int, change: str) -> tuple[float, float]:
    """(share of videos that strict accepts, seconds of CPU a video of scoring alone)."""
    rng = np.random.default_rng((43, size))
    draw = misses.true if kind == "true" else misses.KINDS[kind]
    hits, seconds = 0.0, 0.0
    for _ in range(count):
        scene, video = draw(rng, size)
        changed = misses.CHANGES[change](video, rng)
        started = time.process_time()
        hits += score_video(scene, changed)[0]
        seconds += time.process_time() - started
    return hits / count, seconds / count


def table(size: int, count: int) -> str:
    """Markdown of everything at a size."""
    each = -(-count // len(misses.MISSES))
    lines = [
        f"{count} true videos, {each} of each kind of near miss and of junk; through WebP and with noise a quarter of "
        "that.\n",
        f"| {size} px | {' | '.join(misses.CHANGES)} |",
        f"|---|{'---|' * len(misses.CHANGES)}",
    ]
    speed = []
    for kind in ("true", *misses.KINDS):
        cells = []
        for change in misses.CHANGES:
            whole = count if kind == "true" else each
            share, seconds = accepted(kind, whole if change == "as rendered" else max(whole // 4, 1), size, change)
            cells.append(f"{100 * share:.2f} %")
            if kind == "true":
                speed.append(f"{1000 * seconds:.1f} ms")
        lines.append(f"| {'**true**' if kind == 'true' else kind} | {' | '.join(cells)} |")
    lines.append(f"| CPU a true video of 9 frames, one thread | {' | '.join(speed)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32, choices=(32, 64, 128))
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--kind", choices=("true", *misses.KINDS))
    given = parser.parse_args()
    if given.kind is not None:
        shares = [accepted(given.kind, given.count, given.size, change)[0] for change in misses.CHANGES]
        print(f"| {given.kind} | {' | '.join(f'{100 * share:.2f} %' for share in shares)} |")
        return
    made = table(given.size, given.count)
    print(made)
    begin, end = f"<!-- {given.size} px -->\n", f"\n<!-- end of {given.size} px -->"
    text = PAGE.read_text(encoding="utf-8")
    changed = re.sub(f"{begin}.*?{end}", lambda _: begin + made + end, text, flags=re.DOTALL)
    PAGE.write_text(changed, encoding="utf-8", newline="\n")
