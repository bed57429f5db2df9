"""Preference sets: what a record says, what is left out and told of, the order of a run, single labelled pictures."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowrl.core.errors import ConfigError
from flowrl.data.labels import LabelledSource, labelled
from flowrl.data.options import PreferenceOptions
from flowrl.data.preference_records import StoredImage, Unreadable
from flowrl.data.preferences import PreferenceSet, PreferenceSource, load_preferences
from flowrl.data.prompts import Prompt
from flowrl.data.records import WINDOW_BYTES
from tests.data.row_groups import Stored, png, shards, voted

ALL = PreferenceOptions(max_broken=1.0)


@pytest.fixture
def put(tmp_path: Path) -> Any:
    """Writes pictures a.png .. d.png, each of its own shade, and the records as pairs.jsonl; gives the folder."""
    for k, name in enumerate("abcd"):
        Image.new("RGB", (6, 4), (50 * k, 10, 10)).save(tmp_path / f"{name}.png")

    def write(*records: dict | str) -> str:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return str(tmp_path)

    return write


def pair(chosen: Any = "a.png", rejected: Any = "b.png", **more: Any) -> dict:
    return {"prompt": "x", "chosen": chosen, "rejected": rejected, **more}


def refusal(source: str, options: PreferenceOptions = ALL, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_preferences(source, "data.pairs", options, **more)
    return str(caught.value)


def table(stored: Stored) -> PreferenceSet:
    return PreferenceSet(stored.records, "t", ALL, paired=True)


def red(image: StoredImage | None) -> int:
    """The shade of a picture; of none, -1."""
    return int(np.asarray(image.open())[0, 0, 0]) if image else -1


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes in a window of row groups, made few."""
    for module in ("records", "preferences"):
        monkeypatch.setattr(f"flowrl.data.{module}.WINDOW_BYTES", 3000)
    return 3000


# ---- a record


def test_what_other_programs_sample_a_prompt_by_is_named(put, caplog):
    with caplog.at_level("WARNING", logger="flowrl"):
        load_preferences(put(pair(negative_prompt="y", seed=3, tag=1)), "data.pairs.path")
    (told,) = caplog.messages
    assert "its records have negative_prompt, seed, and no sampler reads them" in told


def test_a_record_gives_prompt_pictures_margin_and_metadata(put, tmp_path):
    folder = put(pair("a.png", "b.png", margin=0.5, tag=[1]), "", pair(str(tmp_path / "c.png"), "d.png"))
    found = load_preferences(folder, "data.pairs")
    first, second = found.read(0), found.read(1)
    assert (first.prompt, first.margin, first.key) == (Prompt("x", {"tag": [1]}), 0.5, "line 1")
    assert (second.prompt, second.margin, second.key) == (Prompt("x"), None, "line 3")
    assert red(first.chosen) == 0
    assert red(first.rejected) == 50
    assert red(second.chosen) == 100
    assert load_preferences(str(tmp_path / "pairs.jsonl"), "data.pairs").read(0).chosen.key == first.chosen.key
    assert len(found) == 2


@pytest.mark.parametrize(("label", "won"), [(1, "a.png"), (0, "b.png"), (1.0, "a.png"), (0.0, "b.png")])
def test_a_label_says_which_of_two_pictures_is_preferred(put, label, won):
    folder = put({"caption": "x", "jpg_0": "a.png", "jpg_1": "b.png", "label_0": label, "label_1": 1 - label})
    found = load_preferences(folder, "data.pairs").read(0)
    assert (red(found.chosen), red(found.rejected)) == ((0, 50) if won == "a.png" else (50, 0))


def test_columns_may_have_other_names(put):
    folder = put({"text": "x", "good": "a.png", "bad": "b.png"}, {"text": "y", "good": "c.png", "bad": "d.png"})
    options = PreferenceOptions(prompt="text", chosen="good", rejected="bad")
    found = load_preferences(folder, "data.pairs", options)
    assert [found.read(k).prompt for k in (0, 1)] == [Prompt("x"), Prompt("y")]
    assert list(found.captions()) == [("x", ()), ("y", ())]
    assert "needs a column 'prompt' or 'caption'; there are: text, good, bad" in refusal(folder)
    message = refusal(folder, PreferenceOptions(prompt="text", chosen="god"))
    assert "needs 'god', or 'jpg_0', 'jpg_1', 'label_0'; has no 'jpg_0'" in message


