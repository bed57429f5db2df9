"""What comes with the package: small models by their bare names."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def asset_roots() -> list[Path]:
    """Where embedded assets are looked for, in order; FLOWRL_ASSETS comes first."""
    roots = [PACKAGE / "assets", PACKAGE.parent / "assets"]
    return [Path(os.environ["FLOWRL_ASSETS"]), *roots] if os.environ.get("FLOWRL_ASSETS") else roots


def asset_folder(name: str, marker: str) -> Path | None:
    """Folder of the embedded asset `name`, known by its file `marker`; None if there is no such asset."""
    return next((root / name for root in asset_roots() if (root / name / marker).is_file()), None)
