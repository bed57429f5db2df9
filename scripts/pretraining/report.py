"""What a tiny pipeline can do: strict accuracy of plain pipeline calls, and its record, `pretraining.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flowrl import shapes
from scripts.pretraining.training import Model, Settings

FINGERPRINT = {"prompt": "a red circle left of a blue square", "seed": 0}


@torch.no_grad()
def strict_accuracy(pipe: Any, count: int, **call: Any) -> dict[str, float]:
    """Strict accuracy of plain pipeline calls on held-out captions, overall and by task."""
    from flowrl.rewards.shapes import detect, score_scene

    captions, hits = shapes.prompts("heldout")[:count], {}
    for start in range(0, len(captions), 64):
        part = captions[start : start + 64]
        generator = [torch.Generator().manual_seed(start + i) for i in range(len(part))]
        images = pipe(part, output_type="np", generator=generator, **call).images
        for scene, image in zip(map(shapes.parse, part), images.transpose(0, 3, 1, 2), strict=True):
            hits.setdefault(scene.task, []).append(score_scene(scene, detect(image))[0])
    flat = [hit for group in hits.values() for hit in group]
    return {"all": sum(flat) / len(flat)} | {task: sum(group) / len(group) for task, group in sorted(hits.items())}


def quiet(pipe: Any) -> Any:
    """The pipeline without progress bars, every part in evaluation mode."""
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.eval()
    return pipe


def report(pipe: Any, model: Model, when: str, count: int, *, final: bool = False) -> dict[str, dict[str, float]]:
    """Print strict accuracy at the lab's own call and, at the end, at others."""
    table, quiet_pipe = {}, quiet(pipe)
    for name, (call, share) in list(model.calls.items())[: None if final else 1]:
        row = table[name] = strict_accuracy(quiet_pipe, round(count * share), **call)
        print(f"{when}, {name}: " + " ".join(f"{k} {v:.3f}" for k, v in row.items()), flush=True)
    return table


@torch.no_grad()
def fingerprint(pipe: Any) -> list[list[list[float]]]:
    """[3][4][4] mean values in [0, 1] of the 8 x 8 px blocks of one plain call's picture."""
    generator = torch.Generator().manual_seed(FINGERPRINT["seed"])
    image = quiet(pipe)(FINGERPRINT["prompt"], output_type="np", generator=generator).images[0]
    blocks = image.transpose(2, 0, 1).reshape(3, 4, 8, 4, 8).mean(axis=(2, 4))
    return np.round(blocks.astype(float), 4).tolist()


def record(model: Model, folder: Path, settings: Settings | None = None) -> None:
    """Measure a saved pipeline and write its `pretraining.json`; `settings` None: those of the file stay."""
    file, pipe = folder / "pretraining.json", model.load(folder)
    kept = json.loads(file.read_text(encoding="utf-8"))["settings"] if settings is None else settings.facts()
    facts = {
        "settings": kept,
        "strict": report(pipe, model, "final", 512, final=True),
        "fingerprint": {**FINGERPRINT, "blocks": fingerprint(pipe)},
    }
    file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
