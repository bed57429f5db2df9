"""What comes with the package: small models and recipes by their names."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def asset_roots() -> list[Path]:
    """Where embedded assets are looked for, in order; FLOWRL_ASSETS comes first."""
    roots = [PACKAGE / "assets", PACKAGE.parent / "assets"]
    return [Path(os.environ["FLOWRL_ASSETS"]), *roots] if os.environ.get("FLOWRL_ASSETS") else roots


def asset_folder(name: str, marker: str) -> Path | None:
    """Folder of the embedded asset `name`, known by its file `marker`; None if there is no such asset."""
    return next((root / name for root in asset_roots() if (root / name / marker).is_file()), None)


def _recipe_folder() -> Path:
    """`configs` in an installed flowrl, or beside the package in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def recipes() -> list[str]:
    """Names of the recipes that come with the package: "quickstart", "sd3/flow_grpo-pickscore"."""
    folder = _recipe_folder()
    return sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))


def recipe_file(name: str) -> Path | None:
    """File of a recipe, also with `configs/` before its name or `.yaml` after it; None if there is none.

    >>> recipe_file("configs/quickstart.yaml") == recipe_file("quickstart"), recipe_file("quickstar")
    (True, None)
    """
    bare = name.removeprefix("configs/").removesuffix(".yaml")
    return _recipe_folder() / f"{bare}.yaml" if bare in recipes() else None


def embedded_prompts(name: str) -> Path | None:
    """The file of the embedded list of prompts `name`, or None."""
    places = [PACKAGE / "assets/prompts" / name, PACKAGE.parent / "assets/prompts" / name]
    return next((place for place in places if place.is_file()), None)
