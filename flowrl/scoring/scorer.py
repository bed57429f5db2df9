"""Several rewards on one batch: retried, masked, summed."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from flowrl.core.errors import Abandoned, RewardError, RewardFailure
from flowrl.media.eight_bits import EightBitImages
from flowrl.reward import Images
from flowrl.scoring.asking import NOBODY, Asking
from flowrl.scoring.attempts import Attempts, Counts
from flowrl.scoring.one_call import score_once
from flowrl.scoring.surroundings import MEND, Batch, Conduct, Latents
from flowrl.scoring.weighted import WeightedReward

FLOATS = 2**28
"""Values of images in 8 bits that a reward is given as floats at once: 1 GiB, 85 images of 1024 px."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Result of scoring B samples."""

    raw: dict[str, Tensor]
    """Output name -> [B] float32, raw scale."""
    values: Tensor
    """Training values per reward, [R, B]; NaN marks a sample to be masked."""
    weights: Tensor
    """[R]."""
    failures: int = 0
    """Samples that some reward could not score."""

    @property
    def total(self) -> Tensor:
        """Weighted sum, [B]; NaN where a reward that counts has failed."""
        live = self.weights != 0
        return (self.values[live] * self.weights[live, None]).sum(dim=0)


def doubled_output(rewards: Sequence[tuple[str, Sequence[str]]]) -> str | None:
    """The error, with its remedy, where two different rewards (who, outputs) share an output; None: there is none."""
    owner: dict[str, str] = {}
    for who, outputs in rewards:
        for name in outputs:
            if name in owner:
                return (
                    f"the output {name!r} is produced by {owner[name]} and by {who}, which are not one reward with the "
                    f"same options; give one of them a prefix (prefix: a makes it a_{name}), make their own options "
                    "equal, or drop one"
                )
            owner[name] = who
    return None


def check_entries(entries: Sequence[WeightedReward], distinct: Sequence[WeightedReward]) -> None:
    """Refuse entries that do not go together; `distinct` are the first of each reward.

    Raises ValueError: an output of two rewards, a share or gate of an output that there is not, other tries or cache
    than an earlier entry of the same reward.
    """
    outputs = [name for entry in distinct for name in entry.reward.card.outputs]
    clash = doubled_output([(repr(entry.name), entry.reward.card.outputs) for entry in distinct])
    if clash is not None:
        raise ValueError(f"rewards: {clash}")
    first = {id(entry.reward): entry for entry in distinct}
    for entry in entries:
        own = list(entry.reward.card.outputs)
        unknown = sorted(set(entry.outputs) - set(own))
        if unknown:
            raise ValueError(f"rewards: {entry.name!r} has no output {unknown[0]!r}; it has {own}")
        if entry.gate is not None and entry.gate.output not in outputs:
            raise ValueError(
                f"rewards: the gate of {entry.name!r} names the output {entry.gate.output!r}; there are {outputs}"
            )
        other = first[id(entry.reward)]
        alike = {"retries": entry.retries == other.retries, "isolate": entry.isolate == other.isolate}
        alike["cache"] = entry.cache is other.cache
        for option, same in alike.items():
            if not same:
                raise ValueError(
                    f"rewards: two entries of {entry.name!r} are scored in one pass and cannot differ in {option}; "
                    "set it alike in both"
                )


