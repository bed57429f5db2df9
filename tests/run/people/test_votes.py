"""The store of votes: undo, several voters, a kill, a second writer, damage, and what diffusion_dpo reads of it."""

import math
import resource
import signal
from dataclasses import replace

import pytest
from PIL import Image

from flowrl.core.errors import ConfigError, WriteError
from flowrl.core.polls import Vote
from flowrl.data.options import PreferenceOptions
from flowrl.data.preferences import load_preferences
from flowrl.run.people.votes import LOG, STRENGTHS, VoteBook, read_votes, strength_records


def vote(choice: str = "first", voter: str = "ann", group: str = "g") -> Vote:
    return Vote(voter=voter, group=group, prompt="a red circle", first="a.png", second="b.png", choice=choice)


def test_undo_takes_back_the_last_vote_of_that_voter_alone(tmp_path):
    with VoteBook(tmp_path, "here") as book:
        for one in (vote(), vote("second", "bob"), vote("tie")):
            book.add(one)
        assert book.undo("ann") == vote("tie")
        assert book.undo("ann") == vote()
        assert book.undo("ann") is None
        assert list(book.votes.values()) == [vote("second", "bob")]
    assert list(read_votes(tmp_path)[0].values()) == [vote("second", "bob")]


def test_a_line_that_a_kill_cut_off_is_dropped_and_voting_goes_on(tmp_path):
    with VoteBook(tmp_path, "here") as book:
        book.add(vote())
    with (tmp_path / LOG).open("a") as log:
        log.write('{"voter": "an')
    with VoteBook(tmp_path, "here") as book:
        assert list(book.votes) == [1]
        assert book.add(vote("second", "bob")) == 2
    assert list(read_votes(tmp_path)[0].values()) == [vote(), vote("second", "bob")]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path):
    with VoteBook(tmp_path, "here") as book:
        book.add(vote())
        size = (tmp_path / LOG).stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        try:
            with pytest.raises(WriteError, match="the votes before it are safe"):
                book.add(vote("second", "bob"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert (tmp_path / LOG).stat().st_size == size
        assert book.add(vote("tie", "bob")) == 2
    assert list(read_votes(tmp_path)[0].values()) == [vote(), vote("tie", "bob")]


def test_a_second_writer_is_told_where_the_first_one_is(tmp_path):
    place = r"takes votes already, at http://127\.0\.0\.1:8420/"
    with VoteBook(tmp_path, "http://127.0.0.1:8420/"), pytest.raises(ConfigError, match=place):
        VoteBook(tmp_path, "there")
    VoteBook(tmp_path, "there").close()


@pytest.mark.parametrize("line", ["nonsense", "3", '{"undone": 7}', '{"voter": "ann"}'])
def test_a_damaged_line_is_named_with_the_remedy(tmp_path, line):
    with VoteBook(tmp_path, "here") as book:
        book.add(vote())
    with (tmp_path / LOG).open("a") as log:
        log.write(line + "\n")
    with pytest.raises(ConfigError, match=r"votes\.jsonl:2 is damaged .* restore the file from a copy"):
        VoteBook(tmp_path, "here")


def test_a_choice_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="must be one of first, second, tie, skip"):
        vote("left")


def test_the_pairs_are_what_diffusion_dpo_reads(tmp_path):
    for name, level in (("a", 10), ("b", 200)):
        Image.new("RGB", (8, 8), (level, 0, 0)).save(tmp_path / f"{name}.png")
    with VoteBook(tmp_path, "here") as book:
        for choice in ("second", "tie", "skip", "first"):
            book.add(vote(choice))
        book.undo("ann")
    pairs = load_preferences(str(tmp_path), "data.pairs", PreferenceOptions())
    assert len(pairs) == 1
    pair = pairs.read(0)
    assert pair.prompt.text == "a red circle"
    assert pair.chosen.open().getpixel((0, 0)) == (200, 0, 0)


def test_votes_on_two_images_together_are_a_pair_with_the_strength_as_its_margin(tmp_path):
    """With a and b wins the strengths are log((a + 1/4) / (b + 1/4)) apart; a tie is half a win for both."""
    for name, level in (("a", 10), ("b", 200)):
        Image.new("RGB", (8, 8), (level, 0, 0)).save(tmp_path / f"{name}.png")
    choices = {"clear": ("second", "second"), "close": ("first", "first", "second"), "even": ("tie", "skip")}
    with VoteBook(tmp_path, "here") as book:
        for group, given in choices.items():
            for choice in given:
                book.add(vote(choice, group=group))
        book.add(vote("skip", group="none"))
        book.add(vote("first", voter="bob", group="even"))
        book.undo("bob")
        written = (tmp_path / STRENGTHS).read_text()
    with VoteBook(tmp_path, "here"):
        assert (tmp_path / STRENGTHS).read_text() == written, "made from the log alone"
    pairs = load_preferences(str(tmp_path / STRENGTHS), "data.pairs", PreferenceOptions(), graded=True)
    found = [pairs.read(k) for k in range(len(pairs))]
    assert [pair.chosen.where.rpartition("(")[2] for pair in found] == ["b.png)", "a.png)", "a.png)"]
    assert [pair.margin for pair in found] == [pytest.approx(math.log(9)), pytest.approx(math.log(9 / 5)), 0.0]
    assert [pair.prompt.metadata["votes"] for pair in found] == [2, 3, 1]
    assert len(load_preferences(str(tmp_path / STRENGTHS), "data.pairs", PreferenceOptions())) == 2, "a tie by rule"


def test_images_that_are_compared_with_others_too_are_as_strong_as_all_votes_say():
    votes = [vote(), vote(), replace(vote(), first="b.png", second="c.png")]
    records = {(r["chosen"], r["rejected"]): r["margin"] for r in strength_records(votes)}
    assert set(records) == {("a.png", "b.png"), ("b.png", "c.png")}
    assert all(margin > 0 for margin in records.values())
    assert strength_records([vote("skip")]) == []
