"""The filmstrip of the user's own prompts."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrl import shapes
from flowrl.apps.gallery import build
from flowrl.core.errors import ConfigError
from tests.apps.folders import EVIL, Page, make_run


def add_previews(folder: Path, prompts: dict[str, list[str]], size: int = 32) -> None:
    """Images of the user's own prompts, at the evaluations of `prompts`: tag -> prompts."""
    for tag, texts in prompts.items():
        (folder / "previews" / tag).mkdir(parents=True)
        for p, text in enumerate(texts):
            scene = shapes.split("train")[sum(map(ord, text + tag)) % 50]
            pixels = 255 * shapes.draw(scene, np.random.default_rng(p), size).clip(0, 1)
            Image.fromarray(np.rint(pixels).astype(np.uint8).transpose(1, 2, 0)).save(
                folder / "previews" / tag / f"{p:05d}-0.png"
            )
        iteration = int(tag.partition("-")[2] or (40 if tag == "tuned" else 0))
        record = {"tag": tag, "iteration": iteration, "prompts": texts}
        (folder / "previews" / f"{tag}.json").write_text(json.dumps(record))


def test_your_own_prompts_have_a_strip_which_says_where_one_was_not_drawn(tmp_path):
    folder = make_run(tmp_path / "run", num_prompts=2, iterations=40)
    assert "Your prompts" not in Page(build([folder])).text("h2")
    add_previews(folder, {"base": ["my dog", EVIL], "tuned": [EVIL, "my cat"]})
    page = Page(build([folder]))
    alts = [value for name, value in page.attributes if name == "alt"]
    for alt in ("base: my dog", "tuned (40): my cat", f"base: {EVIL}", f"tuned (40): {EVIL}"):
        assert alts.count(alt) == 1
    # Three prompts at base, iteration 20 (before the option was set) and tuned.
    assert page.texts["span"].count("not drawn") == 5
    (folder / "previews" / "base.json").write_text('{"prompts": 3}')
    with pytest.raises(ConfigError, match="the report leaves these images out"):
        build([folder])
