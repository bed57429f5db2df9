"""Whether a re-entry predicts what the pipeline's own call predicts: two steps of it, one sample, no decoder.

The classes of the table are compared by flowrl's tests. Another one is compared when it is loaded for a training, at
the recipe's guidance; a pass is kept in the cache folder (FLOWRL_CACHE, or ~/.cache/flowrl) with all that it depends
on. The latents of each step are those of the own call, so its scheduler may be of any kind.
"""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError, WriteError
from flowrl.core.files import cache_folder, read_object, write_atomically
from flowrl.core.rng import normal
from flowrl.core.types import Condition
from flowrl.core.versions import versions
from flowrl.display.console import log
from flowrl.models.base import autocast, network_config
from flowrl.models.generic.adapter import Generic
from flowrl.models.generic.families import FAMILIES
from flowrl.models.generic.images import blank
from flowrl.models.generic.reentry import OwnCall, several

PROMPTS = ("a red circle", "two blue squares on the left of a green triangle")
STEPS = 2
_KEPT = ("call", "dtype", "precision", "attention", "height", "width", "first_frame", "final_alpha", "distilled")
"""Options of `model` on which the result depends."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest one of a comparison."""

    relative: float
    """In units of the own call's largest value; NaN where one of the two is not finite."""
    own: float
    ours: float

    @staticmethod
    def of(ours: Tensor, own: Tensor) -> "Difference":
        a, b = ours.float().flatten(), own.float().flatten()
        apart = (a - b).abs()
        if not bool(apart.isfinite().all()):
            place = int((~apart.isfinite()).nonzero()[0])
            return Difference(float("nan"), float(b[place]), float(a[place]))
        place = int(apart.argmax())
        return Difference(float(apart[place] / b.abs().max().clamp(min=1e-6)), float(b[place]), float(a[place]))


def known(model: Generic) -> bool:
    """Whether flowrl's tests compare this class."""
    return model.kind in FAMILIES and type(model.pipeline).__module__.startswith("diffusers.")


def compare(model: Generic, guidance_scale: float) -> Difference:
    """The largest difference of two steps.

    Raises ModelError: the class steps more than one tensor or changes the latents between its steps, or its call fails.
    """
    x, cond = first_noise(model), encoded(model, PROMPTS[:1])
    grid = model.schedule(STEPS).timesteps.to(model.device)
    found, before, limit = [], x, limit_of(model)
    for k, call in enumerate(own_call(model, x, guidance_scale, STEPS, "latent").steps[: len(grid)]):
        here, own = (model.images.stepped(part, model.latent_shape()) for part in (call.sample, call.prediction))
        moved = Difference.of(here, before)
        if not moved.relative <= limit:
            raise ModelError(
                f"{model.kind} changes the latents before its step {k + 1} (from {moved.ours:.4g} to {moved.own:.4g}), "
                "which flowrl's own steps would not; write a native adapter (docs/models.md)"
            )
        with torch.no_grad():
            ours = model.predict(here.float(), grid[k : k + 1], cond, guidance_scale)
        found.append(Difference.of(ours, model.sign * own))
        before = model.images.stepped(call.left, model.latent_shape())
    return max(found, key=lambda each: each.relative if each.relative == each.relative else float("inf"))


def own_call(model: Generic, x: Tensor, guidance_scale: float, steps: int, output_type: str) -> OwnCall:
    """The pipeline's own call from noise x [1, ...], for the first prompt.

    Raises ModelError: it does not step one tensor once in each iteration, or fails.
    """
    options = model.call.arguments(1, guidance_scale, list(PROMPTS[:1]), steps, output_type)
    options |= model.images.arguments([images_of(model, 0)])
    with model.entrance.explained("by its own call"), autocast(model.device, model.dtype, model.autocasts):
        own = model.reentry.own_call(options, x, model.images.free)
    count, iterations = len(own.steps), len(own.timesteps)
    if count > iterations:
        shapes = list(dict.fromkeys(str(tuple(step.sample.shape)) for step in own.steps))
        of = f"tensors of {' and '.join(shapes)}" if len(shapes) > 1 else f"tensors of {shapes[0]}"
        raise ModelError(several(model.kind, f"calls scheduler.step() {count} times in {iterations} steps, for {of}"))
    if count < iterations:
        raise ModelError(f"{model.kind} makes {count} of the {iterations} steps of its grid by scheduler.step()")
    return own


