"""Images that a score selected (`flowrl sample --best-of`) are in no evaluation, whoever copies them there."""

import pytest
import torch

from flowrl.apps.suites.running.folder import ResultsFolder
from flowrl.core.errors import ConfigError
from flowrl.evaluation import moved, signs
from flowrl.evaluation.suite import Item
from flowrl.media import media

CHOSEN = {media.SELECTED: {"how": "best of 4 by jpeg"}}


def test_no_reader_of_an_evaluation_takes_one(tmp_path):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    for folder in (base, tuned):
        for number in range(2):
            note = CHOSEN if (folder, number) == (tuned, 1) else {}
            media.write(torch.rand(3, 8, 8), folder / f"{number:05d}-0", note)
    # The report, the votes, the trackers and the previews look for a file in this way too.
    assert media.find(base / "00001-0")
    assert media.find(tuned / "00001-0") is None
    assert [one.stem for one, _ in moved.saved_pairs(base, tuned, range(2))] == ["00000-0"]
    assert signs.signs_of(tuned, [1], 1) is None
    suite, item = ResultsFolder(tmp_path / "suite"), Item("a", "a prompt")
    media.write(torch.zeros(3, 8, 8), suite.image(item, 0).with_suffix(""), CHOSEN)
    with pytest.raises(ConfigError, match=r"a-000\.png was selected \(best of 4 by jpeg\)"):
        suite.read(item, 0)
