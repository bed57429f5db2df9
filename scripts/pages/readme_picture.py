"""The README's block and picture, from a finished run.

    python -m scripts.pages readme-picture runs/quickstart

The captions are drawn with a fixed seed before any score is looked at, and each model is at its best guidance; a green
frame is strictly right, a red one is not.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path

import numpy as np
import yaml
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "assets" / "quickstart.png"
MODELS = ("base", "tuned")
COLUMNS, SCALE, MARGIN, CAPTION = 10, 3, 8, 44
RIGHT, WRONG, PAPER, INK = (46, 160, 67), (207, 34, 46), (255, 255, 255), (36, 41, 47)


def load(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def at_best(folder: Path, model: str) -> tuple[str, str]:
    """Tag of a model's evaluation at its best guidance, and its label."""
    scale = load(folder / "summary.json")[f"{model}_best_guidance"]["guidance_scale"]
    tag = f"{model}-guidance-{scale:g}"
    return tag if (folder / "eval" / tag).is_dir() else model, f"{model}\nCFG {scale:g}"


def draw(folder: Path) -> Image.Image:
    """Base above tuned, each at its best guidance, on the same captions and noise."""
    rows = {at_best(folder, model): load(folder / "eval" / f"{at_best(folder, model)[0]}.json") for model in MODELS}
    prompts = load(folder / "eval" / "base.json")["prompts"]
    chosen = sorted(np.random.default_rng(0).choice(len(prompts), size=COLUMNS, replace=False).tolist())
    side = 32 * SCALE
    cell = side + 2 * MARGIN
    sheet = Image.new("RGB", (60 + COLUMNS * cell, CAPTION + 2 * cell), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for column, prompt in enumerate(chosen):
        left = 60 + column * cell
        for number, text in enumerate(textwrap.wrap(prompts[prompt], 17)):
            pen.text((left + MARGIN, 2 + 14 * number), text, fill=INK, font=font)
        for row, ((tag, label), record) in enumerate(rows.items()):
            top = CAPTION + row * cell
            pen.text((8, top + cell // 2 - 12), label, fill=INK, font=font)
            image = Image.open(folder / "eval" / tag / f"{prompt:05d}-0.png").resize((side, side), Image.NEAREST)
            frame = RIGHT if record["scores"]["shapes_strict"][prompt][0] == 1 else WRONG
            pen.rectangle(
                (left + MARGIN - 3, top + MARGIN - 3, left + MARGIN + side + 2, top + MARGIN + side + 2), frame
            )
            sheet.paste(image, (left + MARGIN, top + MARGIN))
    return sheet


def block(folder: Path) -> str:
    """What the README says about the run."""
    summary, facts = load(folder / "summary.json"), load(folder / "provenance.json")
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    method, seeds = config["algorithm"]["name"], config["eval"]["samples_per_prompt"]

    def row(label: str, key: str, sign: str = "") -> str:
        value = summary[key]["shapes_strict"]
        mean, low, high = (format(100 * value[name], f"{sign}.1f") for name in ("mean", "low", "high"))
        return f"| {label} | {mean} % | [{low}, {high}] |"

    def best(model: str) -> str:
        key = f"{model}_best_guidance"
        return row(f"{model} with its best CFG ({summary[key]['guidance_scale']:g})", key)

    count = summary["base"]["shapes_strict"]["n"]
    lines = [
        "![base above tuned, each with its best CFG, on the same captions](assets/quickstart.png)",
        "",
        "Ten captions, drawn before any score was seen; base and tuned model each with its best CFG, from the same "
        "noise. A green frame is strictly right: all asked objects in the asked relation, and no other. A red one "
        "is not.",
        "",
        f"Strict accuracy on {count} held-out captions x {seeds} fixed seeds, {summary['iterations']} iterations "
        f"of `{method}`, {summary['seconds']:.0f} s in all on {facts['hardware']} ({facts['processes']} "
        "processes):",
        "",
        "| | `shapes_strict` | 95 % interval |",
        "|---|---|---|",
        row("base", "base"),
        row("tuned", "tuned"),
        row("paired difference", "difference", "+"),
        best("base"),
        best("tuned"),
        row("paired difference, each with its best CFG", "difference_best_guidance", "+"),
        "",
        f"The CFG of the last three rows is {summary['guidance_search']['how']}.",
        "",
        "Recipe `configs/quickstart.yaml`, seed 0; image and table by `python -m scripts.pages readme-picture "
        f"{folder}`. The tuned numbers depend on the processor: training carries its rounding on. Other seeds, "
        "other numbers of steps, and how the recipe was chosen: "
        "[docs/lab.md](docs/lab.md).",
    ]
    return "\n".join(line if line.startswith(("|", "!")) else _wrapped(line) for line in lines)


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages readme-picture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a finished run folder")
    folder = parser.parse_args(words).run
    draw(folder).save(IMAGE, optimize=True)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    marked = f"<!-- quickstart -->\n{block(folder)}\n<!-- end of quickstart -->"
    pattern = r"<!-- quickstart -->(?:.*<!-- end of quickstart -->)?"
    readme.write_text(re.sub(pattern, lambda _: marked, text, flags=re.DOTALL), encoding="utf-8")
    print(IMAGE)
