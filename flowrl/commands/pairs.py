"""`flowrl pairs`: preference pairs from a model and its rewards, and a look at a preference set."""

import os
import sys
from pathlib import Path

from flowrl.commands._arguments import showing
from flowrl.core.errors import ConfigError
from flowrl.core.files import known_object, out_folder


def command(
    target: str,
    words: list[str] | None = None,
    out: Path | None = None,
    count: int | None = None,
    per_prompt: int | None = None,
    margin: float = 0.0,
    processes: int = 1,
    check: bool = False,
    quiet: bool = False,
) -> None:
    """Make preference pairs by rewards. A pair is the best and the worst sample of a prompt."""
    with showing(quiet):
        if check:
            if out is not None or count is not None or per_prompt is not None or margin or processes > 1:
                raise ConfigError("--check takes a preference set and columns only; leave the other options out")
            from flowrl.commands._pair_check import look

            raise SystemExit(0 if look(target, words or []) else 1)
        if out is None:
            raise ConfigError("--out DIR is required: a folder for the pairs")
        out_folder(out)
        from flowrl.config.load import load_config, resolve

        run = load_config(target, words)  # its faults are told before the libraries are imported
        from flowrl.apps.command_line import in_processes
        from flowrl.apps.pairs.drawing import make
        from flowrl.apps.pairs.folder import HEADER
        from flowrl.apps.pairs.plan import Wanted
        from flowrl.apps.pairs.plan import check as refuse
        from flowrl.data.options import PreferenceOptions
        from flowrl.data.preferences import load_preferences
        from flowrl.data.stored_videos import Frames

        resolved = resolve(run)
        wanted = Wanted(resolved.run.rollout.group_size if per_prompt is None else per_prompt, margin, count)
        refuse(resolved, wanted)
        if processes > 1 and "WORLD_SIZE" not in os.environ:
            raise SystemExit(in_processes(out, processes))
        done = make(resolved, wanted, out)
        if os.environ.get("RANK", "0") == "0":
            print(f"{out}: {done}")
            if done.pairs:  # as a training would load it
                frames = resolved.model.config.frames
                edits = known_object(out / HEADER).get("edits")
                columns = PreferenceOptions(source="source" if edits else None)
                load_preferences(str(out), "data.pairs.path", columns, videos=Frames(frames) if frames > 1 else None)
                if edits:
                    print("pairs of edits: train on them with data.pairs.records.source=source, data.pairs.flip=false")
        if not done.pairs or (count is not None and done.pairs < count):
            raise SystemExit(_short(done.pairs, count, margin))


def _short(pairs: int, count: int | None, margin: float) -> int:
    wanted = "" if count is None else f" of {count}"
    if os.environ.get("RANK", "0") == "0":
        print(
            f"flowrl: {pairs} pairs{wanted}: in a whole round over the prompts no sample was more than {margin:g} "
            "above another; lower --margin, or raise --per-prompt",
            file=sys.stderr,
        )
    return 1
