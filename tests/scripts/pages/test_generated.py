"""What is generated of the documentation is what the code gives, and is read somewhere."""

import pytest

from scripts.pages import concept_pictures, reference
from scripts.pages.__main__ import WITH_WORDS, listed, main
from scripts.pages.generated import GENERATED, different
from scripts.pages.svg import unlike

SLOW = {"models", "hours"}  # builds a tiny pipeline of every class; plans two recipes


@pytest.mark.parametrize(
    "word", [pytest.param(word, marks=pytest.mark.slow if word in SLOW else ()) for word in GENERATED]
)
def test_the_shipped_files_are_what_the_code_gives(word: str):
    found = {file.name: what for file, _, what in different(word)}
    assert found == {}, f"run python -m scripts.pages {word}"


@pytest.mark.parametrize(("module", "kind"), [(reference, "*.md"), (concept_pictures, "*.svg")])
def test_a_folder_of_generated_files_holds_no_other(module, kind):
    assert set(module.PAGES.glob(kind)) == set(module.pages())


def test_every_picture_is_on_a_page():
    folder = concept_pictures.PAGES
    pages = "".join(page.read_text(encoding="utf-8") for page in folder.glob("*.md"))
    assert [file.name for file in folder.glob("*.svg") if f"]({file.name})" not in pages] == []


def test_two_pictures_differ_by_a_word_or_by_more_than_rounding():
    assert unlike('<a x="1.0"/>', '<a x="1.1"/>') == ""
    assert unlike('<a x="1"/>', '<a x="2"/>') == "number 0: 1 instead of 2"
    assert unlike("<a/>", "<b/>") == "other parts or words"


def test_the_command_writes_what_differs_alone_and_its_check_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.pages.generated.ROOT", tmp_path)
    monkeypatch.setattr("scripts.pages.__main__.ROOT", tmp_path)
    same, other, new = (tmp_path / name for name in ("same.md", "other.md", "folder/new.md"))
    same.write_text("same", encoding="utf-8")
    other.write_text("before", encoding="utf-8")
    before = same.stat().st_mtime_ns
    monkeypatch.setattr(reference, "pages", lambda: {same: "same", other: "after", new: "text"})
    assert main(["--check", "reference"]) == 1
    assert capsys.readouterr().out.splitlines() == ["other.md: other words", "folder/new.md: it is not there"]
    assert other.read_text(encoding="utf-8") == "before"
    assert main(["reference"]) == 0
    assert capsys.readouterr().out.splitlines() == ["other.md", "folder/new.md"]
    assert (other.read_text(encoding="utf-8"), new.read_text(encoding="utf-8")) == ("after", "text")
    assert same.stat().st_mtime_ns == before
    assert main(["--check", "reference"]) == 0


def test_every_word_says_what_it_makes_and_another_is_refused(capsys):
    lines = listed().splitlines()
    assert [line.split()[0] for line in lines] == [*GENERATED, *WITH_WORDS]
    assert [line for line in lines if len(line.split()) < 3] == []
    with pytest.raises(SystemExit):
        main(["refernce"])
    assert "no such word: refernce" in capsys.readouterr().err
