"""`flowrl score`: any rewards on a folder of images or videos, and the contract of one tested."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.files import out_folder, write_atomically
from flowrl.media import media
from flowrl.media.media import IMAGE_SUFFIXES, SELECTED, selection
from flowrl.media.mp4 import SUFFIXES

if TYPE_CHECKING:
    import torch

    from flowrl.contracts.laws import Finding
    from flowrl.scoring.entries import RewardPlan
    from flowrl.scoring.scorer import Scorer

LINES = "scores.jsonl"
_SUFFIXES = {*IMAGE_SUFFIXES, *SUFFIXES}
_Sample = tuple[Path, str, dict]
"""File, prompt and metadata."""


def command(
    images: Path | None = None,
    reward: list[str] | None = None,
    prompts: str | None = None,
    options: list[str] | None = None,
    batch_size: int = 16,
    out: Path | None = None,
    check: str | None = None,
) -> None:
    """Score images or videos with any rewards. One line of JSON each (null: not scored), then a summary.

    Exit code 1 if a reward scored nothing.
    """
    from flowrl.apps.command_line import reward_entries
    from flowrl.scoring.build import build_rewards, build_scorer
    from flowrl.scoring.entries import check_plans, reward_plan

    if (check is None) == (not reward):
        raise ConfigError("give either --reward NAME (again for more) or --check NAME")
    if check is not None and out is not None:
        raise ConfigError(f"--out {out}: --check writes no lines, it prints its findings", Remedy(without="--out"))
    trees = reward_entries(reward or [str(check)], options or [], prefixes=True)
    named = [(f"--reward {name}", reward_plan(tree, f"--reward {name}")) for name, tree in trees.items()]
    check_plans(named, latents=check is not None)  # before anything is loaded
    plans = [plan for _, plan in named]
    samples = [] if images is None else _samples(images, prompts, plans)
    if check is not None:
        raise SystemExit(0 if _check(plans[0], samples, prompts) else 1)
    if images is None:
        raise ConfigError("IMAGES is required: a folder of images or videos")
    if out is not None:
        out_folder(out, LINES)
    entries = build_rewards(plans)
    # A failure is reported and stays null: nothing is trained here, so nothing needs to stop.
    scorer = build_scorer(entries, batch_size=batch_size, max_failed_share=1.0, on_error=_warn)
    size = len(samples) if any(entry.reward.card.needs_groups for entry in entries) else batch_size
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    values = _print_records(_scored(scorer, batches), scorer.outputs, out)
    for name, column in values.items():
        mean = f"mean {sum(column) / len(column):.6g} over {len(column)}" if column else "no sample scored"
        _warn(f"{name}: {mean}, {len(samples) - len(column)} failed")
    raise SystemExit(0 if all(values.values()) else 1)


def _print_records(
    records: Iterator[dict[str, Any]], outputs: Sequence[str], out: Path | None
) -> dict[str, list[float]]:
    """Print the lines as they come, or write them into the folder `out` at the end; returns output -> its numbers."""
    values: dict[str, list[float]] = {name: [] for name in outputs}
    lines, selected = list[str](), Counter[str]()
    for record in records:
        selected.update([record[SELECTED]] if SELECTED in record else [])
        for name, column in values.items():
            if record[name] is not None:
                column.append(record[name])
        lines.append(json.dumps(record, ensure_ascii=False))
        if out is None:
            print(lines[-1])
    if out is not None:
        write_atomically(out / LINES, "".join(f"{line}\n" for line in lines))
    for how, count in selected.items():
        _warn(f"{count} of {len(lines)} files were selected ({how}): their mean is not that of a model")
    return values


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


# ---- what is scored


def _samples(images: Path, prompts: str | None, plans: Sequence[RewardPlan]) -> list[_Sample]:
    """What is scored, 10 after 9; `prompts` None: those that `flowrl sample` wrote."""
    from flowrl.apps.matching import matched
    from flowrl.data.natural import natural

    # Hidden files are those of other programs, such as macOS's ._clip.mp4: no video, in spite of the suffix.
    inside = [file for file in images.iterdir() if file.name[0] != "."] if images.is_dir() else []
    result = sorted(inside, key=lambda file: natural(file.name)) or ([images] if images.is_file() else [])
    files = [file for file in result if file.suffix.lower() in _SUFFIXES and not file.is_dir()]
    if not files:
        what = "no images there" if images.exists() else "there is no such file or folder"
        raise ConfigError(
            f"IMAGES={str(images)!r}: {what}; give one with images or videos ({', '.join(sorted(_SUFFIXES))})"
        )
    # Notes and captions next to a file go with it.
    stems, others = {file.stem for file in files}, [file for file in result if file not in set(files)]
    folders = [file.name for file in others if file.is_dir()]
    foreign = [file.name for file in others if not file.is_dir() and file.stem not in stems]
    for names, what in ((folders, "sub-folders"), (foreign, "files that are no images or videos")):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            _warn(f"left out: {len(names)} {what} ({shown})")
    held = [str(media.read_note(file).get("prompt", "")) for file in files]
    if prompts is None:
        samples = [(file, text, {}) for file, text in zip(files, held, strict=True)]
        unknown = sum(not text for _, text, _ in samples)
        if unknown:
            _warn(f"{unknown} of {len(files)} files hold no prompt; a reward that reads it needs --prompts")
    else:
        records = _records_of(prompts)
        rows, how = matched([file.name for file in files], records, f"--prompts {prompts}", held)
        _warn(f"--prompts: {how}")
        samples = [(file, *records[row]) for file, row in zip(files, rows, strict=True)]
    samples = [_with_rate(*sample) for sample in samples]
    for plan in plans:
        for name in plan.card.requires if plan.card is not None else ():
            lacking = next((file for file, _, record in samples if name not in record), None)
            if lacking is not None:
                raise ConfigError(
                    f"the reward {plan.name!r} needs {name!r} for every image, and {lacking.name!r} has none; give "
                    "it in the records of a .jsonl with --prompts"
                )
    return samples


def _with_rate(file: Path, prompt: str, record: dict) -> _Sample:
    """A sample with the frame rate of its video in its record, for rewards that count in seconds; a given one stays.

    Raises ConfigError: a file that needs the extra `video`, which is not installed.
    """
    if not media.is_video_file(file) and file.suffix.lower() not in media.MAY_MOVE:
        return file, prompt, record
    try:
        fps = media.facts(file)[1]
    except ConfigError:
        raise
    except media.UNREADABLE:
        # It is reported when it is opened, and is null. Without a rate, a reward that needs one would refuse all files.
        fps = math.nan
    return file, prompt, record if fps is None else {"fps": fps, **record}


def _records_of(prompts: str) -> list[tuple[str, dict]]:
    """(prompt, metadata) of each record; reference images under "images" are relative to the file's folder."""
    from flowrl.data.prompt_files import TEXTS
    from flowrl.data.prompt_sources import Columns, load_prompts

    return [(p.text, p.metadata) for p in load_prompts(prompts, "--prompts", Columns(TEXTS, names_sample=True))]


