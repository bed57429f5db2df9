"""Set measures of saved images: equal folders, other ones, and what is refused."""

import re

import pytest
import torch

from flowrl.apps import set_measures
from flowrl.core.errors import ConfigError
from flowrl.media import media


def test_equal_sets_cover_each_other_the_base_has_its_own_row_and_selected_images_are_refused(tmp_path):
    random = torch.Generator().manual_seed(0)
    for name in ("base", "tuned"):
        for number in range(20):
            for seed in range(2):
                image = torch.rand(3, 8, 8, generator=random) * (1.0 if name == "base" else 0.2)
                media.write(image, tmp_path / name / f"{number:05d}-{seed}")
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    head, first, second, inside = set_measures.lines(base, tuned, "grids")
    assert "20 saved images, features: grids" in head
    kids = [float(re.findall(r"KID (\S+),", line)[0]) for line in (first, second)]
    assert kids[0] > 20 * abs(kids[1])
    assert "precision 0.000" in first
    spread = [float(number) for number in re.findall(r"[0-9]\.[0-9]+", inside)]
    assert inside.startswith("2 images of one prompt, tuned beside base: mean Vendi ")
    assert all(1 < number < 2 for number in spread), spread  # two images, neither equal nor orthogonal
    learned = set_measures.lines(base, tuned, "tiny-clip")
    assert "20 saved images, features: tiny-clip" in learned[0]
    assert learned[1] != first
    with pytest.raises(ConfigError, match="has 0 images of seed 0, and 16 are needed"):
        set_measures.lines(tmp_path, tuned, "grids")
    media.write(torch.zeros(3, 8, 8), tuned / "00003-0", {"selected": {"how": "best of 4 by jpeg"}})
    with pytest.raises(ConfigError, match=re.escape("was selected (best of 4 by jpeg)")):
        set_measures.lines(base, tuned, "grids")


def test_fid_and_a_run_without_a_base_are_refused_with_the_reason(tmp_path):
    set_measures.require(None, tmp_path)
    with pytest.raises(ConfigError, match="is no run folder with the images of its base"):
        set_measures.require("grids", tmp_path)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "base.json").touch()
    set_measures.require("grids", tmp_path)
    with pytest.raises(ConfigError, match="below 10,000 images its bias hides any effect"):
        set_measures.require("FID", tmp_path)
