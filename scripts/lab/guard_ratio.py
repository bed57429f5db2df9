"""Measure GRPO-Guard's claim: log ratios of unused edges under Flow-GRPO and under the guard, step by step.

    python -m scripts.lab guard-ratio            train both, write docs/algorithms/guard_ratio.{json,svg}, the page
    python -m scripts.lab guard-ratio --write    only write the picture and the page from the numbers
    python -m scripts.lab guard-ratio a.b=c ...  with overrides of scripts/lab/guard_ratio.yaml

Before the 2nd, 3rd, ... update of an iteration, the log ratio of the edges that this update is about to train is
taken without gradients. None of them has moved the policy since it drew them, so their noise z is independent of
the change of the mean; an edge that was trained on has a log ratio that follows its own advantage.

Both forms of the ratio are taken along both runs: that separates what the form does from what the training does.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod
from flowrl.config.load import load_config, resolve
from flowrl.display.console import log, set_up_logging
from flowrl.losses.ratio import normalised_log_ratio
from flowrl.run.report import row_line
from flowrl.run.session import Session
from flowrl.training.edge_batches import EdgeBatches
from flowrl.training.learner import Learner

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "scripts" / "lab" / "guard_ratio.yaml"
PAGES = ROOT / "docs" / "algorithms"
NUMBERS, IMAGE, PAGE = PAGES / "guard_ratio.json", PAGES / "guard_ratio.svg", PAGES / "grpo_guard.md"
# The published clip ranges times sqrt(65536 / 256): both log ratios go with 1 / sqrt(dims).
METHODS = {
    "flow_grpo": ("plain", ["algorithm.clip_range=1.6e-3"]),
    "grpo_guard": ("ratio_norm", ["algorithm.name=grpo_guard", "algorithm.clip_range=3.2e-5"]),
}
FORMS = ("plain", "ratio_norm", "weighted")
DRAWS = 2000


@dataclass(frozen=True, slots=True)
class LogRatios:
    """Of E unused edges; all [E], on the CPU."""

    edge: Tensor
    """Row of the rollout's edges."""
    iteration: Tensor
    step: Tensor
    plain: Tensor
    """log p - log p_old, means over latent dims."""
    ratio_norm: Tensor
    """mean(z * dmu), with dmu the change of the mean since the rollout."""
    own: Tensor
    """What the run's own method uses: one of the two."""
    square: Tensor
    """mean(dmu^2) over latent dims."""
    std: Tensor
    """Of the step's law."""
    gain: Tensor
    """|d mean / d velocity|."""

    @property
    def weighted(self) -> Tensor:
        """ratio_norm times the guard's weight of the step: what its loss is linear in on policy."""
        return self.ratio_norm / self.gain

    @property
    def kl(self) -> Tensor:
        """mean(dmu^2) / (2 s^2): minus the expected plain log ratio."""
        return self.square / (2 * self.std.square())

    @staticmethod
    def join(parts: list[LogRatios]) -> LogRatios:
        return LogRatios(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(LogRatios)})