def most_at_once(images: Images) -> int:
    """Images in 8 bits that may be floats at the same time: as many as `FLOATS` holds, and one at least."""
    if not isinstance(images, EightBitImages):
        return len(images) or 1  # they are in memory already
    return max(1, FLOATS // max(1, images.levels[:1].numel()))


class Scorer:
    """Runs several rewards on a batch: retry, then mask, then abort.

    Entries that hold the same `Reward` object share its one pass over a batch; each makes its own training value.
    `batch_size` samples are handed to a reward at once. Where an entry does not say: `retries`: further tries after an
    exception; `max_failed_share`: above this share of masked samples in one call the run stops. `on_error` is called
    with the text of every exception, and of every sample that one masks. Without entries every sample has the value 0.
    """

    def __init__(
        self,
        entries: Sequence[WeightedReward],
        *,
        batch_size: int = 64,
        retries: int = 2,
        max_failed_share: float = 0.5,
        on_error: Callable[[str], None] = lambda text: None,
    ) -> None:
        first: dict[int, WeightedReward] = {}
        for entry in entries:
            first.setdefault(id(entry.reward), entry)
        self.distinct = tuple(first.values())
        """The first entry of each reward: what is run."""
        self.entries = tuple(entries)
        check_entries(self.entries, self.distinct)
        self.batch_size, self.retries, self.max_failed_share = batch_size, retries, max_failed_share
        self.on_error = on_error
        self.stop: Callable[[], bool] = lambda: False
        """Asked before every call of a reward whether to leave off, which raises `Abandoned`."""
        self.asking: Callable[[int], Asking] = lambda iteration: NOBODY
        """The part of a training iteration in which rewards may ask people."""
        self.counts = [Counts() for _ in self.distinct]
        self._changed: set[tuple[str, str]] = set()
        """(reward, setting) that was reported."""

    @property
    def evaluated(self) -> tuple[WeightedReward, ...]:
        """The entries that evaluations score too: those that no people judge."""
        return tuple(entry for entry in self.entries if not entry.reward.card.by_people)

    @property
    def sees_images(self) -> bool:
        """Whether a reward judges images, and not all of them latents."""
        return any(entry.reward.on_latents is None for entry in self.distinct)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for entry in self.distinct for name in entry.reward.card.outputs)

    def take_counts(self) -> dict[str, int]:
        """Counts since they were last taken, by metric: "<first output of the reward>_calls", ..."""
        result = {
            f"{entry.reward.card.outputs[0]}_{what}": value
            for entry, counts in zip(self.distinct, self.counts, strict=True)
            for what, value in asdict(counts).items()
            if what != "cached" or entry.cache is not None
        }
        self.counts = [Counts() for _ in self.distinct]
        return result

    def score(
        self, images: Images, prompts: Sequence[str], metadata: Sequence[dict], latents: Latents | None = None
    ) -> Scores:
        """Score B samples in chunks; sample i never depends on its chunk (rewards are row-wise).

        Of `EightBitImages` a chunk at a time becomes floats, `FLOATS` values at most. A reward that needs whole groups
        gets the batch in one piece.

        Raises RewardFailure: a broken contract, or more than `max_failed_share` of the samples failed.
        """
        if not self.entries:
            return Scores(raw={}, values=torch.zeros(1, len(prompts)), weights=torch.ones(1))
        errors: list[str] = []
        joined: dict[str, Tensor] = {}
        for entry in self.distinct:
            joined |= self.raw(entry, Batch(images, prompts, metadata, latents), errors)
        return self.combine(joined, errors)

    def raw(self, entry: WeightedReward, batch: Batch, errors: list[str]) -> dict[str, Tensor]:
        """Outputs of one reward, each [B], NaN where it failed; what it raised is appended to `errors`.

        Raises RewardFailure: a broken contract.
        """
        count, counts, batch = len(batch), self.counts[self.distinct.index(entry)], batch.seen_by(entry.reward)
        chunk = max(count, 1) if entry.reward.card.needs_groups else min(self.batch_size, most_at_once(batch.images))
        attempts = self._attempts(entry, counts, errors)
        try:
            parts = [attempts(batch.part(start, start + chunk)) for start in range(0, count, chunk)]
        except RewardError as error:  # before training it would have been the user's to mend
            raise RewardFailure(str(error)) from error
        outputs = entry.reward.card.outputs
        joined = {name: torch.cat([part[name] for part in parts]) if parts else torch.empty(0) for name in outputs}
        counts.masked += int(torch.stack([value.isnan() for value in joined.values()]).any(dim=0).sum())
        return joined

    def combine(self, joined: dict[str, Tensor], errors: Sequence[str]) -> Scores:
        """The scores of B samples from the outputs of all rewards.

        Raises RewardFailure: more than `max_failed_share` of the samples failed.
        """
        values = torch.stack([entry.training_value(joined) for entry in self.entries])
        beyond = [entry.name for entry, row in zip(self.entries, values, strict=True) if row.isinf().any()]
        if beyond:  # the raw ones are finite, so scale, offset or a share has made it so
            errors = [*errors, f"training values of {beyond[0]!r} are beyond float32; lower its scale"]
            values = torch.where(values.isinf(), torch.nan, values)
        weights = torch.tensor([entry.weight for entry in self.entries], dtype=torch.float32)
        self._abort(values, weights, errors)
        return Scores(raw=joined, values=values, weights=weights, failures=int(values.isnan().any(dim=0).sum()))

    def _attempts(self, entry: WeightedReward, counts: Counts, errors: list[str]) -> Attempts:
        def report(text: str) -> None:
            errors.append(text)
            self.on_error(text)

        def once(batch: Batch) -> dict[str, Tensor]:
            if self.stop():
                raise Abandoned
            conduct = Conduct()
            result = score_once(entry, batch, conduct)
            for reason in conduct.reasons:
                report(f"reward {entry.name!r}: {reason}")
            self.report_changed(entry.name, conduct.settings)
            return result

        return Attempts(
            name=entry.name,
            once=once,
            outputs=entry.reward.card.outputs,
            retries=self.retries if entry.retries is None else entry.retries,
            isolate=entry.isolate and not entry.reward.card.needs_groups,
            cache=None if entry.reward.card.needs_groups else entry.cache,
            counts=counts,
            report=report,
        )

    def report_changed(self, name: str, settings: Sequence[str]) -> None:
        """That a reward has left settings of the process changed; once for each."""
        new = [setting for setting in settings if (name, setting) not in self._changed]
        self._changed.update((name, setting) for setting in new)
        if new:
            self.on_error(f"reward {name!r} changed {' and '.join(new)}, which is put back now and every time; {MEND}")

    def _abort(self, values: Tensor, weights: Tensor, errors: Sequence[str]) -> None:
        """Stop where too much is lost. A reward that is only looked at (weight 0) ends nothing by failing."""
        live = weights != 0 if bool((weights != 0).any()) else torch.ones_like(weights, dtype=torch.bool)
        count, why = values.shape[1], errors[-1] if errors else "the rewards returned NaN for them"
        for entry, row, counted in zip(self.entries, values.isnan(), live, strict=True):
            share, lost = entry.max_failed_share, int(row.sum())
            if counted and share is not None and lost > share * count:
                raise RewardFailure(
                    f"{lost} of {count} samples have no value of reward {entry.name!r}, more than its "
                    f"max_failed_share={share} allows; {why}"
                )
        # An entry with a limit of its own was held to that above.
        rest = live & torch.tensor([entry.max_failed_share is None for entry in self.entries])
        lost = int(values[rest].isnan().any(dim=0).sum()) if bool(rest.any()) else 0
        if lost > self.max_failed_share * count:
            raise RewardFailure(
                f"{lost} of {count} samples could not be scored, more than the allowed share "
                f"{self.max_failed_share}; {why}"
            )
