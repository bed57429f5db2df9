"""The rewards of a run: built, refused where they do not fit model or prompts, and tried before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flowrl.core.console import log
from flowrl.core.display import working
from flowrl.core.errors import ConfigError, described
from flowrl.core.phases import lacking, out_of_memory
from flowrl.data.prompts import Prompt
from flowrl.models.base import ModelAdapter
from flowrl.reward import Card, RewardError
from flowrl.scoring.entries import RewardPlan
from flowrl.scoring.one_call import score_once
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import MEND, Batch, Conduct
from flowrl.scoring.weighted import WeightedReward

PROBE_PX = 64
"""Side of a probe image where the adapter does not say its own."""


def warn(text: str) -> None:
    log.warning("%s", text)


def build_rewards(plans: Sequence[RewardPlan]) -> list[WeightedReward]:
    """The entries in their order; those of one component with the same options share it, so its weights load once."""
    built: list[tuple[RewardPlan, WeightedReward]] = []
    for plan in plans:
        sibling = next((entry for earlier, entry in built if plan.same_component(earlier)), None)
        built.append((plan, plan.build(sibling)))
    return [entry for _, entry in built]


def build_scorer(
    entries: Sequence[WeightedReward],
    *,
    batch_size: int = 64,
    max_failed_share: float = 0.5,
    on_error: Callable[[str], None] = warn,
) -> Scorer:
    """A scorer whose errors are logged; the options are the Scorer's.

    Raises:
        ConfigError: entries that do not go together, as only the built rewards show.
    """
    try:
        return Scorer(entries, batch_size=batch_size, max_failed_share=max_failed_share, on_error=on_error)
    except ValueError as error:
        raise ConfigError(str(error)) from None


@working("loading the rewards")
def build_scorers(
    rewards: Sequence[RewardPlan],
    eval_rewards: Sequence[RewardPlan],
    listed: Sequence[Prompt],
    evaluated: tuple[str, Sequence[Prompt]],
) -> tuple[Scorer | None, Scorer | None]:
    """The scorer of the training rewards, and that of these and the ones that are only looked at; None without any.

    A reward that people judge is in the first alone.

    Args:
        rewards: trained on.
        eval_rewards: only looked at: they ask nothing of the training prompts.
        listed: training prompts.
        evaluated: key and prompts of the evaluations.

    Raises:
        ConfigError: a prompt that a reward cannot judge, before a reward's weights are loaded where its card says so.
    """
    both, count = (*rewards, *eval_rewards), len(rewards)

    def fit(cards: Sequence[Card | None]) -> None:
        require_metadata("data.prompts", listed, rewards, cards[:count])
        require_metadata(*evaluated, both, cards)

    fit([plan.card for plan in both])
    entries = build_rewards(both)
    fit([entry.reward.card for entry in entries])  # a built reward may ask for more
    looked = [entry for entry in entries if not entry.reward.card.by_people]
    return (build_scorer(entries[:count]) if rewards else None), (build_scorer(looked) if looked else None)


def probe_batch(count: int, height: int, width: int, num_frames: int) -> torch.Tensor:
    """Noise to try rewards on: images [count, 3, H, W], or videos [count, F, 3, H, W] where there are more frames."""
    frames = (num_frames,) if num_frames > 1 else ()
    return torch.rand(count, *frames, 3, height, width, generator=torch.Generator().manual_seed(0))


def require_metadata(
    key: str, prompts: Sequence[Prompt], plans: Sequence[RewardPlan], cards: Sequence[Card | None]
) -> None:
    """Refuse a prompt that a reward cannot judge: its record lacks a key, or the reward's `check_prompt` refuses it.

    Args:
        key: the option that the prompts come from.
        prompts: all of them are looked at.
        plans: the rewards that judge them.
        cards: one for each reward, where it is known.

    Raises:
        ConfigError: naming the reward, the prompt and what is wrong with it.
    """
    for plan, card in zip(plans, cards, strict=True):
        needed = () if card is None else card.requires + (("images",) if card.modality == "edit" else ())
        check = getattr(plan.module, "check_prompt", None)
        for number, prompt in enumerate(prompts, 1):
            lacking = [name for name in needed if name not in prompt.metadata]
            if lacking:
                raise ConfigError(
                    f"{key}: prompt {number}, {prompt.text[:60]!r}, has no {lacking[0]!r}, which the reward "
                    f"{plan.name!r} needs; give it in every record of a .jsonl or data set, or leave the reward out"
                )
            try:
                if check is not None:
                    check(prompt.text, prompt.metadata)
            except RewardError as error:
                raise ConfigError(f"{key}: prompt {number}, {prompt.text[:60]!r}: {error}") from None
            except (Exception, SystemExit) as error:  # somebody's code may raise anything
                log.debug("reward %r: check_prompt raised", plan.name, exc_info=error)
                raised = f"check_prompt of the reward {plan.name!r} raised {described(error)}"
                raise ConfigError(f"{key}: prompt {number}, {prompt.text[:60]!r}: {raised}") from error


def require_modality(name: str, card: Card, *, videos: bool, file: str = "") -> None:
    """Refuse a reward that cannot judge what the model makes, or what is in a file.

    Raises:
        ConfigError: naming the reward and the remedy.
    """
    if file and card.modality != "any" and videos != (card.modality == "video"):
        judged, given = ("images", "a video") if videos else ("videos", "an image")
        raise ConfigError(
            f"reward {name!r} judges {judged}, and {file} is {given}; keep {judged} in a folder of their own, or use a "
            "reward that `flowrl list rewards` shows for any"
        )
    if card.modality == "video" and not videos:
        raise ConfigError(
            f"reward {name!r} judges videos, and the model makes images; leave it out, or use a video model with more "
            "than one frame"
        )
    if card.modality in ("image", "edit") and videos:
        raise ConfigError(
            f"reward {name!r} judges images, and the model makes videos; leave it out, or use a reward that "
            "`flowrl list rewards` shows for video or any"
        )


@working("trying the rewards")
def probe(scorer: Scorer | None, prompts: Sequence[Prompt], adapter: ModelAdapter, known: Scorer | None = None) -> None:
    """Score noise: a broken reward ends the run here; a warning names what it changes and is put back.

    People are not asked about noise.

    Args:
        scorer: whose rewards are tried; None: nothing is.
        prompts: of the noise.
        adapter: makes images of such a size.
        known: a scorer whose rewards have been warned of; None: none have.

    Raises:
        RewardError: a reward raises, breaks its contract, or leaves a setting of the process changed.
    """
    if scorer is None:
        return
    images = probe_batch(len(prompts), adapter.height, adapter.width, adapter.num_frames)
    given = f"{'videos' if images.ndim == 5 else 'images'} {list(images.shape)}"
    warned = [] if known is None else [entry.reward for entry in known.distinct]
    joined: dict[str, torch.Tensor] = {}
    tried = [entry for entry in scorer.distinct if not entry.reward.card.by_people]
    for entry in tried:
        conduct = Conduct(looks_at_inputs=True)
        joined |= _probed(entry, images, prompts, conduct)
        if not any(entry.reward is reward for reward in warned):
            _warn_of_conduct(entry.name, conduct)
    for entry in scorer.entries if len(tried) == len(scorer.distinct) else ():
        if entry.training_value(joined).isnan().all():
            log.warning(
                "reward %r returned NaN for all of a probe batch of noise, %s: every sample that it cannot score "
                "is masked, and the run stops where that is more than half of them",
                entry.name,
                given,
            )


def _probed(
    entry: WeightedReward, images: torch.Tensor, prompts: Sequence[Prompt], conduct: Conduct
) -> dict[str, torch.Tensor]:
    given = f"{'videos' if images.ndim == 5 else 'images'} {list(images.shape)}"
    try:
        result = score_once(entry, Batch(images, [p.text for p in prompts], [p.metadata for p in prompts]), conduct)
    except RewardError as error:
        if images.ndim < 5:
            raise
        raise RewardError(f"{error} (the model makes videos: it was given {given})") from error
    except (Exception, SystemExit) as error:  # somebody's code may raise anything
        if out_of_memory(error):
            raise lacking(error, f"reward {entry.name!r}") from error
        log.debug("reward %r fails on a probe batch", entry.name, exc_info=error)
        raise RewardError(
            f"reward {entry.name!r} fails on a probe batch of {given}: {described(error)}; nothing was trained"
        ) from error
    if conduct.settings:
        raise RewardError(
            f"reward {entry.name!r} changes {' and '.join(conduct.settings)} and leaves it so, for the whole process; "
            f"{MEND}; nothing was trained"
        )
    return result


def _warn_of_conduct(name: str, conduct: Conduct) -> None:
    """Warn of side effects that reach nobody, since the reward gets a copy and settings are put back."""
    for reason in conduct.reasons:
        log.warning("reward %r: %s", name, reason)
    if conduct.inputs:
        log.warning(
            "reward %r works in place: it changes the %s that it is given; these are a copy, so that other rewards and "
            "the saved images do not change, but work on copies of your own (`flowrl score --check` fails on it)",
            name,
            " and ".join(conduct.inputs),
        )
    if conduct.random:
        log.warning(
            "reward %r seeds or draws %s random numbers of the process: they are put back after every call, and what "
            "flowrl draws does not depend on them; use a generator of its own",
            name,
            " and ".join(conduct.random),
        )
