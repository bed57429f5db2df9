"""How far tiny-judge agrees with the verifier: on samples of the base, noisy ones too, and of a new run that climbs it.

All on held-out captions. `auc` is the share of pairs of a passed and a refused sample whose passed one has the higher
logit; `within captions` the mean of that over captions whose samples are of both kinds.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch
from flowrl.rewards._latent_judge.network import Judge, load
from flowrl.rewards._latent_judge.training import noised

from flowrl import shapes
from scripts.pretraining.clip_measure import auc
from scripts.pretraining.judge import Pool, Settings, World, climb, make, opened

LEVELS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
BASE, CLIMBED = 8, 4
"""Samples a caption."""
SEED = 77_000
"""Of the new run and of all samples, unlike the rounds'."""


@torch.no_grad()
def logits(judge: Judge, world: World, pool: Pool, sigma: float) -> np.ndarray:
    """[N] under the own captions, the latents noised to one level."""
    generator, found = torch.Generator().manual_seed(SEED), []
    for rows in torch.arange(len(pool.x0)).split(256):
        cond, level = world.cond([pool.captions[row] for row in rows.tolist()]), torch.full((len(rows),), sigma)
        x = noised(pool.x0[rows], level, generator)
        found.append(judge(x, level, cond["prompt_embeds"], cond["pooled"]))
    return torch.cat(found).numpy()


def agreement(values: np.ndarray, pool: Pool) -> dict[str, float]:
    """Of a pool's logits with its labels."""
    rows: dict[str, list[int]] = {}
    for row, caption in enumerate(pool.captions):
        rows.setdefault(caption, []).append(row)
    apart = [auc(values[group], pool.strict[group]) for group in rows.values()]
    facts = {"strict": pool.strict.mean(), "judge": (1 / (1 + np.exp(-values))).mean(), "auc": auc(values, pool.strict)}
    facts["within captions"] = np.nanmean(apart) if np.isfinite(apart).any() else np.nan
    return {name: round(float(value), 4) for name, value in facts.items()}


def measure(settings: Settings) -> dict[str, Any]:
    """Of the saved judge."""
    judge, world = load(settings.output, "tiny-judge"), opened(settings)
    held_out, tables = shapes.prompts("heldout"), {}
    base = world.drawn(world.model.adapter, held_out * BASE, SEED)
    tables["samples of the base"] = {
        str(sigma): _told(f"sigma {sigma}", agreement(logits(judge, world, base, sigma), base)) for sigma in LEVELS
    }
    run = tables["a new run that climbs it"] = {}
    for update, adapter in climb(settings.output, SEED, settings.climb, settings.looks[1::2]):
        pool = world.drawn(adapter, held_out * CLIMBED, SEED)
        run[str(update)] = _told(f"update {update}", agreement(logits(judge, world, pool, 0.0), pool))
    return tables


def record(settings: Settings, *, anew: bool = True) -> None:
    """Train, or not `anew`: keep the settings of the file; measure, and write `pretraining.json`."""
    torch.set_num_threads(1)
    file, started = settings.output / "pretraining.json", time.process_time()
    if anew:
        make(settings)
        facts = {"settings": settings.facts(), "cpu_seconds": round(time.process_time() - started)}
    else:
        known = json.loads(file.read_text(encoding="utf-8"))
        facts = {name: known[name] for name in ("settings", "cpu_seconds")}
    file.write_text(json.dumps(facts | measure(settings), indent=1) + "\n", encoding="utf-8")


def _told(name: str, values: dict[str, float]) -> dict[str, float]:
    print(name, json.dumps(values), flush=True)
    return values
