"""Flow-Factory: what becomes of its options of advantages and of its rewards."""

from __future__ import annotations

from typing import Any

from flowrl.apps.migration.engine import Draft, is_number

REWARDS: dict[str, tuple[dict[str, Any], str]] = {
    "PickScore": ({"name": "pickscore", "scale": 0.0384615}, "theirs divides by 26"),
    "CLIP": ({"name": "clip_score"}, ""),
    "OCR": ({"name": "ocr"}, "the reader differs: docs/rewards/ocr.md"),
}
_OF_MEMORY = ("name", "reward_model", "weight", "batch_size", "device", "dtype", "async_reward", "num_workers")


def bound(draft: Draft, key: str) -> float:
    """The bound of a symmetric range, given as one number or two."""
    value = draft.get(key)
    pair = list(value) if isinstance(value, list | tuple) else [value]
    if not 1 <= len(pair) <= 2 or not all(is_number(each) and each for each in pair):
        raise draft.fault(key, "it must be a number, or a lower and an upper bound")
    if len(pair) == 2 and pair[0] != -pair[1]:
        draft.leave(key, f"ranges are symmetric here: {pair[1]:g} is written", changes=True)
    return abs(float(pair[-1]))


def advantages(draft: Draft, *, clip: bool) -> None:
    """Write the advantage rule; `clip`: whether the trainer bounds advantages."""
    rule = draft.choice("train.advantage_aggregation", {"gdpo": "gdpo", "sum": "group"})
    draft.put("algorithm.advantages.name", rule, "train.advantage_aggregation")
    if rule == "gdpo":
        draft.put("algorithm.advantages.std", "group", "train.advantage_aggregation")
        if draft.given("train.global_std"):
            draft.leave("train.global_std", "gdpo does not read it", changes=False)
    else:
        std = "global" if draft.switch("train.global_std") else "group"
        draft.put("algorithm.advantages.std", std, "train.global_std")
    draft.put("algorithm.advantages.eps", 1e-6, note="in their code, as the least std; added to it here")
    if clip:
        draft.put("algorithm.advantages.clip", bound(draft, "train.adv_clip_range"), "train.adv_clip_range")


def _entries(draft: Draft, key: str) -> list[dict[str, Any]]:
    """The rewards under a key that have a counterpart, as entries of ours; the others are listed."""
    found = draft.get(key)
    several = [found] if isinstance(found, dict) else found or ()
    if not isinstance(several, list | tuple):
        raise draft.fault(key, "it must be a reward, or a list of them")
    result: list[dict[str, Any]] = []
    for number, entry in enumerate(several):
        if not isinstance(entry, dict):
            raise draft.fault(key, "each reward must be a mapping with reward_model")
        name = entry.get("reward_model", "PickScore")
        if not isinstance(name, str):
            raise draft.fault(key, "reward_model must be the name of one")
        if name not in REWARDS:
            draft.leave(f"{key}.{number}", f"no reward of flowrl scores as {name} does; left out", changes=True)
            continue
        for other in [other for other in entry if other not in _OF_MEMORY]:
            draft.leave(f"{key}.{number}.{other}", f"an argument of their {name}; left out", changes=True)
        weight = entry.get("weight", 1.0)
        if not is_number(weight):
            raise draft.fault(key, f"the weight of {name} must be a number")
        result.append({**REWARDS[name][0], "weight": float(weight)})
    return result


def rewards(draft: Draft) -> None:
    """Write the rewards of training and those of evaluations."""
    entries = _entries(draft, "rewards")
    for entry in entries:
        note = next(note for ours, note in REWARDS.values() if ours["name"] == entry["name"])
        draft.reward(entry, "rewards", note=note)
    if not any(entry["weight"] for entry in entries):
        raise draft.fault("rewards", "none has a counterpart here with a weight, so there is nothing to train on")
    trained = {entry["name"] for entry in entries}
    others = [entry for entry in _entries(draft, "eval_rewards") if entry["name"] not in trained]
    if others:
        ours = [{key: value for key, value in entry.items() if key != "weight"} for entry in others]
        draft.put("eval.rewards", ours, "eval_rewards", note="those of training are evaluated anyway")
    elif draft.given("eval_rewards"):
        draft.leave("eval_rewards", "rewards of training are evaluated anyway", changes=False)
