"""Requests of `flowrl ask` to a run: taken up between iterations, agreed by all processes, answered in the folder.

Nothing here moves a number of the training: a checkpoint only reads, images and evaluations have noise of their own,
and a failure of what was asked for is the answer, not the end of the run.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.errors import ConfigError, Fault, LostProcess, ModelError, described
from flowrl.core.files import known_object
from flowrl.core.types import Condition
from flowrl.data.prompts import Prompt
from flowrl.data.text_cache import Texts, batches, encoded
from flowrl.display.console import log
from flowrl.display.phases import phase
from flowrl.evaluation import previews
from flowrl.evaluation.evaluator import Setting
from flowrl.evaluation.results import Evaluation
from flowrl.models.memory.encoders import borrowed_encoders
from flowrl.run import checkpoint, handover, status
from flowrl.run import desk as requests
from flowrl.run.session import Session
from flowrl.run.state import Saver
from flowrl.training.signals import Signals
from flowrl.training.world import World

Answer = tuple[str, dict[str, Any]]
"""A sentence, and facts such as paths relative to the run folder."""


class Desk:
    """Where a run finds requests and answers them; the first process alone touches the files."""

    def __init__(self, run: Path, world: World, signals: Signals) -> None:
        self.run, self.world, self.signals = run, world, signals
        self._open = False

    def open(self, *, launched: bool) -> None:
        """Take requests from now on; the folder is locked. `launched`: the launcher has dropped those of an earlier
        run."""
        if not launched:
            requests.open_desk(self.run)
        self._open, self.signals.look = True, self._stop

    def waits(self) -> bool:
        """Whether a request may wait, on the first process; one stat."""
        return self._open and requests.someone_waits(self.run)

    def serve(self, session: Session, saver: Saver, *, last: bool) -> None:
        """Do what waits, between iterations; all processes call this.

        `last`: the final evaluation comes next, and is the answer to a request for one.

        Raises Abandoned: on all processes, if a signal or a request to stop comes while it is done;
        UnwritableCheckpoint, WriteError: a checkpoint that was being written before could not be.
        """
        saver.settle()
        taken = self.world.together(lambda: self._taken(last))[0]
        for name, request in taken:
            word, state, facts = request["word"], "done", {}
            if self.world.main:
                log.info("%s of iteration %d, asked for by %s", word, session.iteration, request["by"])
            try:
                if word not in _WORK:
                    raise ConfigError(f"there is no request {word!r}; this run takes: {', '.join(requests.WORDS)}")
                text, facts = _WORK[word](session, saver, request["options"])
            except LostProcess:
                raise
            except Exception as error:  # what was asked for must not end the run, whatever it is
                state, text = "failed", str(error) if isinstance(error, Fault) else described(error)
                log.warning("%s was asked for and failed: %s", word, text)
            if self.world.main:
                requests.answer(self.run, name, state, text, iteration=session.iteration, **facts)

    def close(self) -> None:
        """Answer what is left by how the run ended, and take no more."""
        if not self._open:
            return
        self._open, self.signals.look = False, lambda: None
        try:
            self._close()
        except OSError as error:  # a full disk must not hide how the run ended
            log.warning("requests in %s could not be answered: %s", self.run, error)

    def _close(self) -> None:
        # Not `status.read`: while the folder is locked, that one says that the run is under way.
        summary = known_object(self.run / status.SUMMARY)
        how, done = summary.get("status"), summary.get("iterations")
        for name in requests.waiting(self.run):
            word = name.rpartition("-")[2]
            if word == "stop" and how == "stopped":
                text = f"the run was stopped after iteration {done}; go on with: {summary.get('command')}"
            elif word == "evaluate" and how == "finished":
                text = "the run finished, with its final evaluation: eval/tuned.json"
            elif word == "save" and how == "finished":
                text = f"the run finished, and its last iteration is saved: adapter/ and checkpoints/ of {done}"
            else:
                continue
            requests.take(self.run, name)
            requests.answer(self.run, name, "done", text, iteration=done)
        requests.close_desk(self.run, f"the run ended before it was done: {how}, after iteration {done}")

    def _stop(self) -> str | None:
        """Who asks the run to stop."""
        if not requests.someone_waits(self.run):
            return None
        for name in requests.waiting(self.run):
            request = requests.peek(self.run, name)
            if request.get("word") == "stop":
                return f"{request.get('by')} at {request.get('at')}"
        return None

    def _taken(self, last: bool) -> list[tuple[str, dict[str, Any]]]:
        # A stop that has come since the processes agreed on none is for their next look.
        later = {"stop", "evaluate"} if last else {"stop"}
        result = []
        for name in requests.waiting(self.run) if self.world.main else ():
            waits = requests.peek(self.run, name).get("word") in later
            request = None if waits else requests.take(self.run, name)
            if request is not None:
                result.append((name, request))
        return result


def _save(session: Session, saver: Saver, options: dict[str, Any]) -> Answer:
    """A checkpoint that is kept, and a copy of the adapter."""
    run, iteration, world = saver.folder.path, session.iteration, session.world
    copy = run / requests.ASKED / f"iteration-{iteration:06d}" / handover.FOLDER
    if world.main:  # before it is written, so that no other checkpoint makes room for it
        checkpoint.retain(saver.folder.checkpoints, iteration, "flowrl ask save")
    saver.save()

    def keep() -> None:
        if world.main:
            half = copy.with_name(f".{copy.name}.tmp")
            for folder in (half, copy):  # the adapter of an earlier request at this iteration
                shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(run / handover.FOLDER, half)
            os.replace(half, copy)

    world.together(keep)
    place = checkpoint.path_of(saver.folder.checkpoints, iteration)
    paths = {"checkpoint": os.path.relpath(place, run), "adapter": os.path.relpath(copy, run)}
    return f"iteration {iteration} is saved and kept: {paths['checkpoint']}, {paths['adapter']}", {"paths": paths}


def _sample(session: Session, saver: Saver, options: dict[str, Any]) -> Answer:
    """Images of the preview prompts, or of others, by the weights that count."""
    run, iteration, world = saver.folder.path, session.iteration, session.world
    prompts, texts, steps, guidance, seed = _wish(session, options)
    base = run / requests.ASKED
    name = world.gather(_free(base, f"iteration-{iteration:06d}") if world.main else "")[0]
    setting = Setting(name, iteration, guidance, steps, save="images")
    with phase("sampling"), session.weights.using(session.optimizer.role):
        session.parts.previews.draw(setting, prompts, texts, requests.ASKED, seed=seed, stop=session.stop)
    files = sorted(os.path.relpath(file, run) for file in (base / name).glob("[0-9]*-0.*"))
    facts = {"paths": {"images": files}, "prompts": [prompt.text for prompt in prompts]}
    facts |= {"guidance_scale": guidance, "num_inference_steps": steps, "seed": seed}
    return f"{len(files)} samples of iteration {iteration}: {os.path.relpath(base / name, run)}", facts


def _free(folder: Path, name: str) -> str:
    """The name, or with a number where that folder has images already."""
    number, result = 1, name
    while any((folder / result).glob("[0-9]*-0.*")):
        number += 1
        result = f"{name}-{number}"
    return result


def _wish(session: Session, options: dict[str, Any]) -> tuple[tuple[Prompt, ...], Texts, int, float, int]:
    """(prompts, their embeddings, steps, guidance scale, seed) of a request for images, else the run's own.

    Raises ConfigError: of a wrong kind, or a prompt it cannot draw.
    """
    drawn = session.parts.previews
    given, steps, guidance, seed = (options.get(key) for key in ("prompts", "steps", "guidance", "seed"))
    if not (isinstance(given or [], list) and all(isinstance(text, str) for text in given or [])):
        raise ConfigError(f"prompts={given!r} is no list of texts")
    if not (steps is None or (isinstance(steps, int) and steps > 0)):
        raise ConfigError(f"--steps {steps!r} must be a whole number above 0")
    if not (guidance is None or (isinstance(guidance, int | float) and np.isfinite(guidance))):
        raise ConfigError(f"--guidance {guidance!r} must be a number")
    if not isinstance(seed or 0, int):
        raise ConfigError(f"--seed {seed!r} must be a whole number")
    prompts, texts = drawn.prompts, drawn.texts
    if given:
        prompts, texts = _embedded(session, given)
    if not prompts or texts is None:
        raise ConfigError(f"{previews.KEY} is empty: there is nothing to draw; give --prompt TEXT")
    try:
        if guidance is not None:
            session.model.check_guidance(guidance, "--guidance")
        if steps is not None:
            session.model.check_steps(steps, "--steps")
    except ValueError as error:
        raise ConfigError.about(error) from None
    scale = session.eval_guidance if guidance is None else float(guidance)
    return prompts, texts, steps or session.eval_steps, scale, seed or 0


def _embedded(session: Session, given: Sequence[str]) -> tuple[tuple[Prompt, ...], Texts]:
    """Prompts of a command line with their embeddings; those that the run does not have are made by the first process.

    Raises ConfigError: one of them is empty, doubled, unfit for the model, or cannot be embedded any more; Elsewhere:
    the first process cannot embed one.
    """
    prompts, parts = tuple(map(Prompt, given)), session.parts
    previews.require_own(prompts, "--prompt")
    edits = parts.data.edits
    previews.require_fit(prompts, session.model, session.resolved.model.config, "--prompt", edits=edits)
    previews.require_learned(prompts, parts.sampling.learned, "--prompt")
    known = parts.sampling.texts
    if all(known.knows(prompt) for prompt in prompts):
        return prompts, known
    table = session.world.together(lambda: _encoded_again(session, prompts))[0]
    assert table is not None
    return prompts, Texts.of(session.model, prompts, table, session.world.device)


def _encoded_again(session: Session, prompts: Sequence[Prompt]) -> Condition | None:
    """Embeddings of prompts by encoders that are loaded for them, in host memory; None on all but the first process."""
    if not session.world.main:
        return None
    try:
        with borrowed_encoders(session.model, session.resolved.model.config):
            made = [encoded(session.model, batch).to("cpu") for batch in batches(prompts)]
        return Condition.collate(made)
    except ModelError as error:
        raise ConfigError(
            f"--prompt: the run has embedded its prompts and freed its text encoders, and {error}. `flowrl ask RUN "
            f"save` and `flowrl sample RUN` draw it beside the run, {previews.KEY} from the next --resume on, and "
            "data.cache_text=false keeps the encoders"
        ) from None


def _evaluate(session: Session, saver: Saver, options: dict[str, Any]) -> Answer:
    """An evaluation as those during training are; that of the schedule, where it is made already."""
    run, iteration, world = saver.folder.path, session.iteration, session.world
    tag = f"iteration-{iteration:06d}"
    file = run / "eval" / f"{tag}.json"
    if not session.parts.evaluator.prompts:
        raise ConfigError("the run evaluates no prompts; name some in data.eval_prompts")
    there = world.gather(world.main and file.is_file())[0]
    limit = session.config.eval.periodic_prompts
    result = Evaluation.load(file) if there else session.evaluate(tag, limit=limit)
    row: dict[str, Any] = {f"eval/{name}": float(np.nanmean(table)) for name, table in result.scores.items()}
    if result.agreement is not None:
        row["eval/implicit_accuracy"] = result.agreement.mean()
    numbers = ", ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in row.items())
    made = "was evaluated already" if there else "is evaluated"
    facts = {"paths": {"evaluation": os.path.relpath(file, run)}, "row": {"iteration": iteration} | row}
    return f"iteration {iteration} {made} ({numbers or 'no scores'}): {facts['paths']['evaluation']}", facts


_WORK = {"save": _save, "sample": _sample, "evaluate": _evaluate}
"""What a word asks for."""
