"""Configurations of methods on given pictures: what they need, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flowrl.commands.plan import geometry, step_plan
from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.core.errors import ConfigError

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
    [
        # a method without what it learns from, and the other way round
        (["data={prompts: a.txt}"], ["data.pairs.path is required", "diffusion_dpo learns from given images"]),
        (
            ["algorithm.name=flow_grpo", "rewards=[{name: jpeg}]"],
            ["data.pairs.path='", "pairs.jsonl': ", "flow_grpo draws its samples", "diffusion_dpo"],
        ),
        (["algorithm.name=online_dpo", "data={prompts: a.txt}"], ["rewards is empty"]),
        (["data={}"], ["prompts is required", "pairs"]),
        (["data.prompts=a.txt"], ["prompts='", "a.txt': captions", "captions of the pairs are the prompts"]),
        (["rewards=[{name: jpeg}]"], ["rewards", "in eval.rewards they are looked at"]),
        # options without a meaning
        (["rollout.group_size=4"], ["rollout.group_size=4", "data.pairs.per_iteration"]),
        (["rollout.prompts_per_iteration=4"], ["rollout.prompts_per_iteration=4", "filled from the pairs"]),
        (["rollout.exploration={pool: 30}"], ["rollout.exploration"]),
        (["rollout.sampler={name: flow_sde}"], ["rollout.sampler", "scores no transition"]),
        (["algorithm.solver=ode"], ["algorithm.solver: unknown key"]),
        (["algorithm.advantages={std: group}"], ["algorithm.advantages: unknown key"]),
        (["eval.rewards=[{name: jpeg}]"], ["eval.rewards", "no prompts in data.eval_prompts"]),
        (["eval.best_guidance=[1, 2]"], ["eval.best_guidance", "no reward to compare by"]),
        (["algorithm.name=sft", "data.pairs.eval=other"], ["data.pairs.eval", "sft compares no images"]),
        # numbers
        (["data.pairs.per_iteration=9"], ["updates_per_iteration=2", "the 9 pairs", "=1, or ", "=3, or ", "=9"]),
        (["data.pairs.per_iteration=0"], ["per_iteration=0"]),
        (["data.pairs.caption_dropout=1.5"], ["caption_dropout=1.5"]),
        (["data.pairs.crop=left"], ["data.pairs.crop"]),
        (["data.pairs.records={chosn: a}"], ["data.pairs.records.chosn", "chosen"]),
        (["data={pairs: {flip: false}}"], ["data.pairs.path: is required"]),
        (["optim.batch_size=1"], ["optim.batch_size=1", "all samples of a prompt", "try optim.batch_size=2"]),
        (["algorithm.name=seppo", "optim.batch_size=7"], ["at all their times", "8 rows"]),
        (["algorithm.beta=0"], ["beta=0"]),
        (["algorithm={name: diffusion_kto, liked_share: 1.0}"], ["liked_share=1.0", "both classes"]),
        (["algorithm={name: seppo, solver: sa}"], ["solver=sa"]),
        (["algorithm={name: seppo, every: 0}"], ["every=0"]),
    ],
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
