"""Assets of the package by name: small models, recipes, lists of prompts."""

import os
from pathlib import Path
from typing import Any

import yaml

PACKAGE = Path(__file__).resolve().parents[1]


def asset_roots() -> list[Path]:
    """Folders with embedded assets in the order of search; FLOWRL_ASSETS comes first."""
    roots = [PACKAGE / "assets", PACKAGE.parent / "assets"]
    return [Path(os.environ["FLOWRL_ASSETS"]), *roots] if os.environ.get("FLOWRL_ASSETS") else roots


def asset_folder(name: str, marker: str) -> Path | None:
    """Folder of the embedded asset `name`, which holds a file `marker`; None if there is no such asset."""
    return next((root / name for root in asset_roots() if (root / name / marker).is_file()), None)


def _recipe_folder() -> Path:
    """`configs` inside an installed flowrl, or next to the package in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def recipes() -> list[str]:
    """Names of the recipes of the package, such as "quickstart" and "sd3/flow_grpo-pickscore"."""
    folder = _recipe_folder()
    return sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))


def recipe_file(name: str) -> Path | None:
    """File of a recipe; None if there is none. `configs/` before the name or `.yaml` after it is ignored.

    >>> recipe_file("configs/quickstart.yaml") == recipe_file("quickstart"), recipe_file("quickstar")
    (True, None)
    """
    bare = name.removeprefix("configs/").removesuffix(".yaml")
    return _recipe_folder() / f"{bare}.yaml" if bare in recipes() else None


def embedded_prompts(name: str) -> Path | None:
    """File of the embedded list of prompts `name`; None if there is none."""
    files = [folder / "assets/prompts" / name for folder in (PACKAGE, PACKAGE.parent)]
    return next((file for file in files if file.is_file()), None)


def table(file: Path) -> Any:
    """The data of one of the package's own YAML files, which lie beside the modules that read them."""
    return yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)
