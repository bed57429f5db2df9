"""What every suite must satisfy (tests/tiny_suites has prompts for those that read them), and what the laws find."""

import math

import pytest

import flowrl
from flowrl.apps.suites import drawbench, wise
from flowrl.commands.new import write
from flowrl.contracts.laws import ContractError
from flowrl.contracts.suites import FEW, SuiteTrial
from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import load_suite
from tests import tiny_suites
from tests.tables import table

NAMES = registry.names("suites")
ENDS = {"wise": (0.0, 2.0), "imgedit": (1.0, 5.0), "gedit": (0.0, 10.0)}
"""Ranges of official scores that do not go from 0 to 1."""


@pytest.fixture(params=NAMES)
def suite(request):
    return load_suite(request.param)


def trials(suite, folder):
    """A suite under its own judge's scores, and under those of its official evaluator."""
    prompts, own = tiny_suites.prompts(suite.name, suite, folder), tiny_suites.tiny(suite.name)
    yield (first := SuiteTrial(suite, prompts))
    if suite.read_results is not None and own is not None:
        places = [(item, 0, suite.layout(item, 0)) for item in first.items]
        found = suite.read_results(own.results(folder, places), first.items)
        names = {name for scores in found.values() for name in scores}
        yield SuiteTrial(suite, prompts, dict.fromkeys(names, ENDS.get(suite.name, (0.0, 1.0))))


def test_every_suite_keeps_its_laws(suite, tmp_path):
    for trial in trials(suite, tmp_path):
        findings = list(trial.run())
        assert len(findings) == 12
        assert [str(finding) for finding in findings if not finding.good] == []


def test_the_level_of_the_facts_is_the_files(suite):
    assert suite.facts.level == registry.load("suites", suite.name).LEVEL


def test_a_long_list_is_tried_on_a_part_of_it():
    trial = SuiteTrial(load_suite("geneval"))
    assert FEW / 2 < len(trial.few) <= FEW
    assert len({item.tags for item in trial.few}) == 6


def test_a_suite_that_reads_its_prompts_is_given_some(tmp_path):
    file = str(tiny_suites.prompts("drawbench", load_suite("drawbench"), tmp_path))
    assert flowrl.check(drawbench, prompts=file) == flowrl.check("drawbench", prompts=file)
    with pytest.raises(ConfigError, match="drawbench: its prompts are read, so add prompts=PATH; they are: hub"):
        flowrl.check("drawbench")
    with pytest.raises(ConfigError, match=r"flowrl\.check\.prompt: unknown key"):
        flowrl.check("drawbench", prompt=file)
    with pytest.raises(ContractError, match="FAIL  items: raised ConfigError"):
        flowrl.check(wise, prompts=str(tmp_path / "nowhere"))


BROKEN = table(__file__, "broken_suites")


@pytest.mark.parametrize(("law", "old", "new", "words"), BROKEN)
def test_a_broken_file_is_told_by_its_law(law, old, new, words, tmp_path):
    write("suite", "mine", tmp_path)
    file = tmp_path / "mine.py"
    text = file.read_text()
    assert old in text
    text = text.replace(old, new) if old else text + new
    if law == "answers" and old:
        text += "\n\ndef from_answers(answers, item):\n    return {'shapes_strict': 0.0 if answers[0] != 1 else 1.0}\n"
    if law == "read again":
        text = text.replace("    # Metadata", "    random.shuffle(pairs)\n    # Metadata")
    file.write_text(text.replace("\nfrom flowrl", "\nfrom dataclasses import replace\nfrom flowrl", 1))
    with pytest.raises(ContractError, match=rf"FAIL  {law}: .*{words}"):
        flowrl.check(str(file))


def test_a_file_that_lacks_a_part_is_no_suite(tmp_path):
    (tmp_path / "mine.py").write_text("FACTS = None\n\n\ndef items(path):\n    return []\n")
    with pytest.raises(ConfigError, match="mine is not a suite: its file must define aggregate"):
        flowrl.check(str(tmp_path / "mine.py"))


def test_scores_of_a_trial_are_missing_where_nobody_judged(tmp_path):
    trial = SuiteTrial(load_suite("geneval2"), tiny_suites.prompts("geneval2", load_suite("geneval2"), tmp_path))
    row = trial.rows(lambda n: math.nan)[0]
    assert set(row.scores.values()) == set(row.answers) == {None}
