"""The prompt lists of the SD3.5 recipes: `python -m scripts.pretraining sd3-prompts`.

Three kinds, each for training and held out, in `assets/prompts/` (small lists to start from) or, with `--count` and
`--out`, as many as there are:

    sd3-general-*.txt     subject, doing, place, style: for preference rewards and the JPEG reward
    sd3-ocr-*.jsonl       'A sign that says "text"' with the text as metadata: for the OCR reward
    sd3-geneval-*.jsonl   GenEval's tasks with their records: for the GenEval reward

The words are this project's; the GenEval records have the form of djghosh13/geneval:prompts/create_prompts.py, and
its tasks the shares of arXiv 2505.05470 (position 7, counting 5, colour binding 3, colour 1, two objects 1). No
prompt is in both lists; of OCR no text is, and of GenEval no combination, whatever its order. Long lists run out of
counting prompts first.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "prompts"
WORDS = yaml.safe_load((Path(__file__).resolve().parent / "sd3_words.yaml").read_text(encoding="ascii"))
SEED = 0

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
TASKS = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}


def general(rng: random.Random, number: int) -> dict:
    parts = [rng.choice(WORDS[kind]) for kind in ("subjects", "doings", "places", "styles")]
    return {"prompt": "{} {} {}, {}".format(*parts), "key": tuple(parts)}


def ocr(rng: random.Random, number: int) -> dict:
    text = f"{rng.choice(WORDS['first_words'])} {rng.choice(WORDS['last_words'])}"
    return {"prompt": rng.choice(WORDS["surfaces"]).format(f'"{text}"'), "text": text, "key": text}


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("s", "ch", "sh", "x")) else f"{noun}s"


def geneval(rng: random.Random, number: int) -> dict:
    tag = [tag for tag, share in TASKS.items() for _ in range(share)][number * 7 % sum(TASKS.values())]
    first, second = rng.sample(WORDS["objects"], 2)
    one, two = rng.sample(COLORS, 2)
    if tag == "counting":
        count = rng.choice(list(NUMBERS))
        text = f"{NUMBERS[count]} {_plural(first)}"
        record = {"include": [{"class": first, "count": count}], "exclude": [{"class": first, "count": count + 1}]}
    elif tag == "colors":
        text, record = f"{_a(one)} {first}", {"include": [{"class": first, "count": 1, "color": one}]}
    elif tag == "color_attr":
        text = f"{_a(one)} {first} and {_a(two)} {second}"
        pairs = ((first, one), (second, two))
        record = {"include": [{"class": noun, "count": 1, "color": color} for noun, color in pairs]}
    elif tag == "position":
        relation = rng.choice(RELATIONS)
        text = f"{_a(first)} {relation} {_a(second)}"
        placed = {"class": first, "count": 1, "position": [relation, 0]}
        record = {"include": [{"class": second, "count": 1}, placed]}
    else:
        text = f"{_a(first)} and {_a(second)}"
        record = {"include": [{"class": noun, "count": 1} for noun in (first, second)]}
    key = (tag, tuple(sorted(text.split())))  # "a cat and a dog" is "a dog and a cat"
    return {"prompt": f"a photo of {text}", "tag": tag, **record, "key": key}


KINDS: dict[str, tuple[Callable[[random.Random, int], dict], str]] = {
    "general": (general, "txt"),
    "ocr": (ocr, "jsonl"),
    "geneval": (geneval, "jsonl"),
}


def draw(kind: str, train: int, held_out: int, seed: int = SEED) -> dict[str, list[dict]]:
    """Distinct records for both lists; the held-out ones first, so that a longer training list leaves them alone."""
    make, rng = KINDS[kind][0], random.Random(f"{seed}/{kind}")
    lists: dict[str, list[dict]] = {"heldout": [], "train": []}
    held_keys, prompts = set(), set()
    for part, wanted in (("heldout", held_out), ("train", train)):
        number = misses = 0
        while len(lists[part]) < wanted:
            record = make(rng, number)
            key = record.pop("key")
            if record["prompt"] in prompts or (part == "train" and key in held_keys):
                misses += 1
                number += misses % 200 == 0  # this task may have no further prompts
                if misses > 10_000:
                    raise SystemExit(f"{kind}: these words make only {len(lists[part])} {part} prompts, not {wanted}")
                continue
            number, misses = number + 1, 0
            prompts.add(record["prompt"])
            lists[part].append(record)
            if part == "heldout":
                held_keys.add(key)
    return lists


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=384, help="training prompts of each kind")
    parser.add_argument("--held-out", type=int, default=96, help="held-out prompts of each kind")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))


def write(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in options.kinds:
        for part, records in draw(kind, options.count, options.held_out).items():
            suffix = KINDS[kind][1]
            lines = [r["prompt"] if suffix == "txt" else json.dumps(r) for r in records]
            file = options.out / f"sd3-{kind}-{part}.{suffix}"
            file.write_text("\n".join(lines) + "\n", encoding="ascii", newline="\n")
            print(f"{file}: {len(lines)} prompts")
