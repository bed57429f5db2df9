"""Remedies of the rewards."""

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flowrl.core.errors import ConfigError, RewardError
from flowrl.rewards import ocr
from flowrl.scoring.entries import reward_plan
from tests.remedies import follows


@follows("flowrl/scoring/entries.py:_require_towards_better")
@pytest.mark.parametrize("option", ["weight", "scale"])
def test_a_factor_below_0_becomes_what_the_message_says(option):
    with pytest.raises(ConfigError) as refused:
        reward_plan({"name": "jpeg", option: -0.5}, "rewards.0")
    ((key, value),) = refused.value.remedies[0].settings.items()
    assert (key, value) == (f"rewards.0.{option}", 0.5)
    entry = reward_plan({"name": "jpeg", option: value}, "rewards.0").entry
    assert getattr(entry, option) == 0.5


@follows("rewards/ocr.py:load_reader")
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_the_extra_that_is_named_installs_a_reader_on_every_python(monkeypatch, python):
    for name in ("rapidocr_onnxruntime", "rapidocr"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RewardError) as refused:
        ocr.load_reader(ocr.Config())
    assert refused.value.remedies[0].command == 'pip install "flowrl[ocr]"'
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in project["optional-dependencies"]["ocr"]]
    names = {each.name for each in wanted if each.marker is None or each.marker.evaluate({"python_version": python})}
    # The older package brings onnxruntime, its successor runs on several engines and brings none.
    assert names in ({"rapidfuzz", "rapidocr-onnxruntime"}, {"rapidfuzz", "rapidocr", "onnxruntime"})
    assert ("rapidocr-onnxruntime" in names) == (python < "3.13"), "it has no files for newer ones"
