"""What a run's guard says, in sentences for the report and the model card."""

import math

from flowrl.apps.gallery.runs import Run, number
from flowrl.run import status

_TOLD = 3
"""Number of warnings that are told, the first ones."""


def chose(run: Run) -> bool:
    """Whether the guard ended the run, so that the final numbers are of the prompts that it did not see."""
    return run.summary.get("status") == status.GUARDED and bool(run.block("guard").get("judged_prompts"))


def remarks(run: Run) -> list[tuple[str, str]]:
    """(tone, sentence) of the end that the guard made, or of its warnings."""
    known = run.block("guard")
    alarms = [alarm for alarm in known.get("alarms") or [] if isinstance(alarm, dict)]
    if not alarms:
        return []
    metric = str(known.get("metric")).replace("_", " ")
    if chose(run):
        taken, ended = known.get("taken"), known.get("ended")
        which = "the last ones" if taken == ended else "its best evaluation's"
        text = f"The guard ({known.get('mode')}) ended the run after iteration {ended}: {known.get('sentence')}"
        result = [("worse", f"{text} The weights are {which}, of iteration {taken}.")]
        result.append(("same", f"The numbers are of the {known['judged_prompts']} prompts that the guard did not see."))
    else:
        result = [("worse", f"The guard warns: {alarm.get('sentence')}") for alarm in alarms[:_TOLD]]
        if len(alarms) > _TOLD:
            result.append(("worse", f"The guard has {len(alarms) - _TOLD} more warnings, in summary.json."))
    if known.get("beat_base") is False:
        best = number((known.get("best_gain") or {}).get("mean"))
        told = f" (the best one, after iteration {known.get('best')}: {best:+.4g})" if math.isfinite(best) else ""
        result.append(("worse", f"Training did not help: no evaluation beat the base by {metric}{told}."))
    return result
