"""The results of a pipeline's `encode_prompt`, taken apart into rows of a Condition and put together again.

Three calls are compared: a short prompt, a long one, and both in a batch of three. A part is

    rows      one row per prompt: stored in the Condition, as one tensor or, where lengths differ, as a list
    shared    one row per prompt, the same for every prompt (the negative embedding): one row is kept here
    constant  anything else (token ids of a fixed length, None): kept here

Rows of different lengths share a forward only with a mask; they are padded as in the pipelines, with zeros on the
right.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.types import Condition

SHORT = "a"
# Some pipelines encode text in quotes separately.
LONG = " ".join(['two blue squares on the left of a large red circle, under a sign that says "open",'] * 8)
Calls = Sequence[Any]
Place = tuple[int | str, ...]


def leaves(value: Any, batch: int, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """(place, part) of nested tuples and dicts; a list of `batch` tensors is one part."""
    if isinstance(value, list | tuple) and not _is_rows(value, batch):
        for i, part in enumerate(value):
            yield from leaves(part, batch, (*place, i))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, batch, (*place, key))
    else:
        yield place, value


def _is_rows(value: Any, batch: int) -> bool:
    # The result of one call is a tuple, the record of all calls a list of those.
    return isinstance(value, list) and len(value) == batch and all(torch.is_tensor(part) for part in value)


def rows_of(part: Any, batch: int) -> list[Tensor] | None:
    """The rows of a part; None unless it has one per prompt."""
    if torch.is_tensor(part):
        return list(part.unbind(0)) if part.ndim and len(part) == batch else None
    return list(part) if _is_rows(part, batch) else None


@dataclass
class Template:
    """How to store and to rebuild the results of the calls of `encode_prompt`."""

    calls: Calls
    """Results for the batch of three, as the structure."""
    listed: set[Place] = field(default_factory=set)
    """Parts that the pipeline takes as a list of tensors."""
    varying: set[Place] = field(default_factory=set)
    """Parts with one row per prompt."""
    shared: dict[Place, Tensor] = field(default_factory=dict)
    """The row of each part that all prompts share."""
    constant: dict[Place, Any] = field(default_factory=dict)
    """All other parts."""
    masks: dict[Place, torch.dtype] = field(default_factory=dict)
    """Types of the masks that the pipeline leaves out where nothing is padded."""
    ragged: bool = False
    """Whether rows have different lengths."""

    def condition(self, calls: Calls, batch: int) -> Condition:
        """Rows of encoded prompts."""
        parts = dict(leaves(calls, batch))
        for place, kept in self.shared.items():
            rows = rows_of(parts.get(place), batch)
            if rows is None or any(row.shape != kept.shape for row in rows) or not _alike(kept, *rows):
                raise ModelError(f"encode_prompt() returned a part {_name(place)} that only some prompts share")
        entries: dict[str, Tensor | list[Tensor]] = {}
        for place in sorted(self.varying, key=str):
            part = parts.get(place)
            if part is None:
                if place not in self.masks:
                    raise ModelError(f"encode_prompt() returned no part {_name(place)} this time")
                continue
            rows = rows_of(part, batch)
            if rows is None:
                raise ModelError(f"encode_prompt() returned a part {_name(place)} without one row per prompt")
            entries[_name(place)] = [row.clone() for row in rows] if self.ragged else torch.stack(rows)
        for place, dtype in self.masks.items():
            if _name(place) not in entries:
                # The tokens of a mask: the first rows of the same call.
                own = (v for k, v in entries.items() if k.split(".")[0] == str(place[0]) and v[0].ndim > 1)
                entries[_name(place)] = [torch.ones(len(row), dtype=dtype, device=row.device) for row in next(own)]
        return Condition(entries)

    def key(self, cond: Condition, row: int) -> tuple:
        """Rows of equal keys may share a forward."""
        if not self.ragged or self.padded:
            return ()
        return tuple(tuple(value[row].shape) for place, value in self._entries(cond) if place not in self.listed)

    def _entries(self, cond: Condition) -> Iterator[tuple[Place, Any]]:
        return ((place, cond[_name(place)]) for place in sorted(self.varying, key=str))

    @property
    def padded(self) -> bool:
        """Whether a mask separates padding from text."""
        parts = dict(leaves(self.calls, 3))
        first = (rows[0] for place in self.varying if (rows := rows_of(parts[place], 3)) is not None)
        return any(row.ndim == 1 and not (row.is_floating_point() and len(row.unique()) > 2) for row in first)

    def rebuild(self, cond: Condition) -> Calls:
        """The results of `encode_prompt` for these prompts, call by call."""
        batch = len(cond)
        parts: dict[Place, Any] = dict(self.constant)
        for place, row in self.shared.items():
            parts[place] = [row] * batch if place in self.listed else row.expand(batch, *row.shape)
        for place, value in self._entries(cond):
            if place in self.listed:
                parts[place] = list(value)
                continue
            rows = torch.nn.utils.rnn.pad_sequence(value, batch_first=True) if isinstance(value, list) else value
            parts[place] = None if place in self.masks and bool(rows.all()) else rows
        return [_assemble(call, parts, (i,), 3) for i, call in enumerate(self.calls)]

    def to(self, device: torch.device) -> None:
        self.shared = {place: row.to(device) for place, row in self.shared.items()}
        moved = {place: part.to(device) for place, part in self.constant.items() if torch.is_tensor(part)}
        self.constant |= moved


def learn(encode: Callable[[list[str]], Calls]) -> Template:
    """The template of a pipeline; `encode` gives the results of its calls of `encode_prompt`.

    Raises ModelError: a part depends on the prompts without one row per prompt.
    """
    short, long, both = encode([SHORT]), encode([LONG]), encode([SHORT, LONG, SHORT])
    if not both:
        raise ModelError("the pipeline's call does not use encode_prompt()")
    template = Template(calls=both)
    of_short, of_long = dict(leaves(short, 1)), dict(leaves(long, 1))
    for place, part in leaves(both, 3):
        rows, one, other = rows_of(part, 3), of_short.get(place), of_long.get(place)
        if rows is not None and (rows_of(one, 1) is not None or (one is None and torch.is_tensor(part))):
            if isinstance(part, list):
                template.listed.add(place)
            _learn_rows(template, place, rows, one, other)
        elif same(one, part) and same(other, part):
            template.constant[place] = part
        else:
            raise ModelError(
                f"encode_prompt() returns a part {_name(place)} that depends on the prompts without one row per prompt"
            )
    if not template.varying:
        raise ModelError(
            "two different prompts have the same embedding: model.call.max_sequence_length cuts them off, or the "
            "pipeline puts a long instruction before them"
        )
    return template


def one_by_one(encode: Callable[[list[str]], Calls]) -> Callable[[list[str]], Calls]:
    """`encode` for a pipeline that takes one prompt only: the rows of several calls, padded to one length."""

    def joined(parts: list[Any]) -> Any:
        if torch.is_tensor(parts[0]) and all(part.ndim > 1 and len(part) == 1 for part in parts):
            return torch.nn.utils.rnn.pad_sequence([part[0] for part in parts], batch_first=True)
        if isinstance(parts[0], list | tuple):
            return type(parts[0])(joined(list(each)) for each in zip(*parts, strict=True))
        return parts[0]

    return lambda prompts: joined([encode([prompt]) for prompt in prompts])


@contextmanager
def without_warnings() -> Iterator[None]:
    """No warnings that the probing prompts are cut off: they are meant to be."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _learn_rows(template: Template, place: Place, rows: list[Tensor], short: Any, long: Any) -> None:
    (one,), (other,) = rows_of(short, 1) or (None,), rows_of(long, 1) or (None,)
    if one is None:
        template.varying.add(place)
        template.masks[place] = rows[0].dtype
        template.ragged = True
        return
    if other is not None and one.shape == other.shape == rows[0].shape and _alike(rows[0], rows[1], one, other):
        template.shared[place] = one.clone()
        return
    template.varying.add(place)
    template.ragged |= other is None or one.shape != other.shape


def _alike(*rows: Tensor) -> bool:
    """Whether rows are equal up to the rounding of another batch size."""
    first = rows[0].float()
    scale = float(first.abs().max()) or 1.0
    return all(float((row.float() - first).abs().max()) <= 1e-2 * scale for row in rows[1:])


def same(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal."""
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _assemble(value: Any, parts: dict[Place, Any], place: Place, batch: int) -> Any:
    if place in parts:
        return parts[place]
    if isinstance(value, dict):
        return {key: _assemble(part, parts, (*place, key), batch) for key, part in value.items()}
    return type(value)(_assemble(part, parts, (*place, i), batch) for i, part in enumerate(value))


def _name(place: Place) -> str:
    return ".".join(str(step) for step in place)
