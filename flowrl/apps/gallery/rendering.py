"""The templates of a page and of its drawings."""

import base64
import functools
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


def rendered(template: str, **values: Any) -> Markup:
    """A template with values, whose texts are escaped."""
    return Markup(_environment().get_template(template).render(values))


def macros(template: str) -> Any:
    """The macros of a template, by their names."""
    return _environment().get_template(template).module


@functools.cache
def _environment() -> jinja2.Environment:
    """The templates; a live page is built often, and they are compiled once."""

    def source(folder: str, suffix: str, names: Sequence[str]) -> Markup:
        """Style or script files of the templates, as they are, one after the other."""
        files = [TEMPLATES / folder / f"{name}.{suffix}" for name in names]
        return Markup("\n".join(file.read_text(encoding="utf-8") for file in files))

    def csp_hash(script: str) -> str:
        """Source expression of the content security policy that allows this script alone."""
        return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["source"] = source
    environment.tests["finite"] = math.isfinite
    environment.filters |= {"csp_hash": csp_hash, "px": "{:.1f}".format, "plain": "{:g}".format}
    return environment
