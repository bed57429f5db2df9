"""A suite's samples in the folder that its official evaluator reads, and that evaluator's results as scores."""

import hashlib
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.apps.suites.running.runner import Sample, Task, rows_of
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.files import writing
from flowrl.evaluation.suite import Item, Row
from flowrl.media import media


def export(task: Task, folder: ResultsFolder, out: Path) -> int:
    """Write all samples of a task into `out` in the official layout; returns the number of files written.

    Raises ConfigError: the suite's official evaluator reads no folder, a sample is missing, `out` holds something else,
    or videos need the extra `video`.
    """
    suite = task.suite
    if suite.layout is None:
        raise ConfigError(
            f"--export: {suite.name} has no official evaluator that reads a folder", Remedy(without="--export")
        )
    missing = [sample for sample in task.all() if not folder.image(*sample).is_file()]
    if missing:
        item, k = missing[0]
        raise ConfigError(
            f"--export: {len(missing)} samples are missing in {folder.path}, the first is prompt {item.id!r}, sample "
            f"{k}; give the same command again to make them"
        )
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--export {out} is not empty; name a new folder")
    files: dict[str, list[Sample]] = {}
    for sample in task.all():
        files.setdefault(suite.layout(*sample), []).append(sample)
    with writing(out):
        for place, samples in files.items():
            target = out / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if len(samples) == 1:
                file = media.unselected(folder.image(*samples[0]))
                if folder.videos and file.suffix != target.suffix:  # the same frame rate
                    media.encode_video(target, *media.decode_video(file))
                else:
                    shutil.copyfile(file, target)
            else:
                _grid(folder, samples, target)
        for place, text in (suite.extras(task.items) if suite.extras else {}).items():
            (out / place).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(text, Path):
                media.open_image(text).save(out / place)
            else:
                (out / place).write_text(text, encoding="utf-8")
    return len(files)


def _grid(folder: ResultsFolder, samples: list[Sample], target: Path) -> None:
    """Images of one prompt in a square, row by row."""
    images = torch.stack([folder.read(*sample) for sample in samples])
    columns = math.isqrt(len(samples))
    if columns * columns != len(samples):
        raise ConfigError(
            f"--export: the official evaluator reads a square of images of each prompt, and {len(samples)} make none",
            [Remedy(flag=f"--samples {max(1, columns) ** 2}"), Remedy(flag=f"--samples {(columns + 1) ** 2}")],
        )
    sheet, _ = media.contact_sheet(images, columns, max(images.shape[-2:]))
    file = media.write(sheet, target.with_suffix(""))
    if file != target:
        file.rename(target)


def with_results(task: Task, folder: ResultsFolder, results: Path) -> list[Row]:
    """The rows of a task with the scores of the official evaluator.

    Raises ConfigError: the suite reads none, or samples are missing, double or foreign there.
    """
    suite = task.suite
    if suite.read_results is None:
        raise ConfigError(f"--results: results of an official evaluator are not read for {suite.name}; use --judge")
    found = suite.read_results(results, task.items)
    require_each_once(found, task.items, task.samples, f"--results {results}")
    rows = rows_of(task, folder)
    for row in rows:
        row.scores, row.answers, row.error = found[row.id, row.k], [], ""
    return rows


def require_each_once(
    found: Mapping[tuple[str, int], object] | Iterable[tuple[str, int]], items: Sequence[Item], samples: int, what: str
) -> None:
    """Refuse other results than the first `samples` of each prompt, once. Raises ConfigError: naming the samples."""
    known = {item.id: item.text for item in items}
    wanted = {(item.id, k) for item in items for k in range(samples)}
    own = set(found)
    missing, foreign = sorted(wanted - own), sorted(own - wanted)
    if foreign:
        raise ConfigError(
            f"{what}: {len(foreign)} results are of no sample of this run, such as prompt {foreign[0][0]!r}, sample "
            f"{foreign[0][1]}; give the results of the folder that --export wrote, unchanged"
        )
    if missing:
        first, k = missing[0]
        raise ConfigError(
            f"{what}: {len(missing)} of {len(wanted)} samples have no result, the first is prompt {first!r} "
            f"({known[first][:60]!r}), sample {k}; run the evaluator on the whole folder again"
        )


def of_models(names: Sequence[str], files: Sequence[Path]) -> dict[str, Path]:
    """Results of each model, in the order in which both were given, unless the paths say another one.

    `names` are those of the models' folders, such as "model" and "base"; `files`, as many, those of --results.

    Raises ConfigError: a path holds the name of another model than its own.
    """
    words = [set(re.findall(r"[a-z]+", str(file).casefold())) for file in files]
    own = [each - set[str]().union(*words[:k], *words[k + 1 :]) for k, each in enumerate(words)]
    for k, name in enumerate(names):
        other = next((each for each in names if each != name and each in own[k]), None)
        if other is not None:
            raise ConfigError(
                f"--results {files[k]}: the {'first' if k == 0 else 'second'} file is that of {name}, and this is "
                f"called by {other}; give that of MODEL first and that of --base second"
            )
    return dict(zip(names, files, strict=True))


def fingerprint(results: Path) -> str:
    """SHA-256 of a results file, or of the names and contents of all files in a results folder."""
    if results.is_file():
        return hashlib.sha256(results.read_bytes()).hexdigest()
    whole = hashlib.sha256()
    for file in sorted(path for path in results.rglob("*") if path.is_file()):
        whole.update(f"{file.relative_to(results).as_posix()}\n{fingerprint(file)}\n".encode())
    return whole.hexdigest()
