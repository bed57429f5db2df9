"""The prompt lists of the recipes: apart, readable by their rewards, as the papers and the script have them."""

import json
import re
from pathlib import Path

import pytest
from flowrl.rewards.geneval import read_clauses
from flowrl.rewards.ocr import target_text

from flowrl.data.prompt_sources import load_prompts
from scripts.pretraining import sd3_prompts
from tests import tiny_sd3 as tiny
from tests.recipes import RECIPES, recipe

# kvablack/ddpo-pytorch:ddpo_pytorch/assets/simple_animals.txt
ANIMALS = """
cat dog horse monkey rabbit zebra spider bird sheep deer cow goat lion tiger bear raccoon fox wolf lizard beetle ant
butterfly fish shark whale dolphin squirrel mouse rat snake turtle frog chicken duck goose bee pig turkey fly llama
camel bat gorilla hedgehog kangaroo
"""


@pytest.mark.parametrize("name", RECIPES)
def test_training_and_held_out_prompts_are_apart(name):
    data, model = recipe(name).run.data, name.partition("/")[0]
    train = [prompt.text for prompt in load_prompts(str(data.prompts), "data.prompts")]
    held_out = [prompt.text for prompt in load_prompts(str(data.eval_prompts), "data.eval_prompts")]
    if name.startswith(
        ("sd/ddpo", "sd/draft")
    ):  # two of the lists overlap by names such as "zebra", which the recipe says
        assert len(set(train) & set(held_out[: data.max_eval_prompts])) == (0 if name.endswith("aesthetic") else 9)
        return
    if name.startswith(("flux_kontext", "qwen_image_edit")):  # instructions recur, edits of a scene do not
        lists = [load_prompts(str(source), "data") for source in (data.prompts, data.eval_prompts)]
        edits = [{(edit.text, Path(edit.images[0]).read_bytes()) for edit in edits} for edits in lists]
        assert not edits[0] & edits[1]
        return
    assert not set(train) & set(held_out)
    if model == "sd3":
        assert (len(set(train)), len(set(held_out))) == (384, 96)
        # The lists of a reward are those of Flow-GRPO's recipe for it, and preferences share theirs.
        reward = name.rpartition("-")[2].replace("hpsv2", "pickscore")
        assert data == recipe(f"sd3/flow_grpo-{reward}").run.data


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_every_prompt_has_what_its_reward_reads(part):
    for prompt in load_prompts(f"sd3-ocr-{part}.jsonl", "data.prompts"):
        assert target_text(prompt.text, prompt.metadata) in prompt.text
    for prompt in load_prompts(f"sd3-geneval-{part}.jsonl", "data.prompts"):
        clauses = read_clauses(prompt.metadata, "include")
        assert all(clause.label in prompt.text for clause in clauses)
        assert all(clause.color is None or clause.color in prompt.text for clause in clauses)
        position = [clause for clause in clauses if clause.relation]
        assert bool(position) == (prompt.metadata["tag"] == "position")
        for clause in position:  # "a photo of a cat left of a dog" places the cat
            other = clauses[clause.target].label
            assert re.search(rf"{clause.label} {clause.relation} an? {other}$", prompt.text)


def test_no_text_and_no_combination_of_objects_is_in_both_lists():
    def keys(kind: str, part: str) -> set:
        records = load_prompts(f"sd3-{kind}-{part}.jsonl", "data.prompts")
        if kind == "ocr":
            return {record.metadata["text"] for record in records}
        return {tuple(sorted(record.text.split())) for record in records}

    for kind in ("ocr", "geneval"):
        assert not keys(kind, "train") & keys(kind, "heldout")


def test_geneval_prompts_have_the_published_shares():
    tags = [prompt.metadata["tag"] for prompt in load_prompts("sd3-geneval-train.jsonl", "data.prompts")]
    shares = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
    for tag, share in shares.items():
        assert tags.count(tag) == pytest.approx(len(tags) * share / 17, abs=1.5)
    assert len(tags) == sum(tags.count(tag) for tag in shares)


@pytest.mark.parametrize("kind", ["general", "ocr", "geneval"])
def test_the_lists_are_those_the_script_writes(kind):
    for part, records in sd3_prompts.draw(kind, 384, 96).items():
        suffix = sd3_prompts.KINDS[kind][1]
        file = tiny.ROOT / "assets" / "prompts" / f"sd3-{kind}-{part}.{suffix}"
        lines = [r["prompt"] if suffix == "txt" else json.dumps(r) for r in records]
        assert file.read_text(encoding="ascii").splitlines() == lines
    longer = sd3_prompts.draw(kind, 500, 96)
    assert longer["heldout"] == sd3_prompts.draw(kind, 384, 96)["heldout"]


def test_more_prompts_than_the_words_make_are_refused():
    possible = (
        len(sd3_prompts.WORDS["first_words"])
        * len(sd3_prompts.WORDS["last_words"])
        * len(sd3_prompts.WORDS["surfaces"])
    )
    with pytest.raises(SystemExit, match=r"ocr: these words make only \d+ train prompts"):
        sd3_prompts.draw("ocr", possible + 1, 0)


def test_the_prompts_of_ddpo_are_those_of_the_paper():
    torchvision = pytest.importorskip("torchvision.models")
    classes = [prompt.text for prompt in load_prompts("imagenet-animals.txt", "data.prompts")]
    assert classes == torchvision.ResNet50_Weights.DEFAULT.meta["categories"][:398]
    assert [prompt.text for prompt in load_prompts("simple-animals.txt", "data.prompts")] == ANIMALS.split()
    assert len(ANIMALS.split()) == 45
