"""The command line starts quickly, lists what there is, and documents every command."""

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli import COMMANDS, DEBUG, GROUPS, PAGES, REFERENCE
from flowrl.commands._arguments import in_full, option
from flowrl.commands.texts import with_texts
from flowrl.core import registry
from tests.e2e.test_bad_input import command


def python(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)


def test_help_names_every_command_and_loads_no_torch():
    result = python("-m", "flowrl", "--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in COMMANDS)
    code = "import sys, flowrl.cli as c; c._register(); print([m for m in ('torch', 'diffusers') if m in sys.modules])"
    loaded = python("-c", code)
    assert loaded.stdout.strip() == "[]", loaded.stderr


@pytest.mark.parametrize("kind", sorted(registry.FOLDERS))
def test_every_component_is_listed_with_a_level(kind: str):
    for name in registry.names(kind):
        module = registry.load(kind, name)
        assert module.LEVEL in ("tested", "verified", "experimental"), name
        assert callable(module.aggregate if kind == "suites" else module.build)
        assert kind == "suites" or hasattr(module, "Config")
        assert module.__doc__


def test_an_unknown_command_exits_with_2():
    assert python("-m", "flowrl", "trian").returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "nowhere", "--backend", "mpi"), "'mpi' is not one of 'nccl', 'gloo'"),
        (("doctor", "--check", "flow_sde", "--model", "tiny-sd3"), "each is a test of its own; leave out --check"),
        (("score", "--check", "jpeg", "--out", "scores"), "--out scores: --check writes no lines"),
        (("sweep", "quickstart", "--seeds", "\u00b2"), "give different whole numbers"),
        (("sample", "tiny-sd3", "a", "--seed", str(2**64)), "torch takes seeds of 64 bits"),
        (("vote", "nowhere", "--voter", ""), "The name of a voter has 1 to 40 printable characters; this one is ''"),
    ],
)
def test_options_without_a_meaning_are_refused(monkeypatch, capsys, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    code, printed = command(monkeypatch, capsys, *words)
    assert code == 2
    assert said in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [(), ("--debug",)])
def test_a_failure_shows_its_traceback_on_debug_alone(monkeypatch, capsys, tmp_path, words):
    monkeypatch.setenv(DEBUG, "")  # so that it is put back
    monkeypatch.delenv(DEBUG)
    code, printed = command(monkeypatch, capsys, *words, "gallery", str(tmp_path / "nowhere"))
    assert code == 2
    assert "flowrl: " in printed
    assert ("Traceback" in printed) == bool(words)


SCREEN = 42
LONG = {"": 35, "new": 26, "sample": 36, "eval": 42}
"""Help texts of more than 24 lines, with their number of lines."""


def help_of(words: list[str], monkeypatch, capsys, columns: int = 100) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, printed = command(monkeypatch, capsys, *words, "--help")
    assert code == 0
    return printed.rstrip("\n").split("\n")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_help_text_fits_a_screen_of_100_columns(name, monkeypatch, capsys):
    lines = help_of([name] if name else [], monkeypatch, capsys)
    assert max(map(len, lines)) <= 100
    assert len(lines) <= LONG.get(name, 24) <= SCREEN
    page, end = PAGES[name or "train"], "\n".join(lines[-3:])
    assert page in end, "the end names the page that shows the command at work"
    assert REFERENCE in end, "and the one with the whole texts"
    assert (Path(__file__).parents[2] / page).is_file()
    assert name or not [line for line in lines[1:] if line.endswith("...")]


def test_the_list_of_commands_has_whole_sentences_in_a_narrow_terminal(monkeypatch, capsys):
    lines = help_of([], monkeypatch, capsys, 80)
    assert not [line for line in lines[1:] if line.endswith("...")]


