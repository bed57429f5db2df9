"""Sizes in bytes and amounts of work as text."""

from __future__ import annotations


def size(count: float | None) -> str:
    """A number of bytes as text.

    >>> size(3 * 2**29), size(1_683_456), size(10_752)
    ('1.50 GiB', '1.6 MiB', '10.5 KiB')
    """
    if count is None:
        return "not known"
    if count >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def operations(count: float | None) -> str:
    """A number of floating-point operations as text.

    >>> operations(5.18e16), operations(9.1e10)
    ('51.8 PFLOP', '0.091 TFLOP')
    """
    if count is None:
        return "not known"
    return f"{count / 1e15:.3g} PFLOP" if count >= 1e15 else f"{count / 1e12:.3g} TFLOP"
