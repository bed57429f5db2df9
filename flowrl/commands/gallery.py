"""`flowrl gallery`: the HTML report of one run, or of several side by side."""

from pathlib import Path


def command(runs: list[Path], accept: bool = False, out: Path | None = None) -> None:
    """Build the HTML report of one or more runs. Several stand side by side. It opens from disk."""
    from flowrl.apps.gallery import build
    from flowrl.apps.gallery.places import PAGE
    from flowrl.core.errors import ConfigError
    from flowrl.core.files import out_folder

    folders = [folder.resolve() for folder in runs]
    twice = next((run for run, folder in zip(runs, folders, strict=True) if folders.count(folder) > 1), None)
    if twice is not None:
        raise ConfigError(f"RUN {twice} is named twice: a run would be compared with itself; name each run once")
    print(build(runs, None if out is None else out_folder(out, PAGE), accept))
