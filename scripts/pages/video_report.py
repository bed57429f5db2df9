"""The report of the lab's SAGE-GRPO run on videos, small enough for the repository, and its filmstrips in docs/lab/.

    python -m scripts.lab video-sage_grpo --seeds 0     the run, if its folder is gone
    python -m scripts.pages video-report

The page docs/lab/video_report/index.html is what `flowrl gallery` writes of the run folder, with the videos of fewer
captions: those that the run would have saved with `eval.save_images` of 48. Numbers are of all captions. The filmstrips
docs/lab/videos.png are of one caption of each task: the first one of the page that the tuned model alone gets right,
or its first one where there is none. Behind it stands how many captions of the task each model gets right.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from flowrl import moving_shapes
from flowrl.apps.gallery import builder
from flowrl.evaluation.results import Evaluation
from scripts.lab import runs
from scripts.pages.strips import strips

RUN = "video-sage_grpo-seed0"
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "lab" / "video_report"
STRIPS = FOLDER.parent / "videos.png"
CAPTIONS = 48
"""Captions whose videos the report has."""
LEFT_OUT = ("checkpoints", "adapter", "gallery")


def copy_run(run: Path, to: Path) -> None:
    """Copy a run folder without its weights and without the videos of all but the first captions.

    Raises:
        SystemExit: the run is not there or has no final evaluation.
    """
    if not (run / "eval" / "tuned.json").is_file():
        raise SystemExit(f"{run} is not a finished run: python -m scripts.lab video-sage_grpo --seeds 0")
    shutil.copytree(run, to, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for video in (to / "eval").glob("*/*-*.*"):
        if int(video.name.split("-")[0]) >= CAPTIONS:
            video.unlink()


def draw(run: Path) -> Image.Image:
    """Base above tuned, on the same noise, for one caption of each task; a green bar is right, a red one wrong."""
    found = {name: Evaluation.load(run / "eval" / f"{name}.json") for name in ("base", "tuned")}
    prompts = found["base"].prompts
    tasks = np.array([moving_shapes.parse(prompt).task for prompt in prompts])
    right = {name: e.scores["shapes_motion_strict"][:, 0] == 1 for name, e in found.items()}
    captions: dict[int, str] = {}
    for task in moving_shapes.TASKS:
        every = np.flatnonzero(tasks == task)
        shown = every[every < CAPTIONS]
        gained = shown[right["tuned"][shown] & ~right["base"][shown]]
        for k in (gained if len(gained) else shown)[:1].tolist():
            counts = ", ".join(f"{name} {right[name][every].sum()}" for name in found)
            captions[k] = f"{prompts[k]}   (right of {len(every)} such captions: {counts})"
    bars = {(name, k): bool(right[name][k]) for name in found for k in captions}
    return strips({name: run / "eval" / name for name in found}, captions, bars)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages video-report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(words)
    run = runs.RUNS / RUN
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / RUN
        copy_run(run, copy)
        page = builder.build([copy], FOLDER)
    draw(run).save(STRIPS, optimize=True)
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB")