def test_pictures_are_turned_upright(put, tmp_path):
    picture = Image.new("RGB", (6, 4))
    exif = picture.getexif()
    exif[0x0112] = 6  # shown turned by a quarter
    picture.save(tmp_path / "turned.jpg", exif=exif)
    assert load_preferences(put(pair("turned.jpg")), "data.pairs").read(0).chosen.open().size == (4, 6)


# ---- what is left out

BROKEN = {
    "no caption": [pair() | {"prompt": " "}, pair() | {"prompt": None}, {"chosen": "a.png", "rejected": "b.png"}],
    "missing image": [pair("gone.png"), pair("a.png", "gone.png"), pair("", "b.png"), pair(3, "b.png"),
        pair("~nobody/a.png"), pair("x" * 9000), pair("nul\0.png"), pair("\ud800.png")],
    "margin not a number from 0": [pair(margin=-1), pair(margin="much"), pair(margin=True), pair(margin=10**400),
        '{"prompt": "x", "chosen": "a.png", "rejected": "b.png", "margin": NaN}'],
    "no rejected image": [pair("a.png", None), {"prompt": "x", "chosen": "a.png"}],
    "not a record": ['{"prompt": "x"', '{"prompt": ' + "[" * 100_000, "[1]", "words", '"x"'],
    "same image twice": [pair("a.png", "a.png"), pair("a.png", "./a.png")],
    "tie": [pair(margin=0), pair(margin=0.0)],
}  # fmt: skip


@pytest.mark.parametrize("reason", BROKEN)
def test_what_cannot_be_used_is_skipped_counted_and_shown_by_its_line(put, reason):
    bad = BROKEN[reason]
    found = load_preferences(put(pair(), *bad, pair("c.png", "d.png")), "data.pairs", ALL)
    assert len(found) == 2
    assert found.report.counts == {reason: len(bad)}
    assert [found.read(k).key for k in (0, 1)] == ["line 1", f"line {len(bad) + 2}"]
    text = str(found.report)
    assert f"2 of {len(bad) + 2} records are used" in text
    assert f"skipped {len(bad)}, {reason}: line 2" in text
    assert (f"and {len(bad) - 3} more" in text) == (len(bad) > 3)
    facts = found.report.facts()
    assert facts["skipped"] == {reason: len(bad)}
    assert len(facts["examples"][reason]) == min(len(bad), 3)
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label_0": 0.5, "label_1": 0.5}, "tie"),
        ({"label_0": 0.7}, "label not 0, 0.5 or 1"),
        ({"label_0": None}, "label not 0, 0.5 or 1"),
        ({"label_0": True}, "label not 0, 0.5 or 1"),
        ({"label_0": 1, "label_1": 1}, "label not 0, 0.5 or 1"),
        *(({"has_label": no}, "no label") for no in (False, 0, 0.0, None, "", "0", "False", "false")),
        ({"image_0_uid": "u", "image_1_uid": "u"}, "same image twice"),
        ({"jpg_1": None}, "missing image"),
    ],
)
def test_a_label_that_says_nothing_is_left_out_by_its_reason(put, change, reason):
    good = {"caption": "x", "jpg_0": "a.png", "jpg_1": "b.png", "label_0": 1}
    found = load_preferences(put(good, good | change), "data.pairs", ALL)
    assert found.report.counts == {reason: 1}
    assert len(found) == 1


