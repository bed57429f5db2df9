"""A pipeline's own `__call__`, entered again at one timestep, with its text encoding and first latents given.

`Reentry.enter` runs `type(pipeline).__call__` without its `torch.no_grad` and with these parts of the pipeline
replaced for that call:

    scheduler        an instance of a subclass of its own class. Pinned, `set_timesteps` keeps the given timesteps
                     (one to predict, none to decode) and `step` ends the call with the prediction
    encode_prompt    returns cached values
    prepare_latents  returns given latents instead of noise
    encode_image and other encoders of images: return cached values (models/generic/images.py)

So packing, guidance, renormalisation and sign are the pipeline's own code.

`Reentry.own_call` runs the call as it is, to its end, and records the steps of its schedulers (own_call.py).
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError

TIME_ARGUMENTS = ("timestep", "timesteps", "t", "time")


class _Stop(Exception):
    """Ends a call early: its result is recorded."""


class _Copied(Exception):
    """The pipeline copies its scheduler."""


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare_latents`."""

    parts: tuple[Any, ...]
    place: int | None
    """Number of the latents among the parts; None: they are the whole result."""
    dtype: torch.dtype
    free: Tensor | None = None
    """Places of the scheduler's latents in a sample of these, in its order; None: all of them."""

    @staticmethod
    def of(value: Any) -> "Prepared":
        if torch.is_tensor(value):
            return Prepared((value,), None, value.dtype)
        place = next((i for i, part in enumerate(value) if torch.is_tensor(part)), 0)
        return Prepared(tuple(value), place, value[place].dtype)

    @property
    def latents(self) -> Tensor:
        return self.parts[self.place or 0]

    def around(self, given: Tensor, keep_dtype: bool) -> Any:
        """The same with other latents, cast to the dtype of the loop."""
        latents = given if keep_dtype else given.to(self.dtype)
        if self.free is not None:
            whole = self.latents.to(latents.dtype).flatten(1)
            latents = whole.index_copy(1, self.free, latents.flatten(1)).view_as(self.latents)
        if self.place is None:
            return latents
        return tuple(latents if i == self.place else part for i, part in enumerate(self.parts))


@dataclass
class Visit:
    """The record of one call of the pipeline."""

    returned: dict[str, list[Any]] = field(default_factory=dict)
    """Method -> its own results, call by call; empty for a stubbed one."""
    prepared: Prepared | None = None
    """Own result of `prepare_latents`; None where it was stubbed."""
    latents: Tensor | None = None
    """First latents of the loop, or those given to `scheduler.step`, [B, ...]."""
    network: str = ""
    """First network component of the loop, if the call was stopped there."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """Its arguments by name."""
    timesteps: Tensor | None = None
    """The scheduler's grid, [K]."""
    sigmas: Tensor | None = None
    """The scheduler's, [K + 1]; None: it has none."""
    prediction: Tensor | None = None
    """The first argument of `scheduler.step`, [B, ...]."""
    output: Any = None
    """Result of a call that ran to its end."""


@dataclass(frozen=True)
class StepCall:
    """One call of a scheduler's `step`: what it was given and what it left, [B, ...]."""

    prediction: Tensor
    sample: Tensor
    left: Tensor


@dataclass(frozen=True)
class OwnCall:
    """The pipeline's own call, to its end."""

    steps: list[StepCall]
    """Of all schedulers and their copies, in order."""
    timesteps: Tensor
    """Its scheduler's grid, [K]."""
    output: Any


def hooked(scheduler: Any, pinned: Tensor | None, visit: Visit) -> Any:
    """A copy of `scheduler` whose `step` ends the call; `pinned` [k] takes the place of its grid.

    Signatures are kept: pipelines inspect them.
    """
    made = copy.copy(scheduler)
    made.__class__ = _hooked_class(type(scheduler))
    made.flowrl_pinned, made.flowrl_visit = pinned, visit
    return made


