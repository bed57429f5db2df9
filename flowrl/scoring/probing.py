"""The rewards of a run tried on noise before anything is trained: does each score, and is a score its sample's own?"""

from collections.abc import Iterator, Sequence

import torch

from flowrl.core.errors import described
from flowrl.core.rng import normal
from flowrl.data.prompts import Prompt
from flowrl.data.text_cache import Texts
from flowrl.display.console import log
from flowrl.display.display import working
from flowrl.display.phases import lacking, out_of_memory
from flowrl.models.base import ModelAdapter
from flowrl.reward import RewardError
from flowrl.scoring.one_call import score_once
from flowrl.scoring.scorer import FLOATS, Scorer
from flowrl.scoring.steadiness import BY_ITSELF, REPEATABLE, Apart, alone_tolerance, could_be_rounding, most_apart, rows
from flowrl.scoring.surroundings import MEND, Batch, Conduct, Latents
from flowrl.scoring.weighted import WeightedReward

PX = 64
"""Side of a probe image where the adapter does not say its own."""
COUNT, FEWEST = 4, 3
"""Probe images, and how many at least where a video is large: one must be neither the best nor the worst of them."""


def probe_batch(prompts: Sequence[Prompt], height: int, width: int, num_frames: int) -> Batch:
    """Samples to try rewards on, each prompt in its turn: `COUNT` images, or videos where there are more frames.

    Half noise, half a colour of each sample's own, so that what is taken over a batch is none of its samples' own.
    """
    frames = (num_frames,) if num_frames > 1 else ()
    size = 3 * height * width * max(num_frames, 1)
    count = max(FEWEST, min(COUNT, FLOATS // size))
    generator = torch.Generator().manual_seed(0)
    colours = torch.rand(count, *(1 for _ in frames), 3, 1, 1, generator=generator)
    images = torch.rand(count, *frames, 3, height, width, generator=generator).add_(colours).div_(2)
    chosen = [prompts[row % len(prompts)] for row in range(count)]
    return Batch(images, [prompt.text for prompt in chosen], [prompt.metadata for prompt in chosen])


def probe_latents(texts: Texts, prompts: Sequence[Prompt], adapter: ModelAdapter) -> Batch:
    """`COUNT` samples of latent noise, of other means, each prompt in its turn; for rewards on latents alone."""
    noise = normal(adapter.latent_shape(), 0, "latent_probe", [(row,) for row in range(COUNT)])
    x0 = noise + torch.linspace(-1, 1, COUNT).reshape(-1, *[1] * (noise.ndim - 1))
    chosen = [prompts[row % len(prompts)] for row in range(COUNT)]
    latents = Latents(x0, texts.lookup(chosen), torch.arange(COUNT))
    return Batch(x0, [prompt.text for prompt in chosen], [prompt.metadata for prompt in chosen], latents)


@working("trying the rewards")
def probe(
    scorer: Scorer | None,
    prompts: Sequence[Prompt],
    adapter: ModelAdapter,
    known: Scorer | None = None,
    texts: Texts | None = None,
) -> None:
    """Score noise: a broken reward ends the run here; a warning names what it changes and is put back.

    People are not asked about noise. Scores are those of the reward itself, whatever its cache holds.

    `adapter` makes images of such a size; without prompts nothing is tried. `known`: a scorer whose rewards were tried
    and warned of; None: none were. `texts`: with them the rewards on latents are tried; None: those on images.

    Raises RewardError: a reward raises, breaks its contract, leaves a setting of the process changed, or has other
    scores for the same image alone or in a second call than its card says.
    """
    if scorer is None or not prompts:
        return
    tried = [e for e in scorer.distinct if (e.reward.on_latents is None) == (texts is None)]
    tried = [entry for entry in tried if not entry.reward.card.by_people]
    if texts is None:
        batch = probe_batch(prompts, adapter.height, adapter.width, adapter.num_frames)
    elif tried:
        batch = probe_latents(texts, prompts, adapter)
    else:
        return
    earlier = [] if known is None else [entry.reward for entry in known.distinct]
    joined: dict[str, torch.Tensor] = {}
    for entry in tried:
        conduct = Conduct(looks_at_inputs=True)
        if any(entry.reward is reward for reward in earlier):
            joined |= _scored(entry, batch, conduct)
            continue
        joined |= try_reward(entry, batch, conduct)
        _warn_of_conduct(entry.name, conduct)
    for entry in scorer.entries if len(tried) == len(scorer.distinct) else ():
        told = any(entry.reward is reward for reward in earlier)
        if not told and entry.training_value(joined).isnan().all():
            log.warning(
                "reward %r has no score for any of a probe batch of noise, %s: every sample that it cannot score "
                "is masked, and the run stops where that is more than half of them",
                entry.name,
                _given(batch),
            )


def try_reward(entry: WeightedReward, batch: Batch, conduct: Conduct) -> dict[str, torch.Tensor]:
    """Scores of a batch, [B] each; called twice more, for the same batch and for one of its samples alone.

    Raises RewardError: it raises, or a sample has other scores there than its card says.
    """
    card = entry.reward.card
    scores = _scored(entry, batch, conduct)
    if not card.repeatable:
        return scores
    second = Conduct()
    again = _scored(entry, batch, second)
    for apart in _differing(scores, again, alone_tolerance(card)):  # sums on a GPU may have no fixed order
        differs = f"differs from call to call: {_values(apart, apart.row, batch, 'in one', 'in the next')}"
        raise RewardError(_refused(entry, differs, REPEATABLE, [*conduct.reasons, *second.reasons]))
    if card.needs_groups:
        return scores
    # Neither the best nor the worst: a rank, or a share of the best, would be the same alone.
    told = max(scores.values(), key=lambda values: values.unique().numel())
    row = int(told.nan_to_num(-torch.inf).argsort()[len(batch) // 2])
    lone = Conduct()
    alone = _scored(entry, batch.pick([row]), lone)
    for apart in _differing(rows(scores, [row]), alone, alone_tolerance(card)):
        differs = f"depends on its batch: {_values(apart, row, batch, f'among {len(batch)}', 'alone')}"
        # On the CPU float32 is float32; a GPU rounds convolutions to TF32 by default, whatever type a reward has.
        if not (torch.cuda.is_available() and could_be_rounding(apart)):
            raise RewardError(_refused(entry, differs, BY_ITSELF, [*conduct.reasons, *lone.reasons]))
        log.warning("reward %r %s; if this is more than rounding, %s", entry.name, differs, BY_ITSELF)
    return scores


def _differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float) -> Iterator[Apart]:
    """The largest difference of each output that has one beyond `tolerance`."""
    for name in first:
        apart = most_apart({name: first[name]}, {name: second[name]})
        if apart.by > tolerance:
            yield apart


def _values(apart: Apart, row: int, batch: Batch, first: str, second: str) -> str:
    """What differs, and both values with the digits that tell float32 numbers apart."""
    return (
        f"{apart.output!r} of probe {row + 1} of {_given(batch)} is {apart.first:.9g} {first} and {apart.second:.9g} "
        f"{second}"
    )


def _refused(entry: WeightedReward, differs: str, remedy: str, reasons: Sequence[str]) -> str:
    why = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
    named = remedy.replace("Card(...", f"Card(outputs={entry.reward.card.outputs}")
    return f"reward {entry.name!r} {differs}{why}; {named}; nothing was trained"


def _given(batch: Batch) -> str:
    shape = [len(batch), *batch.images[0].shape]
    return f"{'latents' if batch.latents is not None else 'videos' if len(shape) == 5 else 'images'} {shape}"


def _scored(entry: WeightedReward, batch: Batch, conduct: Conduct) -> dict[str, torch.Tensor]:
    videos = batch.images[0].ndim == 4 and batch.latents is None
    try:
        result = score_once(entry, batch, conduct)
    except RewardError as error:
        if not videos:
            raise
        raise RewardError(f"{error} (the model makes videos: it was given {_given(batch)})") from error
    except (Exception, SystemExit) as error:  # somebody's code may raise anything
        if out_of_memory(error):
            raise lacking(error, f"reward {entry.name!r}") from error
        log.debug("reward %r fails on a probe batch", entry.name, exc_info=error)
        raise RewardError(
            f"reward {entry.name!r} fails on a probe batch of {_given(batch)}: {described(error)}; nothing was trained"
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
