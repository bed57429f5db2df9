"""One epoch over a preference set in a process of its own, so that its memory can be told from the test's.

`python -m tests.data.preference_epoch SOURCE METHOD` opens every image that METHOD (`pairs` or `labelled`) draws in an
epoch and prints a line of JSON: records drawn, how many different ones, seconds, and the peak of resident memory.
"""

import json
import sys
import time
from collections.abc import Iterator

from flowrl.data.labels import LabelledSource, labelled
from flowrl.data.preference_records import StoredImage
from flowrl.data.preferences import PreferenceSource, load_preferences
from flowrl.planning.out_of_memory import peak_resident

PER_ITERATION = 100


def pictures(source: str, method: str) -> Iterator[tuple[int, list[StoredImage]]]:
    """(number, pictures) of every record of an epoch."""
    pairs = load_preferences(source, "SOURCE")
    if method == "pairs":
        order = PreferenceSource(pairs, PER_ITERATION, seed=0)
        for iteration in range(1, len(pairs) // PER_ITERATION + 1):
            for index in order.draw(iteration):
                pair = pairs.read(index)
                assert pair.rejected is not None
                yield index, [pair.chosen, pair.rejected]
        return
    single = labelled(pairs)
    draws = LabelledSource(single, PER_ITERATION, seed=0, positive_share=0.5)
    for iteration in range(1, len(single) // PER_ITERATION + 1):
        for number in draws.draw(iteration):
            yield number, [single.read(number).image]


def main() -> None:
    started, drawn, sizes = time.perf_counter(), [], set()
    for number, opened in pictures(*sys.argv[1:]):
        drawn.append(number)
        sizes |= {picture.open().size for picture in opened}
    report = {
        "drawn": len(drawn),
        "different": len(set(drawn)),
        "sizes": sorted(sizes),
        "seconds": round(time.perf_counter() - started, 1),
        "peak_mib": peak_resident() / 2**20,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
