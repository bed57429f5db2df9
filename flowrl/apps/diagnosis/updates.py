"""Checks of the updates: dead groups, clip, ratio, gradient, KL, learning rate, weights that hardly move."""

import math

import numpy as np

from flowrl.apps.diagnosis.evidence import TREND_ROWS, Evidence, Lacking, Seen
from flowrl.apps.gallery import movement
from flowrl.evaluation.moved import HALF_LEVEL

DEAD = 0.5
"""Share of dead groups: above it most samples are drawn for nothing."""
SAME_IMAGES = 0.5 / 255
"""Pixel std inside a group: half a level of 8 bits, which a reward of saved images cannot see."""
CLIPPED = 0.5
"""Share of the terms that the clip can reach (those after an iteration's first update, where the ratio is 1). Above it
most of the later updates are without a gradient. PPO's usual share is 0.1 to 0.3."""
PAST_CLIP = 10.0
"""RMS log ratio over the clip range: with less the terms lie around the bound, and clipping some is what it is for."""
UNUSED = 0.02
"""RMS log ratio over the clip range: below it the policy would have to move 50 times as far to meet the clip."""
SMALLEST_CLIP = 1e-5
"""The smallest published clip range (Flow-GRPO's family), where config.yaml has null."""
SURE = 4.0
"""Standard errors of a mean over iterations: three per 100,000 by chance, since several columns are tested."""
GROWTH = 10.0
"""A tenfold median between the first and the last quarter: a falling learning rate and a LoRA that starts at 0 move it
by 2 to 5."""
SKIPPED = 0.05
"""Share of updates without a finite gradient; AMP's own search for a scale skips one or two at the start."""
CUBIC = 8.0
"""A drift that is the third power of the iteration grows 8 times from the middle to the end; a random walk doubles."""
AMP_SEARCH = 2
"""Updates that float16's search for its loss scale may skip at the start of a healthy run."""
SPOKEN_FOR = 20
"""Fewest optimizer steps before a higher learning rate is advised. Adam moves a weight by about the rate in each step,
so ten times the rate does in n steps what the rate does in 10 n. Below 20 of them that is less than 200, the length of
a short run: then the run is short, and its rate may be right."""
ENDED = 0.01
"""Of the largest learning rate: the rest moves the weights by less than a hundredth of an ordinary step."""
ENDED_SHARE = 0.1
"""Share of the iterations below `ENDED`: a cosine over the whole run has 6 % there, a linear fall 1 %."""


