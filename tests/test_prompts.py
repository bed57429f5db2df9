"""Prompt data: files, the order of a run, cached embeddings."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowrl.distributed import shard
from flowrl.prompts import Prompt, PromptSource, Texts, load_prompts, open_picture
from flowrl.strict import ConfigError
from tests.toys import ToyAdapter


@pytest.fixture
def put(tmp_path):
    def write(content: str | bytes, name: str = "prompts.txt") -> str:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return str(file)

    return write


def refusal(source: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_prompts(source, "data.prompts")
    return str(caught.value)


# ---- files


def test_a_text_file_holds_one_prompt_a_line(put):
    found = load_prompts(put("a red circle\n\n  two crosses  \r\n\u00fcber\n"), "data.prompts")
    assert [p.text for p in found] == ["a red circle", "two crosses", "\u00fcber"]
    assert all(p.metadata == {} for p in found)


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(put):
    assert load_prompts(put(b"\xef\xbb\xbfa cat\n"), "k") == [Prompt("a cat")]
    assert load_prompts(put(b'\xef\xbb\xbf{"prompt": "a cat"}\n', "p.jsonl"), "k") == [Prompt("a cat")]


def test_a_jsonl_file_keeps_everything_but_the_prompt_as_metadata(put):
    found = load_prompts(put('{"prompt": "a", "tag": [1]}\n\n{"prompt": "b"}\n', "p.jsonl"), "data.prompts")
    assert found == [Prompt("a", {"tag": [1]}), Prompt("b")]


def test_line_separators_inside_a_json_string_do_not_break_the_line(put):
    """U+2028 and U+0085 are legal there; str.splitlines would cut."""
    found = load_prompts(put('{"prompt": "one\u2028two\x85three"}\n', "p.jsonl"), "data.prompts")
    assert [p.text for p in found] == ["one\u2028two\x85three"]


def test_a_missing_file_is_refused_with_the_key():
    message = refusal("nowhere/prompts.txt")
    assert "data.prompts='nowhere/prompts.txt'" in message
    assert "no such file" in message


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_an_empty_file_is_refused(put, content, name):
    assert "holds no prompt" in refusal(put(content, name))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "b"', "not valid JSON"),
        ('{"text": "b"}', "string under 'prompt'"),
        ('{"prompt": 3}', "string under 'prompt'"),
        ('["b"]', "string under 'prompt'"),
        ("plain words", "not valid JSON"),
    ],
)
def test_a_broken_jsonl_line_is_refused_with_its_number_in_the_file(put, line, reason):
    message = refusal(put('{"prompt": "a"}\n\n' + line + '\n{"prompt": "c"}\n', "p.jsonl"))
    assert "line 3" in message
    assert reason in message


def test_a_file_in_another_encoding_is_refused(put):
    assert "not UTF-8" in refusal(put("caf\u00e9\n".encode("latin-1")))


def test_the_shapes_world_is_a_source_of_its_own():
    train, held_out = (load_prompts(f"shapes:{split}", "data.prompts") for split in ("train", "heldout"))
    assert len(held_out) >= 500  # DESIGN section 5
    assert not {p.text for p in train} & {p.text for p in held_out}
    message = refusal("shapes:tran")
    assert "data.prompts='shapes:tran'" in message


# ---- pictures


@pytest.fixture
def pictures(tmp_path):
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (6, 4), (200, 10, 10)).save(tmp_path / name)
    (tmp_path / "text.png").write_text("no picture")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])


def test_pictures_of_a_record_are_found_beside_its_file_and_told_to_the_rewards(put, pictures, tmp_path):
    records = ['"x", "image": "a.png", "tag": 1', '"x", "images": ["a.png", "b.jpg"]', '"y"']
    lines = "\n".join('{"prompt": ' + record + "}" for record in records)
    one, two, none = load_prompts(put(lines, "p.jsonl"), "data.prompts")
    first, second = (str((tmp_path / name).resolve()) for name in ("a.png", "b.jpg"))
    assert one == Prompt("x", {"tag": 1, "images": [first]}, (first,))
    assert two == Prompt("x", {"images": [first, second]}, (first, second))
    assert none == Prompt("y")
    assert open_picture(first).size == (6, 4)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ('"image": "gone.png"', "there is no picture 'gone.png'"),
        ('"images": ["a.png", "gone.png"]', "there is no picture 'gone.png'"),
        ('"image": "text.png"', "'text.png' cannot be read as a picture"),
        ('"image": "cut.png"', "'cut.png' cannot be read as a picture"),
        ('"image": "a.png", "images": ["a.png"]', "both 'image' and 'images'"),
        ('"image": 3', "needs a path under 'image'"),
        ('"images": "a.png"', "a list of paths under 'images'"),
        ('"images": []', "a list of paths under 'images'"),
    ],
)
def test_a_picture_that_cannot_be_used_is_refused_with_its_line(put, pictures, entry, reason):
    message = refusal(put('{"prompt": "x", "image": "a.png"}\n{"prompt": "y", ' + entry + "}\n", "p.jsonl"))
    assert "line 2" in message
    assert reason in message


# ---- the order of a run


def source(count: int, per_iteration: int, seed: int = 0) -> PromptSource:
    return PromptSource([Prompt(str(k)) for k in range(count)], per_iteration, seed)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 30), per_iteration=st.integers(1, 40), seed=st.integers(0, 100))
def test_every_prompt_comes_exactly_once_per_epoch(count, per_iteration, seed):
    """grpo_family 1.5.6, whatever the iteration's size is to the data's."""
    order = source(count, per_iteration, seed)
    drawn = [k for iteration in range(1, 13) for k in order.draw(iteration)]
    assert len(drawn) == 12 * per_iteration
    for start in range(0, len(drawn) - count + 1, count):
        assert sorted(drawn[start : start + count]) == list(range(count))
    counts = Counter(drawn)
    assert max(counts.values()) - min(counts.get(k, 0) for k in range(count)) <= 1


@settings(max_examples=60, deadline=None)
@given(prompts=st.integers(1, 9), group=st.integers(2, 6), data=st.data())
def test_every_slot_has_exactly_its_group_over_the_union_of_any_number_of_ranks(prompts, group, data):
    """grpo_family 1.5.6: k times each, the same whatever the number of ranks, nobody without work."""
    size = data.draw(st.integers(1, prompts * group))
    parts = [shard(prompts, group, rank, size) for rank in range(size)]
    together = [pair for part in parts for pair in part]
    assert together == [(slot, sample) for slot in range(prompts) for sample in range(group)]
    assert all(parts)
    if size <= prompts:
        assert all(set(Counter(slot for slot, _ in part).values()) == {group} for part in parts)


def test_a_draw_depends_on_seed_and_iteration_alone_and_not_on_history():
    """So a resume needs no state."""
    walked = source(7, 4)
    history = {iteration: walked.draw(iteration) for iteration in range(1, 9)}
    for iteration in (8, 3, 1, 5):
        assert source(7, 4).draw(iteration) == history[iteration]
    assert walked.draw(2) == history[2]


def test_epochs_and_seeds_have_orders_of_their_own():
    order = source(50, 50)
    assert order.draw(1) != order.draw(2)
    assert order.draw(1) != source(50, 50, seed=1).draw(1)
    assert order.draw(1) != list(range(50))


def test_a_set_smaller_than_an_iteration_is_drawn_several_times():
    drawn = source(3, 8).draw(1)
    assert sorted(Counter(drawn).values()) == [2, 3, 3]


# ---- embeddings


def test_cached_texts_are_encoded_once_and_the_encoders_are_freed():
    adapter = ToyAdapter()
    fresh = ToyAdapter().encode(["b", "a", "c"])["prompt"]
    texts = Texts(adapter, ["a", "b", "a", "c"], cache=True, batch_size=2)
    assert adapter.freed
    assert adapter.encoded == [["a", "b"], ["c"]]
    assert torch.equal(texts.lookup(["b", "a", "c"])["prompt"], fresh)
    assert torch.equal(texts.lookup(["a", "a"])["prompt"], fresh[[1, 1]])
    assert adapter.encoded == [["a", "b"], ["c"]]


def test_texts_without_a_cache_are_encoded_when_asked_for():
    adapter = ToyAdapter()
    texts = Texts(adapter, ["a", "b"], cache=False, batch_size=2)
    assert adapter.encoded == []
    found = texts.lookup(["c", "a", "b"])
    assert adapter.encoded == [["c", "a"], ["b"]]
    assert not adapter.freed
    assert torch.equal(found["prompt"], ToyAdapter().encode(["c", "a", "b"])["prompt"])