def test_pairs_that_are_judged_again_are_used_and_told_of(put):
    records = [pair(), pair("b.png", "a.png"), pair(), pair() | {"prompt": "y"}, pair("c.png", "d.png"), pair()]
    found = load_preferences(put(*records), "data.pairs")
    assert len(found) == 6
    assert found.report.votes == {"repeated": (2, ["line 3", "line 6"]), "opposed": (1, ["line 2"])}
    assert "used, 1 opposed (a caption and its pair once more): line 2" in str(found.report)
    assert found.report.facts()["votes"]["repeated"] == {"count": 2, "examples": ["line 3", "line 6"]}
    assert load_preferences(put(*records[3:5]), "data.pairs").report.votes == {}
    named = {"caption": "x", "jpg_0": "a.png", "jpg_1": "b.png", "image_0_uid": "u", "image_1_uid": "v"}
    voted_twice = [named | {"label_0": 1}, named | {"label_0": 0, "jpg_0": "c.png"}]
    assert load_preferences(put(*voted_twice), "data.pairs").report.votes == {"opposed": (1, ["line 2"])}


def test_ties_may_be_most_of_a_set_but_broken_records_only_a_few(put):
    good, tie, gone = pair(), pair(margin=0), pair("gone.png")
    assert len(load_preferences(put(good, *[tie] * 20), "data.pairs")) == 1
    assert len(load_preferences(put(*[good] * 9, gone), "data.pairs")) == 9
    message = refusal(put(*[good] * 8, gone, gone), PreferenceOptions())
    assert "2 of 10 records are broken, more than max_broken=0.1 allows" in message
    assert "skipped 2, missing image: line 9 (chosen='gone.png'); line 10" in message


def test_where_margins_count_a_tie_is_a_pair_and_a_record_without_a_margin_none(put):
    records = [pair(margin=0.5), pair("c.png", margin=0), pair("d.png")]
    found = load_preferences(put(*records), "data.pairs", ALL, graded=True)
    assert [found.read(k).margin for k in range(len(found))] == [0.5, 0.0]
    assert found.report.counts == {"no margin": 1}
    assert found.report.broken == 1
    assert "no margin: line 1 (algorithm.margin needs one)" in refusal(put(pair()), graded=True)


def test_where_margins_count_labels_are_1_apart_or_a_tie(put):
    votes = [{"caption": "x", "jpg_0": "a.png", "jpg_1": "b.png", "label_0": label} for label in (1, 0, 0.5)]
    found = load_preferences(put(*votes), "data.pairs", graded=True)
    assert [(found.read(k).margin, red(found.read(k).chosen)) for k in range(3)] == [(1.0, 0), (1.0, 50), (0.0, 0)]
    plain = load_preferences(put(*votes), "data.pairs")
    assert [plain.read(k).margin for k in range(len(plain))] == [None, None]


def test_a_set_with_nothing_to_use_is_refused_with_the_counts(put, tmp_path):
    message = refusal(put(pair(margin=0), pair("gone.png")))
    assert "no record can be used" in message
    assert "skipped 1, tie: line 1" in message
    assert "skipped 1, missing image: line 2" in message
    assert "needs a column" in refusal(put(""))
    assert "no such file or folder" in refusal(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "must hold pairs.jsonl" in refusal(str(tmp_path / "empty"))
    (tmp_path / "two").mkdir()
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / "two" / name).write_text("{}")
    assert ".jsonl: one.jsonl, two.jsonl" in refusal(str(tmp_path / "two"))
    assert "is not a .parquet file" in refusal(str(tmp_path / "*.png"))


def test_winners_only_are_of_use_where_no_pair_is_needed(put):
    folder = put(pair(), pair("c.png", None), {"prompt": "y", "chosen": "d.png"})
    found = load_preferences(folder, "data.pairs", ALL, paired=False)
    assert [found.read(k).rejected is None for k in range(3)] == [False, True, True]
    assert "3 of 3 records are used, 2 of them with a chosen image only" in str(found.report)
    assert len(load_preferences(folder, "data.pairs", ALL)) == 1
    alone = put({"prompt": "y", "chosen": "d.png"})
    assert "skipped 1, no rejected image" in refusal(alone)


