"""Folders of reports: inside a run for its own one, next to the runs for a comparison."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from flowrl.core.errors import ConfigError

OWN, PAGE = "gallery", "index.html"
"""Folder of a run's own report, and file name of every report."""
_LONGEST = 80


def page_folder(runs: Sequence[Path], out: Path | None) -> Path:
    """Folder of the page about some runs. `out`: folder as the user gave it; None: `<run>/gallery`, or
    `comparison_folder` for several runs.

    Raises ConfigError: `out` is the folder of another run's own report.
    """
    alone = len({run.resolve() for run in runs}) == 1
    if out is None:
        return runs[0] / OWN if alone else comparison_folder(runs)
    place = out.resolve()
    owner = place.parent
    if place.name == OWN and (owner / "config.yaml").is_file() and not (alone and owner == runs[0].resolve()):
        raise ConfigError(f"--out {out}: it holds the report of the run {owner.name!r}; choose another folder")
    return out


def comparison_folder(runs: Sequence[Path]) -> Path:
    """Folder next to the first run, named after all of them, so that comparisons do not collide.

    >>> comparison_folder([Path("runs/a"), Path("runs/b")]).as_posix()
    'runs/gallery-a-b'
    """
    places = [run.resolve() for run in runs]
    title = "-".join(["gallery", *(place.name for place in places)])
    if len(title) > _LONGEST or len({place.parent for place in places}) > 1:
        # A name that is too long, or equal names in several folders: a hash of the paths distinguishes them.
        mark = hashlib.sha256("\n".join(map(str, places)).encode()).hexdigest()[:8]
        title = f"{title[:_LONGEST]}-{mark}"
    parent = runs[0].parent if runs[0].name not in ("", "..") else places[0].parent
    return parent / title
