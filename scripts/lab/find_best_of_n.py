"""FIND against best-of-n on its own prompts, at equal network evaluations.

    python -m scripts.lab find-best-of-n                   train, then write docs/algorithms/find.{json,md}
    python -m scripts.lab find-best-of-n --write           only write the table from the numbers
    python -m scripts.lab find-best-of-n a.b=c ...         with overrides of configs/lab/find.yaml
    python -m scripts.lab find-best-of-n --judge clip_cos 'rewards=[{name: clip_score, model: tiny-clip}]'

An image costs the same number of evaluations in both, so costs are counted in images. After n images a prompt, spent
on training, FIND draws from its Gaussian at one image each. For m images of a prompt both spend n + m: best-of-k has
k = 1 + n / m draws from N(0, 1) for each of them and keeps the one with the best training reward (equal ones: any).
Both are judged by the same output of a reward, the strict verifier unless `--judge` names another, on the same prompts;
intervals are paired, over prompts. Each judge has a table of its own.

The third column is for one image and lets FIND choose too: of the n that it drew in training, the best by the
training reward.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.config.load import load_config, resolve
from flowrl.core.rng import derive
from flowrl.display.console import log, set_up_logging
from flowrl.evaluation.evaluator import Setting
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import interval
from flowrl.rollout.trajectories import Rollout
from flowrl.run.report import row_line
from flowrl.run.session import Session
from flowrl.statistics.best_of import best_of

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "lab" / "find.yaml"
NUMBERS, PAGE = ROOT / "docs" / "algorithms" / "find.json", ROOT / "docs" / "algorithms" / "find.md"
STRICT = "shapes_strict"
WANTED = (1, 16, 64, 256, 1024)
"""Pictures of a prompt that are asked for, m."""


def best_of_share(values: np.ndarray, judged: np.ndarray, count: float) -> float:
    """`best_of` where `count` is a mean: some pictures get one draw more than others."""
    low = math.floor(count)
    if low == count:
        return best_of(values, judged, low)
    more = count - low
    return (1 - more) * best_of(values, judged, low) + more * best_of(values, judged, low + 1)


# ---- measuring


def values_of(session: Session, found: Evaluation, judge: str) -> tuple[np.ndarray, np.ndarray]:
    """(training values, judgements) of an evaluation, both [P, S]."""
    raw = {name: torch.from_numpy(table) for name, table in found.scores.items()}
    total = sum(entry.weight * entry.training_value(raw) for entry in session.rewards.entries)
    return torch.as_tensor(total).numpy(), found.scores[judge]


def drawn(session: Session, count: int, purpose: str, judge: str, *, base: bool) -> tuple[np.ndarray, np.ndarray]:
    """(training values, judgements) of `count` pictures a prompt, [P, count], from the laws or from N(0, 1)."""
    evaluator = replace(session.parts.evaluator, seed=derive(0, purpose))
    if base:
        evaluator = replace(evaluator, sampling=replace(evaluator.sampling, learned=None))
    evaluator = replace(evaluator, options=replace(evaluator.options, samples_per_prompt=count))
    setting = Setting(purpose, 0, session.eval_guidance, session.config.rollout.num_inference_steps, save=False)
    with session.weights.using(session.optimizer.role):
        result = evaluator(setting)
    return values_of(session, result, judge)


def measure(overrides: list[str], pool: int, draws: int, judge: str) -> None:
    """Train, and compare whenever every prompt has had 2^k groups of samples; each moment is written at once."""
    resolved = resolve(load_config(RECIPE, overrides))
    session, config = Session(resolved), resolved.run
    prompts = len(session.parts.evaluator.prompts)
    base = drawn(session, pool, "pool", judge, base=True)
    start = drawn(session, draws, "draws", judge, base=True)[1].mean(axis=1)
    seen: dict[int, list[tuple[float, float]]] = {row: [] for row in range(prompts)}
    points: list[dict[str, Any]] = []
    numbers = {
        "judge": judge,
        "overrides": overrides,
        "prompts": prompts,
        "pool": pool,
        "draws": draws,
        "seed": config.seed,
    }
    numbers |= {"base": interval(base[1].mean(axis=1)), "points": points}
    for iteration in range(1, config.iterations + 1):
        rollout = session.roll_out(iteration)
        note(session, rollout, seen, judge)
        row = session.update(rollout, session.credit(rollout))
        log.info("%s", row_line(row, config.iterations, session.parts.data.prompts))
        count = len(seen[0])
        epochs = count // config.rollout.group_size
        even = all(len(pairs) == count for pairs in seen.values())
        if even and epochs & (epochs - 1) == 0 and count <= pool and count not in [p["n"] for p in points]:
            own = drawn(session, draws, "draws", judge, base=False)[1].mean(axis=1)
            points.append({"n": count} | compared(own, start, base, seen))
            keep(numbers)


def kept_numbers() -> dict[str, Any]:
    """Judge -> what was measured with it."""
    return json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.is_file() else {}


def keep(numbers: dict[str, Any]) -> None:
    NUMBERS.write_text(json.dumps(kept_numbers() | {numbers["judge"]: numbers}, indent=1) + "\n", encoding="utf-8")


def note(session: Session, rollout: Rollout, seen: dict[int, list[tuple[float, float]]], judge: str) -> None:
    """Add (training value, judgement) of every image of a rollout, by the number of its law."""
    weights = torch.tensor([entry.weight for entry in session.rewards.entries])
    total = (rollout.rewards * weights[:, None, None]).sum(dim=0)
    for slot, law in enumerate(rollout.numbers.tolist()):
        seen[law] += zip(total[slot].tolist(), rollout.raw[judge][slot].tolist(), strict=True)


def compared(
    own: np.ndarray,
    start: np.ndarray,
    base: tuple[np.ndarray, np.ndarray],
    seen: dict[int, list[tuple[float, float]]],
) -> dict[str, Any]:
    """Of one moment: FIND's score [P], its gain, and the paired differences to best-of-k."""
    spent = len(seen[0])
    kept = np.array([best_of(*np.array(pairs).T, len(pairs)) for _, pairs in sorted(seen.items())])
    rivals = {}
    for wanted in WANTED:
        count = 1 + spent / wanted
        if count > base[0].shape[1]:
            count = float(base[0].shape[1])  # n + 1 of n: the last picture of the largest pool
        rivals[wanted] = np.array([best_of_share(*pair, count) for pair in zip(*base, strict=True)])
    same = np.array([best_of(*pair, spent) for pair in zip(*base, strict=True)])
    return {
        "find": interval(own),
        "gain": interval(own - start),
        "rivals": {str(m): interval(rival) for m, rival in rivals.items()},
        "differences": {str(m): interval(own - rival) for m, rival in rivals.items()},
        "kept": interval(kept),
        "kept_difference": interval(kept - same),
    }