def test_a_picture_that_turns_out_unreadable_says_where_it_lies(put, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    found = load_preferences(put(pair("text.png", "cut.png"), pair()), "data.pairs")
    first = found.read(0)
    for picture, name in ((first.chosen, "text.png"), (first.rejected, "cut.png")):
        assert picture is not None
        with pytest.raises(Unreadable) as caught:
            picture.open()
        assert "line 1" in caught.value.where
        assert name in caught.value.where
        assert "cannot be read" in str(caught.value)
    for k in "abcd":
        (tmp_path / f"{k}.png").unlink()
    with pytest.raises(Unreadable, match=r"line 2.*missing image"):
        found.read(1)  # it was there when the set was loaded
    (tmp_path / "pairs.jsonl").unlink()
    with pytest.raises(Unreadable, match=r"line 2.*No such file"):
        found.read(1)


@pytest.mark.parametrize("content", [b"", None, b"\x00" * 40, b"BM" + b"\xff" * 60, png(3)[:48]])
def test_whatever_bytes_a_row_holds_end_in_one_error(content):
    with pytest.raises(Unreadable):
        StoredImage(content, "row 1").open()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_the_size_of_a_jpeg_is_known_where_it_can_be_opened_and_nowhere_else(mode, progressive, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert(mode)
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "whole.jpg", progressive=progressive, exif=exif)
    whole = (tmp_path / "whole.jpg").read_bytes()
    assert StoredImage(whole, "row 1").size() == StoredImage(whole, "row 1").open().size == (48, 64)
    for share in (0.02, 0.3, 0.6, 0.9, 0.98):
        cut = StoredImage(whole[: int(share * len(whole))], "row 1")
        for look in (cut.open, cut.size):
            with pytest.raises(Unreadable):
                look()


def test_captions_are_given_once_in_the_order_of_the_set_and_of_usable_records_alone(put):
    records = [pair() | {"prompt": p} for p in ("b", "a", "b", "c")]
    records.insert(1, pair("gone.png") | {"prompt": "of a broken record"})
    assert list(load_preferences(put(*records), "data.pairs", ALL).captions()) == [(text, ()) for text in "bac"]


# ---- rankings

LIST = {"prompt": "x", "images": ["a.png", "b.png", "c.png"]}


@pytest.mark.parametrize(
    ("more", "columns", "pairs"),
    [
        ({}, {}, [(0, 50, None), (0, 100, None), (50, 100, None)]),
        ({"rank": [2, 1, 4]}, {"ranks": "rank"}, [(50, 0, 1), (0, 100, 2), (50, 100, 3)]),
        ({"score": [0.5, -1, 2]}, {"scores": "score"}, [(0, 50, 1.5), (100, 0, 1.5), (100, 50, 3)]),
        ({"rank": [1, 2, 2]}, {"ranks": "rank"}, [(0, 50, 1), (0, 100, 1)]),
    ],
)
def test_every_two_images_of_a_ranking_are_a_pair(put, more, columns, pairs):
    folder = put(LIST | more | {"tag": 1}, LIST | more | {"prompt": "y", "images": ["d.png", "c.png", "b.png"]})
    found = load_preferences(folder, "data.pairs", PreferenceOptions(ranked="images", **columns))
    assert len(found) == 2 * len(pairs)
    read = [found.read(k) for k in range(len(found))]
    assert [(red(p.chosen), red(p.rejected), p.margin) for p in read[: len(pairs)]] == pairs
    assert {p.prompt.text for p in read[len(pairs) :]} == {"y"}
    assert read[0].prompt == Prompt("x", {"tag": 1})
    assert [p.key for p in read[:2]] == ["line 1, pair 1", "line 1, pair 2"]
    assert found.report.counts == ({} if len(pairs) == 3 else {"tie": 2})
    graded = load_preferences(folder, "data.pairs", found.options, graded=True) if columns else found
    assert len(graded) == 6


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (LIST | {"images": ["a.png"], "rank": [1]}, "missing image: line 2, pair 1 (chosen=['a.png'])"),
        (LIST | {"images": "a.png", "rank": [1]}, "no rejected image: line 2, pair 1"),
        (LIST | {"rank": [1, 2]}, "margin not a number from 0: line 2, pair 1 (margin=of [1, 2])"),
        (LIST | {"rank": [1, "2", 3]}, "margin not a number from 0: line 2, pair 1"),
        (LIST | {"rank": [1, math.nan, 3]}, "margin not a number from 0: line 2, pair 1"),
        (LIST, "margin not a number from 0: line 2, pair 1 (margin=of None)"),
        ("words", "not a record: line 2, pair 1"),
    ],
)
def test_what_is_no_ranking_is_left_out_and_named(put, record, reason):
    options = PreferenceOptions(ranked="images", ranks="rank", max_broken=1.0)
    found = load_preferences(put(LIST | {"rank": [1, 2, 3]}, record), "data.pairs", options)
    assert len(found) == 3
    assert reason in str(found.report)


