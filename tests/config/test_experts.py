"""Wan 2.2 A14B: the words of a recipe's header train the expert that they name, and no other."""

import pytest

from flowrl.commands.plan import _steps_table, step_plan
from flowrl.core.types import SampleId
from flowrl.diffusion.training_times import draw
from tests.recipes import RECIPES, adapter, recipe, words

HIGH, LOW = "transformer", "transformer_2"
NAMES = [name for name in RECIPES if name.startswith("wan22_a14b/")]
SUBSETS = [
    ("times={name: subset, count: 8, fraction: 0.33}", HIGH),
    ("times={name: subset, count: 16, begin: 0.33, fraction: 1.0}", LOW),
]
# Method -> its words and whom they train; without words it is as the file has it.
CHOICES = {
    "dance_grpo": [("", None), ("sde_steps=[0,1,2,3,4,5,6]", HIGH), ("sde_steps=[7,8,9,10,11,12,13,14]", LOW)],
    "diffusion_nft": [("", None), *SUBSETS],
    "flow_grpo_fast": [("", HIGH), ("low=7", LOW), ("high=19", None)],
    "sage_grpo": [
        ("", None),
        ("sde_steps=[0,1,2,3,4,5,6,7,8]", HIGH),
        ("sde_steps=[9,10,11,12,13,14,15,16,17,18]", LOW),
    ],
}
CASES = [(name, *case) for name in NAMES for case in CHOICES[name.split("/")[1].split("-")[0]]]
ALSO = {"low=7": ("algorithm.high=19",)}


def trained_parts(name: str, *overrides: str) -> set[str]:
    """The experts at the steps, or the times, that iterations of a recipe train."""
    run = recipe(name, *overrides)
    model = adapter(run)
    schedule = model.schedule(run.run.rollout.num_inference_steps)
    times = run.method.config.times if hasattr(run.method.config, "times") else None
    if times is None:
        plans = [run.method.plan(schedule, run.sampler.build(), n, run.run.seed) for n in range(40)]
        return {model.part_at(schedule.timesteps[k].item()) for plan in plans for k in plan.train}
    drawn = draw(times, schedule, [SampleId(slot, 0) for slot in range(40)], (0, 1))
    return {model.part_at(timestep) for timestep in drawn.timestep.flatten().tolist()}


@pytest.mark.parametrize(("name", "word", "expert"), CASES)
def test_the_words_of_the_header_train_the_expert_that_they_name(name, word, expert):
    overrides = (f"algorithm.{word}", *ALSO.get(word, ())) if word else ()
    assert trained_parts(name, *overrides) == ({HIGH, LOW} if expert is None else {expert})
    key, _, value = word.partition("=")
    assert (f"{key}: {value}" if word in ALSO or key == "high" else word) in words(name)


def test_the_plan_shows_whose_a_step_is_where_there_are_two():
    run = recipe("wan22_a14b/flow_grpo_fast-video_align")
    model = adapter(run)
    table = _steps_table(run, model, step_plan(run, model))
    assert table.columns[-1].header == "expert"
    assert list(table.columns[-1].cells) == 7 * [HIGH] + 13 * [LOW]
    one = recipe("wan/flow_grpo_fast-video_align")
    assert "expert" not in [c.header for c in _steps_table(one, adapter(one), step_plan(one, adapter(one))).columns]


def test_every_recipe_of_the_model_is_tried():
    assert {name.split("/")[1].split("-")[0] for name in NAMES} == set(CHOICES)
