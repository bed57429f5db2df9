"""The rewards of a run: built, and refused where they do not fit model or prompts."""

from collections.abc import Callable, Sequence

from flowrl.core.errors import ConfigError, described
from flowrl.data.prompts import Prompt
from flowrl.display.console import log
from flowrl.display.display import working
from flowrl.models.base import ModelAdapter
from flowrl.reward import Card, RewardError
from flowrl.scoring.entries import RewardPlan
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward


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

    Raises ConfigError: entries that do not go together, as only the built rewards show.
    """
    try:
        return Scorer(entries, batch_size=batch_size, max_failed_share=max_failed_share, on_error=on_error)
    except ValueError as error:
        raise ConfigError.about(error) from None


@working("loading the rewards")
def build_scorers(
    rewards: Sequence[RewardPlan],
    eval_rewards: Sequence[RewardPlan],
    listed: Sequence[Prompt],
    evaluated: tuple[str, Sequence[Prompt]],
) -> tuple[Scorer | None, Scorer | None]:
    """The scorer of the training rewards, and that of these and the ones that are only looked at; None without any.

    A reward that people judge is in the first alone. `eval_rewards` are only looked at: they ask nothing of the
    training prompts, which are `listed`; `evaluated` has the key and prompts of the evaluations.

    Raises ConfigError: a prompt that a reward cannot judge, before a reward's weights are loaded where its card says
    so.
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


def require_metadata(
    key: str, prompts: Sequence[Prompt], plans: Sequence[RewardPlan], cards: Sequence[Card | None]
) -> None:
    """Refuse a prompt that a reward cannot judge: its record lacks a key, or the reward's `check_prompt` refuses it.

    `key` is the option that the prompts come from, all of which are looked at; of the rewards, `plans`, `cards` has one
    for each, where it is known.

    Raises ConfigError: naming the reward, the prompt and what is wrong with it.
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

    Raises ConfigError: naming the reward and the remedy.
    """
    own = ""
    if card.licence == "unknown" and card.modality == "image":  # as for a function without a card
        own = (
            f"; if it is yours and scores a video by its frames, say so in its file: CARD = "
            f"flowrl.Card(outputs={card.outputs}, modality='any')"
        )
    if file and card.modality != "any" and videos != (card.modality == "video"):
        judged, given = ("images", "a video") if videos else ("videos", "an image")
        raise ConfigError(
            f"reward {name!r} judges {judged}, and {file} is {given}; keep {judged} in a folder of their own, or use a "
            f"reward that `flowrl list rewards` shows for any{own}"
        )
    if card.modality == "video" and not videos:
        raise ConfigError(
            f"reward {name!r} judges videos, and the model makes images; leave it out, or use a video model with more "
            "than one frame"
        )
    if card.modality in ("image", "edit") and videos:
        raise ConfigError(
            f"reward {name!r} judges images, and the model makes videos; leave it out, or use a reward that "
            f"`flowrl list rewards` shows for video or any{own}"
        )


def require_fit(scorer: Scorer | None, adapter: ModelAdapter) -> None:
    """Refuse a reward that judges other samples, or other latents, than a model makes.

    Raises ConfigError: naming the reward and the remedy.
    """
    for entry in () if scorer is None else scorer.distinct:
        require_modality(entry.name, entry.reward.card, videos=adapter.num_frames > 1)
        judge, made = entry.reward.on_latents, tuple(adapter.latent_shape())
        if judge is not None and tuple(judge.shape) != made:
            raise ConfigError(
                f"reward {entry.name!r} judges latents {list(judge.shape)}, and the model's are {list(made)}; take a "
                "judge of this model at model.height and model.width, or a reward on images"
            )
