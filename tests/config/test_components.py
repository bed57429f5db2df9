"""Samplers and methods in files of one's own: `rollout.sampler: {path: ...}` and `algorithm: {path: ...}`."""

from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.config.components import Component, component
from flowrl.contracts.grids import flow_schedule
from flowrl.core.errors import ConfigError
from flowrl.samplers import flow_sde

SAMPLER = """
import flowrl
from flowrl.samplers.base import StepDistribution
class Still(flowrl.Sampler):
    def transition(self, process, prediction, x, step):
        return StepDistribution(x, 0 * step.sigma)
"""
METHOD = """
from dataclasses import dataclass
import flowrl
@dataclass(frozen=True, kw_only=True)
class Config(flowrl.EdgeMethod.Config):
    scale: float = 1.0
class Mine(flowrl.EdgeMethod):
    pass
"""
BUILD = "def build(config):\n    return 3\n"
FAILING = "    def __init__(self, config):\n        raise OSError('full')\n"


@pytest.fixture
def found(tmp_path: Path):
    """Writes a file and resolves it as a component."""

    def find(kind: str, text: str, **options: Any) -> Component:
        (tmp_path / "mine.py").write_text(text)
        where = {"samplers": "rollout.sampler", "algorithms": "algorithm"}[kind]
        return component(kind, {"path": str(tmp_path / "mine.py"), **options}, where, "flow_sde")

    return find


def test_a_file_with_one_class_is_a_component_with_the_options_of_its_base(found, tmp_path):
    part = found("samplers", SAMPLER, noise_level=0.3)
    assert part.name == "mine"
    assert part.reference == {"path": str(tmp_path / "mine.py")}
    assert part.config == flowrl.Sampler.Config(noise_level=0.3)
    sampler = part.build()
    assert isinstance(sampler, flowrl.Sampler)
    assert sampler.default_noise_level() == 0.3


def test_its_own_config_is_checked_strictly_and_a_class_that_extends_a_method_has_its_options(found):
    assert found("algorithms", METHOD, scale=2.0).build().config.scale == 2.0
    with pytest.raises(ConfigError, match=r"algorithm\.scle: unknown key .*did you mean 'scale'"):
        found("algorithms", METHOD, scle=2.0)
    with pytest.raises(ConfigError, match=r"algorithm\.scale = 'much'"):
        found("algorithms", METHOD, scale="much")
    text = "from flowrl.algorithms.flow_grpo import FlowGrpo\nclass Mine(FlowGrpo):\n    pass\n"
    part = found("algorithms", text, clip_range=2e-4)
    assert type(part.config).__module__ == "flowrl.algorithms.flow_grpo"
    assert part.build().config.clip_range == 2e-4


def test_a_method_of_ones_own_has_the_options_of_its_kind_and_their_checks(found):
    """In the style of the built-in ones: a `Config` that extends its kind's, and calls its checks (F66, F67)."""
    checked = METHOD.replace(
        "scale: float = 1.0\n",
        "scale: float = 1.0\n    def __post_init__(self):\n        super().__post_init__()\n"
        "        if self.scale <= 0: raise ValueError('scale must be positive')\n",
    )
    given = {"sde_steps": [0, 1], "kl": {"coef": 0.1}, "advantages": {"std": "group"}}
    method = found("algorithms", checked, scale=2.0, **given).build()
    assert method.roles == ("reference",)
    assert method.rule.config.std == "group"
    grid = flow_schedule(4)
    assert method.plan(grid, flow_sde.build(flow_sde.Config()), 1, 0).train == (0, 1)
    for options, words in (({"scale": -1.0}, "scale must be"), ({"sde_steps": [1, 1]}, "names a step twice")):
        with pytest.raises(ConfigError, match=words):
            found("algorithms", checked, **options)


def test_a_build_goes_before_classes_and_helpers_and_bases_in_the_file_are_not_meant(found):
    text = SAMPLER + "class _Helper(flowrl.Sampler):\n    pass\nclass Last(Still):\n    pass\n"
    assert type(found("samplers", text).build()).__name__ == "Last"
    text = SAMPLER + "Config = flowrl.Sampler.Config\ndef build(config):\n    return Still(Config(noise_level=0.1))\n"
    assert found("samplers", text).build().config.noise_level == 0.1


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("samplers", "x = 1\n", r"one class that extends flowrl\.Sampler \(it has 0\), or Config and build"),
        ("samplers", SAMPLER + "class Other(flowrl.Sampler):\n    pass\n", r"it has 2: Still, Other"),
        ("algorithms", SAMPLER, r"extends flowrl\.Method \(it has 0"),
        ("algorithms", METHOD.replace("(flowrl.EdgeMethod.Config)", ""), "Config of mine must extend flowrl.Method.C"),
        ("samplers", "Config = dict\n" + SAMPLER + BUILD, "Config of .* must be a dataclass"),
        ("samplers", BUILD, "must define Config and build"),
        (
            *("samplers", "import flowrl\nConfig = flowrl.Sampler.Config\n" + BUILD),
            r"rollout\.sampler: build\(config\) of mine gives a int, not a flowrl\.Sam",
        ),
        ("samplers", "class (:\n", "cannot be imported: SyntaxError"),
        ("samplers", "raise KeyError('no')\n", r"cannot be imported: KeyError: 'no' \(mine.py:1\)"),
        ("samplers", "import torch\ntorch.set_default_dtype(torch.float64)\n" + SAMPLER, "changes the default dtype"),
        ("samplers", SAMPLER + FAILING, r"cannot be built: OSError: full \(mine.py:\d+\)"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_what_to_mend(found, kind, text, words):
    with pytest.raises(ConfigError, match=words):
        found(kind, text)


def test_name_and_path_exclude_each_other_and_a_path_is_a_file(tmp_path):
    with pytest.raises(ConfigError, match=r"name='ddim' and path='mine.py': one of them is given"):
        component("samplers", {"name": "ddim", "path": "mine.py"}, "rollout.sampler")
    with pytest.raises(ConfigError, match=r"rollout\.sampler\.path='mine' must be a \.py file"):
        component("samplers", {"path": "mine"}, "rollout.sampler")
    with pytest.raises(ConfigError, match=r"sampler path='.*gone\.py': there is no such file"):
        component("samplers", {"path": str(tmp_path / "gone.py")}, "rollout.sampler")
    assert component("samplers", {"name": None, "path": None}, "rollout.sampler", "ddim").name == "ddim"


def test_a_file_is_found_beside_the_configuration_and_an_unknown_key_elsewhere_is_told(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.py").write_text(SAMPLER)
    text = "name: a\niterations: 1\nmodel: {path: tiny-sd3}\ndata: {prompts: shapes:train}\nrewards: [{name: jpeg}]\n"
    (tmp_path / "there" / "run.yaml").write_text(text + "rollout: {sampler: {path: mine.py}}\n")
    monkeypatch.chdir(tmp_path)
    config = flowrl.load_config("there/run.yaml")
    assert config.rollout.sampler == {"path": str(tmp_path / "there" / "mine.py")}
