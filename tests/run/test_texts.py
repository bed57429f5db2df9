"""Embeddings of a run: in files those of memory, shared by processes, found by the next run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.config.load import load_config, resolve
from flowrl.core.types import Condition
from flowrl.data.prompts import Prompt
from flowrl.evaluation.held_out import RunPrompts
from flowrl.models.sd3 import Sd3
from flowrl.run.texts import embedded, text_lengths
from flowrl.training.world import ALONE, World
from tests import tiny_sd3
from tests.training.test_sharding import everywhere

PROMPTS = [f"a red circle and {number} squares" for number in range(70)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of prompts in each call of the encoders; 1 is the negative prompt."""
    made: list[int] = []
    own = Sd3.texts

    def texts(self: Sd3, prompts: list[str]) -> Condition:
        made.append(len(prompts))
        return own(self, prompts)

    monkeypatch.setattr(Sd3, "texts", texts)
    return made


def looked_up(world: World, folder: Path | None, model: Sd3) -> tuple[dict[str, Any], torch.Tensor]:
    """(embeddings of some prompts, of the negative prompt) of a run."""
    place = "memory" if folder is None else str(folder)
    resolved = resolve(load_config("configs/quickstart.yaml", [f"data.text_cache={place}"]))
    texts = embedded(resolved, model, PROMPTS, world)
    assert model.pipeline.text_encoder is None
    assert model.unconditional is not None
    return dict(texts.lookup([PROMPTS[k] for k in (69, 3, 66)]).tensors), model.unconditional["prompt_embeds"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_has_the_same_embeddings_from_files_and_the_next_one_encodes_nothing(tmp_path, calls, size):
    expected = looked_up(ALONE, None, tiny_sd3.adapter())
    assert sorted(calls) == [1, 6, 64]
    calls.clear()
    # Each process that encodes makes the negative prompt.
    for count in ([1] * size + [6, 64], []):
        models = [tiny_sd3.adapter() for _ in range(size)]
        found = everywhere(size, lambda world, models=models: looked_up(world, tmp_path, models[world.rank]))
        assert sorted(calls) == count
        calls.clear()
        for embeds, away in found:
            assert all(torch.equal(embeds[name], expected[0][name]) for name in expected[0])
            assert torch.equal(away, expected[1])


def test_images_of_prompts_are_not_kept_in_files(tmp_path):
    resolved = resolve(load_config("configs/quickstart.yaml", [f"data.text_cache={tmp_path}"]))
    with pytest.raises(ValueError, match="prompts with images"):
        embedded(resolved, tiny_sd3.adapter(), [Prompt("x", images=("a.png",))], ALONE)


def test_lengths_of_prompts_are_counted_for_each_encoder_without_encoding(calls: list[int]):
    resolved = resolve(load_config("configs/quickstart.yaml"))
    model = resolved.model.build()
    model.free_text_encoders()
    short, long = Prompt("a red circle", {}), Prompt(" ".join(["red"] * 30), {})
    few = RunPrompts(listed=[], train=[short] * 3, evaluated=[long], name="held-out prompts", source="")
    facts = text_lengths(model, resolved.model.config, few)
    assert {name: (row["limit"], row["cut"], row["prompts"]) for name, row in facts.items()} == {
        "tokenizer": (12, 0.25, 4),  # the positions of CLIP
        "tokenizer_2": (12, 0.25, 4),
        "tokenizer_3": (9, 0.25, 4),  # model.max_sequence_length
    }
    assert facts["tokenizer_3"]["longest"] >= 31, "30 words and the end"
    assert calls == []
    none = RunPrompts(listed=[], train=[], evaluated=[], name="no prompts", source="")
    assert text_lengths(model, resolved.model.config, none) == {}
