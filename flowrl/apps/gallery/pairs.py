"""Cards of base and tuned on one prompt and seed, for every section of the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.apps.gallery import album, links
from flowrl.apps.gallery.images import Pair, Place
from flowrl.apps.gallery.results import Metric, paired
from flowrl.apps.gallery.runs import Run

_FIXED_BYTES, _ROW_BYTES, _CARD_BYTES, _TEXTS = 200_000, 500, 1_500, 4
"""Bytes of style, script and tables; of a prompt's row; of a card; texts a card repeats."""


@dataclass(frozen=True)
class Page:
    """What is the same for all runs of a page."""

    place: Place
    marks: Sequence[str]
    """End of the permanent anchors of each run."""
    taken: int = 0
    """Bytes of what the page has above the runs."""

    @property
    def alone(self) -> bool:
        """Whether the page is of one run, with the images of every prompt; a comparison has those of its cards."""
        return len(self.marks) == 1


@dataclass(frozen=True)
class Cards:
    """Cards of one run; the sections ask for theirs in the order of the page, `every` last."""

    run: Run
    metrics: Sequence[Metric]
    anchors: Sequence[str]
    """Permanent anchor of each prompt."""
    mark: str
    album: album.Album
    permanent: Sequence[Sequence[Pair]]
    """Of each prompt with images: its first seed with images, then the others that are shown."""

    def link(self, pair: Pair) -> str:
        """Permanent anchor of a pair; "": the page has no place for it."""
        if not any(pair in pairs for pairs in self.permanent if pairs[0][0] == pair[0]):
            return ""
        return links.pair_anchor(self.anchors[pair[0]], self.run.both[0].seeds[pair[1]]) + self.mark

    def card(self, pair: Pair, section: str = "") -> dict[str, Any]:
        """Values of one card; its anchor begins with `section`, or is the permanent one without it."""
        (base, tuned), (p, k) = self.run.both, pair
        scores = []
        for metric in self.metrics:
            before, after = (float(table[p, k]) for table in paired(self.run, metric.name))
            scores.append({"metric": metric, "before": before, "after": after, "delta": after - before})
        link = self.link(pair)
        return {
            "anchor": f"{section}-{p:05d}-{k}" if section else link,
            "link": link,
            "prompt_id": p,
            "text": base.prompts[p],
            "seed": base.seeds[k],
            "given": [(name, self.album.show(file)) for name, file in base.given(p).items()],
            "before": self.album.show(base.image(p, k)),
            "after": self.album.show(tuned.image(p, k)),
            "scores": scores,
            "tone": self.metrics[0].tone(scores[0]["delta"]),
        }

    def every(self) -> list[dict[str, Any]]:
        """A card for each prompt with images, with those of its other seeds in "further"."""
        return [self.card(first) | {"further": [self.card(pair) for pair in rest]} for first, *rest in self.permanent]


def collect(
    run: Run, metrics: Sequence[Metric], drawn: Sequence[Pair], available: np.ndarray, room: int, index: int, page: Page
) -> Cards:
    """Embed the images of a run's pairs, as large as the page has room for. `drawn` are pairs of the other sections,
    which may repeat; `available` [P, K] bool: whether both images were saved; `room`: bytes for the run's texts and
    pairs; `index`: place of the run on the page.

    Raises ConfigError: a file is not an image.
    """
    prompts = run.base.prompts if run.base else ()
    saved = [[(int(p), int(k)) for k in np.flatnonzero(available[p])] for p in range(len(available))]
    wanted = [pairs for pairs in saved if pairs and metrics] if page.alone else []
    shown = [pair for pair in drawn if available[pair]]
    main = list(dict.fromkeys([*shown, *(pairs[0] for pairs in wanted)]))
    further = [pair for pair in dict.fromkeys(pair for pairs in wanted for pair in pairs) if pair not in set(main)]

    def files(pairs: Sequence[Pair]) -> list[album.Files]:
        found = [(*(e.image(p, k) for e in run.both), *run.both[0].given(p).values()) for p, k in pairs]
        return [tuple(file for file in pair if file is not None) for pair in found]

    def text_bytes(pairs: Sequence[Pair]) -> int:
        return sum(_CARD_BYTES + _TEXTS * len(prompts[p].encode("utf-8", "replace")) for p, _ in pairs)

    texts = text_bytes(drawn) + text_bytes([*main, *further]) + len(prompts) * _ROW_BYTES + _FIXED_BYTES
    filled = album.fill(files(main), files(further), max(room - texts, 0), f"run-{index}", page.place)
    anchors = links.prompt_anchors(prompts)
    kept = [[(p, k) for p, k in pairs if all(e.image(p, k) in filled for e in run.both)] for pairs in wanted]
    return Cards(run, metrics, anchors, page.marks[index], filled, [pairs for pairs in kept if pairs])
