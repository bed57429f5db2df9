"""One component in words: what it is, its level, its page, its options; and the recipes by model and method."""

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.core import assets, registry
from flowrl.core.errors import ConfigError, UnknownName

PAGES = {"models": "docs/models.md", "samplers": "docs/library.md", "credits": "docs/architecture.md"}
_OWN_PAGES = {"rewards": {"geneval": "docs/rewards/geneval.md", "ocr": "docs/rewards/ocr.md"}}
MEMORY = "memory.json"
"""File next to the recipes: name -> what `flowrl plan` said (scripts/bench/recipe_memory.py)."""


def page(kind: str, name: str) -> str:
    """Page of the docs about a built-in component."""
    if kind == "algorithms":
        return f"docs/algorithms/{name}.md"
    return _OWN_PAGES.get(kind, {}).get(name) or PAGES.get(kind, f"docs/{kind}.md")


def credit_rules() -> dict[str, str]:
    """Advantage rule -> its sentence."""
    from flowrl.credit.advantages import RULES

    return {
        name: (rule.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ") for name, rule in RULES.items()
    }


def described(kind: str, name: str) -> dict[str, Any]:
    """A component as plain data, from its module: kind, name, about, level, page, card, options.

    Raises UnknownName: there is no such component, with the nearest names; ConfigError: it has no options to show.
    """
    from flowrl.commands._option_texts import option_texts

    result: dict[str, Any] = {"kind": kind, "name": name, "level": None, "page": page(kind, name), "card": None}
    if kind == "credits":
        from flowrl.credit.advantages import AdvantageConfig

        rules = credit_rules()
        if name not in rules:
            raise UnknownName(f"advantage rule {name!r} is unknown; {registry.suggest(name, [*rules])}"
                              f"there are: {', '.join(rules)}")  # fmt: skip
        about, config = rules[name], AdvantageConfig
        result["where"] = "algorithm.advantages"
    else:
        from flowrl.scoring.entries import imported

        own = vars(imported(kind, name, f"flowrl list {kind}"))
        about, config, card = own["__doc__"] or "", own.get("Config"), own.get("CARD")
        result |= {"level": own.get("LEVEL", "experimental"), "where": WHERE[kind]}
        if kind == "rewards":
            if card is None:
                raise ConfigError(
                    f"the reward {name!r} declares no CARD, so nothing is known about it before it is built"
                )
            result["card"] = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(card).items()}
        if name not in registry.names(kind):
            result["page"] = None
    texts = [] if config is None else option_texts(config)
    options = [dataclasses.asdict(one) for one in texts]
    return result | {"about": about.strip(), "options": options}


WHERE = {"models": "model", "samplers": "rollout.sampler", "algorithms": "algorithm", "rewards": "rewards.0"}
"""Kind -> key of the configuration that holds the options."""


def show(facts: Mapping[str, Any]) -> None:
    """Print a component as text."""
    print(facts["about"] or facts["name"])
    if facts["level"] is not None:
        print(f"\nlevel: {facts['level']}")
    if facts["page"]:
        print(f"page: {facts['page']}")
    if facts["card"] is not None:
        print("\ncard")
        for key, value in facts["card"].items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            print(f"  {key}: {shown if shown != '' else 'none'}")
    if not facts["options"]:
        print("\nno options")
        return
    print(f"\noptions, below {facts['where']}")
    for one in facts["options"]:
        print(f"  {one['name']}: {one['default']}")
        note = ". ".join(filter(None, (one["type"], one["about"])))
        for line in textwrap.wrap(note, 94, break_on_hyphens=False):
            print(f"      {line}")


# ---- recipes


def recipes() -> list[dict[str, Any]]:
    """The recipes as plain data: name, model, method, memory of the plan in GiB (null: not measured), what it is."""
    from flowrl.data.contents import fingerprint

    file = assets.recipe_file("quickstart")
    stored = {} if file is None or not (f := file.parent / MEMORY).is_file() else json.loads(f.read_text("ascii"))
    result = []
    for name in assets.recipes():
        tree, known = recipe_tree(name), stored.get(name, {})
        model, method = tree.get("model", {}), tree.get("algorithm", {})
        fresh = known.get("recipe") == fingerprint(tree)
        result.append(
            {
                "name": name,
                "model": model.get("path"),
                "method": method.get("name") or method.get("path") or "flow_grpo",
                "memory_gib": known["gib"] if fresh else None,
                "about": first_comment(name),
            }
        )
    return result


def recipe_tree(name: str) -> dict[str, Any]:
    """Plain data of a recipe, merged with what it extends."""
    from flowrl.core.strict import load_tree

    tree = load_tree(_file(name))
    if "extends" not in tree:
        return tree
    from flowrl.config.extends import load_layers

    return load_layers(_file(name)).tree


def _file(name: str) -> Path:
    file = assets.recipe_file(name)
    assert file is not None
    return file


def first_comment(recipe: str) -> str:
    """The first line of a recipe's file, which says what it is."""
    first = _file(recipe).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
