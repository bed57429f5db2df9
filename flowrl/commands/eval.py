"""`flowrl eval`: fixed-seed evaluation of a configuration's model, or of a run's tuned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    target: Annotated[str, typer.Argument(help="YAML file (the untouched model) or run folder (the tuned one).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=c words, such as eval.guidance_scale=4.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for scores and pictures.")] = None,
) -> None:
    """Scores on the held-out prompts with 95 % intervals; the same seeds as in training runs."""
    from flowrl.config import load_config, resolve
    from flowrl.evaluate import summary
    from flowrl.trainer import Trainer

    folder = Path(target)
    run = folder if (folder / "config.yaml").is_file() else None
    resolved = resolve(load_config(folder / "config.yaml" if run else target, overrides))
    default = folder / "eval-extra" if run else Path("eval") / resolved.run.name
    result = Trainer(resolved).evaluate_only(run, out or default)
    for name, value in summary(result).items():
        print(
            f"{name}: {value['mean']:.4f} (95 % interval {value['low']:.4f} to {value['high']:.4f}, "
            f"{value['n']} prompts x {result.scores[name].shape[1]} seeds)"
        )
