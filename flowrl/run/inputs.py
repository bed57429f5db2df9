"""Contents of the user's files, which are a part of a run: their record, their copies and their changes.

A run folder's `inputs.json` names each file by its key in the configuration, with its SHA-256; code and prompt lists
are copied to `inputs/`. A preference set may be large: its record is the scan's fingerprint with the names and sizes of
its files. docs/files.md is the users' page.
"""

import ast
import json
import shutil
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl.config.resolved import Resolved
from flowrl.core.assets import embedded_prompts
from flowrl.core.files import file_sha256, replaced, write_atomically
from flowrl.core.paths import NAME_OR_PATH, PATH
from flowrl.core.strict import Options
from flowrl.data import contents
from flowrl.data.contents import COPIES, FILE, Input, Kind, Record, file_of, fingerprint, require_same, say
from flowrl.data.prompts import Prompt

_ROUNDED = ("shard", "gradient_checkpointing", "compile", "precision", "guidance_gradient")
"""Options of a model that change its images by rounding alone."""
LARGEST_COPY = 64 << 20
LARGEST_TEXT = 1 << 20
"""Largest size in bytes of an option's file (a rubric, a question) that is recorded; larger ones are weights."""

# ---- the files now


def collect(resolved: Resolved) -> list[Input]:
    """The files of a run whose contents can change its numbers, except data sets, which are scanned later.

    They are the code of the user's own components with its neighbouring imports, prompts, and small files that rewards'
    options name.
    """
    modules = [("model.name", resolved.model.module)]
    for key, part in (("algorithm", resolved.algorithm), ("rollout.sampler", resolved.sampler)):
        modules += [(f"{key}.{named}", part.module) for named in part.reference]
    for key, plan in _rewards(resolved):
        modules.append((f"{key}.{'name' if plan.entry.path is None else 'path'}", plan.module))
    own = [(key, module) for key, module in modules if not f"{module.__name__}.".startswith("flowrl.")]
    result = [_input(key, "code", file) for key, module in own for file in code_files(module)]
    data = resolved.run.data
    for key, source in (("prompts", data.prompts), ("eval_prompts", data.eval_prompts)):
        file = None if source is None else embedded_prompts(source) or Path(source)
        if file is not None and file.is_file():
            result.append(_input(f"data.{key}", "prompts", file, source))
    for key, plan in _rewards(resolved):
        for option, value in _paths_in(plan.config):
            file = Path(value)
            if file.is_file() and file.stat().st_size <= LARGEST_TEXT:
                result.append(_input(f"{key}.{option}", "text", file))
    return result


def _rewards(resolved: Resolved) -> Iterator[tuple[str, Any]]:
    yield from ((f"rewards.{i}", plan) for i, plan in enumerate(resolved.rewards))
    yield from ((f"eval.rewards.{i}", plan) for i, plan in enumerate(resolved.eval_rewards))


def _paths_in(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(option, value) of the files that a component's options name."""
    if not is_dataclass(config):
        return
    hints = typing.get_type_hints(type(config), include_extras=True)
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, str) and {PATH, NAME_OR_PATH} & set(typing.get_args(hints[item.name])):
            yield prefix + item.name, value
        yield from _paths_in(value, f"{prefix}{item.name}.")


def code_files(module: ModuleType) -> list[Path]:
    """A module's file, then those that it imports from its own folder or the working directory."""
    if module.__file__ is None:
        return []
    main = Path(module.__file__)
    roots = {main.parent.resolve(), Path.cwd()}
    result, waiting = [main], [main]
    while waiting:
        for name in _imported(waiting.pop()):
            if name.split(".")[0] in ("flowrl", *sys.stdlib_module_names) or name not in sys.modules:
                continue
            origin = vars(sys.modules[name]).get("__file__")  # one that is built in, or a folder alone, has none
            file = None if origin is None else Path(origin).resolve()
            if file is None or file.suffix != ".py":
                continue
            installed = {"site-packages", "dist-packages"} & set(file.parts)
            if file not in result and not installed and any(file.is_relative_to(root) for root in roots):
                result.append(file)
                waiting.append(file)
    return result


