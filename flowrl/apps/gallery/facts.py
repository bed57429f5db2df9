"""What a run is, in words: state, time, model, algorithm, provenance."""

import math
import re

import numpy as np

from flowrl.apps.gallery import results
from flowrl.apps.gallery.runs import Run, number, value_at
from flowrl.display.units import duration


def status(run: Run) -> str:
    """State of the run and its iterations, such as "finished, 55 of 55 iterations"."""
    planned = number(run.config.get("iterations"))
    done = f"{run.iterations} of {planned:.0f} iterations" if math.isfinite(planned) else f"{run.iterations} iterations"
    return f"{run.summary.get('status') or 'not finished'}, {done}"


def seconds(run: Run) -> float:
    """Wall time of the summary; of iterations that it does not have, their sum."""
    known, (x, y) = number(run.summary.get("seconds")), run.curve("time/iteration_s")
    if not math.isfinite(known):
        return float(np.nansum(y))
    return known + (float(np.nansum(y[x > (run.summary.get("iterations") or 0)])) if run.begun else 0.0)


def facts(run: Run) -> list[tuple[str, str]]:
    """(label, text) of the known facts of a run, for the header."""
    config = run.config
    rank = value_at(config, "model", "lora", "rank")
    # An explicit null is full fine-tuning; a missing key is not.
    full = "full fine-tuning" if "lora" in (config.get("model") or {}) and rank is None else None
    if any("noise/prior" in row for row in run.rows):
        full = "learned initial noise, the network frozen"
    model = [
        value_at(config, "model", "name"),
        value_at(config, "model", "path"),
        f"LoRA rank {rank}" if rank else full,
    ]
    sampler = [value_at(config, "rollout", "sampler", "name")]
    steps, guidance = value_at(config, "rollout", "num_inference_steps"), value_at(config, "rollout", "guidance_scale")
    sampler += [f"{steps} steps" if steps else None, f"guidance {guidance}" if guidance is not None else None]
    rewards = [
        f"{' '.join(filter(None, (entry.get('prefix'), entry.get('name') or entry.get('path'))))} x "
        f"{entry.get('weight', 1.0):g}"
        for entry in (config.get("rewards") or [])
    ]
    seeds = ", ".join(map(str, run.base.seeds)) if run.base else ""
    hardware = [run.provenance.get(key) for key in ("hardware", "device", "gpu", "cpu")]
    known = {
        "Model": ", ".join(str(part) for part in model if part),
        "Algorithm": str(value_at(config, "algorithm", "name") or ""),
        "Rollout": ", ".join(str(part) for part in sampler if part),
        "Rewards": ", ".join(rewards),
        "Evaluated on": _evaluated_on(run),
        "Seeds": f"training {config.get('seed', results.DASH)}" + (f"; evaluation {seeds}" if seeds else ""),
        "Hardware": next((str(h) for h in hardware if h), ""),
        "Time": duration(seconds(run)),
        "Started": str(run.provenance.get("started") or ""),
        "Commit": commit(run),
    }
    return [(label, text) for label, text in known.items() if text]


def commit(run: Run) -> str:
    """Commit of the training, its start alone; "": not known."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]+\b", r"\1", str(run.provenance.get("commit") or ""))


def _evaluated_on(run: Run) -> str:
    """Number and kind of the prompts, and the source of a share."""
    if run.base is None or not run.base.prompts:
        return ""
    held_out = run.summary.get("held_out")
    share = held_out.get("source") if isinstance(held_out, dict) and held_out.get("share") is not None else None
    text = f"{run.base.num_distinct()} {run.subject.name}".replace("its own", "of its own")
    return f"{text} ({share})" if share else text
