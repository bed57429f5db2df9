"""Remedies of the command line: a word to leave out or to give, or another command."""

import shlex
from pathlib import Path

import pytest

from tests.remedies import follows
from tests.remedies.following import command_fault, goes_further, numbered, provoked, with_remedy
from tests.tables import table

CASES = table(__file__, "faults_of_commands")


@pytest.mark.slow  # they go on to plans, models and servers
@pytest.mark.parametrize(("place", "line"), CASES, ids=[case[0] for case in CASES])
@follows(*(place for case in CASES for place in numbered(case[0])))
def test_a_command_goes_on_with_each_remedy(place, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ddpo.yaml").write_text("num_epochs: 200\ntrain_batch_size: 2\nsample_batch_size: 2\n")
    fault = provoked(lambda: command_fault(shlex.split(line)), numbered(place))
    for remedy in fault.remedies:
        assert goes_further(with_remedy(shlex.split(line), remedy), fault), f"{fault}: {remedy} does not end it"
