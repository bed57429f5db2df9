"""`flowrl export`: a run's weights in the formats that other programs read, and on the hub where that is asked for."""

import os
import tempfile
from pathlib import Path
from typing import Literal

Format = Literal["diffusers", "kohya", "comfyui", "merged"]


def command(
    run: Path,
    out: Path | None = None,
    layout: Format = "diffusers",
    push: str | None = None,
    private: bool = False,
    dry_run: bool = False,
) -> None:
    """Export a run's weights with a model card. It prints the file or folder to load.

    With --push the exported folder is uploaded too.
    """
    from flowrl.core.errors import ConfigError, Remedy

    if push is None and (private or dry_run):
        given = " ".join(name for name, on in {"--private": private, "--dry-run": dry_run}.items() if on)
        raise ConfigError(f"{given}: for --push alone", Remedy(without=given))
    if push is None and out is None:
        raise ConfigError("--out is missing: give a new folder for the result")
    if dry_run:
        # Before the hub's library is imported: a base model of the hub is not even looked up.
        os.environ["HF_HUB_OFFLINE"] = "1"
    from flowrl.apps.publish import publish
    from flowrl.apps.publish.card import FILE

    if push is None:
        assert out is not None
        print(_export(run, layout, out))
        return
    publish.require_name(push)
    if dry_run:
        with tempfile.TemporaryDirectory() as spare:
            folder = out or Path(spare)
            _export(run, layout, folder)
            print(f"Dry run: nothing is sent. To {push} ({'private' if private else 'public'}):")
            print(publish.listing(publish.files(folder)))
            card = folder / FILE
            print(f"\n{FILE}:\n\n{card.read_text(encoding='utf-8')}" if card.is_file() else f"\nThere is no {FILE}.")
        return
    folder = out or run / f"export-{layout}"
    print(_export(run, layout, folder))
    message = f"{run.resolve().name}, exported by flowrl ({layout})"
    print(publish.push(folder, push, message, private=private, api=publish.hub()))


def _export(run: Path, layout: Format, out: Path) -> Path:
    """The weights and their card in the folder `out`; the file or folder to load."""
    from flowrl.apps.publish.card import try_card
    from flowrl.apps.publish.export import export

    result = export(run, layout, out)
    try_card(run, out, layout)
    return result
