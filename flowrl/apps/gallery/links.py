"""Permanent names of prompts on the page: a link keeps its aim when prompts are added, sorted or drawn anew."""

import hashlib
from collections import Counter
from collections.abc import Sequence

_DIGITS = 10


def prompt_anchors(prompts: Sequence[str]) -> list[str]:
    """An anchor for each prompt, made from its text alone: `p-` and the start of its SHA-256.

    A repeated text, as of prompts with different reference images, gets its number among the equal ones.

    >>> prompt_anchors(["a dog", "a cat", "a dog"])
    ['p-7dbdf68ac0', 'p-51e4674156', 'p-7dbdf68ac0.2']
    """
    seen: Counter[str] = Counter()
    anchors = []
    for text in prompts:
        # "surrogatepass": a lone surrogate in a prompt cannot be encoded otherwise.
        name = f"p-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:_DIGITS]}"
        seen[name] += 1
        anchors.append(f"{name}.{seen[name]}" if seen[name] > 1 else name)
    return anchors


def pair_anchor(prompt_anchor: str, seed: int) -> str:
    """Anchor of a prompt's pair of images at a seed."""
    return f"{prompt_anchor}-s{seed}"


def run_marks(names: Sequence[str]) -> list[str]:
    """Ends of the anchors of each run on one page: "" for one run, else a mark of the run's name."""
    return [""] if len(names) == 1 else [anchor.replace("p-", "-r", 1) for anchor in prompt_anchors(names)]
