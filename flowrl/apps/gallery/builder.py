"""The report: one HTML file that opens from disk.

Only text files and images of run folders are read, so a report can be built anywhere, without a model, and while the
run is under way.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.apps.gallery import images
from flowrl.apps.gallery.compare.page import WHOLE, comparison
from flowrl.apps.gallery.images import OnDisk, Place
from flowrl.apps.gallery.links import run_marks
from flowrl.apps.gallery.pairs import Page
from flowrl.apps.gallery.places import PAGE, page_folder
from flowrl.apps.gallery.rendering import rendered
from flowrl.apps.gallery.runs import Run, load_run
from flowrl.apps.gallery.view import num_bytes, view
from flowrl.core.errors import ConfigError
from flowrl.core.files import replaced
from flowrl.data.contents import require_comparable


def build(run_folders: Sequence[Path], out: Path | None = None, accept_changes: bool = False) -> Path:
    """Write the report of one or several runs.

    Args:
        run_folders: folders that `flowrl train` wrote, finished or not.
        out: folder of the page; None: `<run>/gallery`, or `places.comparison_folder` for several runs.
        accept_changes: show runs that had different contents of a file side by side, without a common chart.

    Returns:
        `out / "index.html"`, a page without references to a network.

    Raises ConfigError: a folder that is not a run, a damaged file, runs with different contents of a file, runs that
    share no prompt or metric, or a page that would replace a run's own report; with the file and the remedy.
    WriteError: the disk is full or not writable.
    """
    if not run_folders:
        raise ConfigError("run_folders is empty; name at least one run folder, such as runs/quickstart")
    runs = [load_run(Path(folder)) for folder in run_folders]
    changed = require_comparable([run.folder for run in runs], accept=accept_changes)
    output = page_folder([run.folder for run in runs], out) / PAGE
    page = render(runs, OnDisk(output.parent), alike=not changed)
    with replaced(output, "the run itself is safe, and flowrl gallery RUN builds its report") as temporary:
        temporary.write_bytes(page.encode("utf-8", "replace"))  # a lone surrogate in a prompt cannot be encoded
    return output


def render(runs: Sequence[Run], place: Place, *, alike: bool, live: Mapping[str, Any] | None = None) -> str:
    """The page about some runs. `runs` are contents of the run folders; none: the frame of a live page that cannot be
    built yet. `alike`: whether they had equal contents of their files; others are only listed. `live`: values of
    `live.html.j2`, for a page that a server refreshes; None: a page that is complete in itself.

    Raises ConfigError: an image that cannot be read, or runs that share no prompt, seed or metric.
    """
    compared = comparison(runs, place, alike=alike) if len(runs) > 1 else None
    shown = runs if len(runs) <= WHOLE else []
    page = Page(place, run_marks([run.name for run in runs]), num_bytes(compared))
    views = [view(run, index, page) for index, run in enumerate(shown)]
    values = {"runs": views, "names": [run.name for run in runs], "comparison": compared, "live": live}
    return str(rendered("index.html.j2", **values, selection_seed=images.SELECTION_SEED))