def dead_groups(seen: Evidence) -> Seen | None:
    """Groups with equal rewards, in the second half of the run."""
    values = seen.column("advantage/dead_group_share")
    share = float(values[len(values) // 2 :].mean())
    if share <= DEAD:
        return None
    size, cases = int(seen.option("rollout.group_size")), list[str]()
    if "sample/image_std" in seen.columns and float(np.median(seen.column("sample/image_std"))) < SAME_IMAGES:
        cases.append("same images")
    return Seen(share, share, DEAD, *cases, size=size, twice=2 * size)


def _clip(seen: Evidence) -> float:
    """The bound on |ratio - 1|, the narrower where a run gives two; the smallest published one where it gives none."""
    given = seen.given("algorithm.clip_range", SMALLEST_CLIP)
    return float(min(given) if isinstance(given, list) else given)


def clip_never(seen: Evidence) -> Seen | None:
    """A policy that stays so close to itself within an iteration that the clip is never met."""
    clipped, log_ratio = seen.column("policy/clip_fraction"), seen.log_ratio()
    seen.require_steps(SPOKEN_FOR)
    if seen.trains_noise or seen.updates < 2 or clipped.any() or seen.moved or seen.faint:
        return None  # one update an iteration: the ratio is 1 whatever the policy does
    clip = _clip(seen)
    if log_ratio >= UNUSED * clip:
        return None
    rate = 10 * float(seen.option("optim.learning_rate"))
    return Seen(1.0, log_ratio / clip, UNUSED, log_ratio=log_ratio, clip=clip, rate=rate)


def clip_always(seen: Evidence) -> Seen | None:
    """A clip that takes the gradient of most terms away."""
    clipped = seen.column("policy/clip_fraction")
    if seen.trains_noise or seen.updates < 2:
        return None
    share = min(float(clipped.mean()) / (1 - 1 / seen.updates), 1.0)
    if share <= CLIPPED:
        return None
    given = seen.given("algorithm.clip_range")
    if given is not None and "policy/approx_kl" in seen.columns and seen.log_ratio() < PAST_CLIP * _clip(seen):
        return None
    cases, limit = [] if given is None else ["given"], CLIPPED * (1 - 1 / seen.updates)
    words = {"share": share, "updates": seen.updates, "wider": 10 * _clip(seen)}
    return Seen(share, float(clipped.mean()), limit, *cases, **words)


def ratio_below_one(seen: Evidence) -> Seen | None:
    """A mean ratio below 1 by more than the clip range: positive advantages no longer meet the clip."""
    names = sorted(name for name in seen.columns if name.startswith("policy/ratio/step")) or ["policy/ratio_mean"]
    if seen.trains_noise or "policy/approx_kl" not in seen.columns:
        seen.column("policy/ratio_mean")
        return None  # a ratio of errors, not of densities: its mean need not be 1
    worst, where, clip = 0.0, "", _clip(seen)
    for name in names:
        drop = 1 - seen.column(name, TREND_ROWS)
        mean, error = float(drop.mean()), float(drop.std(ddof=1)) / math.sqrt(len(drop))
        if mean > max(clip, SURE * error) and mean > worst:
            worst, where = mean, name
    if not where:
        return None
    return Seen(min(worst / (4 * clip), 1.0), 1 - worst, 1 - clip, name=where, clip=clip)


def gradient_explodes(seen: Evidence) -> Seen | None:
    """A gradient norm that grows tenfold past its clip, or updates that are skipped."""
    rate = float(seen.option("optim.learning_rate")) / 10
    cases = ["noise"] if seen.trains_noise else []
    if seen.skipped > SKIPPED and seen.skipped * seen.steps > AMP_SEARCH:
        return Seen(1.0, seen.skipped, SKIPPED, "skipped", *cases, rate=rate)
    first, last = seen.quarters("grad/norm")
    bound = seen.option("optim.max_grad_norm")
    if not first or last <= GROWTH * first or (bound is not None and last <= float(bound)):
        return None
    return Seen(min(math.log10(last / first) / 3, 1.0), last, GROWTH * first, *cases, first=first, rate=rate)


def gradient_vanishes(seen: Evidence) -> Seen | None:
    """A gradient norm below Adam's eps, although groups are alive."""
    norm, eps = seen.column("grad/norm"), float(seen.option("optim.eps"))
    if "advantage/dead_group_share" in seen.columns:
        dead = seen.run.curve("advantage/dead_group_share")[1]
        norm = norm[dead < 1] if len(dead) == len(norm) else norm
    if len(norm) < 2 or seen.moved or seen.skipped > SKIPPED or seen.faint:
        return None  # weights that are not finite any more have other gradients
    typical = float(np.median(norm))
    if typical >= eps:
        return None
    return Seen(1.0, typical, eps)


def kl_runaway(seen: Evidence) -> Seen | None:
    """A distance from the reference, or from the policy of the rollout, that grows ever faster."""
    names = [n for n in ("policy/kl_reference", "matching/to_reference", "policy/approx_kl") if n in seen.columns]
    if not names:
        raise Lacking("metrics.jsonl has no policy/kl_reference, matching/to_reference or policy/approx_kl")
    if seen.trains_noise:
        return None  # the density of all values: a few samples far out make its mean
    for name in names:
        values = seen.column(name, TREND_ROWS)
        tenth = max(len(values) // 10, 2)
        middle = len(values) // 2
        around = values[middle - tenth // 2 : middle + (tenth + 1) // 2]
        before, last = float(np.median(around)), float(np.median(values[-tenth:]))
        if before > 0 and last > CUBIC * before and last > CUBIC * float(np.median(values[:middle])):
            times, coef = last / before, 10 * float(seen.given("algorithm.kl.coef", 0.0)) or 0.01
            return Seen(min(math.log10(times) / 2, 1.0), last, CUBIC * before, name=name, times=times, coef=coef)
    return None


def schedule_ended(seen: Evidence) -> Seen | None:
    """Iterations at the end with next to no learning rate."""
    rate = seen.column("optim/learning_rate", TREND_ROWS)
    live = np.nonzero(rate >= ENDED * rate.max())[0]
    idle = len(rate) - 1 - int(live[-1])
    if rate.max() <= 0 or idle < ENDED_SHARE * len(rate):
        return None
    words = {"idle": idle, "total": len(rate), "live": len(rate) - idle}
    return Seen(idle / len(rate), float(rate[-1]), ENDED * float(rate.max()), **words)


def weights_hardly_move(seen: Evidence) -> Seen | None:
    """Images of the trained model that are those of the base."""
    if not seen.run.rows:
        raise Lacking("metrics.jsonl has no row")
    seen.require_steps(SPOKEN_FOR)
    if seen.moved or not seen.live or seen.faint:
        return None
    found = movement.of_run(seen.run)
    if found is None:
        raise Lacking("no sample of the same prompt and seed is saved for both evaluations")
    if not found.hardly:
        return None
    cases = [] if seen.given("model.lora") is None else ["lora"]
    words = {"words": movement.of_run_in_words(seen.run), "rate": 10 * float(seen.option("optim.learning_rate"))}
    return Seen(1 - found.levels, found.levels, HALF_LEVEL, *cases, **words)
