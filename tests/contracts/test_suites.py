"""What every suite must satisfy (tests/tiny_suites has prompts for those that read them), and what the laws find."""

from __future__ import annotations

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

NAMES = registry.names("suites")
ENDS = {"wise": (0.0, 2.0)}
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


BROKEN = [
    ("facts", 'licence="yours"', 'licence=" "', "licence is empty"),
    ("facts", 'source="yours"', 'source="https://a.b"', "names the host 'https:'"),
    ("facts", "level=LEVEL", 'level="new"', "level='new'"),
    ("facts", "images_per_prompt=2", "images_per_prompt=0", "is below 1"),
    ("prompts", '    refuse_path(path, "mine")\n', "", "takes the prompts"),
    ("prompts", "num_prompts=12", "num_prompts=13", "12 prompts, and num_prompts=13"),
    ("items", 'f"{color}-{shape}"', "color", "two have one id"),
    ("items", 'f"{color}-{shape}"', 'f"{color}/{shape}"', "the id 'red/circle'"),
    ("items", 'f"a {color} {shape}"', '" "', "red-circle has the text ' '"),
    ("items", "{}, (color,)", '{"pair": (color,)}, (color,)', "has the metadata"),
    ("items", "(color,)) for", "(0,)) for", r"has the tags \(0,\)"),
    ("read again", "pairs = [", "import random; pairs = [", "another list"),
    ("judges", 'reward=({"name": "shapes"},)', "reward=None", "nobody judges it"),
    ("judges", '{"name": "shapes"}', '{"name": "shapes", "colour": 1}', "unknown key"),
    ("judges", "num_prompts=12", "num_prompts=12, videos=True", "judges images"),
    ("table", 'line("overall"', 'line("red"', "the lines"),
    ("table", '(tuple(lines), "overall")', '(tuple(lines), "all")', "the headline 'all' is no line"),
    ("table", "bounds = (0.0, 1.0)", "bounds = (0.0, 0.1)", r"outside of 0\.\.0\.1"),
    ("table", "Table(tuple(lines)", "Table(tuple(replace(x, low=9.0) for x in lines)", "outside of 9.."),
    ("table", "Table(tuple(lines)", "Table(tuple(replace(x, n_images={1}) for x in lines)", "not JSON serializable"),
    ("table", "score(output), output=output, bounds=bounds))", "lambda row: None))", "overall is nan"),
    ("parts", "Table(tuple(lines)", "Table(tuple(replace(x, mean=x.mean + 1e-3) for x in lines)", "its parts have"),
    ("parts", "Table(tuple(lines)", "Table(tuple(replace(x, parts=()) for x in lines)", "no line has any"),
    ("parts", "groups.values()), score(output)", "groups.values()), score(output), weights=(1, 1, 0)", "weights"),
    ("order of rows", '"overall", list(groups.values())', '"overall", [rows[:3]]', "another mean of overall"),
    ("range", "bounds = (0.0, 1.0)", "bounds = (0.0, 2.0)", "red is 1 at the top, and not 2"),
    ("range", "bounds = (0.0, 1.0)", "bounds = (-1.0, 1.0)", "red is 0 at the bottom, and not -1"),
    ("missing score", "score(output)", "lambda row: row.scores[output] or 0.0", "without one of equal scores"),
    ("missing score", "Table(tuple(lines)", "Table(tuple(replace(x, n_scored=x.n_images) for x in lines)", "n_scored"),
    ("answers", "", "\n\ndef from_answers(answers, item):\n    return {'a': 1.0}\n", "has no questions"),
    ("answers", "{}, (color,)", '{"questions": ["a"]}, (color,)', "for answers that are missing"),
    ("official folder", "", "\n\ndef layout(item, k):\n    return '/' + item.id\n", "the place /red-circle"),
    ("official folder", "", "\n\ndef layout(item, k):\n    return item.tags[0]\n", "share a place"),
    ("official folder", "", "\n\ndef read_results(path, items):\n    return {}\n", "a folder that is never written"),
]


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
