"""How a run is put together: in parts that a reader can follow, and with checks that only its processes show."""

import pytest
import torch

from flowrl.algorithms import awm, dgpo
from flowrl.core.errors import ConfigError
from flowrl.run.assembly.learner import require_whole_groups
from flowrl.training.world import World
from tests.test_layers import imported_modules

MOST = 14
"""Modules of the package that one of the parts may enter."""


@pytest.mark.parametrize("part", ["data", "model", "rewards", "learner", "parts"])
def test_each_part_enters_few_modules(part):
    assert len(imported_modules(f"flowrl.run.assembly.{part}")) <= MOST


def test_a_method_on_whole_groups_needs_a_prompt_for_every_process():
    world = World(0, 3, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"prompts_per_iteration=2: .* one of 3 processes; try .*=3"):
        require_whole_groups(dgpo.build(dgpo.Config()), 2, world)
    require_whole_groups(dgpo.build(dgpo.Config()), 3, world)
    require_whole_groups(awm.build(awm.Config()), 2, world)
