"""`flowrl.check`: what it takes for what, and how it answers."""

import importlib
from pathlib import Path

import pytest
import torch

import flowrl
from flowrl.contracts.laws import ContractError
from flowrl.core.errors import ConfigError
from flowrl.samplers import ddim

SAMPLER = "from flowrl.samplers.flow_sde import Config, build  # noqa: F401\n"
REWARD = "import torch\ndef score(images, prompts, metadata):\n    return torch.stack([i.mean() for i in images])\n"
BROKEN = REWARD.replace("images])", "images]) - images[0].mean()")


def write(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return str(folder / "mine.py")


def laws(*found) -> set[str]:
    return {finding.law for finding in flowrl.check(*found)}


def test_a_name_a_file_a_module_and_an_object_are_told_apart(tmp_path):
    of_samplers = laws("flow_sde")
    assert "without noise" in of_samplers
    assert laws(write(tmp_path, SAMPLER)) == laws(ddim) == laws(ddim.build(ddim.Config())) == of_samplers
    assert "order" in laws(write(tmp_path, REWARD))
    card = flowrl.Card(outputs=("a",), modality="any")
    assert "order" in laws(flowrl.Reward(lambda images, *_: torch.stack([i.mean() for i in images]), card))


def test_options_are_those_of_its_config(tmp_path):
    found = {finding.law: finding.measured for finding in flowrl.check(write(tmp_path, SAMPLER), noise_level=0.25)}
    assert found["declarations"].endswith("noise level 0.25")
    with pytest.raises(ConfigError, match=r"flowrl\.check\.noise: unknown key"):
        flowrl.check("flow_sde", noise=1.0)
    with pytest.raises(ConfigError, match=r"options \['noise_level'\] are for a file"):
        flowrl.check(ddim.build(ddim.Config()), noise_level=1.0)


def test_a_broken_law_is_named_with_what_it_expects_and_what_was_measured(tmp_path):
    with pytest.raises(ContractError, match=r"mine breaks .* of its contract") as told:
        flowrl.check(write(tmp_path, BROKEN))
    assert told.value.exit_code == 2
    (finding,) = [finding for finding in told.value.broken if finding.law == "alone as in a batch"]
    assert finding.measured.startswith("differs by ")
    assert "score each sample by itself" in finding.expected
    assert f"{finding.law}: {finding.measured}" in str(told.value)
    assert len(told.value.findings) > len(told.value.broken)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (3, "a int is not a flowrl.Sampler, Method, Reward, Suite, Model, file or module"),
        ("flow_sd", "'flow_sd' is unknown; did you mean 'flow_sde'"),
        ("nowhere/mine.py", "there is no such file"),
        (importlib.import_module("json"), "json defines no class that extends"),
    ],
)
def test_what_is_no_component_is_refused(thing, words):
    with pytest.raises(ConfigError, match=words):
        flowrl.check(thing)
