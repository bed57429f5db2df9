"""`flowrl eval`: fixed-seed evaluation of a configuration's model, or of a run's tuned weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flowrl.commands._arguments import Config, Overrides, option

if TYPE_CHECKING:
    from flowrl.evaluation.results import Evaluation
    from flowrl.run.assembly import Parts


Accept = Annotated[
    bool,
    option(
        "Permission to evaluate although files of the run have changed (docs/files.md).",
        "The new contents are used. Without it the evaluation is refused.",
        name="--accept-changes",
    ),
]
Out = Annotated[
    Path | None,
    option("Folder for scores and images.", "Default: RUN/eval-extra for a run folder, else eval/NAME."),
]


def command(target: Config, overrides: Overrides = None, accept: Accept = False, out: Out = None) -> None:
    """Evaluate a model with fixed seeds: mean scores with 95 % intervals, and win rates against the run's base.

    The model has the tuned weights for a run folder, and is untouched for a YAML file or a recipe.
    Prompts and seeds are those of a training run.
    """
    from flowrl.config.load import load_config, resolve
    from flowrl.core import status
    from flowrl.core.contents import require_unedited
    from flowrl.core.errors import no_exit
    from flowrl.core.files import out_folder
    from flowrl.evaluation.results import Evaluation
    from flowrl.evaluation.statistics import accuracy, summary
    from flowrl.run.inputs import collect
    from flowrl.run.report import format_accuracy
    from flowrl.run.trainer import Trainer

    folder = Path(target)
    run = folder if (folder / "config.yaml").is_file() else None
    resolved = resolve(load_config(target, overrides))
    default = folder / "eval-extra" if run else Path("eval") / resolved.run.name
    if run is not None:
        require_unedited(run, collect(resolved), accept=accept)
    saved = folder / "eval" / "base.json"
    # Read before anything is sampled: a damaged file is reported now and not after the evaluation.
    base = Evaluation.load(saved) if run is not None and saved.is_file() else None
    trainer = Trainer(resolved)
    if run is not None and (ended := status.describe(status.read(run))):
        print(f"{run}: {ended}")
    with no_exit():
        result = trainer.evaluate_only(run, out_folder(out or default), accept)
    parts = trainer.session.parts
    for name, value in summary(result).items():
        print(
            f"{name}: {value['mean']:.4f} (95 % interval {value['low']:.4f} to {value['high']:.4f}, "
            f"{parts.data.prompts.counted(round(value['n']))} x {result.scores[name].shape[1]} seeds)"
        )
    if result.agreement is not None:
        print(format_accuracy(accuracy(result.agreement)))
    if base is not None:
        _against(base, result, parts)


def _against(base: Evaluation, tuned: Evaluation, parts: Parts) -> None:
    """Print win rates against the run's base where both were evaluated alike."""
    from flowrl.evaluation.statistics import win_rate
    from flowrl.run.report import format_win_rate

    cards = [] if parts.scorers.watched is None else [entry.reward.card for entry in parts.scorers.watched.distinct]
    higher = {name: card.higher_is_better for card in cards for name in card.outputs}
    for name in (name for name in tuned.scores if name in base.scores):
        unlike = tuned.unlike(base, name)
        if unlike:
            print(f"no win rate by {name}: the run's base was made with other values of: {', '.join(unlike)}")
        else:
            print(
                format_win_rate(name, win_rate(base, tuned, name, higher_is_better=higher[name]), parts.data.prompts.on)
            )
