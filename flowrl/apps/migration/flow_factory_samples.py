"""Flow-Factory's trainers on finished samples: nft, awm, dgpo, crd and dpo (its commit a0b2bc5)."""

from __future__ import annotations

from typing import Any

from flowrl.apps.migration.engine import Draft, is_number
from flowrl.apps.migration.flow_factory_credit import advantages, bound

METHODS = {"nft": "diffusion_nft", "awm": "awm", "dgpo": "dgpo", "crd": "crd", "dpo": "online_dpo"}
# Shift of the grid that the family's published models have; the others' depends on the size of the image.
_SHIFTS = {"sd3": 3.0}
_TRAINING_STEPS = 1000
_RULES = ("discrete", "discrete_with_init", "discrete_wo_init", "logit_normal", "uniform")
_WEIGHTINGS = {"Uniform": "uniform", "t": "sigma", "t**2": "sigma2", "huber": "huber", "ghuber": "ghuber"}
# Released paces of CRD's networks by number and name: first optimizer steps, d there, slope, limit.
_PACES: dict[Any, tuple[float, ...]] = {
    **dict.fromkeys((0, "none"), (0, 0.0, 0.0, 0.0)),
    **dict.fromkeys((1, "slow"), (0, 0.0, 0.001, 0.5)),
    **dict.fromkeys((2, "medium"), (75, 0.0, 0.0075, 0.999)),
    **dict.fromkeys((3, "offline"), (0, 1.0, 0.0, 1.0)),
    **dict.fromkeys((4, "fast"), (0, 0.0, 0.02, 0.99)),
    **dict.fromkeys((5, "moderate"), (0, 0.0, 0.01, 0.5)),
    6: (0, 0.0, 0.0075, 0.999),
}
_LEAST_PULL = 1e-4
"""Least coefficient of CRD's pull, in their code."""


def method(draft: Draft, family: str, updates: int) -> None:
    """Write the method and its options; `updates`: optimizer steps of an iteration."""
    kind = draft.get("train.trainer_type")
    note = "centred within a prompt here, over a batch of all prompts there" if kind == "crd" else ""
    draft.put("algorithm.name", METHODS[kind], "train.trainer_type", note=note)
    _solver(draft)
    if draft.given("train.num_inner_epochs"):
        draft.put("algorithm.passes", draft.whole("train.num_inner_epochs"), "train.num_inner_epochs")
    if kind != "dgpo":  # which trains without guidance
        note = "training is under it there too"
        scale = float(draft.number("train.guidance_scale"))
        draft.put("algorithm.guidance_scale", scale, "train.guidance_scale", note=note)
    _times(draft, kind, family)
    advantages(draft, clip=kind != "dpo")
    if kind != "dpo":
        draft.put("algorithm.kl.coef", float(draft.number("train.kl_beta", least=0)), "train.kl_beta")
        draft.put("algorithm.kl.weight", "uniform", "train.kl_type", note="of velocities")
    {"nft": _nft, "awm": _awm, "dgpo": _dgpo, "crd": _crd, "dpo": _dpo}[kind](draft, updates)


def terms(draft: Draft) -> int:
    """Training times of a sample (T) in their code."""
    low, high = _span(draft)
    count = draft.get("train.num_train_timesteps")
    if count in (None, 0) or (type(count) is int and count < 0):
        return max(1, int(draft.whole("train.num_inference_steps") * (high - low)))
    return draft.whole("train.num_train_timesteps")


