"""Bytes and operations of networks of many equal blocks, measured on a few of them.

A network with N equal blocks in a row is measured with four of them, b0 to b3. What a block adds is read between the
starts of b1 and b2, and again between those of b2 and b3: bytes that stay, and operations; in a backward pass between
the arrivals of their gradients. Two equal readings are the contribution of every other block.

Operations are linear in N. The peak is the largest of many moments, each of them linear in N: a moment near the
beginning of a pass does not move with N, one near its end moves by what the pass holds for each block. So the peak of
the small network is extrapolated only where no moment grows faster with N than the one that is the peak: then it is the
peak for every larger N, and the result is that of the whole network to the byte. Anything else is measured whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flowrl.models.memory.meter import Meter, measured

KEPT = 4
"""Blocks that stay of a row of equal ones."""
_PLAIN = (bool, int, float, str, tuple, type(None))
_NUMBER = "layer_idx"
"""Attribute with a block's own number in transformers."""


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive equal blocks of a list, of which KEPT stay."""

    kept: tuple[nn.Module, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The meter at the start of a block, or where the gradient of its output arrives."""

    block: nn.Module
    call: int
    """Number of the block's forwards before this one, or before the one whose gradient it is."""
    backward: bool
    grad: bool
    """Whether gradients are recorded."""
    now: int
    flop: int


def folded(work: Callable[[], Any], modules: Sequence[nn.Module], *, grad: bool) -> tuple[int, float]:
    """(peak bytes, operations) of `work`, as `measured` has them, with few of the equal blocks of `modules`."""
    with _short(modules) as rows:
        marks: list[Mark] = []
        with torch.set_grad_enabled(grad), Meter() as meter, _watched(rows, meter, marks):
            work()
    if not rows:
        return meter.peak, float(meter.flop)
    added = _added(rows, marks, meter.peak_after)
    if added is None:
        return measured(work, grad=grad)
    peak, flop = meter.peak, meter.flop
    for row, (held, operations) in zip(rows, added, strict=True):
        peak, flop = peak + row.dropped * held, flop + row.dropped * operations
    return peak, float(flop)


# ---- a shorter network


@contextmanager
def _short(modules: Sequence[nn.Module]) -> Iterator[list[Row]]:
    """The modules with KEPT blocks of each row of more equal ones, until the end of the block."""
    rows: list[Row] = []
    whole = [found for module in modules for found in _lists(module)]
    try:
        for parent, name, blocks in whole:
            left: list[nn.Module] = []
            for _, equal in groupby(blocks, _structure):
                row = list(equal)
                left += row[:KEPT]
                if len(row) > KEPT:
                    rows.append(Row(tuple(row[:KEPT]), len(row) - KEPT))
            if len(left) < len(blocks):
                setattr(parent, name, nn.ModuleList(left))
        yield rows
    finally:
        for parent, name, blocks in whole:
            setattr(parent, name, blocks)


def _lists(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """(parent, attribute, list) of the outermost lists of blocks in a module."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield module, name, child
        else:
            yield from _lists(child)


def _structure(block: nn.Module) -> list[Any]:
    """What decides a block's work: its classes, options and the shapes of its tensors."""
    result: list[Any] = []
    for name, part in block.named_modules():
        tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        own = [(key, tuple(t.shape), t.dtype, t.requires_grad) for key, t in tensors]
        options = [
            (key, repr(value) if isinstance(value, _PLAIN) else type(value).__name__)
            for key, value in sorted(vars(part).items())
            if key != _NUMBER
        ]
        result.append((name, type(part), own, options))
    return result


# ---- what a block adds


@contextmanager
def _watched(rows: Sequence[Row], meter: Meter, marks: list[Mark]) -> Iterator[None]:
    """Mark the start of each kept block, and the arrival of the first gradient of its outputs."""
    calls: dict[nn.Module, int] = {}

    def mark(block: nn.Module, call: int, *, backward: bool) -> None:
        marks.append(Mark(block, call, backward, torch.is_grad_enabled(), meter.now, meter.flop))
        meter.moment = len(marks)

    def begins(block: nn.Module, args: Any) -> None:
        calls[block] = calls.get(block, -1) + 1
        mark(block, calls[block], backward=False)

    def ends(block: nn.Module, args: Any, output: Any) -> None:
        call = calls[block]
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: mark(block, call, backward=True))

    handles: list[Any] = []
    for block in (block for row in rows for block in row.kept):
        handles += [block.register_forward_pre_hook(begins), block.register_forward_hook(ends)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _added(rows: Sequence[Row], marks: Sequence[Mark], peak: int) -> list[tuple[int, int]] | None:
    """(bytes at the peak, operations) that another block of each row adds; None where that is not certain.

    `marks` are in the order of time, and `peak` of them are before the peak.
    """
    passes = _passes(marks)
    if passes is None:
        return None
    result: list[tuple[int, int]] = []
    for row in rows:
        held = most = at_peak = operations = 0
        for places in passes:
            own = sorted(places[block] for block in row.kept if block in places)
            if not own:
                continue  # an expert that has no part in it
            if len(own) < KEPT:
                return None
            one, two, three = (marks[place] for place in own[1:])
            added = two.now - one.now
            if (three.now - two.now, three.flop - two.flop) != (added, two.flop - one.flop):
                return None
            if added and (own[1] < peak <= own[3] or not (one.grad or one.backward or places is passes[-1])):
                return None  # the peak is inside, or what is held is not held by a graph
            held, operations = held + added, operations + two.flop - one.flop
            most = max(most, held)
            at_peak += added if own[3] < peak else 0
        if at_peak != most:
            return None  # another moment may be the peak of a longer row
        result.append((at_peak, operations))
    return result


def _passes(marks: Sequence[Mark]) -> list[dict[nn.Module, int]] | None:
    """Block -> place of its mark, for each pass in the order of time; None where passes are not one after another."""
    begun = next((place for place, mark in enumerate(marks) if mark.backward), len(marks))
    found: dict[tuple[bool, int], dict[nn.Module, int]] = {}
    for place, mark in enumerate(marks):
        # What starts during a backward pass is a block that is recomputed.
        if mark.backward or place < begun:
            found.setdefault((mark.backward, mark.call), {}).setdefault(mark.block, place)
    passes = sorted(found.values(), key=lambda places: min(places.values()))
    apart = all(max(a.values()) < min(b.values()) for a, b in pairwise(passes))
    order = list(found.get((False, 0), ()))
    alike = all(list(places) == order[:: -1 if backward else 1] for (backward, _), places in found.items())
    return passes if apart and alike else None
