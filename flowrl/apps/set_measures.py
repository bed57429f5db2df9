"""KID, Vendi, precision and recall of the images that two evaluations saved: `flowrl eval RUN --set-measures`."""

from pathlib import Path

import numpy as np

from flowrl.core.errors import ConfigError
from flowrl.core.registry import load
from flowrl.evaluation import diversity
from flowrl.media import media
from flowrl.media.eight_bits import unit_floats
from flowrl.statistics.sets import kid, precision_recall, vendi

LEAST = 16
"""Images of a set below which nothing is said."""


def require(features: str | None, run: Path) -> None:
    """Raise ConfigError for a measure in place of features, and where `run` has no base to compare with."""
    if features is not None and not (run / "eval" / "base.json").is_file():
        raise ConfigError(f"--set-measures {features}: {run} is no run folder with the images of its base (eval/base)")
    if (features or "").lower() == "fid":
        raise ConfigError(
            "--set-measures fid: below 10,000 images its bias hides any effect (512 of one law have 38 where 0 is "
            "right), and no evaluation saves so many; KID has no bias: name features, such as grids"
        )


def lines(base: Path, tuned: Path, features: str) -> list[str]:
    """Sentences about the first seed of the tuned model's folder beside the base's, and two seeds of the base.
    `features`: `grids`, 8 x 8 mean colours; else a CLIP or DINO: a folder, a hub id, or tiny-clip.

    Raises ConfigError: too few images, or one that was selected by a score.
    """
    before, after = features_of(base, features), features_of(tuned, features)
    seed = min(1, len(before) - 1)
    real, made = before[seed], after[0]
    pairs = [("tuned", made)] + ([("base with another seed", before[0])] if seed else [])
    result = [f"sets of {len(real)} saved images, features: {features}; compare at equal numbers of images alone"]
    for name, each in pairs:
        precision, recall = precision_recall(each, real)
        result.append(
            f"{name} beside base: KID {kid(each, real):+.3g}, precision {precision:.3f}, recall {recall:.3f}; "
            f"Vendi {vendi(each):.3f} and {vendi(real):.3f}"
        )
    if (seeds := min(len(before), len(after))) > 1:
        own = [np.mean([vendi(of_prompt) for of_prompt in each[:seeds].swapaxes(0, 1)]) for each in (after, before)]
        result.append(f"{seeds} images of one prompt, tuned beside base: mean Vendi {own[0]:.3f} and {own[1]:.3f}")
    return result


def features_of(folder: Path, name: str) -> np.ndarray:
    """Features [S, N, D] of the images of the seeds that each of N prompts has, one seed at least."""
    by_seed = [sorted(folder.glob(f"*-{seed}.png")) for seed in range(len(list(folder.glob("00000-*.png"))) or 1)]
    full = [row for row in by_seed if len(row) == len(by_seed[0])]
    if len(full[0]) < LEAST:
        raise ConfigError(f"--set-measures: {folder} has {len(full[0])} images of seed 0, and {LEAST} are needed")
    files = [file for row in full for file in row]
    images = [media.read_levels(media.unselected(file)) for file in files]
    if name == "grids":
        found = np.stack([diversity.grid(image).ravel() for image in images])
    else:
        embed = load("rewards", "diversity").network(name, None, reward="--set-measures", instead="'grids', or ")
        found = embed([unit_floats(image) for image in images]).double().numpy()
    return found.reshape(len(full), len(full[0]), -1)
