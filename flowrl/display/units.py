"""Times, sizes in bytes and amounts of work as text."""


def duration(seconds: float) -> str:
    """Seconds in words, of two units at most.

    >>> duration(3.4), duration(125), duration(7260)
    ('3 s', '2 min 5 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


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
