"""Flow-Factory's trainers: what becomes of the options of each (its commit a0b2bc5)."""

from contextlib import suppress

from flowrl.apps.migration.engine import Draft, is_number
from flowrl.apps.migration.table import read_table

_ON_EDGES = {"grpo": "flow_grpo", "grpo-guard": "grpo_guard"}
_ON_SAMPLES = {"nft": "diffusion_nft", "awm": "awm", "dgpo": "dgpo", "crd": "crd", "dpo": "online_dpo"}
METHODS = {**_ON_EDGES, **_ON_SAMPLES}
_SAMPLERS = {"Flow-SDE": "flow_sde", "Dance-SDE": "dance_sde", "CPS": "cps"}
# Shift of the grid that the family's published models have; the others' depends on the size of the image.
_SHIFTS = {"sd3": 3.0}
_TRAINING_STEPS = 1000
_RULES = ("discrete", "discrete_with_init", "discrete_wo_init", "logit_normal", "uniform")
_WEIGHTINGS = {"Uniform": "uniform", "t": "sigma", "t**2": "sigma2", "huber": "huber", "ghuber": "ghuber"}
_PACES = read_table("tables", "flow_factory")["paces"]
_LEAST_PULL = 1e-4
"""Least coefficient of CRD's pull, in their code."""


def method(draft: Draft, kind: str, family: str) -> int:
    """Write the sampler or solver, the method and its options; returns the optimizer steps of an iteration."""
    if kind in _ON_EDGES:
        name = draft.choice("scheduler.dynamics_type", _SAMPLERS)
        draft.put("rollout.sampler.name", name, "scheduler.dynamics_type")
        option = "eta" if name == "dance_sde" else "noise_level"
        draft.put(f"rollout.sampler.{option}", draft.real("scheduler.noise_level"), "scheduler.noise_level")
        trained = _grpo(draft, _ON_EDGES[kind])
        draft.put("algorithm.clip_range", _bounds(draft, "train.clip_range"), "train.clip_range")
        coef, form = draft.real("train.kl_beta", least=0), draft.get("train.kl_type")
        if coef and form != "x-based":
            draft.leave("train.kl_beta", "a KL of velocities has no counterpart here; none is written", changes=True)
            draft.put("algorithm.kl.coef", 0.0, "train.kl_type")
        else:
            draft.put("algorithm.kl.coef", coef, "train.kl_beta")
            if coef:
                draft.put("algorithm.kl.divisor", "none", "train.kl_type")
            else:
                draft.unread("there is no KL", "train.kl_type")
        _advantages(draft, clip=True)
        return _updates(draft, trained)
    updates = _updates(draft, _terms(draft)) * draft.whole("train.num_inner_epochs")
    _on_samples(draft, kind, family, updates)
    return updates


