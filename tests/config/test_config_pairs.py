"""Configurations of methods on given pictures: what they need, and what is refused before anything is loaded."""

from pathlib import Path

import pytest
import yaml

from flowrl.commands.plan import geometry, step_plan
from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError
from tests.tables import table

TREE = {
    "name": "run",
    "iterations": 2,
    "model": {"name": "sd3", "path": "tiny-sd3", "max_sequence_length": 9},
    "data": {"pairs": {"path": "pairs.jsonl", "per_iteration": 8}},
    "algorithm": {"name": "diffusion_dpo"},
}


@pytest.fixture
def read(tmp_path: Path):
    def found(*overrides: str) -> Resolved:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(TREE))
        return resolve(load_config(tmp_path / "run.yaml", list(overrides)))

    return found


def test_pairs_need_neither_prompts_nor_rewards_nor_a_rollout(read):
    run = read()
    assert (run.slots, run.group_size, run.drawn) == (8, 2, 0)
    assert run.run.data.caches_text is False
    assert read("data.cache_text=true").run.data.caches_text is True
    assert run.tree()["rollout"]["sampler"] is None


@pytest.mark.parametrize(
    ("method", "size", "drawn"), [("diffusion_kto", 1, 0), ("sft", 1, 0), ("seppo", 2, 1), ("diffusion_dpo", 2, 0)]
)
def test_slots_are_filled_as_the_method_says(read, method, size, drawn):
    run = read(f"algorithm.name={method}", "rollout.batch_size=4")
    assert (run.slots, run.group_size, run.drawn) == (8, size, drawn)
    counts = geometry(run, step_plan(run, None), 2, extra=1)
    assert counts.samples == 4 * size
    assert counts.rollout_forwards == 10 * drawn  # ten steps of four samples


@pytest.mark.parametrize(
    ("overrides", "words"),
    table(__file__, "refused_pairs"),
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_does_not_go_together_is_refused_with_the_remedy(read, overrides, words):
    with pytest.raises(ConfigError) as caught:
        read(*overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_online_dpo_takes_the_options_of_its_family_and_forwards_of_one_pair(read):
    words = ("data={prompts: 'shapes:train'}", "algorithm.name=online_dpo", "rewards=[{name: jpeg}]")
    run = read(*words, "rollout.prompts_per_iteration=4", "rollout.group_size=6", "optim.batch_size=2")
    assert (run.slots, run.group_size, run.drawn) == (4, 6, 6)
    with pytest.raises(ConfigError, match=r"advantages\.select"):
        read(*words, "algorithm.advantages={select: {keep: 2}}")
