"""Lists and results of another form than a suite reads: each is refused by name; what all refuse: test_contract.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import load_suite
from tests import tiny_suites
from tests.tiny_suites import dpg as tiny_dpg
from tests.tiny_suites import table

UNI = ("index", "prompt_en", "sub_dims_en")
RECORD = {"prompt": "x", "atom_count": 1, "vqa_list": [["a", "Yes"], ["b", "Yes"]], "skills": ["x", "y"]}
ICE = {"Prompt": "ice", "Explanation": "cold", "prompt_id": 701}


def questions(*row: object) -> str:
    """A table of DPG-Bench with one row more than the first."""
    rows = (tiny_dpg.ROWS[0], row)
    full = [(key, f"text of {key}", "", number, above, "", "", kind, ask) for key, number, above, kind, ask in rows]
    return table(tiny_dpg.COLUMNS, full)


def atoms(**change: Any) -> str:
    return json.dumps(RECORD | change)


def dimension(text: object = "a", *names: str, **more: Any) -> str:
    return json.dumps([{"prompt_en": text, "dimension": names} | more])


LISTS = [
    ("dpg", questions("a1", 2, "7", "x", "Is it?"), r"item 'a1': .*'Is it\?' has the parent 7, .* mend the column"),
    ("dpg", questions("a1", 2, "one", "x", "Is it?"), "dependency='one' must be"),
    ("dpg", questions("a/1", 2, "0", "x", "Is it?"), "item_id='a/1' must be letters"),
    ("dpg", questions("a1", 2, "0", "x", " "), "question_natural_language is empty"),
    ("drawbench", "a,b\n1,2\n", "no column"),
    ("geneval2", atoms(vqa_list=[["q"]]), r"line 1.*vqa_list=.* must be a list of \[question, answer\]"),
    ("geneval2", atoms(skills=["count"]), "line 1.*2 questions have the skills"),
    ("geneval2", atoms(atom_count=None, skills=None), "line 1.*have the skills None"),
    ("geneval2", atoms(prompt=None), "line 1.*the prompt None must be a text that is not empty"),
    ("partiprompts", "Prompt\tCategory\na\tb\nc\n", "line 3: has 1 cells, but the header has 2"),
    ("partiprompts", "Prompt\tCategory\n\tb\n", "line 2: 'Prompt' is empty"),
    (
        "partiprompts",
        "Words\tCategory\na\tb\n",
        "line 1: has no column of texts .*there are: Words, Category .separated by tabs",
    ),
    (
        "unigenbench",
        table(UNI, [("9", "p", '{"Testpoints": ["Style" "Text"]}')]),
        "line 2.*index 9: the JSON of sub_dims breaks at character 25, in",
    ),
    ("unigenbench", table(UNI, [("7", "p", "{}")]), "line 2.*index 7: .* must be a JSON object with 'Testpoints'"),
    (
        "unigenbench",
        table(UNI, [("0", "p", json.dumps({"Testpoints": ["a"], "Testpoint Description": []}))]),
        "line 2.*1 test points have 0 desc",
    ),
    (
        "unigenbench",
        table(UNI, [("x", "p", json.dumps({"Testpoints": ["a"], "Testpoint Description": ["b"]}))]),
        "line 2.*index='x' must be a whole",
    ),
    ("vbench", '{"a": 1}', "list of objects with prompt_en and dimension; give VBench_full_info.json"),
    ("vbench", '[{"prompt_en": "a"}]', "must be a list of objects with prompt_en and dimension"),
    ("vbench", dimension("a", "Human_Anatomy"), "'a' has the dimension 'Human_Anatomy'; those of VBench 1"),
    ("vbench", dimension(" "), "the prompt ' ' must be a text that is not empty"),
    ("vbench", dimension(None, "color"), "the prompt None must be a text"),
    ("vbench", dimension("a"), "'a' has no dimension; those of VBench 1"),
    ("vbench", dimension("a", "color", auxiliary_info=[1]), "must be a list of objects"),
    ("vbench", b"\xff\xfe", "UTF-8"),
    ("wise", json.dumps([ICE | {"prompt_id": True}]), "prompt_id=True must be a whole number"),
    ("wise", json.dumps([ICE | {"Prompt": ""}]), "the prompt '' must be a text"),
    ("wise", json.dumps([ICE, ICE]), "prompt_id=701 occurs twice"),
    ("wise", json.dumps([ICE | {"prompt_id": 1001}]), "from 1 to 1000"),
    ("wise", json.dumps([{"Prompt": "p", "prompt_id": 1}]), "has no 'Explanation'"),
]
FILES = {
    **{"dpg": "dpg_bench.csv", "drawbench": "other.csv", "geneval2": "geneval2_data.jsonl", "partiprompts": "p.tsv"},
    **{"unigenbench": "p.csv", "vbench": "VBench_full_info.json", "wise": "mine.json"},
}
"""Suite -> name of a list."""


def correct(text: str) -> str:
    return '{"filename": "00003/samples/00000.png", "correct": ' + text + "}"


def points(score: object) -> str:
    return table(("index", "result_json", "img_path"), [("0", json.dumps({"score": score}), "out/0_0.png")])


RESULTS = [
    ("dpg", "scores.txt", "out/a1.png, (0, 0, 1, 1), Is it?, yes", "give the file of scores, not the _detail one"),
    ("dpg", "scores.txt", "Model: x", "holds no line of an image"),
    ("dpg", "scores.txt", "out/a1.png, 50.0, 100.0, 75.0", "the score 50.0 must be from 0 to 1"),
    *(("geneval", "r.jsonl", correct(text), "line 1: correct=.* true or false") for text in ('"False"', "null", "0.3")),
    ("unigenbench", "results.csv", points([1, 1]), r"score=\[1, 1\] must be 3 numbers, each 0 or 1"),
    ("vbench", "x_eval_results.json", "[1]", "must be an object of dimensions"),
    ("vbench", "x_eval_results.json", '{"color": 0.5}', "must be an object of dimensions"),
    ("vbench", "x_eval_results.json", '{"colour": [0.5, []]}', "'colour' is no dimension of VBench 1"),
]


def written(folder: Path, name: str, content: str | bytes) -> Path:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder / name


@pytest.mark.parametrize(("suite", "content", "words"), LISTS)
def test_a_list_of_another_form_is_named(tmp_path, suite, content, words):
    with pytest.raises(ConfigError, match=words) as refused:
        registry.load("suites", suite).items(written(tmp_path, FILES[suite], content))
    assert suite != "partiprompts" or "'prompt'" not in str(refused.value), "told in the form that it has"


@pytest.mark.parametrize(("name", "file", "content", "words"), RESULTS)
def test_results_of_another_form_are_named(tmp_path, name, file, content, words):
    suite = load_suite(name)
    items = suite.items(tiny_suites.prompts(name, suite, tmp_path))
    assert suite.read_results is not None
    with pytest.raises(ConfigError, match=words):
        suite.read_results(written(tmp_path, file, content), items)