def work(draft: Draft) -> tuple[int, int, str]:
    """Batches of an epoch in their training, as a fraction and in words: of samples, with dpo of pairs."""
    prompts, part = draft.whole("train.unique_sample_num_per_epoch"), draft.whole("train.per_device_batch_size")
    gpus = draft.gpus()
    if draft.get("train.trainer_type") == "dpo":
        pairs = draft.quotient(prompts, gpus, "pairs of a process", "prompts / GPUs")
        return -(-pairs // part), 1, "batches of pairs"
    return prompts * draft.whole("train.group_size"), gpus * part, "prompts x group / (GPUs x b)"


def _solver(draft: Draft) -> None:
    draft.put("algorithm.solver", "ode", "scheduler.dynamics_type")
    kind = draft.get("scheduler.dynamics_type")
    if kind != "ODE":
        reason = f"{kind} adds noise to the rollout there; the method takes a solver without noise here"
        draft.leave("scheduler.dynamics_type", reason, changes=True)
    for name in ("noise_level", "num_sde_steps", "sde_steps"):
        if draft.given(f"scheduler.{name}"):
            draft.leave(f"scheduler.{name}", "the rollout is without noise, all steps alike", changes=False)


def _span(draft: Draft) -> tuple[float, float]:
    """Fractions of the way from noise to data between which they train."""
    value = draft.get("train.timestep_range")
    pair = list(value) if isinstance(value, list | tuple) else [0.0, value]
    if len(pair) != 2 or not all(map(is_number, pair)):
        raise draft.fault("train.timestep_range", "it must be a number, or two of them")
    if not 0 <= pair[0] < pair[1] <= 1:
        raise draft.fault("train.timestep_range", "its fractions must be in [0, 1], the lower one first")
    return float(pair[0]), float(pair[1])


def _times(draft: Draft, kind: str, family: str) -> None:
    key = "train.weighting_scheme" if kind == "dpo" else "train.time_sampling_strategy"
    names = ("logit_normal", "uniform") if kind == "dpo" else _RULES
    name = str(draft.choice(key, {each: each for each in names}))
    draft.put("algorithm.times.name", name, key)
    count = terms(draft)
    low, high = _span(draft)
    if low > 0:
        reason = f"times here start at pure noise: 0 is taken for {low:g}"
        draft.leave("train.timestep_range", reason, changes=True)
    if name.startswith("discrete"):
        count = _grid(draft, name, count, high, family)
        if draft.given("train.time_shift"):
            draft.leave("train.time_shift", f"{name} takes the times of the rollout", changes=False)
    else:
        _sigmas(draft, name, high, shifted=kind != "dpo" or name == "logit_normal")
    note = "" if draft.get("train.num_train_timesteps") else "0 there: steps x range"
    draft.put("algorithm.times.count", count, "train.num_train_timesteps", note=note)


def _grid(draft: Draft, name: str, count: int, high: float, family: str) -> int:
    """Write the share of the grid that is trained, and return the number of terms that it has room for."""
    steps = draft.whole("train.num_inference_steps")
    nodes, note = int(steps * high), ""
    if family in _SHIFTS:
        nodes = _last_node(steps, high, _SHIFTS[family])
        note = f"{nodes} of {steps} nodes: theirs are down to t = {_TRAINING_STEPS * (1 - high):g}"
    else:
        reason = (
            f"theirs trains at grid times of at least {_TRAINING_STEPS * (1 - high):g}, here at the first "
            f"{high:g} of the grid's nodes; with a shift these are other nodes"
        )
        draft.leave("train.timestep_range", reason, changes=True)
    room = nodes - (name == "discrete_wo_init")
    if room < 1:
        raise draft.fault("train.timestep_range", f"it leaves no node of {steps} steps that {name} can draw")
    # The least share with that number of nodes, in four digits: the product must not fall below a whole number.
    draft.put("algorithm.times.fraction", -(-nodes * 10**4 // steps) / 10**4, "train.timestep_range", note=note)
    if count > room:
        reason = f"theirs draws the same {room} nodes several times; here each is trained once for a sample"
        draft.leave("train.num_train_timesteps", reason, changes=True)
    return min(count, room)


def _last_node(steps: int, high: float, shift: float) -> int:
    """The last node with a time of at least 1 - high, on a grid that is shifted; it bounds their strata.

    >>> _last_node(10, 0.6, 3.0), _last_node(14, 0.9, 3.0)
    (7, 12)
    """

    def shifted(u: float) -> float:
        return shift * u / (1 + (shift - 1) * u)

    end = shifted(1 / _TRAINING_STEPS)
    grid = [shifted(1 - k * (1 - end) / max(steps - 1, 1)) for k in range(steps)]
    return sum(sigma >= 1 - high - 1e-6 for sigma in grid) - 1


def _sigmas(draft: Draft, name: str, high: float, *, shifted: bool) -> None:
    """A rule on sigma. Theirs shifts the fraction walked from noise, and 1 - shift(u, s) = shift(1 - u, 1 / s)."""
    shift = float(draft.number("train.time_shift")) if shifted else 1.0
    if shift <= 0:
        raise draft.fault("train.time_shift", "it must be positive")
    note = f"1 / {shift:g}: theirs shifts the fraction walked from noise, ours sigma" if shift != 1 else ""
    draft.put("algorithm.times.shift", round(1 / shift, 6), *(["train.time_shift"] if shifted else []), note=note)
    if name == "uniform":
        draft.put("algorithm.times.low", round(1 - high, 6), "train.timestep_range", note="1 - range")
    elif high < 0.99:
        reason = f"logit_normal reaches all of (0, 1] here, and sigma above {1 - high:g} alone there"
        draft.leave("train.timestep_range", reason, changes=True)
    else:
        draft.leave("train.timestep_range", "logit_normal reaches all of (0, 1] here", changes=False)


def _average(draft: Draft, option: str, updates: int, *given: str) -> None:
    """The pace of a network that follows the policy, from their average's, which counts epochs; `given`: other keys."""
    kind, decay = draft.get("train.ema_decay_schedule"), float(draft.number("train.ema_decay", least=0))
    flat = start = slope = 0.0
    keys = ["train.ema_decay_schedule", *given]
    if kind == "constant":
        start = decay
    elif kind == "linear":
        slope = decay / draft.whole("train.warmup_steps") / updates
        flat = updates
        keys.append("train.warmup_steps")
    elif kind == "piecewise_linear":
        # After the first epoch theirs counts 0, ours its optimizer steps.
        flat = (draft.whole("train.flat_steps", least=0) + 1) * updates
        slope = float(draft.number("train.ramp_rate")) / updates
        keys += ["train.flat_steps", "train.ramp_rate"]
    else:
        start = decay
        reason = f"{kind} is no pace of ours: {decay:g} is written from the start; ours are constant or linear"
        draft.leave("train.ema_decay_schedule", reason, changes=True)
    draft.put(f"{option}.flat", int(flat), *keys)
    draft.put(f"{option}.start", start, *keys)
    note = f"by {updates} optimizer steps of an epoch" if slope and updates > 1 else ""
    draft.put(f"{option}.slope", round(slope, 12), *keys, note=note)
    draft.put(f"{option}.limit", decay, "train.ema_decay")
    if draft.whole("train.ema_update_interval") > 1:
        reason = f"{option} follows after every iteration; the interval is that of optim.ema alone"
        draft.leave("train.ema_update_interval", reason, changes=True)


def _nft(draft: Draft, updates: int) -> None:
    draft.put("algorithm.mix", float(draft.number("train.nft_beta")), "train.nft_beta")
    if draft.switch("train.off_policy") and draft.number("train.ema_decay", least=0):
        _average(draft, "algorithm.old", updates, "train.off_policy")
    else:
        draft.put("algorithm.old", "none", "train.off_policy", note="the policy itself draws the samples")


def _awm(draft: Draft, updates: int) -> None:
    draft.put("algorithm.weighting", draft.choice("train.awm_weighting", _WEIGHTINGS), "train.awm_weighting")
    if draft.get("train.awm_weighting") == "ghuber":
        draft.put("algorithm.power", float(draft.number("train.ghuber_power")), "train.ghuber_power")
    elif draft.given("train.ghuber_power"):
        draft.leave("train.ghuber_power", "ghuber alone has it", changes=False)
    draft.put("algorithm.clip_range", bound(draft, "train.clip_range"), "train.clip_range")
    note = "clipped and not rescaled"
    draft.put("algorithm.advantage_max", bound(draft, "train.adv_clip_range"), "train.adv_clip_range", note=note)
    pull, away = float(draft.number("train.ema_kl_beta", least=0)), draft.switch("train.off_policy")
    averaged = bool(draft.number("train.ema_decay", least=0))
    draft.put("algorithm.ema_kl.coef", pull if averaged else 0.0, "train.ema_kl_beta")
    draft.put("algorithm.off_policy", away and averaged, "train.off_policy")
    if averaged and (pull or away):
        _average(draft, "algorithm.ema", updates)


def _dgpo(draft: Draft, updates: int) -> None:
    draft.put("algorithm.beta", float(draft.number("train.dpo_beta")), "train.dpo_beta")
    draft.put("algorithm.clip_range", bound(draft, "train.clip_range"), "train.clip_range")
    start, keys = draft.whole("train.switch_ema_ref", least=0), ["train.switch_ema_ref"]
    if draft.switch("train.off_policy"):
        start, keys = 0, ["train.off_policy"]
        if draft.given("train.switch_ema_ref"):
            draft.leave("train.switch_ema_ref", "off_policy samples with the average from the start", changes=False)
    elif draft.given("train.off_policy"):
        keys.append("train.off_policy")
    draft.put("algorithm.sample_average_from", start, *keys)
    reason = "the average of the ratio draws the samples here, there the slower one of ema_decay"
    draft.leave(keys[0], reason, changes=True)
    draft.put("algorithm.against_average", draft.switch("train.use_ema_ref"), "train.use_ema_ref")
    guidance = float(draft.number("train.kl_cfg"))
    draft.put("algorithm.reference_guidance", guidance if guidance > 1 else None, "train.kl_cfg")
    limit, slope = draft.number("train.ema_ref_max_decay", least=0), draft.number("train.ema_ref_ramp_rate", least=0)
    draft.put("algorithm.average.limit", float(limit), "train.ema_ref_max_decay")
    draft.put("algorithm.average.slope", float(slope), "train.ema_ref_ramp_rate")
    if updates > 1:
        reason = f"the average follows after an iteration, there after each of its {updates} optimizer steps"
        draft.leave("train.ema_ref_max_decay", reason, changes=True)
    for name, needed in (("use_shared_noise", True), ("clip_dsm", True), ("clip_kl", False)):
        if draft.switch(f"train.{name}") is not needed:
            draft.leave(f"train.{name}", f"it is {str(needed).lower()} here, without an option", changes=True)
        elif draft.given(f"train.{name}"):
            draft.leave(f"train.{name}", "as it always is here", changes=False)


def _pace(draft: Draft, option: str, key: str) -> None:
    """A pace of CRD, which counts optimizer steps: a number or name of theirs, or steps-start-slope-limit."""
    value = draft.get(key)
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    pace: tuple[float, ...] | None = None
    if isinstance(value, int | str) and not isinstance(value, bool):  # True would be 1
        pace = _PACES.get(value)
    if pace is None and isinstance(value, str):
        try:
            pace = tuple(float(part) for part in value.split("-"))
        except ValueError:
            pace = None
    if pace is None or len(pace) != 4 or not all(map(is_number, pace)):
        known = ", ".join(str(name) for name in _PACES)
        raise draft.fault(key, f"it must be steps-start-slope-limit, or one of {known}")
    flat, start, slope, limit = pace
    draft.put(f"{option}.flat", int(flat), key)
    draft.put(f"{option}.start", start, key)
    draft.put(f"{option}.slope", slope, key)
    draft.put(f"{option}.limit", limit, key)


def _crd(draft: Draft, updates: int) -> None:
    draft.put("algorithm.beta", float(draft.number("train.crd_beta")), "train.crd_beta")
    draft.put("algorithm.fit", draft.choice("train.crd_loss_type", {"mse": "mse", "bce": "bce"}), "train.crd_loss_type")
    draft.put("algorithm.adaptive", draft.switch("train.adaptive_logp"), "train.adaptive_logp")
    heat = float(draft.number("train.weight_temp"))
    draft.put("algorithm.pools", None if heat < 0 else heat, "train.weight_temp", note="below 0: the plain mean")
    if heat == 0:
        draft.leave("train.weight_temp", "their two pools test r > 0 where A > 0 is meant, ours A", changes=True)
    _pace(draft, "algorithm.old", "train.old_model_decay")
    _pace(draft, "algorithm.sampling", "train.sampling_model_decay")
    draft.put("algorithm.reference_guidance", max(1.0, float(draft.number("train.kl_cfg"))), "train.kl_cfg")
    pull = float(draft.number("train.kl_beta", least=0))
    least = min(1.0, _LEAST_PULL / pull) if pull and draft.switch("train.reward_adaptive_kl") else 1.0
    draft.put("algorithm.least_pull", round(least, 9), "train.reward_adaptive_kl", note="false: 1, alike for all")
    if not draft.switch("train.use_old_for_loss"):
        draft.leave("train.use_old_for_loss", "the implicit reward is against `old` alone", changes=True)
    elif draft.given("train.use_old_for_loss"):
        draft.leave("train.use_old_for_loss", "as it always is here", changes=False)


def _dpo(draft: Draft, updates: int) -> None:
    draft.put("algorithm.beta", float(draft.number("train.beta")), "train.beta")
    draft.put("algorithm.behaviour", "policy", "train.trainer_type", note="the policy draws its samples")
    for name, needed in (("logit_mean", 0), ("logit_std", 1)):
        other = draft.get("train.weighting_scheme") == "logit_normal" and draft.number(f"train.{name}") != needed
        if other or draft.given(f"train.{name}"):
            draft.leave(f"train.{name}", f"logit_normal has {needed} here", changes=other)
