"""Checks of the run's settings: evaluation unlike training, text that is cut, blur, a slow phase."""

import math
from pathlib import Path

import numpy as np

from flowrl.apps.diagnosis.evidence import Evidence, Lacking, Seen
from flowrl.apps.gallery.runs import number, value_at
from flowrl.core.assets import table

CUT_SHARE = 0.05
"""Share of the prompts that are cut: below it a prompt of an iteration of 8 is cut every third iteration."""
BLURRED = 0.5
"""Median over images of the trained model's edge energy over the base's. Healthy runs keep it within a tenth of 1;
a Gaussian blur of half a pixel already halves it."""
FEW_STEPS = 10
"""Steps of a rollout up to which its samples are blurred by the solver's own error (flow models take 20 to 50)."""
SIDE_PHASE = 0.5
"""Share of an iteration's time for a phase in which the network does not work: it waits for more than half."""
NETWORK_PHASE = 0.9
"""Share for sampling or for the update: these are the work itself, and 0.6 to 0.8 is usual."""
_LEAST = 1e-3
"""A guidance scale may be 0, and has no logarithm then."""
REMEDIES: dict[str, tuple[str, str]] = table(Path(__file__).with_name("checks.yaml"))["phases"]


def evaluation_differs(seen: Evidence) -> Seen | None:
    """Another guidance or another number of steps in evaluations than in training, where the metric did not rise."""
    if seen.run.subject.name == "no prompts" or seen.rose:
        return None
    base = seen.base
    own = "algorithm.guidance_scale" if seen.given("algorithm.guidance_scale") is not None else "rollout.guidance_scale"
    settings = (
        ("num_inference_steps", "denoising steps", base.num_inference_steps, "rollout.num_inference_steps"),
        ("guidance_scale", "guidance scales", base.guidance_scale, own),
    )
    for key, words, used, option in settings:
        trained = seen.option(option)
        if used is None or trained is None or float(used) == float(trained):
            continue
        factor = max(float(used), _LEAST) / max(float(trained), _LEAST)
        severity = min(abs(math.log(factor)), 1.0)
        return Seen(severity, float(used), float(trained), what=words, key=key, metric=seen.metric)
    return None


def text_cut(seen: Evidence) -> Seen | None:
    """Prompts that every text encoder cuts off."""
    facts = seen.run.provenance.get("text")
    if not isinstance(facts, dict) or not facts:
        raise Lacking("provenance.json has no lengths of the prompts")
    name = min(facts, key=lambda n: number(value_at(facts, n, "cut")))
    share = number(value_at(facts, name, "cut"))
    longest, limit = (number(value_at(facts, name, key)) for key in ("longest", "limit"))
    if not share > CUT_SHARE:
        return None
    cases = [] if seen.given("model.max_sequence_length") is None else ["option"]
    return Seen(share, share, CUT_SHARE, *cases, name=name, tokens=limit, longest=longest)


def blur(seen: Evidence) -> Seen | None:
    """Images that lost their edges in a training with few steps."""
    steps = int(seen.option("rollout.num_inference_steps"))
    if steps > FEW_STEPS:
        return None
    ratios = [edge_energy(after) / before for one, after in seen.images if (before := edge_energy(one)) > 0]
    if not ratios:
        raise Lacking("the base's images have no edges")
    ratio = float(np.median(ratios))
    if ratio >= BLURRED:
        return None
    used = seen.base.num_inference_steps or steps
    return Seen(1 - ratio, ratio, BLURRED, steps=steps, twice=2 * steps, images=len(ratios), used=used)


def edge_energy(image: np.ndarray) -> float:
    """Mean square of the Laplacian of a brightness [H, W]."""
    inner = 4 * image[1:-1, 1:-1] - image[:-2, 1:-1] - image[2:, 1:-1] - image[1:-1, :-2] - image[1:-1, 2:]
    return float(np.square(inner).mean()) if inner.size else 0.0


def slow_phase(seen: Evidence) -> Seen | None:
    """One phase that takes most of an iteration."""
    whole = seen.column("time/iteration_s")[1:].sum()  # the first iteration has what is done once
    shares = {
        name: float(seen.column(f"time/{name}_s", 1)[1:].sum() / whole)
        for name in REMEDIES
        if f"time/{name}_s" in seen.columns
    }
    if not shares or not whole:
        raise Lacking("metrics.jsonl has no seconds of the phases")
    bounds = {name: NETWORK_PHASE if name in ("rollout", "update", "explore") else SIDE_PHASE for name in shares}
    if "rollout" not in shares:
        bounds.pop("update", None)  # given images: the update is all that there is
    over = {name: shares[name] / bound for name, bound in bounds.items() if shares[name] > bound}
    if not over:
        return None
    name = max(over, key=lambda n: over[n])
    option, advice = REMEDIES[name]
    return Seen(shares[name], shares[name], bounds[name], name=name, option=option, advice=advice)
