"""The option tables of docs/algorithms/, each between its two marks.

A mark names what its table is of: `<!-- options: awm -->` the method, `<!-- options: data.pairs -->` a mapping of a
configuration. Every option has a row. A mapping that many methods share is one row, with the values in which it differs
from its own defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from flowrl.algorithms._matching import AnchorConfig, LagConfig
from flowrl.algorithms._options import SolverOptions, TimesOptions
from flowrl.commands._option_texts import OptionText, option_texts
from flowrl.config.schema import RunConfig
from flowrl.core import registry
from flowrl.credit.advantages import AdvantageConfig
from flowrl.diffusion.training_times import TimesConfig
from scripts.pages.reference import cell, code, value

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "algorithms"
START, END = "<!-- options: {} -->", "<!-- end of options -->"
MARKED = re.compile(r"<!-- options: (?P<of>.+?) -->\n.*?<!-- end of options -->", re.DOTALL)
OWN = "its own"
SHARED = (AdvantageConfig, TimesConfig, AnchorConfig, LagConfig)
"""Mappings of several methods, which one row describes."""
KEYS = {
    "advantages": "Its keys: [advantage rules](../reference/credits.md).",
    "times": "Its keys: [times](forward_process.md#times).",
    "coef": "Its keys: `coef`, `weight` ([pulls](forward_process.md#pulls)).",
    "flat": "Its keys: `flat`, `start`, `slope`, `limit` ([roles that lag](forward_process.md#roles-that-lag)).",
}


@dataclass(frozen=True, kw_only=True)
class Drawn(SolverOptions, TimesOptions):
    """What all methods have that draw their samples."""

    times: TimesConfig = field(default_factory=lambda: TimesConfig(name="discrete"))


def known() -> dict[str, tuple[type, str, str]]:
    """What a mark may name -> class of the options, dotted place of the mapping in it, prefix of the keys."""
    methods = {name: (registry.load("algorithms", name).Config, "", "algorithm.") for name in methods_names()}
    flow_grpo = methods["flow_grpo"][0]
    places = {name: (RunConfig, f"{name}.", "") for name in ("rollout.exploration", "data.pairs")}
    return methods | places | {
        "methods on finished samples": (Drawn, "", "algorithm."),
        "times": (TimesConfig, "", "times."),
        "pull": (AnchorConfig, "", ""),
        "role that lags": (LagConfig, "", ""),
        "algorithm.spatial": (flow_grpo, "spatial.", "algorithm."),
    }  # fmt: skip


def methods_names() -> list[str]:
    return registry.names("algorithms")


def table(of: str) -> str:
    """The table of what a mark names, without the marks."""
    cls, place, prefix = known()[of]
    options = [one for one in option_texts(cls) if one.name.startswith(place)]
    rows = [row(one, prefix) for one in folded(options)]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def row(one: OptionText, prefix: str) -> str:
    shown = one.default if one.default == OWN else value(one.default)
    return f"| {code(prefix + one.name)} | {cell(one.type)} | {shown} | {cell(one.about)} |"


def folded(options: list[OptionText]) -> Iterator[OptionText]:
    """The options, where a shared mapping has one row with its values that differ, and none for its keys."""
    skipped: str | None = None
    for number, one in enumerate(options):
        if skipped is not None and one.name.startswith(skipped):
            continue
        skipped = None
        below = [each for each in options[number + 1 :] if each.name.startswith(f"{one.name}.")]
        keys = kind(one.name, below)
        if keys is None:
            yield one
            continue
        skipped = f"{one.name}."
        text = " ".join(filter(None, (one.about, KEYS[keys])))
        yield replace(one, about=text, default=differing(one, below) if one.default == "as below" else one.default)


def kind(name: str, below: list[OptionText]) -> str | None:
    """Key of `KEYS` of a shared mapping; None: it is none."""
    last, names = name.rpartition(".")[2], {each.name.removeprefix(f"{name}.") for each in below}
    if last in ("advantages", "times") and below:
        return last
    return next(
        (key for key, full in (("coef", {"coef", "weight"}), ("flat", set(own(LagConfig)))) if names == full), None
    )


def own(cls: type) -> dict[str, str]:
    """Key -> default of a mapping by itself."""
    return {one.name: one.default for one in option_texts(cls)}


def differing(one: OptionText, below: list[OptionText]) -> str:
    """The values of a shared mapping that are not its own defaults, as YAML has them."""
    given = {each.name.removeprefix(f"{one.name}."): each.default for each in below}
    usual = next((own(cls) for cls in SHARED if given.keys() <= own(cls).keys()), {})
    parts = [f"{name}: {nested(name, given)}" for name, now in given.items()
             if "." not in name and now != usual.get(name)]  # fmt: skip
    return "{" + ", ".join(parts) + "}" if parts else OWN


def nested(name: str, given: dict[str, str]) -> str:
    """A value, or a mapping in one line."""
    if given[name] != "as below":
        return given[name]
    inner = {key.removeprefix(f"{name}."): now for key, now in given.items() if key.startswith(f"{name}.")}
    return "{" + ", ".join(f"{key}: {now}" for key, now in inner.items()) + "}"


def written(text: str) -> str:
    """A page's text with its tables as the code has them."""

    def between(match: re.Match[str]) -> str:
        of = match["of"]
        return f"{START.format(of)}\n\n{table(of)}\n\n{END}"

    return MARKED.sub(between, text)


def pages() -> dict[Path, str]:
    """File -> its text with options as the code has them."""
    return {file: written(file.read_text(encoding="utf-8")) for file in sorted(PAGES.glob("*.md"))}