def _scored(scorer: Scorer, batches: Sequence[Sequence[_Sample]]) -> Iterator[dict[str, Any]]:
    """A record for each sample; null where the file is not an image or could not be scored.

    While a batch is read, rewards that overlap score the one before.
    """
    import torch

    from flowrl.scoring.overlap import Beside
    from flowrl.scoring.surroundings import Batch

    with Beside(scorer, torch.device("cuda" if torch.cuda.is_available() else "cpu")) as beside:
        for batch in batches:
            for samples, rows, images in _opened(scorer, batch):
                kept = [samples[place] for place in rows]
                texts, metadata = [text for _, text, _ in kept], [record for _, _, record in kept]
                for (before, opened), scores in beside.add((samples, rows), Batch(images, texts, metadata)):
                    yield from _records(scorer.outputs, before, opened, scores.raw)
        for (before, opened), scores in beside.rest():
            yield from _records(scorer.outputs, before, opened, scores.raw)


def _opened(scorer: Scorer, samples: Sequence[_Sample]) -> Iterator[tuple[Sequence[_Sample], list[int], Any]]:
    """(samples, positions of those that could be read, their images) of a batch, in 8 bits where they are of one size.

    Videos of several sizes are handed on size by size, unless a reward needs the whole batch: as floats, which images
    of several sizes are, they would be four times as large.
    """
    import torch

    from flowrl.media.eight_bits import EightBitImages, unit_floats
    from flowrl.scoring.build import require_modality

    read: list[torch.Tensor | None] = []
    for file, _, _ in samples:
        try:
            read.append(_levels(file))
        except ConfigError as error:
            _warn(str(error))
            read.append(None)
    pairs = zip(samples, read, strict=True)
    kinds = {levels.ndim == 4: file.name for (file, _, _), levels in pairs if levels is not None}
    for entry in scorer.distinct:
        for videos, name in kinds.items():
            require_modality(entry.name, entry.reward.card, videos=videos, file=name)
    whole = True not in kinds or any(entry.reward.card.needs_groups for entry in scorer.distinct)
    ends = [] if whole else _changes([None if levels is None else levels.shape for levels in read])
    for start, stop in itertools.pairwise([0, *ends, len(samples)]):
        rows = [place for place in range(start, stop) if read[place] is not None]
        images = [levels for levels in read[start:stop] if levels is not None]
        handed: Any
        if len({image.shape for image in images}) == 1:
            handed = EightBitImages(torch.stack(images), torch.ones(len(images), dtype=torch.bool))
        else:
            handed = [unit_floats(image) for image in images]
        yield samples[start:stop], [place - start for place in rows], handed
        read[start:stop] = [None] * (stop - start)


