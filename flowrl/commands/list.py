"""`flowrl list`: components with their levels, rewards with their cards, and recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from flowrl.commands._arguments import argument
from flowrl.core import assets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flowrl.core.excerpt import Excerpt
    from flowrl.reward import Card


Kind = Annotated[
    Literal["models", "samplers", "algorithms", "rewards", "recipes"],
    argument("KIND", "models, samplers, algorithms, rewards or recipes."),
]
Name = Annotated[
    str | None,
    argument(
        "NAME", "Reward (name, dotted path or .py file) whose card and options are shown. Default: a list of all."
    ),
]


def command(kind: Kind, name: Name = None) -> None:
    """List components with their levels (tested, verified, experimental), or recipes. Downloads nothing."""
    from flowrl.core import registry
    from flowrl.core.errors import ConfigError

    if name is not None:
        if kind != "rewards":
            raise ConfigError(f"{kind} have no cards; leave {name!r} out")
        _show(name)
        return
    if kind == "recipes":
        _print(("name", "what it is"), [(each, _first_comment(each)) for each in assets.recipes()])
        return
    rows: list[tuple[str, ...]]
    titles: tuple[str, ...] = ("name", "level", "what it is")
    if kind == "rewards":
        titles, rows = ("name", *COLUMNS), list(_rewards())
    else:
        known = {each: registry.facts(kind, each) for each in registry.names(kind)}
        rows = [(each, facts.get("LEVEL", "experimental"), about(facts.about)) for each, facts in known.items()]
    _print(titles, rows)
    for each in registry.plugins(kind):
        wrong = registry.collision(kind, each)
        if wrong is not None:
            print(f"note: {wrong}")


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


def _first_comment(recipe: str) -> str:
    """The first line of a recipe's file, which says what it is."""
    file = assets.recipe_file(recipe)
    first = file.read_text(encoding="utf-8").partition("\n")[0] if file is not None else ""
    return first.removeprefix("#").strip() if first.startswith("#") else ""


COLUMNS = ("level", "outputs", "range", "better", "sees", "resolution", "gradient", "licence", "source")


def about(text: str | None) -> str:
    """The first line of a docstring."""
    return (text or "").strip().splitlines()[0] if (text or "").strip() else ""


def cells(card: Card) -> tuple[str, ...]:
    """Cells of a card, by COLUMNS."""
    return (
        card.level,
        ", ".join(card.outputs),
        span(card),
        "more" if card.higher_is_better else "less",
        {"any": "images, videos by frames", "image": "images", "video": "videos", "edit": "source and result"}[
            card.modality
        ],
        card.resolution,
        "yes" if card.differentiable else "no",
        card.licence,
        card.source,
    )


def span(card: Card) -> str:
    """Declared range of the raw values.

    >>> from flowrl.reward import Card
    >>> span(Card(outputs=("a",), low=0.0)), span(Card(outputs=("a",)))
    ('0 and up', 'any')
    """
    low, high = (f"{value:.4g}" for value in (card.low, card.high))
    if low == "-inf":
        return "any" if high == "inf" else f"up to {high}"
    return f"{low} and up" if high == "inf" else f"{low} to {high}"


def _rewards() -> Iterator[tuple[str, ...]]:
    from flowrl.core import registry
    from flowrl.core.errors import described

    builtin = registry.names("rewards")
    for name in (*builtin, *(each for each in registry.plugins("rewards") if each not in builtin)):
        try:
            own = vars(registry.load("rewards", name)) if name not in builtin else registry.facts("rewards", name)
            card, level = own.get("CARD"), own.get("LEVEL", "experimental")
        except (Exception, SystemExit) as error:  # a package's plug-in may fail in any way; the others are listed still
            yield (name, "", f"cannot be imported: {described(error)}", *[""] * (len(COLUMNS) - 2))
            continue
        yield (name, *cells(card)) if card else (name, level, "(no CARD)", *[""] * (len(COLUMNS) - 2))


def _show(name: str) -> None:
    """Print a reward's whole card, and its own options with their defaults."""
    import dataclasses

    from flowrl.core import registry
    from flowrl.core.errors import ConfigError

    own: Mapping[str, Any] | Excerpt
    if name in registry.names("rewards"):
        own = registry.facts("rewards", name)
        text = own.about
    else:
        from flowrl.scoring.entries import imported

        module = imported("rewards", name, "flowrl list rewards")
        own, text = vars(module), module.__doc__
    card = own.get("CARD")
    if card is None:
        raise ConfigError(f"the reward {name!r} declares no CARD, so nothing is known about it before it is built")
    print((text or "").strip() or name)
    print("\ncard")
    for item in dataclasses.fields(card):
        value = getattr(card, item.name)
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        print(f"  {item.name}: {shown if shown != '' else 'none'}")
    config = own.get("Config")
    if config is not None:
        print("\noptions")
        for item in dataclasses.fields(config):
            made = item.default_factory
            value = item.default if made is dataclasses.MISSING else made()
            print(f"  {item.name}: {'required' if value is dataclasses.MISSING else repr(value)}")
