"""How far tiny-clip agrees with the verifier on samples of tiny-sd3, and how far its score can be raised without it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata, spearmanr
from torch import Tensor

from flowrl import shapes
from flowrl.statistics.intervals import interval
from scripts.pretraining.clip import Settings, cosines, load, train

ASSETS = Path(__file__).resolve().parents[2] / "assets"
CAPTIONS, GROUP = 128, 16
ASCENT_STEPS, ASCENT_RATE, ASCENT_CAPTIONS = (0, 3, 10, 30, 100), 0.03, 64
VALUES = ("clip_cos", "shapes_strict", "shapes_partial")


def verify(images: Tensor, captions: list[str]) -> np.ndarray:
    """[B, 2] strict and partial."""
    from flowrl.rewards.shapes import detect, score_scene

    scenes = map(shapes.parse, captions)
    return np.asarray([score_scene(s, detect(i.numpy())) for s, i in zip(scenes, images.detach(), strict=True)])


@torch.no_grad()
def base_samples(captions: list[str], seed: int) -> Tensor:
    """[P, 16, 3, 32, 32] of tiny-sd3 at the lab's call: six steps, no CFG; each sample from its own noise."""
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(ASSETS / "tiny-sd3", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 6, "guidance_scale": 1.0, "max_sequence_length": 9, "output_type": "np"}
    groups = []
    for start in range(0, len(captions), 8):
        part = captions[start : start + 8]
        numbers = range(start * GROUP, (start + len(part)) * GROUP)
        generators = [torch.Generator().manual_seed(1_000_003 * (seed + 1) + number) for number in numbers]
        images = pipe(part, num_images_per_prompt=GROUP, generator=generators, **call).images
        groups.append(torch.from_numpy(images).permute(0, 3, 1, 2).unflatten(0, (len(part), GROUP)))
    return torch.cat(groups)


def auc(values: np.ndarray, hits: np.ndarray) -> float:
    """Share of (hit, miss) pairs whose hit has the higher value, ties half; NaN without both.

    >>> auc(np.asarray([3.0, 1.0, 2.0]), np.asarray([1, 0, 1]))
    1.0
    """
    positive, negative = int((hits == 1).sum()), int((hits == 0).sum())
    if not positive or not negative:
        return float("nan")
    ranks = rankdata(values)[hits == 1].sum()
    return float((ranks - positive * (positive + 1) / 2) / (positive * negative))


def _spearman(values: np.ndarray, others: np.ndarray) -> float:
    constant = np.ptp(values) == 0 or np.ptp(others) == 0
    return float("nan") if constant else float(spearmanr(values, others).statistic)


def agreement(proxy: np.ndarray, strict: np.ndarray, partial: np.ndarray) -> dict[str, dict[str, float]]:
    """Of [P, G] scores, means over prompts (95 % bootstrap) of what a group shows; n prompts where it shows any."""
    tables = {
        "auc of strict": [auc(v, h) for v, h in zip(proxy, strict, strict=True)],
        "spearman with strict": [_spearman(v, h) for v, h in zip(proxy, strict, strict=True)],
        "spearman with partial": [_spearman(v, h) for v, h in zip(proxy, partial, strict=True)],
    }
    return {
        name: interval(np.asarray(values), bounds=(0.0, 1.0) if name.startswith("auc") else (-1.0, 1.0))
        for name, values in tables.items()
    }


def measure_base(model: Any, tokenizer: Any, part: str, seed: int) -> dict[str, Any]:
    """Agreement within groups, and over all samples, for the first captions of a split."""
    captions = shapes.prompts(part)[:CAPTIONS]
    samples = base_samples(captions, seed)
    flat, repeated = samples.flatten(0, 1), [caption for caption in captions for _ in range(GROUP)]
    with torch.no_grad():
        proxy = torch.cat(
            [
                cosines(model, tokenizer, flat[start : start + 256], repeated[start : start + 256])
                for start in range(0, len(flat), 256)
            ]
        ).numpy()
    strict, partial = verify(flat, repeated).T
    tables = [values.reshape(samples.shape[:2]) for values in (proxy, strict, partial)]
    tasks = np.asarray([shapes.parse(caption).task for caption in captions])
    return {
        "mean": dict(zip(VALUES, (float(values.mean()) for values in tables), strict=True)),
        "std of clip_cos within groups": float(tables[0].std(axis=1).mean()),
        "within groups": agreement(*tables),
        "within groups, auc of strict by task": {
            str(task): agreement(*(values[tasks == task] for values in tables))["auc of strict"]
            for task in np.unique(tasks)
        },
        "all samples": {"auc of strict": auc(proxy, strict), "spearman with partial": _spearman(proxy, partial)},
    }


def ascend(model: Any, tokenizer: Any, images: Tensor, captions: list[str], steps: int, rate: float) -> Tensor:
    """Pictures after `steps` of Adam on the pixels, held in [0, 1], up the cosine with the caption."""
    pixels = images.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([pixels], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        (-cosines(model, tokenizer, pixels, captions).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)
    return pixels.detach()


def measure_ascent(model: Any, tokenizer: Any, seed: int) -> dict[str, list[dict[str, float]]]:
    """Start -> rows of proxy and verifier along the ascent, means over held-out captions."""
    captions, rng = shapes.prompts("heldout")[:ASCENT_CAPTIONS], np.random.default_rng((seed, 3))
    truth = torch.from_numpy(np.stack([shapes.draw(shapes.parse(caption), rng) for caption in captions]))
    starts = {
        "rendered truth": truth,
        "base samples": base_samples(captions, seed)[:, 0],
        "empty pictures": torch.full_like(truth, shapes.BACKGROUND),
    }
    table: dict[str, list[dict[str, float]]] = {}
    for name, images in starts.items():
        table[name] = []
        for steps in ASCENT_STEPS:
            moved = ascend(model, tokenizer, images, captions, steps, ASCENT_RATE)
            with torch.no_grad():
                proxy = float(cosines(model, tokenizer, moved, captions).mean())
            means = (proxy, *verify(moved, captions).mean(axis=0).tolist())
            table[name].append({"steps": steps} | dict(zip(VALUES, means, strict=True)))
    return table


def make(settings: Settings, *, only_measure: bool = False) -> None:
    """Train (unless told not to), measure, and write `pretraining.json`."""
    torch.set_num_threads(1)
    file = settings.output / "pretraining.json"
    if only_measure:
        known = json.loads(file.read_text(encoding="utf-8"))
        facts = {key: known[key] for key in ("settings", "training")}
    else:
        own = {key: value for key, value in vars(settings).items() if key != "output"}
        facts = {"settings": own, "training": train(settings)}
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    model, tokenizer = load(settings.output)
    seed, started = facts["settings"]["seed"], time.process_time()
    facts["base samples of tiny-sd3"] = {
        part: measure_base(model, tokenizer, part, seed) for part in ("train", "heldout")
    }
    facts["gradient ascent on the pixels"] = measure_ascent(model, tokenizer, seed)
    facts["measuring_cpu_seconds"] = round(time.process_time() - started)
    file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(file.read_text(encoding="utf-8"))