def _updates(draft: Draft, trained: int) -> int:
    """Write the optimizer steps of a pass, and return their number; `trained`: steps, or times, of a sample."""
    many = draft.get("train.gradient_accumulation_steps")
    if many == "auto":
        updates, keys = draft.whole("train.gradient_step_per_epoch"), ["train.gradient_step_per_epoch"]
        keys += [key for key in ("train.gradient_accumulation_steps", "num_processes") if draft.given(key)]
    else:
        # Batches of an epoch in their training, as a fraction and in words: of samples, with dpo of pairs.
        prompts, size = draft.whole("train.unique_sample_num_per_epoch"), draft.whole("train.per_device_batch_size")
        gpus = draft.gpus()
        if draft.get("train.trainer_type") == "dpo":
            pairs = draft.quotient(prompts, gpus, "pairs of a process", "prompts / GPUs")
            total, part, how = -(-pairs // size), 1, "batches of pairs"
        else:
            group = draft.whole("train.group_size")
            total, part, how = prompts * group, gpus * size, "prompts x group / (GPUs x b)"
        part *= draft.whole("train.gradient_accumulation_steps")
        how = f"{how} x trained steps / accumulation"
        updates = draft.quotient(total * trained, part, "optim.updates_per_iteration", how)
        keys = ["train.gradient_accumulation_steps", "num_processes"]
        draft.unread("an integer accumulation takes its place", "train.gradient_step_per_epoch")
    draft.put("optim.updates_per_iteration", updates, *keys)
    return updates


def _grpo(draft: Draft, method: str) -> int:
    """The method and its trained steps, whose number is returned."""
    steps, count = draft.whole("train.num_inference_steps"), draft.whole("scheduler.num_sde_steps")
    asked = draft.get("scheduler.sde_steps")
    places = list(range(steps - 1)) if asked is None else asked
    if not isinstance(places, list) or not places or not all(type(each) is int and each >= 0 for each in places):
        raise draft.fault("scheduler.sde_steps", "it must be a list of steps")
    keys = ("scheduler.num_sde_steps", "scheduler.sde_steps")
    kept = sorted(each for each in set(places) if each < steps - 1)
    if not kept:
        raise draft.fault("scheduler.sde_steps", "the last step is never trained here, and it names no other")
    if len(kept) < len(set(places)):
        draft.leave("scheduler.sde_steps", f"the last step is never trained here: {kept} remain", changes=True)
    row = kept == list(range(kept[0], kept[-1] + 1))
    if count >= len(kept) or method == "grpo_guard":
        draft.put("algorithm.name", method, "train.trainer_type")
        whole = kept == list(range(steps - 1))
        draft.put("algorithm.sde_steps", None if whole else kept, *keys, note="all of these are trained")
        if count < len(kept):
            reason = f"{count} of {len(kept)} steps are drawn there; {method} trains all of them here"
            draft.leave("scheduler.num_sde_steps", reason, changes=True)
    else:
        draft.put("algorithm.name", "flow_grpo_fast", "train.trainer_type", *keys, note="some steps of a row")
        draft.put("algorithm.window_size", count, "scheduler.num_sde_steps")
        draft.put("algorithm.low", kept[0], "scheduler.sde_steps")
        draft.put("algorithm.high", kept[-1] + 1, "scheduler.sde_steps", note="exclusive")
        if count > 1 or not row:
            reason = f"theirs draws {count} of {kept} anywhere, the window here is of neighbours"
            draft.leave("scheduler.num_sde_steps", reason, changes=True)
    if method == "grpo_guard":
        draft.put("algorithm.reweight", "none", "train.trainer_type", note="as their grpo-guard")
    return min(count, len(kept))


def _bounds(draft: Draft, key: str) -> float | list[float]:
    """The bound of a range that is given as one number or two; where they differ, its fall and rise."""
    value = draft.get(key)
    pair = list(value) if isinstance(value, list | tuple) else [value]
    if not 1 <= len(pair) <= 2 or not all(is_number(each) and each for each in pair):
        raise draft.fault(key, "it must be a number, or a lower and an upper bound")
    low, high = (abs(float(pair[place])) for place in (0, -1))
    return high if low == high else [low, high]


def _bound(draft: Draft, key: str) -> float:
    """The bound of a symmetric range."""
    found = _bounds(draft, key)
    if isinstance(found, list):
        draft.leave(key, f"the range is symmetric here: {found[1]:g} is written", changes=True)
        return found[1]
    return found


def _advantages(draft: Draft, *, clip: bool) -> None:
    """Write the advantage rule; `clip`: whether the trainer bounds advantages."""
    rule = draft.choice("train.advantage_aggregation", {"gdpo": "gdpo", "sum": "group"})
    draft.put("algorithm.advantages.name", rule, "train.advantage_aggregation")
    if rule == "gdpo":
        draft.put("algorithm.advantages.std", "group", "train.advantage_aggregation")
        draft.unread("gdpo does not read it", "train.global_std")
    else:
        std = draft.choice("train.global_std", {True: "global", False: "group"})
        draft.put("algorithm.advantages.std", std, "train.global_std")
    draft.put("algorithm.advantages.eps", 1e-6, note="in their code, as the least std; added to it here")
    if clip:
        draft.put("algorithm.advantages.clip", _bound(draft, "train.adv_clip_range"), "train.adv_clip_range")


def _on_samples(draft: Draft, kind: str, family: str, updates: int) -> None:
    """Write a method on finished samples and its options."""
    note = "centred within a prompt here, over a batch of all prompts there" if kind == "crd" else ""
    draft.put("algorithm.name", METHODS[kind], "train.trainer_type", note=note)
    draft.put("algorithm.solver", "ode", "scheduler.dynamics_type")
    noise = draft.get("scheduler.dynamics_type")
    if noise != "ODE":
        reason = f"{noise} adds noise to the rollout there; the method takes a solver without noise here"
        draft.leave("scheduler.dynamics_type", reason, changes=True)
    keys = ("scheduler.noise_level", "scheduler.num_sde_steps", "scheduler.sde_steps")
    draft.unread("the rollout is without noise, all steps alike", *keys)
    if draft.given("train.num_inner_epochs"):
        draft.copy("train.num_inner_epochs")
    if kind != "dgpo":  # which trains without guidance
        scale, note = draft.real("train.guidance_scale"), "training is under it there too"
        draft.put("algorithm.guidance_scale", scale, "train.guidance_scale", note=note)
    _times(draft, kind, family)
    _advantages(draft, clip=kind != "dpo")
    if kind != "dpo":
        draft.put("algorithm.kl.coef", draft.real("train.kl_beta", least=0), "train.kl_beta")
        draft.put("algorithm.kl.weight", "uniform", "train.kl_type", note="of velocities")
    {"nft": _nft, "awm": _awm, "dgpo": _dgpo, "crd": _crd, "dpo": _dpo}[kind](draft, updates)


def _terms(draft: Draft) -> int:
    """Training times of a sample (T) in their code."""
    low, high = _span(draft)
    count = draft.get("train.num_train_timesteps")
    if count in (None, 0) or (type(count) is int and count < 0):
        return max(1, int(draft.whole("train.num_inference_steps") * (high - low)))
    return draft.whole("train.num_train_timesteps")


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
    count = _terms(draft)
    low, high = _span(draft)
    if low > 0:
        reason = f"times here start at pure noise: 0 is taken for {low:g}"
        draft.leave("train.timestep_range", reason, changes=True)
    if name.startswith("discrete"):
        count = _grid(draft, name, count, high, family)
        draft.unread(f"{name} takes the times of the rollout", "train.time_shift")
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
    shift = draft.real("train.time_shift") if shifted else 1.0
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
    kind, decay = draft.get("train.ema_decay_schedule"), draft.real("train.ema_decay", least=0)
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
        slope = draft.real("train.ramp_rate") / updates
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
    draft.copy("train.nft_beta")
    if draft.switch("train.off_policy") and draft.number("train.ema_decay", least=0):
        _average(draft, "algorithm.old", updates, "train.off_policy")
    else:
        draft.put("algorithm.old", "none", "train.off_policy", note="the policy itself draws the samples")


def _awm(draft: Draft, updates: int) -> None:
    draft.put("algorithm.weighting", draft.choice("train.awm_weighting", _WEIGHTINGS), "train.awm_weighting")
    if draft.get("train.awm_weighting") == "ghuber":
        draft.copy("train.ghuber_power")
    else:
        draft.unread("ghuber alone has it", "train.ghuber_power")
    draft.put("algorithm.clip_range", _bounds(draft, "train.clip_range"), "train.clip_range")
    note = "clipped and not rescaled"
    draft.put("algorithm.advantage_max", _bound(draft, "train.adv_clip_range"), "train.adv_clip_range", note=note)
    pull, away = draft.real("train.ema_kl_beta", least=0), draft.switch("train.off_policy")
    averaged = bool(draft.number("train.ema_decay", least=0))
    draft.put("algorithm.ema_kl.coef", pull if averaged else 0.0, "train.ema_kl_beta")
    draft.put("algorithm.off_policy", away and averaged, "train.off_policy")
    if averaged and (pull or away):
        _average(draft, "algorithm.ema", updates)


def _dgpo(draft: Draft, updates: int) -> None:
    draft.copy("train.dpo_beta")
    draft.put("algorithm.clip_range", _bound(draft, "train.clip_range"), "train.clip_range")
    start, keys = draft.whole("train.switch_ema_ref", least=0), ["train.switch_ema_ref"]
    if draft.switch("train.off_policy"):
        start, keys = 0, ["train.off_policy"]
        draft.unread("off_policy samples with the average from the start", "train.switch_ema_ref")
    elif draft.given("train.off_policy"):
        keys.append("train.off_policy")
    draft.put("algorithm.sample_average_from", start, *keys)
    reason = "the average of the ratio draws the samples here, there the slower one of ema_decay"
    draft.leave(keys[0], reason, changes=True)
    draft.copy("train.use_ema_ref")
    guidance = draft.real("train.kl_cfg")
    draft.put("algorithm.reference_guidance", guidance if guidance > 1 else None, "train.kl_cfg")
    limit, slope = draft.number("train.ema_ref_max_decay", least=0), draft.number("train.ema_ref_ramp_rate", least=0)
    draft.put("algorithm.average.limit", float(limit), "train.ema_ref_max_decay")
    draft.put("algorithm.average.slope", float(slope), "train.ema_ref_ramp_rate")
    if updates > 1:
        reason = f"the average follows after an iteration, there after each of its {updates} optimizer steps"
        draft.leave("train.ema_ref_max_decay", reason, changes=True)
    for name, needed in (("use_shared_noise", True), ("clip_dsm", True), ("clip_kl", False)):
        _fixed(draft, f"train.{name}", needed, f"it is {str(needed).lower()} here, without an option")


def _fixed(draft: Draft, key: str, needed: bool, reason: str) -> None:
    """List a switch that has one place here, with the reason why the other one is left out."""
    if draft.switch(key) is not needed:
        draft.leave(key, reason, changes=True)
    else:
        draft.unread("as it always is here", key)


def _pace(draft: Draft, option: str, key: str) -> None:
    """A pace of CRD, which counts optimizer steps: a number or name of theirs, or steps-start-slope-limit."""
    value = draft.get(key)
    name = int(value) if isinstance(value, str) and value.isdigit() else value
    pace = _PACES.get(name) if type(name) in (int, str) else None  # True would be 1
    if pace is None and isinstance(name, str):
        with suppress(ValueError):
            pace = tuple(float(part) for part in name.split("-"))
    if pace is None or len(pace) != 4 or not all(map(is_number, pace)):
        known = ", ".join(str(name) for name in _PACES)
        raise draft.fault(key, f"it must be steps-start-slope-limit, or one of {known}")
    for name, part in zip(("flat", "start", "slope", "limit"), (int(pace[0]), *pace[1:]), strict=True):
        draft.put(f"{option}.{name}", part, key)


def _crd(draft: Draft, updates: int) -> None:
    draft.copy("train.crd_beta")
    draft.put("algorithm.fit", draft.choice("train.crd_loss_type", {"mse": "mse", "bce": "bce"}), "train.crd_loss_type")
    draft.copy("train.adaptive_logp")
    heat = draft.real("train.weight_temp")
    draft.put("algorithm.pools", None if heat < 0 else heat, "train.weight_temp", note="below 0: the plain mean")
    if heat == 0:
        draft.leave("train.weight_temp", "their two pools test r > 0 where A > 0 is meant, ours A", changes=True)
    _pace(draft, "algorithm.old", "train.old_model_decay")
    _pace(draft, "algorithm.sampling", "train.sampling_model_decay")
    draft.put("algorithm.reference_guidance", max(1.0, draft.real("train.kl_cfg")), "train.kl_cfg")
    pull = draft.real("train.kl_beta", least=0)
    least = min(1.0, _LEAST_PULL / pull) if pull and draft.switch("train.reward_adaptive_kl") else 1.0
    draft.put("algorithm.least_pull", round(least, 9), "train.reward_adaptive_kl", note="false: 1, alike for all")
    _fixed(draft, "train.use_old_for_loss", True, "the implicit reward is against `old` alone")


def _dpo(draft: Draft, updates: int) -> None:
    draft.copy("train.beta")
    draft.put("algorithm.behaviour", "policy", "train.trainer_type", note="the policy draws its samples")
    for name, needed in (("logit_mean", 0), ("logit_std", 1)):
        other = draft.get("train.weighting_scheme") == "logit_normal" and draft.number(f"train.{name}") != needed
        if other or draft.given(f"train.{name}"):
            draft.leave(f"train.{name}", f"logit_normal has {needed} here", changes=other)
