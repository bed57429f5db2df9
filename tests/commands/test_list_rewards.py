"""`flowrl list rewards`: the cards, without loading a weight."""

import pytest

from flowrl.commands import list as listing
from flowrl.config.load import load_config
from flowrl.core import registry
from flowrl.core.errors import ConfigError
from flowrl.reward import Card


def test_every_reward_is_listed_with_its_card(capsys):
    listing.command("rewards")
    printed = " ".join(capsys.readouterr().out.split())
    for name in registry.names("rewards"):
        card = registry.load("rewards", name).CARD
        assert name in printed
        assert card.outputs[0] in printed
        assert card.licence.split()[0] in printed
    assert "0 to 0.6931" in printed


def test_recipes_are_listed_by_the_names_that_train_takes(capsys):
    listing.command("recipes")
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("quickstart", "lab/awm", "sd3/flow_grpo-pickscore"))
    assert "AWM on tiny-sd3 with the shapes verifier" in printed
    for name in ("quickstart", "configs/quickstart.yaml", "lab/awm"):
        assert load_config(name).name
    with pytest.raises(ConfigError, match=r"did you mean 'quickstart'\? `flowrl list recipes`"):
        load_config("quikstart")


def test_one_reward_is_shown_whole_with_its_options(capsys, tmp_path):
    listing.command("rewards", "jpeg")
    printed = capsys.readouterr().out
    assert printed.startswith("Size of the image as a JPEG")
    for line in ("higher_is_better: False", "low: 0.0", "source: DDPO, arXiv:2305.13301", "quality: 95"):
        assert f"  {line}\n" in printed
    file = tmp_path / "mine.py"
    file.write_text("def score(images, prompts, metadata):\n    return [0.0] * len(prompts)\n")
    with pytest.raises(ConfigError, match="declares no CARD"):
        listing.command("rewards", str(file))


def test_marks_of_a_type_are_none_of_its_words(capsys):
    listing.command("rewards", "remote")
    assert "text or null. File that holds the bearer token." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("bounds", "shown"),
    [({}, "any"), ({"low": -2.5}, "-2.5 and up"), ({"high": 3}, "up to 3"), ({"low": 0, "high": 1}, "0 to 1")],
)
def test_a_range_is_told_in_words(bounds, shown):
    assert listing.span(Card(outputs=("a",), **bounds)) == shown