class Probe:
    """Listens in a learner: before each update but the first of an iteration, the log ratios of its edges.

    Nothing is drawn and no weight is touched, so the run goes on bitwise as without it.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner, self.parts, self.iteration = learner, [], 0
        self.trained = torch.zeros(0, dtype=torch.int64)  # edges used since the old policy was frozen
        learner.before_update = self.before_update
        # Flow-GRPO needs no mean_old, we do.
        learner.method.columns = ("mean_old",)

    def begin(self, iteration: int) -> None:
        """A new rollout: the old policy is the present one, no edge is used."""
        self.iteration, self.trained = iteration, self.trained[:0]

    def before_update(self, work: EdgeBatches, number: int) -> None:
        """Take the log ratios of the share that is about to be trained."""
        share = work.shares[number]
        assert not torch.isin(share, self.trained).any(), "an edge was used before"
        if len(self.trained) and len(share):  # on policy every log ratio is 0
            self.parts.append(self.log_ratios(work, number))
        self.trained = torch.cat([self.trained, share])

    @torch.no_grad()
    def log_ratios(self, work: EdgeBatches, number: int) -> LogRatios:
        """Of the edges of one share, at the batches of their update."""
        algorithm, networks = self.learner.method, self.learner.networks
        sampler, share, parts = networks.policy.sampler, work.shares[number], []
        for batch, _ in work.batches(number):
            policy, old = networks.transition(batch), batch.columns["mean_old"]
            values = {
                "plain": EdgeMethod.log_ratio(algorithm, policy, batch, sampler),
                "ratio_norm": normalised_log_ratio(policy, old, batch.next_latents),
                "own": algorithm.log_ratio(policy, batch, sampler),
                "square": (policy.mean - old).square().flatten(1).mean(dim=1),
                "std": policy.std,
                "gain": sampler.velocity_gain(batch.step).abs(),
                "step": batch.step.index,
            }
            here = {name: value.cpu() for name, value in values.items()}
            here |= {"edge": share[batch.place], "iteration": torch.full((len(batch),), self.iteration)}
            parts.append(LogRatios(**here))
        return LogRatios.join(parts)


def train(method: str, overrides: list[str]) -> tuple[LogRatios, dict]:
    """One run with the probe in its learner: the log ratios, and what became of the rewards."""
    resolved = resolve(load_config(RECIPE, METHODS[method][1] + overrides))
    config, started, rows = resolved.run, time.monotonic(), []
    session = Session(resolved)
    probe = Probe(session.parts.learner)
    base = session.evaluate("base")
    for iteration in range(1, config.iterations + 1):
        probe.begin(iteration)
        rows.append(session.step(iteration))
        log.info("%s", row_line(rows[-1], config.iterations, session.parts.data.prompts))
    tuned = session.evaluate("tuned")
    size, clip = max(1, len(rows) // 5), resolved.algorithm.config.clip_range
    result = LogRatios.join(probe.parts)
    facts = {
        "iterations": config.iterations,
        "updates_per_iteration": config.optim.updates_per_iteration,
        "samples_per_iteration": config.samples_per_iteration,
        "learning_rate": config.optim.learning_rate,
        "seed": config.seed,
        "clip_range": clip,
        "dims": int(np.prod(session.model.latent_shape())),
        "jpeg_kb_first_fifth": float(np.mean([row["reward/jpeg_kb_mean"] for row in rows[:size]])),
        "jpeg_kb_last_fifth": float(np.mean([row["reward/jpeg_kb_mean"] for row in rows[-size:]])),
        "held_out": {name: [float(np.nanmean(e.scores[name])) for e in (base, tuned)] for name in base.scores},
        "above_clip": float((result.own.exp() > 1 + clip).float().mean()),
        "below_clip": float((result.own.exp() < 1 - clip).float().mean()),
        "seconds": round(time.monotonic() - started),
    }
    return result, facts


# ---- statistics


def moments(values: Tensor, iteration: Tensor) -> dict[str, float]:
    """Mean of `values` [E], its standard error, and the std of one value.

    The error is clustered by iteration: all edges of one share a change of the policy, and the steps of a sample
    share its path. Noise of different edges is independent, so for the normalised form it agrees with std / sqrt(E).
    """
    mean, std = values.double().mean(), values.double().std(correction=0)
    clusters, place = iteration.unique(return_inverse=True)
    sums = torch.zeros(len(clusters), dtype=torch.float64).index_add_(0, place, values.double() - mean)
    count = max(len(clusters), 2)
    error = (sums.square().sum() * count / (count - 1)).sqrt() / len(values)
    return {"mean": float(mean), "error": float(error), "std": float(std), "n": len(values)}


def spread_draws(values: Tensor, found: LogRatios) -> np.ndarray:
    """Largest std of a step over the smallest: as measured, then DRAWS bootstrap draws over iterations, [1 + DRAWS]."""
    steps, clusters = found.step.unique(return_inverse=True)[1], found.iteration.unique(return_inverse=True)[1]
    shape = (int(clusters.max()) + 1, int(steps.max()) + 1)
    tables = []
    for power in (0, 1, 2):
        table = torch.zeros(shape, dtype=torch.float64)
        tables.append(table.index_put_((clusters, steps), values.double() ** power, accumulate=True).numpy())
    drawn = np.random.default_rng(0).multinomial(shape[0], np.full(shape[0], 1 / shape[0]), size=DRAWS)
    count, first, second = (np.vstack([np.ones(shape[0]), drawn]) @ table for table in tables)
    std = np.sqrt(second / count - (first / count) ** 2)
    return std.max(axis=1) / std.min(axis=1)


def interval(draws: np.ndarray) -> dict[str, float]:
    low, high = np.percentile(draws[1:], [2.5, 97.5])
    return {"value": float(draws[0]), "low": float(low), "high": float(high)}


def summarise(found: LogRatios) -> dict:
    """Per form: over all edges, per step, and the spread of the steps' std."""
    result = {}
    for form in FORMS:
        values, steps = getattr(found, form), []
        for k in found.step.unique().tolist():
            here = found.step == k
            expected = float(-found.kl[here].double().mean()) if form == "plain" else 0.0
            steps.append({"step": k} | moments(values[here], found.iteration[here]) | {"expected": expected})
        result[form] = {
            "all": moments(values, found.iteration),
            "expected": float(-found.kl.double().mean()) if form == "plain" else 0.0,
            "spread": interval(spread_draws(values, found)),
            "steps": steps,
        }
    laws = [(found.std[found.step == k][0], found.gain[found.step == k][0]) for k in found.step.unique().tolist()]
    return result | {"law": [{"std": float(std), "gain": float(gain)} for std, gain in laws]}


