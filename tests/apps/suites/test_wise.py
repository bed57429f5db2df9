"""WISE: two protocols by their files, their weights, their evaluators' results."""

import json

import pytest

from flowrl.apps.suites import wise
from flowrl.core.errors import ConfigError
from flowrl.evaluation.suite import Row
from tests.apps.suites.written import means
from tests.tiny_suites import wise as tiny


def test_the_files_tell_the_protocols_apart_with_the_limits_of_their_categories(tmp_path):
    first, second = (wise.items(tiny.prompts(tmp_path, verified=verified)) for verified in (False, True))
    assert [item.id for item in first] == ["1", "401", "568", "701", "801", "901"]
    assert [item.id for item in second] == ["1", "401", "521", "641", "761", "881"]
    for items, name in ((first, "wise_legacy"), (second, "wise_verified")):
        assert [item.tags[0] for item in items] == list(wise.WEIGHTS["legacy"])
        assert wise.rewards(items) == ({"name": "vlm_judge", "rubric": name},)
        assert items[0].metadata["explanation"] == "it is 1"
    file = tmp_path / "data_verified" / "natural_science_verified.json"
    assert [item.tags[0] for item in wise.items(file)] == ["biology", "physics", "chemistry"]
    counts = {
        protocol: [len([n for n in range(1, 1001) if wise.category(n, protocol) == name]) for name in weights]
        for protocol, weights in wise.WEIGHTS.items()
    }
    assert counts == {"legacy": [400, 167, 133, 100, 100, 100], "verified": [400, 120, 120, 120, 120, 120]}
    for weights in wise.WEIGHTS.values():
        assert sum(weights.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["mine.json", "my_verified_list.json"])
@pytest.mark.parametrize(("last", "protocol"), [(("time", 560), "legacy"), (("Space", 560), "verified")])
def test_categories_tell_the_protocols_apart_whatever_the_file_is_called(tmp_path, name, last, protocol):
    """560 is of time in the first protocol, and of space in the verified one."""
    rows = [("Cultural knowledge", 1), ("Physical Knowledge", 790), last]
    rows = [row for row in rows if protocol == "verified" or row[1] != 790]
    records = [{"Prompt": "p", "Explanation": "e", "Category": kind, "prompt_id": number} for kind, number in rows]
    (tmp_path / name).write_text(json.dumps(records))
    assert wise.protocol_of(wise.items(tmp_path / name)) == protocol


@pytest.mark.parametrize("prefix", ["", "vlm_judge_"])
def test_the_wiscore_weighs_ratings_and_categories(tmp_path, prefix):
    items = wise.items(tiny.prompts(tmp_path))
    ratings = [(2, 1, 0), (0, 2, 2), (1, 1, 1), (2, 2, 2), (0, 0, 0), (2, 0, 1)]
    names = ("consistency", "realism", "aesthetic_quality")
    rows = [
        Row(item.id, item.text, 0, scores={f"{prefix}{name}": float(v) for name, v in zip(names, given, strict=True)})
        for item, given in zip(items, ratings, strict=True)
    ]
    table = wise.aggregate(rows, items)
    own = [(0.7 * c + 0.2 * r + 0.1 * a) / 2 for c, r, a in ratings]
    weights = (0.4, 0.167, 0.133, 0.1, 0.1, 0.1)
    assert list(means(table).values())[:6] == pytest.approx(own)
    assert means(table)["WiScore"] == pytest.approx(sum(w * value for w, value in zip(weights, own, strict=True)))
    assert table.headline == "WiScore"


def test_a_failed_judgement_is_missing_and_not_999():
    assert wise.wiscore({"consistency": 999.0, "realism": 1.0, "aesthetic_quality": 1.0}) is None
    assert wise.wiscore({"consistency": None, "realism": 1.0, "aesthetic_quality": 1.0}) is None


def test_verified_is_one_binary_score_under_its_own_name(tmp_path):
    items = wise.items(tiny.prompts(tmp_path, verified=True))
    rows = [
        Row(item.id, item.text, 0, scores={"vlm_judge": v, "vlm_judge_score": v})
        for item, v in zip(items, (1.0, 0.0, 1.0, 1.0, 0.0, 0.0), strict=True)
    ]
    table = wise.aggregate(rows, items)
    assert (table.headline, means(table)["WISE_Verified"]) == ("WISE_Verified", pytest.approx(0.4 + 0.12 + 0.12))
    part = wise.aggregate(rows[:2], items[:2])
    assert means(part)["WISE_Verified of 2 categories"] == pytest.approx(0.4 / 0.52)


def test_the_evaluators_results_come_back_and_those_of_the_other_protocol_are_refused(tmp_path):
    items = wise.items(tiny.prompts(tmp_path, verified=True))
    folder = tmp_path / "Results"
    folder.mkdir()
    file = folder / "cultural_common_sense_scores_results.jsonl"
    file.write_text("".join(json.dumps({"prompt_id": int(item.id), "score": 1}) + "\n" for item in items))
    assert wise.read_results(folder, items)["521", 0] == {"score": 1.0}
    legacy = {"prompt_id": 1, "consistency": 1, "realism": 999, "aesthetic_quality": 2}
    file.write_text(json.dumps(legacy))
    with pytest.raises(ConfigError, match=r"needs the numbers score of the verified protocol.*same protocol"):
        wise.read_results(folder, items)
    first = wise.items(tiny.prompts(tmp_path))
    assert wise.read_results(file, first)["1", 0] == {"consistency": 1.0, "realism": None, "aesthetic_quality": 2.0}
    file.unlink()
    with pytest.raises(ConfigError, match=r"holds no \*results.jsonl"):
        wise.read_results(folder, first)


def test_bad_prompts_are_named(tmp_path):
    place = tiny.prompts(tmp_path)
    (place / "natural_science.json").unlink()
    with pytest.raises(ConfigError, match=r"natural_science\.json: there is no such file"):
        wise.items(place)
    with pytest.raises(ConfigError, match="--samples 1"):
        wise.layout(wise.items(tiny.prompts(tmp_path, verified=True))[0], 1)