def test_rankings_are_of_lines_that_have_their_columns(put):
    with pytest.raises(ValueError, match="give one of them, with the list in ranked"):
        PreferenceOptions(scores="score")
    assert "has no column 'rank'; there are: prompt, images" in refusal(
        put(LIST), PreferenceOptions(ranked="images", ranks="rank")
    )


# ---- sources


EDITS = PreferenceOptions(source="image", max_broken=1.0)


def edits(*sources: Any) -> PreferenceSet:
    """A table of pairs whose source is the shade, the list of shades or the bytes given."""

    def stored(one: Any) -> Any:
        return [stored(each) for each in one] if isinstance(one, list) else png(one) if isinstance(one, int) else one

    rows = [{"prompt": "x", "chosen": png(1), "rejected": png(2), "image": stored(one)} for one in sources]
    return PreferenceSet(Stored([[rows]]).records, "t", EDITS, paired=True)


def test_sources_inside_a_table_are_files_of_their_content_and_several_are_a_list():
    found = edits(7, [7, 9], 7)
    assert [images for _, images in found.captions()] == [found.read(0).prompt.images, found.read(1).prompt.images]
    one, several, same = (found.read(k).prompt for k in range(3))
    assert one == same
    assert several.metadata == {"images": list(several.images)}
    assert several.images[0] == one.images[0]
    shades = [np.asarray(Image.open(file))[0, 0, 0] for file in several.images]
    assert shades == [7, 9]
    assert Path(one.images[0]).read_bytes() == png(7)


@pytest.mark.parametrize("source", [b"no image", png(3)[:48], b"", [], [None], None])
def test_a_source_inside_a_table_that_is_no_image_is_named_with_its_row(source):
    found = edits(7, source)
    with pytest.raises(Unreadable, match=r"t, part-0.parquet, row 2"):
        found.read(1)
    assert found.some_sources == found.read(0).prompt.images
    assert list(found.captions()) == [("x", found.some_sources)]


