"""`flowrl score`: any rewards on a folder of images or videos or on pairs, and the contract of one tested."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.commands._scored import Sample, levels, rated, scored, warn
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.files import file_sha256, is_mapping, out_folder, write_atomically
from flowrl.media import media
from flowrl.media.media import IMAGE_SUFFIXES, SELECTED, selection
from flowrl.media.mp4 import SUFFIXES

if TYPE_CHECKING:
    from flowrl.contracts.laws import Finding
    from flowrl.scoring.entries import RewardPlan

LINES = "scores.jsonl"
_SUFFIXES = {*IMAGE_SUFFIXES, *SUFFIXES}
_File = tuple[Path, str, dict[str, Any]]
"""File, prompt and metadata."""
_COLUMN = "records."
"""Start of the options that are columns of a preference set."""


def command(
    images: Path | None = None,
    reward: list[str] | None = None,
    prompts: str | None = None,
    options: list[str] | None = None,
    batch_size: int = 16,
    out: Path | None = None,
    check: str | None = None,
    pairs: str | None = None,
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
    for name, given in {"IMAGES": images, "--prompts": prompts, "--check": check}.items():
        if pairs is not None and given is not None:
            raise ConfigError(
                f"{name} {given}: --pairs {pairs} has images and prompts of its own", Remedy(without=name)
            )
    columns = [word for word in options or [] if pairs is not None and word.startswith(_COLUMN)]
    options = [word for word in options or [] if word not in columns]
    trees = reward_entries(reward or [str(check)], options, prefixes=True)
    named = [(f"--reward {name}", reward_plan(tree, f"--reward {name}")) for name, tree in trees.items()]
    check_plans(named, latents=check is not None)  # before anything is loaded
    plans = [plan for _, plan in named]
    samples = [] if images is None else _samples(images, prompts, plans)
    if check is not None:
        raise SystemExit(0 if _check(plans[0], samples, prompts) else 1)
    if images is None and pairs is None:
        raise ConfigError("IMAGES is required: a folder of images or videos; or give a preference set, --pairs SET")
    if out is not None:
        out_folder(out, LINES)
    if pairs is not None:
        from flowrl.commands._pair_scores import agreement

        raise SystemExit(
            0 if agreement(pairs, [w.removeprefix(_COLUMN) for w in columns], plans, batch_size, out) else 1
        )
    entries = build_rewards(plans)
    # A failure is reported and stays null: nothing is trained here, so nothing needs to stop.
    scorer = build_scorer(entries, batch_size=batch_size, max_failed_share=1.0, on_error=warn)
    size = len(samples) if any(entry.reward.card.needs_groups for entry in entries) else batch_size
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    values = _print_records(map(_record, scored(scorer, batches)), scorer.outputs, out)
    for name, column in values.items():
        mean = f"mean {sum(column) / len(column):.6g} over {len(column)}" if column else "no sample scored"
        warn(f"{name}: {mean}, {len(samples) - len(column)} failed")
    raise SystemExit(0 if all(values.values()) else 1)


def _record(found: tuple[Sample, dict[str, float | None]]) -> dict[str, Any]:
    """The line of a file."""
    (file, text, _), values = found
    assert isinstance(file, Path)
    return {"image": file.name, "prompt": text, **values} | ({SELECTED: how} if (how := selection(file)) else {})


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
        warn(f"{count} of {len(lines)} files were selected ({how}): their mean is not that of a model")
    return values


# ---- what is scored


def _samples(images: Path, prompts: str | None, plans: Sequence[RewardPlan]) -> list[_File]:
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
            warn(f"left out: {len(names)} {what} ({shown})")
    notes = [media.read_note(file) for file in files]
    held = [str(note.get("prompt", "")) for note in notes]
    samples: list[_File]
    if prompts is None:
        samples = [(file, text, {}) for file, text in zip(files, held, strict=True)]
        unknown = sum(not text for _, text, _ in samples)
        if unknown:
            warn(f"{unknown} of {len(files)} files hold no prompt; a reward that reads it needs --prompts")
    else:
        records = _records_of(
            prompts, edits=any(plan.card is not None and plan.card.modality == "edit" for plan in plans)
        )
        told, marks = records, [_marks(note) for note in notes]
        if all(marks) and all("images" in record for _, record in records):
            # One instruction for several sources: what a file holds of its source tells them apart.
            hashed = cache(lambda file: file_sha256(Path(file)))
            told = [(f"{text} {''.join(map(hashed, own['images']))}", own) for text, own in records]
            held = [f"{text} {mark}" for text, mark in zip(held, marks, strict=True)]
        rows, how = matched([file.name for file in files], told, f"--prompts {prompts}", held)
        warn(f"--prompts: {how}")
        samples = [(file, *records[row]) for file, row in zip(files, rows, strict=True)]
    samples = [(file, text, rated(file, record)) for file, text, record in samples]
    for plan in plans:
        for name in plan.card.requires if plan.card is not None else ():
            lacking = next((file for file, _, record in samples if name not in record), None)
            if lacking is not None:
                raise ConfigError(
                    f"the reward {plan.name!r} needs {name!r} for every image, and {lacking.name!r} has none; give "
                    "it in the records of a .jsonl with --prompts"
                )
    return samples


def _records_of(prompts: str, *, edits: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """(prompt, metadata) of each record; reference images under "images" are relative to the file's folder.

    `image` names the file of a record, or its source where rewards of edits (`edits`) find no "images" beside it.
    """
    from flowrl.data.prompt_files import TEXTS
    from flowrl.data.prompt_sources import Columns, load_prompts

    found = load_prompts(prompts, "--prompts", Columns(TEXTS, names_sample=True))
    if edits and any("image" in p.metadata and not p.images for p in found):
        found = load_prompts(prompts, "--prompts", Columns(TEXTS))
    return [(p.text, p.metadata) for p in found]


def _marks(note: dict[str, Any]) -> str:
    """The contents of the sources in a note of `flowrl sample`, as a word; "": it has none."""
    images = note.get("images") or ()
    return "".join(str(image.get("sha256")) for image in images if is_mapping(image))


# ---- the contract


def _check(plan: RewardPlan, samples: Sequence[_File], prompts: str | None) -> bool:
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
        loaded: Any = [unit_floats(levels(file)) for file, _, _ in part]
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