@functools.cache
def _hooked_class(base: type) -> type:
    @functools.wraps(base.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        pinned = self.flowrl_pinned
        if pinned is None:
            base.set_timesteps(self, *args, **kwargs)
            return
        self.timesteps, self.num_inference_steps = pinned, len(pinned)
        # Read by caches and callbacks alone; their number must fit.
        self.sigmas = torch.cat([pinned.float() / self.config.num_train_timesteps, pinned.new_zeros(1).float()])

    @functools.wraps(base.step)
    def step(self: Any, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> None:
        self.flowrl_visit.prediction, self.flowrl_visit.latents = model_output, sample
        raise _Stop

    def copied(*_: Any) -> None:
        raise _Copied

    # SDXL's Euler scheduler would scale the given latents.
    members = {"set_timesteps": set_timesteps, "step": step, "init_noise_sigma": 1.0, "__deepcopy__": copied}
    return type(base.__name__, (base,), members)


def _watched(scheduler: Any, calls: list[StepCall]) -> Any:
    """A copy of `scheduler` that records its steps; its class does it, so copies that the pipeline makes do too."""
    base = type(scheduler)

    @functools.wraps(base.step)
    def step(self: Any, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = model_output.clone(), sample.clone()  # a loop may write in place
        result = base.step(self, model_output, timestep, sample, *args, **kwargs)
        left = result[0] if isinstance(result, tuple) else result.prev_sample
        calls.append(StepCall(*given, left.clone()))
        return result

    made = copy.copy(scheduler)
    made.__class__ = type(base.__name__, (base,), {"step": step})
    return made


class Reentry:
    """A pipeline and its denoising networks by component name.

    `answered`: methods that encode images; those that the pipeline lacks are left out. With `holds` tokens of timestep
    0 keep it, whatever the timestep of their sample.

    Raises ModelError: the pipeline's class lacks a part that a re-entry replaces.
    """

    def __init__(
        self, pipeline: Any, networks: dict[str, nn.Module], answered: Sequence[str] = (), *, holds: bool = False
    ) -> None:
        kind = type(pipeline)
        self.pipeline, self.networks, self.holds = pipeline, networks, holds
        self.answered = [name for name in ("encode_prompt", *answered) if self._method(name) is not None]
        self._call: Callable[..., Any] = inspect.unwrap(kind.__call__)
        self.parameters = inspect.signature(kind.__call__).parameters
        self._signatures = {name: inspect.signature(network.forward) for name, network in networks.items()}
        self._rest: dict[tuple, Prepared] = {}
        for part in ("encode_prompt", "prepare_latents"):
            if self._method(part) is None:
                raise ModelError(
                    f"{kind.__name__} has no {part}(): the generic adapter cannot enter its call again; "
                    "write a native adapter (docs/models.md)"
                )
        self._draw = pipeline.prepare_latents
        self.time_arguments: dict[str, str] = {}
        """Network -> the name of its timestep argument."""
        for name, network in networks.items():
            argument = next((a for a in TIME_ARGUMENTS if a in self._signatures[name].parameters), None)
            if argument is None:
                raise ModelError(f"{kind.__name__}: {type(network).__name__} takes no timestep")
            self.time_arguments[name] = argument

    def _method(self, name: str) -> Any:
        """The pipeline's method of that name, or None."""
        result = getattr(self.pipeline, name, None)
        return result if callable(result) else None

    def forget(self) -> None:
        """Drop the kept results of `prepare_latents`, which are on the old device."""
        self._rest.clear()

    def enter(
        self,
        options: dict[str, Any],
        *,
        answers: Mapping[str, Sequence[Any]] | None = None,
        latents: Tensor | None = None,
        timesteps: Tensor | None = None,
        times: Tensor | None = None,
        stop_at_network: bool = False,
        keep_dtype: bool = False,
        prepared: Prepared | None = None,
    ) -> Visit:
        """One call of the pipeline.

        `options` are its arguments; `answers`: method -> its results, call by call, the others run themselves.
        `latents`: result of `prepare_latents`, [B, ...], None: it draws; `prepared`: its further results, for pipelines
        with images. `timesteps`: the grid, [k]; None: the pipeline's own. `times`: the network's own timesteps of the
        samples, [B], instead of the pinned one. `stop_at_network` ends at the first call of a network; `keep_dtype`
        does not cast `latents` to the dtype of the loop.
        """
        visit = Visit()
        scheduler = hooked(self.pipeline.scheduler, timesteps, visit)
        prepare = functools.partial(self._prepare, visit, latents, keep_dtype, prepared)
        parts = {"scheduler": scheduler, "prepare_latents": prepare}
        for name in self.answered:
            record = visit.returned.setdefault(name, [])
            parts[name] = self._answer(name, record, (answers or {}).get(name))
        with ExitStack() as stack:
            stack.enter_context(replaced(self.pipeline, parts))
            for name, network in self.networks.items():
                hook = None
                if stop_at_network:
                    hook = functools.partial(self._stop, visit, name)
                elif times is not None:
                    hook = functools.partial(self._set_time, name, times)
                if hook is not None:
                    handle = network.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
                    stack.callback(handle.remove)
            try:
                with suppress(_Stop):
                    visit.output = self._call(self.pipeline, **options)
            except _Copied:
                raise ModelError(
                    several(type(self.pipeline).__name__, "copies its scheduler for another one")
                ) from None
        visit.timesteps = scheduler.timesteps
        sigmas = vars(scheduler).get("sigmas")
        visit.sigmas = torch.as_tensor(sigmas) if sigmas is not None else None
        return visit

    @torch.no_grad()
    def own_call(self, options: dict[str, Any], latents: Tensor, free: Tensor | None = None) -> OwnCall:
        """The pipeline's own call with `options` and nothing replaced but the noise of `prepare_latents`, by `latents`
        [B, ...]; schedulers are copies. `free`: places of the latents in a sample, as in `Prepared`.
        """
        calls: list[StepCall] = []

        def prepare(*args: Any, **kwargs: Any) -> Any:
            return replace(Prepared.of(self._draw(*args, **kwargs)), free=free).around(latents, keep_dtype=False)

        schedulers = {
            name: _watched(part, calls)
            for name, part in self.pipeline.components.items()
            if callable(getattr(part, "step", None)) and callable(getattr(part, "set_timesteps", None))
        }
        with replaced(self.pipeline, {**schedulers, "prepare_latents": prepare}):
            output = self._call(self.pipeline, **options)
        return OwnCall(calls, schedulers["scheduler"].timesteps, output)

    def _answer(self, method: str, record: list[Any], values: Sequence[Any] | None) -> Callable[..., Any]:
        """The pipeline's method with its results recorded; with `values`, a function that returns those in turn."""
        if values is not None:
            answers = iter(values)
            return lambda *_, **__: next(answers)
        real = self._method(method)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            value = real(*args, **kwargs)
            record.append(value)
            return value

        return recorded

    def _prepare(
        self, visit: Visit, given: Tensor | None, keep_dtype: bool, prepared: Prepared | None, *args: Any, **kwargs: Any
    ) -> Any:
        """`prepare_latents` with its noise replaced; its further results are made once for each kind of call."""
        if given is not None and prepared is not None:
            return prepared.around(given, keep_dtype)
        plain = [*args, *sorted(kwargs.items())]
        # Images are not in the key: results that depend on them come as `prepared`.
        key = tuple(value for value in plain if not isinstance(value, torch.Generator) and _hashable(value))
        if given is None or key not in self._rest:
            value = self._draw(*args, **kwargs)
            visit.prepared = Prepared.of(value)
            visit.latents = visit.prepared.latents
            if given is None:
                return value
            self._rest[key] = visit.prepared
        return self._rest[key].around(given, keep_dtype)

    def _bind(self, name: str, args: tuple, kwargs: dict) -> dict[str, Any]:
        return dict(self._signatures[name].bind(*args, **kwargs).arguments)

    def _stop(self, visit: Visit, name: str, _: nn.Module, args: tuple, kwargs: dict) -> None:
        visit.network, visit.inputs = name, self._bind(name, args, kwargs)
        raise _Stop

    def _set_time(self, name: str, times: Tensor, _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The network's arguments with one timestep per sample: repeated for doubled batches, spread over tokens."""
        bound, key = self._bind(name, args, kwargs), self.time_arguments[name]
        old, first = bound[key], next(iter(bound.values()))
        rows = len(old) if torch.is_tensor(old) and old.ndim else len(first)
        value = times.repeat(rows // len(times))
        if old.ndim > 1:
            value = value.reshape(-1, *[1] * (old.ndim - 1)).expand(old.shape)
        if self.holds:
            value = torch.where(old == 0, old, value)
        if key in kwargs:
            return args, {**kwargs, key: value}
        place = list(self._signatures[name].parameters).index(key)
        return (*args[:place], value, *args[place + 1 :]), kwargs


def several(kind: str, how: str) -> str:
    """The message about a class that steps more than one tensor; `how` it is seen."""
    return (
        f"{kind} steps more than one tensor, such as the sound of a video: it {how}. flowrl trains one, and the others "
        "would stay at their noise; write a native adapter (docs/models.md)"
    )


def _hashable(value: Any) -> bool:
    plain = (int, float, str, bool, type(None), torch.dtype, torch.device)
    return isinstance(value, plain) or (isinstance(value, tuple) and all(_hashable(v) for v in value))


@contextmanager
def replaced(pipeline: Any, parts: dict[str, Any]) -> Iterator[None]:
    """Attributes of the instance, changed for a while; past its __setattr__, which would rewrite its configuration."""
    before = {name: pipeline.__dict__[name] for name in parts if name in pipeline.__dict__}
    pipeline.__dict__.update(parts)
    try:
        yield
    finally:
        for name in parts:
            del pipeline.__dict__[name]
        pipeline.__dict__.update(before)
