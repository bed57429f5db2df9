"""The report of the lab's SAGE-GRPO run on videos, small enough to be in the repository: docs/lab/video_report/.

    python scripts/lab.py video-sage_grpo --seeds 0     the run, if its folder is gone
    python scripts/video_report.py

The page is what `flowrl gallery` writes of the run folder, with the videos of fewer captions: those that the run would
have saved with `eval.save_images` of 48. Numbers are of all captions.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import lab

from flowrl.gallery import builder

RUN = "video-sage_grpo-seed0"
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "lab" / "video_report"
CAPTIONS = 48
LEFT_OUT = ("checkpoints", "adapter", "gallery")


def copy_run(run: Path, to: Path) -> None:
    """Copy a run folder without its weights and without the videos of all but the first captions.

    Raises:
        SystemExit: the run is not there or has no final evaluation.
    """
    if not (run / "eval" / "tuned.json").is_file():
        raise SystemExit(f"{run} is not a finished run: python scripts/lab.py video-sage_grpo --seeds 0")
    shutil.copytree(run, to, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for video in (to / "eval").glob("*/*-*.*"):
        if int(video.name.split("-")[0]) >= CAPTIONS:
            video.unlink()


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / RUN
        copy_run(lab.RUNS / RUN, copy)
        page = builder.build([copy], FOLDER)
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
