"""Round numbers for the axes of charts, and their labels."""

import math
from collections.abc import Sequence


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers that cover [low, high].

    >>> nice_ticks(0.0, 0.93)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> nice_ticks(3.0, 3.0)
    [2.0, 3.0, 4.0]
    >>> nice_ticks(4e-4, 4.000000000000001e-4)
    [0.0003, 0.0004, 0.0005]
    >>> nice_ticks(1.5, 1.5)
    [0.0, 1.0, 2.0, 3.0]
    >>> nice_ticks(0.0, 0.0)
    [0.0, 1.0]
    """
    if low == high == 0:
        # A count, share or time that never left 0: nothing below it.
        return [0.0, 1.0]
    if high - low <= 1e-9 * abs(low):
        # Round ticks on both sides of a constant curve of any size, whose last digits smoothing moves.
        pad = 10.0 ** math.floor(math.log10(abs(low)))
        return nice_ticks(low - pad, low + pad, 2)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Axis labels with as many decimals as distinguish `ticks`, or in powers of ten if those are too many.

    >>> tick_labels([0.0, 0.25, 0.5])
    ['0.00', '0.25', '0.50']
    >>> tick_labels([0.0, 1e-06, 2e-06])
    ['0', '1e-6', '2e-6']
    >>> tick_labels([1000000.0, 1000500.0, 1001000.0])
    ['1e6', '1.0005e6', '1.001e6']
    """
    step, largest = ticks[1] - ticks[0], max(abs(tick) for tick in ticks)
    if largest < 1e-3 or largest >= 1e6:
        labels = [_power_of_ten(tick, step) for tick in ticks]
    else:
        # Steps of 0.25 and 2.5 need one digit more than their power of ten; at most six fit the margin.
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        decimals += round(step * 10**decimals * 10) % 10 != 0
        labels = [f"{tick:.{min(decimals, 6)}f}" for tick in ticks]
    return ["\u2212" + label[1:] if label.startswith("-") else label for label in labels]


def _power_of_ten(tick: float, step: float) -> str:
    """A tick in scientific form, with the digits that ticks `step` apart differ in.

    >>> _power_of_ten(2500000.0, 500000.0), _power_of_ten(0.0, 1.0), _power_of_ten(-3e-12, 1e-12)
    ('2.5e6', '0', '-3e-12')
    """
    if tick == 0:
        return "0"
    # Two digits beyond the step's own power of ten: steps are 1, 2, 2.5 or 5 of it.
    digits = max(1, math.floor(math.log10(abs(tick))) - math.floor(math.log10(step)) + 2)
    mantissa, power = f"{tick:.{digits - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"


def compact(ticks: Sequence[float]) -> list[str]:
    """Labels of an axis: thousands and millions in short.

    >>> compact([0.0, 20000.0]), compact([0.0, 0.5])
    (['0', '20k'], ['0.0', '0.5'])
    """
    largest = max(abs(tick) for tick in ticks)
    for least, unit in ((2e6, "M"), (2e3, "k")):
        if largest >= least:
            size = 1e6 if unit == "M" else 1e3
            return ["0" if tick == 0 else f"{tick / size:g}{unit}" for tick in ticks]
    return tick_labels(ticks)
