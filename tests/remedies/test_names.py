"""Remedies of messages about prompts, files and names."""

from pathlib import Path

import pytest

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.evaluation.held_out import run_prompts
from tests.remedies import follows


@follows("flowrl/data/prompt_sources.py:load_prompts")
def test_a_column_of_another_name_is_set_as_the_message_says(tmp_path: Path) -> None:
    (tmp_path / "p.tsv").write_text("Prompt\tCategory\na cat\tAnimals\n")
    words = [f"data.prompts={tmp_path / 'p.tsv'}", "data.eval_prompts=null"]
    with pytest.raises(ConfigError) as refused:
        run_prompts(resolve(load_config("quickstart", words)).run, own=False)
    (remedy,) = refused.value.remedies
    assert str(remedy) == "data.prompt_column=Prompt"
    found = run_prompts(resolve(load_config("quickstart", [*words, *str(remedy).split()])).run, own=False)
    assert [prompt.text for prompt in found.train] == ["a cat"]
