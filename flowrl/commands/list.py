"""`flowrl list`: components with their levels, rewards with their cards, and recipes."""

import dataclasses
import json
import shlex
from typing import TYPE_CHECKING, NoReturn

from flowrl.core import assets, registry
from flowrl.core.errors import ConfigError, Remedy, described
from flowrl.core.files import json_ready

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowrl.evaluation.suite import Facts
    from flowrl.reward import Card


KINDS = ("models", "samplers", "algorithms", "rewards", "credits", "suites", "recipes")


def command(kind: str, name: str | None = None, as_json: bool = False) -> None:
    """List components, their options, and recipes. Downloads nothing."""
    from flowrl.commands import _listed

    if kind not in KINDS:
        _refuse(kind)
    if name is not None:
        if kind == "recipes":
            raise ConfigError(
                f"{name!r}: recipes have no options of their own",
                [Remedy(command=f"flowrl plan {shlex.quote(name)}"), Remedy(without=name)],
            )
        shown = registry.stored(kind).get(name, {}).get("shown")
        if kind == "suites":
            if as_json:
                raise ConfigError("--json: suites are shown as text alone", Remedy(without="--json"))
            print("\n".join(shown or suite_lines(name)))
            return
        facts = shown or _listed.described(kind, name)
        print(json.dumps(json_ready(facts), indent=1)) if as_json else _listed.show(facts)
        return
    titles, rows = _rows(kind)
    if as_json:
        keys = [title.replace(" ", "_") for title in titles]
        objects = [dict(zip(keys, row, strict=True)) for row in rows]
        # Of recipes with numbers as numbers, where the table has texts.
        print(json.dumps(_listed.recipes() if kind == "recipes" else objects, indent=1))
        return
    _print(titles, rows)
    for each in registry.plugins(kind):
        wrong = registry.collision(kind, each)
        if wrong is not None:
            print(f"note: {wrong}")


def _refuse(kind: str) -> NoReturn:
    """Refuse a KIND that there is not; where it is like the name of a component or recipe, that is what is meant."""
    from flowrl.commands._listed import credit_rules

    commands = {each: f"flowrl list {each}" for each in KINDS}
    named = {name: f"flowrl list {each} {name}" for each in registry.FOLDERS for name in registry.names(each)}
    named |= {name: f"flowrl list credits {name}" for name in credit_rules()}
    recipes = {name: f"flowrl plan {name}" for name in assets.recipes()}
    meant = registry.near(kind, KINDS, cutoff=0.8) or registry.near(kind, [*named, *recipes])
    # A recipe has the name of a method in its own.
    meant = [each for each in meant if each not in recipes] or meant or registry.near(kind, KINDS)
    raise ConfigError(
        f"KIND={kind!r} is none; there are: {', '.join(KINDS)}",
        remedies=[Remedy(command=(commands | named | recipes)[each]) for each in meant[:3]],
    )


def _rows(kind: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(titles, rows) of a kind."""
    from flowrl.commands import _listed

    if kind == "credits":
        return ("name", "what it is"), list(_listed.credit_rules().items())
    if kind == "recipes":
        made = _listed.recipes()
        memory = ["" if one["memory_gib"] is None else f"{one['memory_gib']:g} GiB" for one in made]
        rows = [
            (one["name"], one["model"], one["method"], m, one["about"]) for one, m in zip(made, memory, strict=True)
        ]
        return ("name", "model", "method", "memory", "what it is"), rows
    return ("name", *COLUMNS.get(kind, ("level", "what it is"))), list(_components(kind))


def _components(kind: str) -> "Iterator[tuple[str, ...]]":
    """Name and cells of each component: a built-in one's as they are stored, of one that is not stored by an import."""
    builtin, known = registry.names(kind), registry.stored(kind)
    for name in (*builtin, *(each for each in registry.plugins(kind) if each not in builtin)):
        try:
            yield (name, *(known[name]["row"] if name in builtin and name in known else cells(kind, name)))
        except (Exception, SystemExit) as error:  # a package's plug-in may fail in any way; the others are listed still
            yield (name, "", f"cannot be imported: {described(error)}", *[""] * (len(COLUMNS[kind]) - 2))


def _print(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    # A pipe or a narrow window gets whole rows, rather than columns of single letters.
    wide = 12 * len(titles)
    (console if console.is_terminal and console.width >= wide else Console(width=max(console.width, 200))).print(table)


COLUMNS = {
    "rewards": ("level", "outputs", "range", "better", "sees", "resolution", "gradient", "licence", "source"),
    "suites": ("level", "prompts", "images each", "judge", "differs from the official protocol"),
}


def about(text: str | None) -> str:
    """The first line of a docstring."""
    return (text or "").strip().splitlines()[0] if (text or "").strip() else ""


def direction(card: "Card") -> str:
    """What is better: more or less, and of which outputs the other."""
    if not card.higher_is_better or not card.less_is_better:
        return "more" if card.higher_is_better else "less"
    return f"more; less of {', '.join(card.less_is_better)}"


def cells(kind: str, name: str) -> tuple[str, ...]:
    """Cells of a component, by COLUMNS, from its module."""
    own = vars(registry.load(kind, name))
    level = own.get("LEVEL", "experimental")
    if kind == "suites":
        facts: Facts = own["FACTS"]
        come = {"generated": "generated here", "shipped": "shipped", "read": "not shipped: --prompts"}
        prompts = f"{facts.num_prompts}, {come[facts.prompts]}"
        return (facts.level, prompts, str(facts.images_per_prompt), facts.judge, facts.differs)
    if kind != "rewards":
        return (level, about(own["__doc__"]))
    card: Card | None = own.get("CARD")
    if card is None:
        return (level, "(no CARD)", *[""] * (len(COLUMNS[kind]) - 2))
    sees = {"any": "images, videos by frames", "image": "images", "video": "videos", "edit": "source and result"}
    sees["latents"] = "latents"
    return (
        card.level,
        ", ".join(card.outputs),
        span(card),
        direction(card),
        sees[card.modality],
        card.resolution,
        "yes" if card.differentiable else "no",
        card.licence,
        card.source,
    )


def span(card: "Card") -> str:
    """Declared range of the raw values.

    >>> from flowrl.reward import Card
    >>> span(Card(outputs=("a",), low=0.0)), span(Card(outputs=("a",)))
    ('0 and up', 'any')
    """
    low, high = (f"{value:.4g}" for value in (card.low, card.high))
    if low == "-inf":
        return "any" if high == "inf" else f"up to {high}"
    return f"{low} and up" if high == "inf" else f"{low} to {high}"


def suite_lines(name: str) -> list[str]:
    """A suite's facts in lines, from its module."""
    from flowrl.evaluation.suite import load_suite

    suite = load_suite(name)
    return [
        about(suite.facts.title),
        *(f"  {item.name}: {getattr(suite.facts, item.name)}" for item in dataclasses.fields(suite.facts)),
        f"  official evaluator's folder: {'--export' if suite.layout else 'none'}",
        f"  its results: {'--results' if suite.read_results else 'not read'}",
    ]