def refusal(model: Generic, guidance_scale: float) -> str | None:
    """Why the model must not be trained, from a comparison; None: it may be."""
    try:
        found = compare(model, guidance_scale)
    except ModelError as error:
        return str(error)
    limit = limit_of(model)
    if found.relative <= limit:
        log.info("%s: two steps differ from its own call by %.1e (allowed %.0e)", model.kind, found.relative, limit)
        return None
    return (
        f"{model.kind} predicts {found.own:.6g} by its own call and {found.ours:.6g} when flowrl enters it: the "
        f"largest difference of {STEPS} steps at guidance_scale={guidance_scale:g} is {found.relative:.1e} of the "
        f"largest value (allowed {limit:.0e}). flowrl would train another model than the pipeline's; write a native "
        "adapter (docs/models.md)"
    )


def limit_of(model: Generic) -> float:
    """Largest accepted difference in units of the largest value."""
    return 1e-3 if model.dtype == torch.float32 else 5e-2


# ---- kept results


def question(model: Generic, guidance_scale: float) -> dict[str, Any]:
    """Plain data of all that a result depends on but the weights."""
    kind, config = type(model.pipeline), model.config
    installed = versions()
    asked = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "code": _code(kind),
        "versions": {name: installed[name] for name in ("flowrl", "diffusers", "transformers", "torch")},
        "forwards": model.branches(guidance_scale),
        "options": {name: getattr(config, name) for name in _KEPT},
        "device": model.device.type,
        "pipeline": _plain(model.pipeline.config),
        "scheduler": [type(model.pipeline.scheduler).__name__, _plain(model.pipeline.scheduler.config)],
        "networks": {n: [type(part).__name__, _plain(network_config(part))] for n, part in model.networks.items()},
    }
    return json.loads(json.dumps(asked, sort_keys=True, default=str))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a configuration without those that say where it came from."""
    return {name: value for name, value in config.items() if not name.startswith("_")}


def _code(kind: type) -> str | None:
    """Hash of the source of a class, its bases and this package; None: it is in no file, so nothing is kept."""
    result = hashlib.sha256()
    try:
        files = [inspect.getfile(each) for each in kind.__mro__[:-1]]
        for file in (*files, *sorted(Path(__file__).parent.glob("*.py"))):
            result.update(Path(file).read_bytes() + b"\0")
    except (TypeError, OSError):  # of a notebook or a shell
        return None
    return result.hexdigest()


def passed(asked: dict[str, Any]) -> bool:
    """Whether a pass is kept; a damaged file is none."""
    if asked["code"] is None:
        return False
    try:
        kept = read_object(_file(asked), "the pipeline is compared again")
    except ConfigError:
        return False
    return kept == {"question": asked, "passed": True}


def keep(asked: dict[str, Any]) -> None:
    """Keep a pass; a folder that cannot be written keeps nothing, which costs the time of comparing again."""
    if asked["code"] is None:
        return
    try:
        write_atomically(_file(asked), json.dumps({"question": asked, "passed": True}))
    except WriteError:
        log.debug("%s could not be written", _file(asked))


def _file(asked: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "own_calls" / f"{name}.json"


# ---- what is drawn


def first_noise(model: Generic, count: int = 1) -> Tensor:
    """Noise of the comparisons, [count, ...]."""
    return normal(model.latent_shape(), 0, "doctor", [(row,) for row in range(count)]).to(model.device)


def encoded(model: Generic, prompts: Sequence[str]) -> Condition:
    """Conditions of prompts, with images if the pipeline needs them."""
    images = [images_of(model, number) for number in range(len(prompts))]
    return model.encode(prompts, images if images[0] else None)


def images_of(model: Generic, number: int) -> list[Any]:
    """Images of one colour, another for each prompt."""
    least, _ = model.image_limits
    return [blank((model.width, model.height), 40 + 80 * number)] * least