def test_commands_stand_once_in_their_groups_with_a_sentence_of_at_most_45_letters(monkeypatch, capsys):
    heading, listed = "", dict[str, tuple[str, str]]()
    for line in help_of([], monkeypatch, capsys, 66):  # which 45 letters and the widest name just fit
        if not line.startswith("  "):
            heading = line.removesuffix(":")
        elif heading in GROUPS:
            name, _, text = line.strip().partition(" ")
            assert name not in listed
            listed[name] = heading, text.strip()
    assert {name: place for name, (place, _) in listed.items()} == {
        name: place for place, names in GROUPS.items() for name in names
    }
    for name, (_, text) in listed.items():
        assert 10 < len(text) <= 45, f"{name}: {text}"
        assert text.endswith("."), f"{name}: a whole sentence, on one line"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("Train", "No such command 'Train'; did you mean 'train'? there are: train, plan, "),
        ("config quickstart", "No such command 'config'; did you mean 'convert-config'? there are"),
        ("zzz", "No such command 'zzz'; there are: train"),
        ("--Verson", "No such option: --Verson; did you mean '--version'?"),
        ("eval runs/a --limt 3", "No such option: --limt; did you mean '--limit'?"),
        ("sample m p --format Mp4", "'Mp4' is not one of 'webp', 'mp4'; did you mean 'mp4'?"),
        ("new rewards mine", "did you mean 'reward'?"),
        ("list Flow-GRPO", "KIND='Flow-GRPO' is none; there are: models, samplers, algorithms, rewards, credits, "),
        ("list Flow-GRPO", "suites, recipes; run flowrl list algorithms flow_grpo\n"),
        ("list guard", "; run flowrl list algorithms grpo_guard\n"),
        ("list reward", "; run flowrl list rewards\n"),
        ("list quickstrt", "; run flowrl plan quickstart\n"),
        ("list zzz", "suites, recipes\n"),
        ("list algorithms guard", "algorithm name='guard' is unknown; did you mean 'grpo_guard'?"),
        ("train quickstart algorithm.name=grpo", "algorithm name='grpo' is unknown; did you mean 'flow_grpo'?"),
        ("plan grpo_guard-pickscore", "did you mean 'sd3/grpo_guard-pickscore' or 'flux/grpo_guard-pickscore'?"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(words, told, monkeypatch, capsys):
    code, printed = command(monkeypatch, capsys, *words.split())
    assert code == 2
    assert told in printed


def test_what_the_terminal_leaves_out_stands_on_the_reference_page(monkeypatch, capsys):
    row = "With --suite: Only so many prompts, spread over the suite. For a quick look. A larger number, given later,"
    assert row in (Path(__file__).parents[2] / REFERENCE).read_text(encoding="utf-8")
    text = "\n".join(help_of(["eval"], monkeypatch, capsys))
    assert "With --suite:\n" in text
    assert "--limit <int range>       Only so many prompts, spread over the suite.  [x>=1]\n" in text


def test_two_options_with_one_first_sentence_have_one_text():
    assert in_full("Samples of each prompt.") == "Samples of each prompt."
    with pytest.raises(ValueError, match="go on differently"):
        option("Samples of each prompt.", "Another text.")


def test_every_parameter_of_a_command_has_a_text_and_every_text_a_parameter():
    def watch(runs: list[Path], port: int | None = None, speed: float = 1.0) -> None: ...

    with pytest.raises(ValueError, match=r"watch: .*speed"):
        with_texts(watch, "watch")


def test_a_fault_of_the_file_or_of_a_word_is_told_before_the_libraries_are_loaded(tmp_path):
    """torch takes seconds. A file beside it of a like name is named."""
    (tmp_path / "bad.yaml").write_text("model: {path: tiny-sd3\n", encoding="ascii")
    (tmp_path / "Mine.yml").write_text("name: mine\n", encoding="ascii")
    code = (
        "import contextlib, io, sys\nfrom flowrl.cli import main\n"
        "for name in ('train', 'plan'):\n"
        "    for words in (['bad.yaml'], ['mine.yaml'], ['Mine.yml', 'iterations']):\n"
        "        sys.argv, told = ['flowrl', name, *words], io.StringIO()\n"
        "        with contextlib.redirect_stderr(told), contextlib.suppress(SystemExit):\n"
        "            main()\n"
        "        print('torch' in sys.modules, told.getvalue().replace('\\n', ' '))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = [line.partition(" ") for line in done.stdout.splitlines()]
    assert [loaded for loaded, _, _ in found] == ["False"] * 6
    for number, reason in enumerate(("not valid YAML", "did you mean 'Mine.yml'?", "'iterations'") * 2):
        assert reason in found[number][2]
