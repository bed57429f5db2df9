"""Text of users in Markdown, and paths without the folders that they lie in."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_SPECIAL = re.compile(
    r"[^\w\s.,;:/()'+%=-]"  # has, or may have, a meaning in Markdown or HTML
    r"|(?<![^\W_])_|_(?![^\W_])"  # inside a word it has none
    r"|:(?=//)|(?<=www)\."  # a link
    r"|^[+=-]"  # a list or a line, at the start
)
_ROOTED = re.compile(r"(?<![\w:/.])(?:~|/)(?:[^\s/'\",;]+/)*([^\s/'\",;]+)")


def escaped(text: object) -> str:
    """A text as one line of Markdown that shows it and is nothing else: no link, heading, HTML or mention.

    >>> escaped("a *red* circle\\n# <script>")
    'a &#42;red&#42; circle &#35; &#60;script&#62;'
    >>> escaped("flow_grpo: _a_ https://x.org")
    'flow_grpo: &#95;a&#95; https&#58;//x.org'
    """
    return _SPECIAL.sub(lambda match: f"&#{ord(match.group())};", " ".join(str(text).split()))


class Named:
    """Shortens the absolute paths of a configuration to the names of their files.

    A path says who trained where; a name says which file it was.

    >>> Named({"data": {"prompts": "/home/ann/my prompts.txt"}})("data.prompts=/home/ann/my prompts.txt")
    'data.prompts=my prompts.txt'
    >>> Named({})("--out /srv/x/y.txt, https://a.org/b/c and shapes:train")
    '--out y.txt, https://a.org/b/c and shapes:train'
    """

    def __init__(self, config: dict[str, Any]) -> None:
        texts = (text for text in _leaves(config) if text.startswith(("/", "~")))
        self.paths = sorted(set(texts), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for path in self.paths:
            text = text.replace(path, Path(path).name)
        return _ROOTED.sub(r"\1", text)


def ends(paths: Sequence[str | Path]) -> list[str]:
    """The last parts of absolute paths, as few as tell different ones apart.

    >>> ends(["/home/ann/a/x.txt", "/data/b/x.txt", "/data/b/x.txt"])
    ['a/x.txt', 'b/x.txt', 'b/x.txt']
    """
    parts = [Path(path).parts for path in paths]
    count = next((n for n in range(1, 99) if len({p[-n:] for p in parts}) == len(set(parts))), 0)
    return ["/".join(p[-count:]).lstrip("/") for p in parts]


def _leaves(value: Any) -> Iterator[str]:
    """All texts of plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
