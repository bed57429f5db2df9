"""The benchmark's prompts: what is published of them, and that the script draws the file."""

import hashlib
from collections import Counter
from pathlib import Path

import pytest
from flowrl.rewards.geneval import read_clauses

from flowrl.data.prompt_sources import load_prompts
from scripts.pretraining.geneval_prompts import lines
from tests import tiny_sd3

FILE = tiny_sd3.ROOT / "assets" / "prompts" / "geneval.jsonl"
COUNTS = {"single_object": 80, "two_object": 99, "counting": 80, "colors": 94, "position": 100, "color_attr": 100}


def test_the_file_has_the_published_number_of_prompts_of_each_task_and_no_byte_has_changed():
    prompts = load_prompts("geneval.jsonl", "data.eval_prompts")
    assert Counter(prompt.metadata["tag"] for prompt in prompts) == COUNTS
    assert len(prompts) == 553
    digest = "5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13"
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == digest


def test_the_file_is_what_the_script_draws():
    assert FILE.read_text(encoding="ascii").splitlines() == lines()


@pytest.mark.parametrize(
    "line",
    (Path(__file__).parent / "geneval_quoted.jsonl").read_text(encoding="ascii").splitlines(),
)
def test_lines_published_by_users_of_the_benchmark_are_in_the_file(line):
    """Sources: evaluation_metadata.jsonl as quoted on GitHub; wookiekim/SOLACE:dataset/geneval/test_metadata.jsonl."""
    assert FILE.read_text(encoding="ascii").splitlines().count(line) == 1


def test_every_record_is_one_that_the_reward_takes():
    for prompt in load_prompts("geneval.jsonl", "data.eval_prompts"):
        assert read_clauses(prompt.metadata, "include")
        assert len(read_clauses(prompt.metadata, "exclude")) == (prompt.metadata["tag"] == "counting")
