"""`flowrl diagnose`: what keeps a run from learning, in plain words, from its folder alone."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.apps.diagnosis import Diagnosis


def command(run: Path, as_json: bool = False) -> None:
    """Explain what keeps a run from learning. In plain words, the likeliest cause first."""
    from flowrl.apps.diagnosis import diagnose
    from flowrl.apps.gallery.runs import load_run
    from flowrl.core.files import json_ready

    result = diagnose(load_run(run))
    print(json.dumps(json_ready(result.plain())) if as_json else text(result))


def text(result: "Diagnosis") -> str:
    """A diagnosis for the terminal."""
    count = len(result.findings)
    counted = {0: "nothing found", 1: "1 finding"}.get(count, f"{count} findings, the likeliest first")
    lines = [f"{result.run}: {counted}"]
    for number, found in enumerate(result.findings, start=1):
        shown = found.number
        lines += [
            f"{number}. {found.name} (likelihood {found.likelihood:.2f})",
            f"   {found.sentence}",
            f"   number: {shown.name} = {shown.value:.4g} (limit {shown.limit:.4g})",
            f"   change: {found.advice}",
            f"   more:   {found.docs}",
        ]
    if result.looked_at:
        lines.append(f"looked at: {', '.join(result.looked_at)}")
    if result.not_looked_at:
        lines.append("could not be looked at:")
        lines += [f"   {name}: {reason}" for name, reason in result.not_looked_at.items()]
    return "\n".join(lines)
