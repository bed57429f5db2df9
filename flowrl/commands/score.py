"""`flowrl score`: any reward on a folder of pictures or clips."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif"}


def command(
    images: Annotated[Path, typer.Argument(help="Folder of pictures or clips (.png, .jpg, .webp, .gif).")],
    reward: Annotated[str, typer.Option("--reward", help="Name, dotted path, or your own .py file.")],
    prompts: Annotated[Path | None, typer.Option("--prompts", help="One line per file, in file-name order.")] = None,
    options: Annotated[list[str] | None, typer.Option("--set", help="key=value options of the reward.")] = None,
) -> None:
    """One line of JSON per picture or clip; NaN is null."""
    import json

    from flowrl import media
    from flowrl.components import reward_plan
    from flowrl.config import ConfigError
    from flowrl.reward import score_once
    from flowrl.strict import apply_override

    files = sorted(f for f in images.iterdir() if f.suffix.lower() in _SUFFIXES) if images.is_dir() else []
    if not files:
        raise ConfigError(f"{str(images)!r}: no pictures there ({', '.join(sorted(_SUFFIXES))})")
    texts = [""] * len(files) if prompts is None else prompts.read_text(encoding="utf-8").splitlines()
    if len(texts) != len(files):
        raise ConfigError(f"--prompts has {len(texts)} lines for {len(files)} pictures")
    tree: dict = {"path" if reward.endswith(".py") else "name": reward}
    for word in options or []:
        apply_override(tree, word)
    entry = reward_plan(tree, "--reward").build()
    for file, text in zip(files, texts, strict=True):
        scores = score_once(entry, media.read(file)[None], [text], [{}])
        values = {name: None if value.isnan() else float(value) for name, value in scores.items()}
        print(json.dumps({"image": file.name, "prompt": text} | values))