def _imported(file: Path) -> Iterator[str]:
    """Names of the modules that a file imports; `from a import b` may mean a or a.b."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _input(key: str, kind: Kind, file: Path, source: str | None = None) -> Input:
    return Input(key, kind, source or str(file), file_sha256(file), file.stat().st_size)


# ---- in the run folder


def write(run: Path, record: Record) -> Record:
    """Write a record, and copies of the files that have none yet."""
    kept = []
    for one in record.inputs:
        source = file_of(one)
        if one.copy is None and one.kind != "set" and one.bytes <= LARGEST_COPY and source.is_file():
            copy = Path(COPIES) / one.sha256[:8] / source.name
            if not (run / copy).is_file():
                with replaced(run / copy) as half:
                    shutil.copyfile(source, half)
            one = replace(one, copy=str(copy))
        kept.append(one)
    record = Record(tuple(kept), record.changes)
    plain = {"inputs": [asdict(one) for one in record.inputs], "changes": list(record.changes)}
    write_atomically(run / FILE, json.dumps(plain, indent=1) + "\n")
    return record


def alike(then: Options, now: Options, record: Record | None, inputs: Sequence[Input]) -> None:
    """Give both configurations the same value for a file that was moved: its contents are compared instead."""
    known = {} if record is None else {one.key: one for one in reversed(record.inputs)}
    for one in reversed(inputs):
        old = known.get(one.key)
        if old is not None and (old.sha256 == one.sha256 or old.name == one.name):
            _put(then, one.key, one.path)
            _put(now, one.key, one.path)
    for key in (key for key, old in known.items() if old.kind == "set"):  # compared when they are scanned
        if _get(then, key) and _get(now, key):
            _put(then, key, _get(now, key))


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else (tree or {}).get(part)
    return tree


def _put(tree: Any, key: str, value: Any) -> None:
    *path, last = key.split(".")
    node = _get(tree, ".".join(path)) if path else tree
    if isinstance(node, dict) and isinstance(node.get(last), str):
        node[last] = value


def update(
    run: Path, record: Record | None, now: Sequence[Input], iteration: int, accept: bool, agreed: Sequence[str] = ()
) -> None:
    """Update the run folder's record: new inputs, moved ones, and accepted changes.

    `agreed` are sentences about options with another value, which are accepted already.

    Raises ConfigError: contents differ and the change is not accepted.
    """
    if record is None:
        record, now = Record(tuple(now)), ()
    changed = require_same(run, record, now, accept=accept)
    for line in (*changed, *agreed):
        say("accepted after iteration %d: %s", iteration, line)
    fresh = {one.place: one for one in now}
    kept = []
    for old in record.inputs:
        new = fresh.pop(old.place, old)
        kept.append(replace(old, path=new.path) if new.sha256 == old.sha256 else new)
    changes = ({"iteration": iteration, "what": changed},) if changed else ()
    write(run, Record((*kept, *fresh.values()), (*record.changes, *changes)).with_options(iteration, agreed))


def note(run: Path, iteration: int, what: Sequence[str]) -> None:
    """Record what else changed after an iteration, for the report."""
    record = contents.read(run)
    if record is not None:
        write(run, record.with_options(iteration, what))


def made_with(resolved: Resolved, prompts: Sequence[Prompt], outputs: Sequence[Sequence[str]]) -> dict[str, str]:
    """Fingerprints of all that an evaluation's numbers depend on, except its steps, guidance and seeds. They are
    `model`, `prompts`, and `score NAME` for each output; `outputs` names those of each reward that is evaluated, those
    of `eval.rewards` last. The folders of files do not matter.
    """
    model = {k: v for k, v in asdict(resolved.model.config).items() if k not in _ROUNDED}
    model.pop("fps", None)  # decides no pixel
    model["memory"] = {k: v for k, v in model["memory"].items() if k != "vae_channels_last"}  # rounding alone
    result = {"model": fingerprint([resolved.model.name, _portable(model)])}
    result["prompts"] = prompts_mark(prompts)
    files = collect(resolved)
    evaluated = [(key, plan) for key, plan in _rewards(resolved) if not plan.by_people]
    for (key, plan), names in zip(evaluated, outputs, strict=True):
        own = [(one.kind, one.name, one.sha256) for one in files if one.key.startswith(f"{key}.")]
        options = None if plan.config is None else _portable(asdict(plan.config))
        for name in names:
            result.setdefault(f"score {name}", fingerprint([plan.name, options, own]))
    return result


def prompts_mark(prompts: Sequence[Prompt]) -> str:
    """Fingerprint of prompts with what is recorded of them."""
    return fingerprint([[p.text, _portable(p.metadata)] for p in prompts])


def _portable(value: Any) -> Any:
    """Plain data with the names of files instead of whole paths."""
    if isinstance(value, dict):
        return {key: _portable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value
