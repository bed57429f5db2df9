"""Which record of a list a file has: the right one is stated, and every list that says nothing clear is refused."""

import random
from typing import Any

import pytest

from flowrl.apps.matching import matched
from flowrl.core.errors import ConfigError
from flowrl.data.natural import natural

TWELVE = sorted((f"{number}.png" for number in range(12)), key=natural)
ORDER = random.Random(0).sample(range(12), 12)


def shuffled(key: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Twelve records in a random order; `value(n)` of the record of n.png stands under a key."""
    return [(f"text {'abcdefghijkl'[number]}", {"want": number + 100, key: value(number)}) for number in ORDER]


KEYS = [
    *(
        "image",
        "video",
        "file",
        "file_name",
        "image_path",
        "filename",
        "path",
        "img",
        "image_name",
        "name",
        "id",
        "key",
    ),
    *("file_path", "video_path", "url", "of", "my picture"),
]
VALUES = {
    "name": lambda n: f"{n}.png",
    "path": lambda n: f"/data/made/{n}.png",
    "windows": lambda n: f"C:\\made\\{n}.png",
    "address": lambda n: f"https://host/made/{n}.png?width=64",
    "converted": lambda n: f"made/{n}.JPG",
    "nested": lambda n: {"bytes": None, "path": f"{n}.png"},
    "listed": lambda n: [f"{n}.png"],
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_file_has_the_record_that_names_it_under_whatever_key(key, value):
    records = shuffled(key, value)
    rows, how = matched(TWELVE, records, "--prompts p")
    assert [records[row][1]["want"] for row in rows] == list(range(100, 112))
    assert f"by '{key}" in how


@pytest.mark.parametrize("key", ["id", "image_id", "imageId", "index", "key", "name", "image", "seed"])
@pytest.mark.parametrize("value", [int, str, float, lambda n: f"{n:04d}"], ids=["int", "text", "float", "padded"])
@pytest.mark.parametrize(
    "names", [TWELVE, [f"{n:04d}.png" for n in range(12)], [f"img_{n:02d}.png" for n in range(12)]]
)
def test_numbers_under_a_key_of_numbers_are_names(key, value, names):
    rows, how = matched(names, shuffled(key, value), "--prompts p")
    assert [ORDER[row] for row in rows] == list(range(12))
    assert f"by '{key}'" in how


@pytest.mark.parametrize("names", ["{}.png", "{}_000003.png", "{}-0.mp4"])
def test_prompts_that_are_names_match_their_files(names):
    texts = ["a blue cat, asleep", 'says "STOP"', "a/b"]
    files = [names.format(text) for text in ("a blue cat, asleep", "a_b", "says _STOP_")]
    rows, how = matched(files, [(text, {}) for text in texts], "--prompts p")
    assert rows == [0, 2, 1]
    assert "by the prompts in them or their names" in how


def test_several_samples_of_a_record_are_its_files():
    assert matched(["cat-0.png", "cat-1.png", "dog-0.png"], [("dog", {}), ("cat", {})], "p")[0] == [1, 1, 0]
    numbered: list[tuple[str, dict[str, Any]]] = [(f"p{n}", {"index": str(n)}) for n in (10, 9, 11)]
    assert matched(["9_0.png", "9_1.png", "10_0.png", "11_0.png"], numbered, "p")[0] == [1, 1, 0, 2]
    records = [("x", {"files": ["b.png", "c.png"]}), ("y", {"files": ["a.png"]})]
    assert matched(["a.png", "b.png", "c.png"], records, "p")[0] == [1, 0, 0]


def test_a_list_that_says_nothing_goes_by_place_where_the_names_have_one_order():
    lines: list[tuple[str, dict[str, Any]]] = [(f"line {letter}", {"count": 2}) for letter in "abcdefghijkl"]
    rows, how = matched([f"{number:02d}.png" for number in range(12)], lines, "p")
    assert rows == list(range(12))
    assert how == "12 files matched with 12 records by place, from 00.png to 11.png"
    assert matched(TWELVE, lines[:1] * 12, "p")[0] == list(range(12)), "equal records have no order"


@pytest.mark.parametrize(
    ("names", "records", "words"),
    [
        (TWELVE, [(f"line {n * 7}!", {}) for n in range(12)], "two orders .*'2.png' or '10.png' is number 3"),
        (["B.png", "a.png"], [("x", {}), ("y", {})], "two orders"),
        (["a.png", "b.png"], [("x", {"image_path": "b.png"}), ("y", {})], "no record has the file 'a.png' under"),
        (["a.png", "b.png"], [("x", {"image": "c.png"}), ("y", {"image": "d.png"})], "no record has .* is 'c.png'"),
        (["a.png", "b.png"], [("x", {"image_path": "c.png"}), ("y", {})], "no record has .*'image_path' is 'c.png'"),
        (["a.png", "b.png"], [("x", {"of": "b"}), ("y", {"of": "b"})], "two records name the same file, 'b.png'"),
        (["0.png", "1.png"], [("x", {"id": 1}), ("y", {"id": 2})], "no record has the file '0.png' under 'id'"),
        (["0.png", "1.png"], [("x", {"n": 1}), ("y", {"n": 0})], "'n' numbers the files in another order"),
        (["a.png", "b.png"], [("x", {"p": "a.png", "q": "b"}), ("y", {"p": "b.png", "q": "a"})], "'p' and .* by 'q'"),
        (["cat.png", "1.png"], [("a dog", {}), ("a cat", {"was": "x"}), ("b", {})], "3 prompts for 2 files"),
        (["cat.png", "d.png"], [("a dog", {}), ("cat", {})], "no record has the file 'd.png' under 'prompt'"),
    ],
)
def test_what_could_mean_two_things_is_refused(names, records, words):
    with pytest.raises(ConfigError, match=words) as refused:
        matched(names, records, "--prompts p")
    assert "under 'image'" in str(refused.value)


def test_a_plain_name_goes_before_a_number_and_names_of_the_other_kind_of_umlaut_are_equal():
    records = [("x", {"id": 0, "image": "1.png"}), ("y", {"id": 1, "image": "0.png"})]
    assert matched(["0.png", "1.png"], records, "p")[0] == [1, 0]
    assert matched(["u\u0308.png", "z.png"], [("x", {"f": "z.png"}), ("y", {"f": "\u00fc.png"})], "p")[0] == [1, 0]


def test_files_that_hold_their_prompts_have_the_records_of_those():
    """As those of `flowrl sample`, two a prompt, and a list in another order."""
    names = [f"0000{prompt}-{k}-0123abcd.png" for prompt in range(2) for k in range(2)]
    records: list[tuple[str, dict[str, Any]]] = [("a dog", {"n": 1}), ("a cat", {"n": 2})]
    rows, how = matched(names, records, "p", ["a cat", "a cat", "a dog", "a dog"])
    assert rows == [1, 1, 0, 0]
    assert "by the prompts in them" in how
    same: list[tuple[str, dict[str, Any]]] = [("a cat", {"n": 1}), ("a cat", {"n": 2}), ("a dog", {"n": 3})]
    assert matched(names[:3], same, "p", ["a cat", "a cat", "a dog"])[0] == [0, 1, 2], "a list with a prompt twice"
    with pytest.raises(ConfigError, match="two records name the same file"):
        matched(names[:3], same, "p", ["a cat", "a dog", "a dog"])
    assert matched(names[:2], [("ein Hund", {}), ("eine Katze", {})], "p", ["a dog", "a cat"])[0] == [0, 1]


def test_files_called_by_the_beginning_of_their_prompts_have_them():
    """As other programs name them: cut, with a number before it, and in another order than the list's."""
    texts = ["3 red cats asleep on a sofa, oil", "a dog that runs along a beach", "red cats asleep on a mat in the sun"]
    records: list[tuple[str, dict[str, Any]]] = [(text, {}) for text in reversed(texts)]
    for named in ("{cut}", "0001{place}-77{place}-{cut}", "{cut}-0"):
        names = [
            named.format(place=place, cut=text[:18].replace(" ", "_")) + ".png" for place, text in enumerate(texts)
        ]
        assert matched(names, records, "p")[0] == [2, 1, 0], named
    assert matched(["2 red cats-0.png", "red cats-0.png"], [("red cats", {}), ("2 red cats", {})], "p")[0] == [1, 0]
    many: list[tuple[str, dict[str, Any]]] = [(f"a photo of {thing}", {}) for thing in ("cats", "a dog")]
    assert matched(["a photo of_01.png", "a photo of_02.png"], many, "p")[0] == [0, 1], "the name of all says nothing"
    with pytest.raises(ConfigError, match=r"no record has the file 'zebra.png' under 'prompt'"):
        matched([*(text[:12] + ".png" for text in texts[1:]), "zebra.png"], records, "p")


@pytest.mark.parametrize(
    "record",
    [
        lambda n: {"seed": 3},
        lambda n: {"seed": 5 + n},
        lambda n: {"group_id": n // 3, "class_idx": n % 2},
        lambda n: {"image_path": "", "path": " "},
    ],
    ids=["one seed", "seeds that count", "groups", "empty cells"],
)
def test_numbers_that_hit_a_file_by_accident_and_empty_cells_are_no_names(record):
    names, records = [f"{n:05d}.png" for n in range(12)], [(f"text {n}!", record(n)) for n in range(12)]
    assert matched(names, records, "p")[0] == list(range(12))
    if "seed" in record(0):
        scattered = ["1.png", "3.png", "5.png", "8.png", "9.png"]  # files called by seeds
        with pytest.raises(ConfigError, match="under 'seed'"):
            matched(scattered, [(f"text {n}!", {"seed": n}) for n in (1, 3, 5, 7, 9)], "p")


def test_counts_are_no_names():
    records = [("x", {"count": 1, "images": ["/in/1.png"]}), ("y", {"count": 1, "images": ["/in/1.png"]})]
    assert matched(["0.png", "1.png"], records, "p")[0] == [0, 1]