def _changes(shapes: Sequence[Any]) -> list[int]:
    """Positions where another shape begins; None has none.

    >>> _changes([None, 1, 1, None, 2, None, 1])
    [4, 6]
    """
    result, now = list[int](), None
    for place, shape in enumerate(shapes):
        if shape is not None and shape != now:
            result += [] if now is None else [place]
            now = shape
    return result


def _levels(file: Path) -> torch.Tensor:
    """The image or video of a file, uint8; ConfigError where there is none."""
    try:
        return media.read_levels(file)
    except media.UNREADABLE as error:
        raise ConfigError(f"{file.name} cannot be read: {error}") from error


def _records(
    outputs: Sequence[str], samples: Sequence[_Sample], opened: Sequence[int], raw: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, Any]]:
    """The lines of a batch whose samples at the positions `opened` were scored."""
    rows = {place: row for row, place in enumerate(opened)}
    for place, (file, text, _) in enumerate(samples):
        record: dict[str, Any] = {"image": file.name, "prompt": text}
        for name in outputs:
            value = float(raw[name][rows[place]]) if place in rows else float("nan")
            record[name] = None if value != value else value
        yield record | ({SELECTED: how} if (how := selection(file)) else {})


# ---- the contract


def _check(plan: RewardPlan, samples: Sequence[_Sample], prompts: str | None) -> bool:
    """Test the contract of a reward and print the findings; True if it holds."""
    from flowrl.contracts.latents import LatentTrial
    from flowrl.contracts.rewards import COUNT, RewardTrial, trial_batch
    from flowrl.media.eight_bits import unit_floats
    from flowrl.scoring.build import require_modality
    from flowrl.scoring.surroundings import Batch

    if plan.card is not None and plan.card.requires and prompts is None:
        raise ConfigError(
            f"the reward {plan.name!r} needs {', '.join(plan.card.requires)} for every sample; give records that have "
            "them with --prompts"
        )
    entry = plan.build()
    if (judge := entry.reward.on_latents) is not None:
        return _shown(LatentTrial(plan.name, judge).run())
    given = trial_batch(entry.reward.card)
    if samples:
        if len(samples) < 2:
            raise ConfigError("--check compares samples with each other: give at least two images or videos")
        part = samples[:COUNT]
        loaded: Any = [unit_floats(_levels(file)) for file, _, _ in part]
        for (file, _, _), image in zip(part, loaded, strict=True):
            require_modality(entry.name, entry.reward.card, videos=image.ndim == 4, file=file.name)
        if len({image.shape for image in loaded}) == 1:
            import torch

            loaded = torch.stack(loaded)
        given = Batch(loaded, [text for _, text, _ in part], [record for _, _, record in part])
    elif prompts is not None:
        records = _records_of(prompts)
        chosen = [records[i % len(records)] for i in range(COUNT)]
        given = Batch(given.images, [text for text, _ in chosen], [record for _, record in chosen])
    return _shown(RewardTrial(plan.name, entry.reward, given).run())


def _shown(findings: Iterable[Finding]) -> bool:
    """Print findings; True if all laws hold."""
    good = True
    for finding in findings:
        good &= finding.good
        print(finding)
    return good