# ---- the page


def percent(value: dict[str, float], sign: str = "+") -> str:
    mean, low, high = (format(100 * value[key], f"{sign}.1f") for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def table(numbers: dict[str, Any]) -> str:
    """A row for each n."""
    titles = ["n", "FIND", "gain on the base", *(f"less best-of-k, m = {m}" for m in WANTED)]
    titles.append("best of FIND's own n, less best-of-n")
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for point in numbers["points"]:
        cells = [str(point["n"]), percent(point["find"], ""), percent(point["gain"])]
        cells += [percent(point["differences"][str(m)]) for m in WANTED]
        lines.append("| " + " | ".join([*cells, percent(point["kept_difference"])]) + " |")
    base = percent(numbers["base"], "")
    judge = [] if numbers["judge"] == STRICT else [f"--judge {numbers['judge']}"]
    options = [*judge, f"--pool {numbers['pool']}", f"--draws {numbers['draws']}"]
    words = " ".join([*(shlex.quote(word) for word in numbers["overrides"]), *options])
    return "\n".join(
        [
            f"{numbers['prompts']} prompts, seed {numbers['seed']}, {numbers['draws']} draws of FIND a prompt, a pool "
            f"of {numbers['pool']} images of the base a prompt, whose mean is {base}; `python "
            f"scripts/find_against_best_of_n.py {words}`. `{numbers['judge']}`, hundredths.",
            "",
            *lines,
        ]
    )


def write_page(numbers: dict[str, Any]) -> None:
    start, end = (f"<!-- {word} best of n by {numbers['judge']} -->" for word in ("begin", "end"))
    marked, pattern = f"{start}\n{table(numbers)}\n{end}", f"{start}.*{end}"
    text, result = re.subn(pattern, lambda _: marked, PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert result == 1, f"{PAGE} lost its marks"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="a.b=c words")
    parser.add_argument("--pool", type=int, default=512, help="images of the base a prompt; the largest n")
    parser.add_argument("--draws", type=int, default=16, help="images that measure a noise distribution")
    parser.add_argument("--judge", default=STRICT, help="output of a reward of the run")
    parser.add_argument("--write", action="store_true", help="only write the table")
    args = parser.parse_args()
    if not args.write:
        set_up_logging(None, main=True)
        measure(args.overrides, args.pool, args.draws, args.judge)
    for numbers in kept_numbers().values():
        write_page(numbers)
        print(table(numbers))
