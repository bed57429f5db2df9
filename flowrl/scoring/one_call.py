"""One call of a reward: its batch handed out, its surroundings kept, what it returns checked against its card."""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import RewardError
from flowrl.reward import REASONS, Images, ScoreFunction, unscored
from flowrl.scoring.surroundings import Batch, Conduct, Handed, kept
from flowrl.scoring.weighted import WeightedReward


def called(entry: WeightedReward, batch: Batch, conduct: Conduct | None = None) -> dict[str, Any]:
    """Outputs of a reward by name, unchecked; it gets a copy of its batch, and what it changes is put back. `conduct`
    takes what the call did to its surroundings; None: it is dropped, and reasons for NaN are logged.
    """
    given, noted = Handed(batch, entry.reward), Conduct() if conduct is None else conduct
    token = REASONS.set(noted.reasons)
    try:
        # A score must not depend on the autocast of its caller; a reward that wants one enters its own.
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), kept(noted):
            result = entry.reward.score(*given.arguments)
    finally:
        REASONS.reset(token)
    if noted.looks_at_inputs:
        noted.note(inputs=given.changed())
    if conduct is None:
        for text in noted.reasons:
            unscored(f"reward {entry.name!r}: {text}")
    return dict(result) if isinstance(result, Mapping) else {entry.reward.card.outputs[0]: result}


def score_once(
    entry: WeightedReward, batch: Batch, conduct: Conduct | None = None, *, graph: bool = False
) -> dict[str, Tensor]:
    """Raw outputs of one reward, each [B] float32, checked against its card; as `called` otherwise.

    On the CPU, unless `graph` keeps them where they are, with their graph.

    Raises RewardError: no numbers, a wrong shape, other outputs than declared, a finite value outside the range.
    """
    card, count = entry.reward.card, len(batch)
    named = called(entry, batch, conduct)
    if set(named) != set(card.outputs):
        raise RewardError(
            f"reward {entry.name!r} declares the outputs {list(card.outputs)} but returned {list(named)}; "
            f"name them all in its card, outputs={tuple(named)}"
        )
    checked: dict[str, Tensor] = {}
    for name in card.outputs:
        try:
            tensor = torch.as_tensor(named[name], dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RewardError(
                f"reward {entry.name!r} returned a {type(named[name]).__name__} for {name!r} that is not one number "
                f"a sample ({error}); a sample that could not be scored is NaN"
            ) from error
        tensor = tensor if graph else tensor.detach().cpu()
        if tensor.shape != (count,):
            raise RewardError(
                f"reward {entry.name!r} returned shape {tuple(tensor.shape)} for {name!r}; "
                f"it was given {count} samples and must return one number for each, shape ({count},)"
            )
        finite, infinite = tensor[tensor.isfinite()], int(tensor.isinf().sum())
        if infinite and conduct is not None:
            conduct.reasons.append(f"{infinite} of {count} values of {name!r} are inf, which is no score")
        # Ranges are declared with float literals: allow for their rounding.
        slack = 1e-4 * max(1.0, abs(card.high) if math.isfinite(card.high) else 1.0)
        if finite.numel() and (finite.min() < card.low - slack or finite.max() > card.high + slack):
            raise RewardError(
                f"reward {entry.name!r} returned {finite.min():.4g}..{finite.max():.4g} for {name!r}, "
                f"outside its declared range {card.low}..{card.high}"
            )
        checked[name] = torch.where(tensor.isfinite(), tensor, torch.nan)
    return checked


def one_output(score: ScoreFunction) -> ScoreFunction:
    """A function without a card, whose scores may stand under any one name."""

    def unnamed(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor | Mapping[str, Tensor]:
        result = score(images, prompts, metadata)
        return next(iter(result.values())) if isinstance(result, Mapping) and len(result) == 1 else result

    return functools.update_wrapper(unnamed, score)


def require_three_arguments(score: ScoreFunction, name: str) -> None:
    """Refuse a function that cannot be called as rewards are, by its own line.

    Raises RewardError: it takes other arguments.
    """
    try:
        signature = inspect.signature(score)
    except (TypeError, ValueError):  # of C, or of a callable that hides it
        return
    try:
        signature.bind([], [], [])
    except TypeError as error:
        code = inspect.unwrap(score).__code__ if inspect.isfunction(score) else None
        where = "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
        raise RewardError(
            f"reward {name!r}: score{signature}{where} must take (images, prompts, metadata): {error}"
        ) from None
