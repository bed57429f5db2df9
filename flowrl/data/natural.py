"""The order of names in which 10 comes after 9, for folders that are read in the order of their names."""

import re
from collections.abc import Sequence


def natural(name: str) -> list[tuple[int, str]]:
    """Key of a name for sorting: its digits count as numbers.

    >>> sorted(["10.png", "9.png", "b-2", "b-10"], key=natural)
    ['9.png', '10.png', 'b-2', 'b-10']
    """
    parts = re.split(r"(\d+)", name)  # text and digits by turns
    return [*((int(part), "") if part.isdecimal() else (0, part) for part in parts), (0, name)]


def one_order(names: Sequence[str]) -> bool:
    """Whether names have one order: as text, by their numbers, and in small letters.

    >>> one_order(["09.png", "10.png"]), one_order(["9.png", "10.png"]), one_order(["B.png", "a.png"])
    (True, False, False)
    """
    return sorted(names) == sorted(names, key=natural) == sorted(names, key=str.casefold)
