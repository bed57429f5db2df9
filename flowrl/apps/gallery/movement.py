"""How much a run's images differ from its base's, from its folder."""

from collections.abc import Iterator
from pathlib import Path

from flowrl.apps.gallery.runs import Evaluation, Run
from flowrl.evaluation import sharpness
from flowrl.evaluation.moved import Moved, measure, saved_pairs, sentence, trained


def shared_pairs(before: Evaluation, after: Evaluation) -> Iterator[tuple[Path, Path]]:
    """`saved_pairs` of the prompts that both evaluations have at the same place."""
    both = enumerate(zip(before.prompts, after.prompts, strict=False))
    return saved_pairs(before.images, after.images, (place for place, (one, other) in both if one == other))


def of_run(run: Run) -> Moved | None:
    """How far, as its summary has it, else from its images; None: not known."""
    if run.finished and (stated := run.block("moved")):
        return Moved(**stated)
    return measure(shared_pairs(*run.both)) if run.both else None


def of_run_in_words(run: Run) -> str:
    """How far the images are from the base's, and their sharpness, in sentences."""
    sharp = sharpness_of(run)
    return sentence(of_run(run), trained(run.config)) + (f" {sharp[1]}" if sharp else "")


def sharpness_of(run: Run) -> tuple[str, str] | None:
    """(tone, sentence) of the sharpness beside the base's; None: not known."""
    found = run.block("sharpness")
    if "tuned" not in found:
        return None
    return "worse" if sharpness.lost(found) else "same", sharpness.sentence(found)
