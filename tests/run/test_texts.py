"""Embeddings of a run: in files those of memory, shared by processes, found by the next run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.config.load import load_config, resolve
from flowrl.core.types import Condition
from flowrl.data.prompts import Prompt
from flowrl.models.sd3 import Sd3
from flowrl.run.texts import embedded
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