def measure(overrides: list[str]) -> dict:
    """Both runs, and how many times smaller the guard's spread is."""
    numbers, own = {"overrides": overrides, "runs": {}}, {}
    for method, (form, _) in METHODS.items():
        result, facts = train(method, overrides)
        numbers["runs"][method] = {"own": form} | facts | summarise(result)
        own[method] = result
    plain = spread_draws(own["flow_grpo"].plain, own["flow_grpo"])
    numbers["plain_over"] = {
        f"{method}/{form}": interval(plain / spread_draws(getattr(result, form), result))
        for method, result in own.items()
        for form in FORMS[1:]
    }
    return numbers


# ---- the page


def table(numbers: dict) -> str:
    """Rows per run and form, then the two own ratios step by step."""
    lines = [
        "| run | log ratio | mean | expected | mean / error | std of a step, smallest to largest | spread [95 %] |",
        "|---|---|---|---|---|---|---|",
    ]
    names = {"plain": "plain", "ratio_norm": "normalised", "weighted": "normalised, times delta"}
    for method, run in numbers["runs"].items():
        for form in FORMS:
            part, stds = run[form], [step["std"] for step in run[form]["steps"]]
            whole, spread = part["all"], part["spread"]
            own = "**" if form == run["own"] else ""
            lines.append(
                f"| {method} | {own}{names[form]}{own} | {whole['mean']:.2e} ± {whole['error']:.1e} "
                f"| {part['expected']:.2e} | {whole['mean'] / whole['error']:+.1f} "
                f"| {min(stds):.2e} to {max(stds):.2e} "
                f"| {spread['value']:.2f} [{spread['low']:.2f}, {spread['high']:.2f}] |"
            )
    lines += [
        "",
        "| step | std of the step | plain, flow_grpo: mean (expected) | std | normalised, grpo_guard: mean | std |",
        "|---|---|---|---|---|---|",
    ]
    plain, guard = (run[run["own"]]["steps"] for run in numbers["runs"].values())
    for law, a, b in zip(numbers["runs"]["flow_grpo"]["law"], plain, guard, strict=True):
        lines.append(
            f"| {a['step']} | {law['std']:.3f} | {a['mean']:.2e} ± {a['error']:.1e} ({a['expected']:.2e}) "
            f"| {a['std']:.2e} | {b['mean']:.2e} ± {b['error']:.1e} | {b['std']:.2e} |"
        )
    return "\n".join(lines)


def draw(numbers: dict, file: Path) -> None:
    """Mean per step in units of the step's std, and the std over its smallest step's: free of each form's unit."""
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and the same numbers give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "guard_ratio", "font.size": 9}
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    styles = {"plain": ("#d1495b", "o"), "ratio_norm": ("#2e6f95", "s"), "weighted": ("#7a9e3f", "^")}
    names = {"plain": "plain", "ratio_norm": "normalised", "weighted": "normalised x delta"}
    for method, run in numbers["runs"].items():
        for form, (color, marker) in styles.items():
            steps, own = run[form]["steps"], form == run["own"] or (form == "weighted" and method == "grpo_guard")
            at, std = [step["step"] for step in steps], np.array([step["std"] for step in steps])
            look = {"color": color, "marker": marker, "markersize": 4, "alpha": 1.0 if own else 0.45}
            look |= {"linestyle": "-" if own else ":", "label": f"{names[form]}, {method} run"}
            if form != "weighted":
                mean, error = (np.array([step[name] for step in steps]) / std for name in ("mean", "error"))
                left.errorbar(at, mean, 1.96 * error, capsize=2, **look)
            right.plot(at, std / std.min(), **look)
    left.axhline(0, color="black", linewidth=0.6)
    left.set(xlabel="denoising step", ylabel="mean log ratio / std of the step", title="mean, with 95 % interval")
    right.set(xlabel="denoising step", ylabel="std / smallest std", title="std; spread is the highest point")
    right.set_yscale("log")
    ticks = [2**power for power in range(8)]
    right.set_yticks(ticks, labels=[str(tick) for tick in ticks])
    right.minorticks_off()
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def write_page(numbers: dict) -> None:
    marked = f"<!-- guard_ratio -->\n{table(numbers)}\n<!-- end of guard_ratio -->"
    pattern = r"<!-- guard_ratio -->.*<!-- end of guard_ratio -->"
    text, result = re.subn(pattern, lambda _: marked, PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert result == 1, f"{PAGE} lost its marks"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="a.b=c words")
    parser.add_argument("--write", action="store_true", help="only write the picture and the page")
    args = parser.parse_args()
    if not args.write:
        set_up_logging(None, main=True)
        NUMBERS.write_text(json.dumps(measure(args.overrides), indent=1) + "\n", encoding="utf-8")
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    draw(numbers, IMAGE)
    write_page(numbers)
    print(table(numbers))