def test_sources_of_a_set_of_lines_are_single_still_images_each_opened_once(put, tmp_path, monkeypatch):
    frames = [Image.new("RGB", (6, 4), (k, k, 9)) for k in (0, 90)]
    for name in ("moving.gif", "moving.png", "moving.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:48])
    (tmp_path / "cut.webp").write_bytes((tmp_path / "moving.webp").read_bytes()[:20])
    wrong = ["moving.gif", "moving.png", ["c.png", "moving.webp"], ".", "gone.png", []]
    right = ["c.png", ["c.png", "d.png"], "cut.png", "cut.webp", "c.png"]
    found = load_preferences(put(*(pair(image=one) for one in (*wrong, *right))), "data.pairs", EDITS)
    assert found.report.counts == {"source not an image": 4, "missing image": 2}
    assert "line 1 (image=" in str(found.report)
    assert "give one still image" in str(found.report)
    opened: list[str] = []
    plain = StoredImage.size
    monkeypatch.setattr(StoredImage, "size", lambda self: (opened.append(self.where), plain(self))[1])
    files = {name: str(tmp_path / f"{name}.png") for name in "cd"}
    assert found.read(1).prompt == Prompt("x", {"images": list(files.values())}, tuple(files.values()))
    for index, name in ((2, "cut.png"), (3, "cut.webp")):
        with pytest.raises(Unreadable, match=rf"line {index + 7}, image \(.*{name}\) cannot be read"):
            found.read(index)
    assert found.read(4).prompt == found.read(0).prompt
    assert sorted(Path(file).name for file in opened) == ["c.png", "cut.png", "cut.webp", "d.png"]


# ---- the order


def test_an_epoch_holds_every_record_once_in_an_order_of_seed_and_epoch(put):
    found = load_preferences(put(*[pair() for _ in range(30)]), "data.pairs")
    source = PreferenceSource(found, 7, seed=3)
    drawn = [k for iteration in range(1, 31) for k in source.draw(iteration)]
    epochs = [drawn[start : start + 30] for start in range(0, 210, 30)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7
    one_window = table(shards([[10] * 10], size=10)).arrange(np.arange(100), 0, "preferences", 0)
    assert len(set((one_window[:20] // 10).tolist())) > 5, "shuffled as a whole"
    # A draw needs no draw before it, and no other size of an iteration changes the order.
    assert PreferenceSource(found, 7, seed=3).draw(19) == drawn[18 * 7 : 19 * 7]
    wider = PreferenceSource(found, 70, seed=3)
    assert wider.draw(1) + wider.draw(2) == drawn[:140]
    assert PreferenceSource(found, 7, seed=4).draw(1) != drawn[:7]


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(st.integers(0, 6), min_size=1, max_size=9).filter(any),
    share=st.sampled_from([1e-3, 0.1, 0.3, 2.0]),
    seed=st.integers(0, 5),
)
def test_tables_are_shuffled_by_windows_of_row_groups(groups, share, seed):
    """Every record once; row groups with records before and behind a place never take more than a window's memory."""
    size = int(share * WINDOW_BYTES)
    found = PreferenceSet(shards([groups], size=size).records, "t", ALL, paired=True)
    of = [number for number, rows in enumerate(groups) for _ in range(rows)]
    order = found.arrange(np.arange(len(found)), seed, "preferences", 0).tolist()
    assert sorted(order) == list(range(sum(groups)))
    for place in range(1, len(order)):
        under_way = {of[k] for k in order[:place]} & {of[k] for k in order[place:]}
        used = sum(groups[number] for number in under_way) * size
        assert used <= max(WINDOW_BYTES, max(groups) * size)


def test_one_epoch_of_a_table_reads_each_row_group_once_and_keeps_a_few(window):
    stored = shards([[10] * 20, [10] * 20], size=100)  # 1000 bytes a group: three make a window
    found = table(stored)
    stored.reads.clear()
    source = PreferenceSource(found, 8, seed=0)
    for iteration in range(1, 51):
        for index in source.draw(iteration):
            found.read(index)
    assert Counter(stored.reads) == dict.fromkeys(((f, g) for f in range(2) for g in range(20)), 1)
    assert stored.most <= 2 * 3000


@pytest.mark.parametrize("single", [False, True])
def test_a_checkpoint_of_another_set_is_refused(put, single):
    def source(*records: dict) -> PreferenceSource | LabelledSource:
        found = load_preferences(put(*records), "data.pairs")
        return LabelledSource(labelled(found), 1, 0) if single else PreferenceSource(found, 1, 0)

    two = pair(), pair("c.png", "d.png")
    state = json.loads(json.dumps(source(*two).state_dict()))
    source(*two).load_state_dict(state)
    for changed in ([pair()], [pair(), pair("d.png", "c.png")], [pair(), two[1] | {"prompt": "z"}]):
        with pytest.raises(ConfigError, match="has changed since the checkpoint"):
            source(*changed).load_state_dict(state)


# ---- tables


def test_a_row_of_a_table_is_found_in_its_shard_and_group():
    stored = shards([[3, 0, 2], [4]], size=10)
    found = table(stored)
    assert len(found) == 9
    read = [found.read(k) for k in range(9)]
    assert [p.prompt.text for p in read] == [f"caption {k}" for k in range(9)]
    assert read[3].key == "part-0.parquet, row 4"
    assert read[5].key == "part-1.parquet, row 1"
    for k, one in enumerate(read):
        assert red(one.chosen) == k
        assert red(one.rejected) == 100 + k
        assert one.prompt.metadata["model_0"] == "m"
        assert not {"jpg_0", "jpg_1"} & set(one.prompt.metadata)


def test_a_table_is_scanned_without_its_pictures():
    stored = shards([[5, 5]], size=10)
    table(stored)
    assert stored.columns == {"caption", "label_0", "model_0"}


def test_a_picture_that_a_table_lacks_is_told_of_when_it_is_read():
    rows = [voted(0), voted(1) | {"jpg_1": None}]
    found = table(Stored([[rows]]))
    assert found.read(0).key
    with pytest.raises(Unreadable, match=r"part-0.parquet, row 2.*missing image"):
        found.read(1)


def test_shards_of_two_layouts_are_refused():
    rows, other = [voted(0)], [{k: v for k, v in voted(1).items() if k != "label_0"}]
    with pytest.raises(ConfigError, match=r"part-1\.parquet has no column 'label_0', unlike part-0\.parquet"):
        Stored([[rows], [other]])


def test_a_row_group_that_cannot_be_read_ends_the_scan_and_later_masks_the_record():
    stored = shards([[2, 2]], size=10)
    found = table(stored)
    stored.broken.add((0, 1))
    assert found.read(1).key
    with pytest.raises(Unreadable, match="row group 1 is damaged"):
        found.read(2)
    with pytest.raises(ConfigError, match=r"part-0.parquet cannot be read: row group 1 is damaged"):
        table(stored)


# ---- single pictures with a label


def test_pictures_are_labelled_by_what_became_of_them_in_all_their_pairs(put):
    """a beats b, b beats c, a beats d: a won, c and d lost, b did both; under another prompt b won."""
    records = [pair("a.png", "b.png"), pair("b.png", "c.png"), pair("a.png", "d.png")]
    found = load_preferences(put(*records, pair("b.png", "a.png") | {"prompt": "y"}), "data.pairs")

    def labels(mixed: Any) -> dict[tuple[str, str], int]:
        marked = labelled(found, mixed)
        assert marked.counts == {"won": 2, "lost": 3, "both": 1}
        read = [marked.read(k) for k in range(len(marked))]
        return {(one.prompt.text, one.image.source.name[0]): one.label for one in read}  # type: ignore[union-attr]

    sure = {("x", "a"): 1, ("x", "c"): -1, ("x", "d"): -1, ("y", "b"): 1, ("y", "a"): -1}
    assert labels("positive") == sure | {("x", "b"): 1}
    assert labels("negative") == sure | {("x", "b"): -1}
    assert labels("drop") == sure


def test_pictures_inside_a_table_are_known_by_their_bytes_or_by_the_name_the_set_gives():
    """Picture 1 loses to 0 and beats 2."""
    rows = [voted(0) | {"jpg_0": png(0), "jpg_1": png(1)}, voted(0) | {"jpg_0": png(1), "jpg_1": png(2)}]
    by_bytes = labelled(table(Stored([[rows]])))
    assert by_bytes.counts == {"won": 1, "lost": 1, "both": 1}
    named = [rows[0] | {"image_0_uid": "p", "image_1_uid": "q"}, rows[1] | {"image_0_uid": "r", "image_1_uid": "s"}]
    stored = Stored([[named]])
    pairs = table(stored)
    stored.columns.clear()
    assert labelled(pairs).counts == {"won": 2, "lost": 2, "both": 0}
    assert not {"jpg_0", "jpg_1"} & stored.columns  # the names were enough
    assert red(labelled(pairs).read(1).image) == 1


def test_a_set_with_one_class_only_is_refused(put):
    found = load_preferences(put(pair("a.png", None)), "data.pairs", ALL, paired=False)
    with pytest.raises(ConfigError, match="no image is negative"):
        labelled(found)


@pytest.mark.parametrize("share", [0.8, 0.5, 0.57])
def test_labels_are_drawn_by_their_share_each_class_once_an_epoch(share):
    pictures = labelled(table(shards([[5] * 8], size=10)))
    source = LabelledSource(pictures, 25, seed=1, positive_share=share)
    drawn = [k for iteration in range(1, 41) for k in source.draw(iteration)]
    for n in range(1, 1001):
        positive = sum(int(pictures.labels[k]) > 0 for k in drawn[:n]) if n % 97 == 0 or n < 20 else None
        assert positive is None or positive == math.floor(n * share + 1e-9)
    for sign in (1, -1):
        own = [k for k in drawn if pictures.labels[k] == sign]
        for start in range(0, len(own) - 40, 40):
            assert sorted(own[start : start + 40]) == np.flatnonzero(pictures.labels == sign).tolist()
    assert LabelledSource(pictures, 25, 1, share).draw(33) == drawn[32 * 25 : 33 * 25]
    assert LabelledSource(pictures, 25, 2, share).draw(1) != drawn[:25]


def test_drawing_winners_beside_losers_reads_each_row_group_once_for_either(window):
    stored = shards([[10] * 30], size=100)
    pictures = labelled(table(stored))
    stored.reads.clear()
    source = LabelledSource(pictures, 10, seed=0, positive_share=0.5)
    for iteration in range(1, 61):
        for number in source.draw(iteration):
            pictures.read(number)
    assert len(stored.reads) <= 2 * 30
    assert stored.most <= 2 * 3000


# ---- parquet and data sets, by the libraries themselves


def write_parquet(file: Path, rows: list[dict], group: int = 2) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=group)


PICK = [voted(k) | {"label_0": label} for k, label in enumerate((1.0, 0.0, 0.5, 1.0, 1.0))]


@pytest.mark.parametrize("form", ["{0}/part-0.parquet", "{0}", "{0}/part-*.parquet"])
def test_parquet_in_the_layout_of_pick_a_pic(tmp_path, form):
    write_parquet(tmp_path / "set" / "part-0.parquet", PICK)
    if not form.endswith("0.parquet"):
        write_parquet(tmp_path / "set" / "part-1.parquet", PICK)
    found = load_preferences(form.format(tmp_path / "set"), "data.pairs")
    assert found.report.counts["tie"] == len(found) // 4
    read = [found.read(k) for k in range(4)]
    assert [red(one.chosen) for one in read] == [0, 101, 3, 4]
    assert [red(one.rejected) for one in read] == [100, 1, 103, 104]
    assert read[2].key == "part-0.parquet, row 4"
    assert read[2].prompt == Prompt("caption 3", {"label_0": 1.0, "model_0": "m"})
    assert sorted(PreferenceSource(found, len(found), 0).draw(1)) == list(range(len(found)))


def test_parquet_of_chosen_and_rejected_with_bytes_structs_and_paths(tmp_path):
    Image.new("RGB", (6, 4), (7, 0, 0)).save(tmp_path / "a.png")
    stored = {"bytes": png(3), "path": None}
    for name, record in {
        "bytes": pair(png(1), png(2), margin=0.5),
        "struct": pair(stored, stored | {"bytes": png(4)}),
        "paths": pair("a.png", "gone.png"),
    }.items():
        write_parquet(tmp_path / f"{name}.parquet", [record])
    found = load_preferences(str(tmp_path / "bytes.parquet"), "data.pairs").read(0)
    assert (found.margin, red(found.chosen)) == (0.5, 1)
    found = load_preferences(str(tmp_path / "struct.parquet"), "data.pairs").read(0)
    assert red(found.chosen) == 3
    assert "missing image: paths.parquet, row 1 (rejected='gone.png')" in refusal(str(tmp_path / "paths.parquet"))
    (tmp_path / "broken.parquet").write_text("no table")
    assert "broken.parquet is not a readable parquet file" in refusal(str(tmp_path / "broken.parquet"))


def test_a_data_set_in_the_layout_of_pick_a_pic(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = datasets.Dataset.from_list(PICK)
    made.save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    made.to_parquet(tmp_path / "files" / "train.parquet")
    boxed = [row | {name: {"bytes": row[name], "path": None} for name in ("jpg_0", "jpg_1")} for row in PICK]
    images = datasets.Dataset.from_list(boxed)
    for name in ("jpg_0", "jpg_1"):
        images = images.cast_column(name, datasets.Image())
    images.save_to_disk(tmp_path / "images")
    for name in ("saved", "files", "images"):
        found = load_preferences(f"hf:{tmp_path / name}:train", "data.pairs")
        assert found.report.counts == {"tie": 1}
        assert [red(found.read(k).chosen) for k in range(4)] == [0, 101, 3, 4]
        assert found.read(2).key == "row 4"
        assert list(found.captions()) == [(f"caption {k}", ()) for k in (0, 1, 3, 4)]
    assert "there is no split 'test'" in refusal(f"hf:{tmp_path / 'saved'}:test")
