"""`flowrl convert-config`: a recipe from a configuration of another tool."""

from pathlib import Path


def command(
    file: str, tool: str | None = None, gpus: int | None = None, out: Path | None = None, strict: bool = False
) -> None:
    """Make a recipe of another tool's file. Keys without a counterpart go to the error stream."""
    import sys
    import tempfile

    from flowrl.apps.migration.engine import convert, left, recipe_text
    from flowrl.apps.migration.tools import TOOLS, tool_of
    from flowrl.config.load import load_config, resolve
    from flowrl.core.errors import ConfigError, Remedy
    from flowrl.core.files import write_atomically

    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: it exists; name a new file, or remove it")
    source = tool_of(file, tool)
    try:
        draft = convert(source, file, gpus, Path() if out is None else out.parent)
    except ConfigError as error:
        if tool is not None:
            raise
        raise ConfigError(
            f"{error} (read as {source.name}'s, by its ending; --from names another tool of {', '.join(TOOLS)})"
        ) from None
    print(*left(draft), sep="\n", end="\n" if draft.listed else "", file=sys.stderr)
    losing = [key for key, entry in draft.listed.items() if entry.changes]
    if strict and losing:
        raise ConfigError(
            f"--strict: {len(losing)} without a counterpart change results: {', '.join(losing)}; nothing was written. "
            "Else the recipe is written, with the list as comments",
            Remedy(without="--strict"),
        )
    text = recipe_text(draft)
    with tempfile.TemporaryDirectory() as folder:  # read as a run in the recipe's folder would
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(text, encoding="utf-8")
        try:
            resolve(load_config(recipe, folder=draft.folder), offline=True)
        except ConfigError as error:
            told = str(error).replace(f"{recipe}", "the recipe")
            raise ConfigError(f"{draft.source.file}: the recipe made of it is not valid: {told}") from None
    if out is None:
        print(text, end="")
    else:
        write_atomically(out, text)
        print(out)
