"""Best against best on a real pipeline: what the search sees, the paired difference, resumption, title, `eval`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flowrl.commands._plan_data import data_here, evaluations
from flowrl.commands.eval import command
from flowrl.commands.train import AFTER
from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.evaluation.results import Evaluation
from flowrl.run import best_guidance
from flowrl.run.session import Session
from flowrl.run.trainer import Trainer
from flowrl.statistics import paired
from tests.apps.folders import Page
from tests.e2e.conftest import digest, inside, train
from tests.e2e.test_preferences import SCENE, make_pairs

# Tells each batch that it scored: captions, and the values, which CFG moves.
CONTRAST = """
import json
from pathlib import Path

def score(images, prompts, metadata):
    values = images.std(dim=(1, 2, 3))
    with Path("told.jsonl").open("a") as file:
        file.write(json.dumps([list(prompts), values.tolist()]) + chr(10))
    return values
"""
TRAINED = ["a red circle", "a red circle", "a blue square", "a green triangle", "a red square", "a blue circle"]
HELD_OUT = ["a green circle", "a blue square", "a green square"]
FIRST = ["a red circle", "a blue square", "a green triangle"]
SCALES = (1.0, 2.0, 4.0)
WORDS = (
    "data={prompts: trained.txt, eval_prompts: held.txt}",
    "rewards=[{path: contrast.py}]",
    "eval={batch_size: 8, samples_per_prompt: 2, every: 1, best_guidance: [2.0, 4.0, 1.0]}",
)
BEST = ("base_best_guidance", "tuned_best_guidance", "difference_best_guidance")


def prepare(place: Path) -> None:
    (place / "contrast.py").write_text(CONTRAST)
    (place / "trained.txt").write_text("\n".join(TRAINED))
    (place / "held.txt").write_text("\n".join(HELD_OUT))


def summary_of(run: str) -> dict[str, Any]:
    return json.loads(Path(f"runs/{run}/summary.json").read_text())


def told() -> list[tuple[str, float]]:
    """(caption, value) of all that was scored."""
    batches = map(json.loads, Path("told.jsonl").read_text().splitlines())
    return [pair for prompts, values in batches for pair in zip(prompts, values, strict=True)]


def noting(patch: pytest.MonkeyPatch) -> list[str]:
    """The tags of the evaluations that are made from now on."""
    drawn: list[str] = []
    evaluate = Session.evaluate

    def noted(session: Session, tag: str = "evaluation", **options: Any) -> Evaluation:
        drawn.append(tag)
        return evaluate(session, tag, **options)

    patch.setattr(Session, "evaluate", noted)
    return drawn


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A run of one iteration, gone on with for a second one with the other title; told: its first summary, its tags."""
    place = tmp_path_factory.mktemp("best")
    with inside(place), pytest.MonkeyPatch.context() as patch:
        prepare(place)
        patch.setattr(best_guidance, "CAPTIONS", len(FIRST))
        drawn = noting(patch)
        trainer = Trainer(resolve(load_config("run.yaml", [*WORDS, "iterations=1"])))
        facts: dict[str, Any] = {"first": trainer.fit(), "search": trainer.report.search}
        facts |= {"drawn": list(drawn), "told": told()}
        drawn.clear()
        facts["second"] = train(*WORDS, "iterations=2", "eval.verdict=best", resume=True, after=AFTER)
        facts["resumed"] = list(drawn)
        yield facts


def searched(model: str) -> dict[float, Evaluation]:
    files = Path("runs/run/guidance").glob(f"{model}-search-*.json")
    return {each.guidance_scale: each for each in map(Evaluation.load, files)}


def test_the_search_is_on_the_first_training_captions_with_noise_of_its_own(run):
    for model in ("base", "tuned"):
        found = searched(model)
        assert sorted(found) == list(SCALES), "the list, and the recipe's own"
        assert {each.prompts for each in found.values()} == {tuple(FIRST)}
    # The second caption is a judged one too, at the same scale, by the same weights.
    judged = Evaluation.load(Path("runs/run/eval/base.json"))
    own = searched("base")[1.0].scores["contrast"][FIRST.index("a blue square")]
    others = judged.scores["contrast"][HELD_OUT.index("a blue square")]
    assert not set(own.tolist()) & set(others.tolist())
    # Captions that are not among the first ones were trained on and never searched on.
    assert {"a red circle", "a green triangle"} <= {caption for caption, _ in run["told"]}


def test_each_is_evaluated_at_the_scale_that_its_search_preferred(run):
    summary, other = run["second"], 0
    for model in ("base", "tuned"):
        means = {scale: each.scores["contrast"].mean() for scale, each in searched(model).items()}
        best = max(means, key=lambda scale: means[scale])
        assert summary[f"{model}_best_guidance"]["guidance_scale"] == best
        assert summary["guidance_search"][model] == {f"{s:g}": pytest.approx(m) for s, m in means.items()}
        other += best != 1.0
    assert other, "of a search that changes nothing nothing is tested"


def test_the_paired_difference_is_that_by_hand(run):
    tables = {}
    for model in ("base", "tuned"):
        scale = run["second"][f"{model}_best_guidance"]["guidance_scale"]
        tag = model if scale == 1.0 else f"{model}-guidance-{scale:g}"
        found = Evaluation.load(Path(f"runs/run/eval/{tag}.json"))
        assert (found.prompts, found.guidance_scale) == (tuple(HELD_OUT), scale)
        tables[model] = found.scores["contrast"]
    change = run["second"]["difference_best_guidance"]["contrast"]
    assert change["mean"] == pytest.approx(np.mean(tables["tuned"] - tables["base"]))
    assert change == paired.difference(tables["base"], tables["tuned"], np.arange(3))
    assert change["low"] < change["mean"] < change["high"]
    assert change != run["second"]["difference"]["contrast"]


def test_a_resumed_run_searches_for_the_trained_model_alone(run):
    assert run["drawn"][:4] == ["base", "base-search-1", "base-search-2", "base-search-4"]
    assert [tag for tag in run["resumed"] if tag.startswith("base")] == []
    assert [f"tuned-search-{scale:g}" for scale in SCALES] == [t for t in run["resumed"] if "search" in t]
    assert run["second"]["base_best_guidance"] == run["first"]["base_best_guidance"]
    assert {Evaluation.load(file).iteration for file in Path("runs/run/guidance").glob("tuned-*")} == {2}


def test_captions_that_are_evaluated_too_are_counted_and_said(run):
    how = "chosen by contrast on 3 training captions, 1 of which are evaluated too, with other noise"
    assert run["second"]["guidance_search"]["evaluated_too"] == 1
    assert run["second"]["guidance_search"]["how"] == how
    assert how in Path("runs/run/train.log").read_text()
    assert how in Page(Path("runs/run/gallery/index.html")).text()


def test_the_images_of_the_search_are_in_the_plan_and_in_the_time_that_is_left(run):
    trained = [tag for tag in run["drawn"] if tag.startswith("tuned-")]
    images = sum(2 * len(FIRST if "search" in tag else HELD_OUT) for tag in trained)
    assert run["search"].coming == images == 2 * (3 * 3 + 3)
    resolved = resolve(load_config("run.yaml", [*WORDS, "eval.every=0"]))
    planned = evaluations(resolved, data_here(resolved))
    assert "of base and result 3 guidance scales on 3 training captions, and the best one" in planned
    assert f"; {2 * 2 * len(HELD_OUT) + 2 * images} images of 3 steps" in planned
    without = replace(resolved, run=replace(resolved.run, eval=replace(resolved.run.eval, best_guidance=[])))
    assert "guidance" not in evaluations(without, data_here(without))


def test_the_title_is_that_of_the_verdict_in_terminal_report_and_card(run):
    lines = Path("runs/run/train.log").read_text().splitlines()
    best, same = (
        [k for k, line in enumerate(lines) if words in line] for words in ("base with its best CFG", "win rate by")
    )
    assert same[0] < best[0] < best[1] < same[1], "verdict: same at the first end, best at the second"
    each = "with each model at its best guidance"
    page, card = Page(Path("runs/run/gallery/index.html")), Path("runs/run/adapter/README.md").read_text()
    assert each in page.text("h1")
    assert "At the same guidance contrast" in page.text("span")
    bullets = [line for line in card.splitlines() if line.startswith("- Contrast") or "same guidance contrast" in line]
    assert each in bullets[0]
    assert bullets[1].startswith("- At the same guidance contrast")
    assert "difference, each at its best guidance |" in card
    told = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert told == round(run["second"]["tuned_best_guidance"]["contrast"]["mean"], 6)


def test_eval_of_the_run_says_the_same_as_its_end_and_searches_for_a_base_that_is_missing(
    run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    ends = [line.split("] ")[-1] for line in Path("runs/run/train.log").read_text().splitlines() if "best CFG" in line]
    Path("runs/run/guidance/base-search-2.json").unlink()
    drawn = noting(monkeypatch)
    command("runs/run", [])
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if "its best CFG" in line]
    assert len(lines) == 3
    assert all(any(end.endswith(line) for end in ends) for line in lines)
    assert printed.index(lines[0]) < next(k for k, line in enumerate(printed) if line.startswith("contrast: "))
    assert "base-search-2" in drawn
    assert not {"base", "base-search-1", "base-search-4"} & set(drawn)


def test_without_best_guidance_nothing_is_searched_and_no_number_moves(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(best_guidance, "captions", lambda *given: pytest.fail("captions are looked at"))
    found = train(*WORDS, "name=plain", "eval.best_guidance=[]", "iterations=2")
    assert not Path("runs/plain/guidance").exists()
    assert not {"tuned_best_guidance", "difference_best_guidance", "guidance_search"} & found.keys()
    assert found["base_best_guidance"] == found["base"] | {"guidance_scale": 1.0}
    same = ("base", "tuned", "difference", "win_rate", "sharpness", "moved")
    assert {key: found[key] for key in same} == {key: run["second"][key] for key in same}
    assert digest("plain", 2) == digest("run", 2)
    rows = [json.loads(line) for line in Path("runs/plain/metrics.jsonl").read_text().splitlines()]
    during = Evaluation.load(Path("runs/plain/eval/iteration-000001.json")).sharpness
    assert [row.get("eval/image_sharpness") for row in rows] == [pytest.approx(during.mean()), None]


def test_sharpness_stands_beside_the_bases_in_summary_and_report(run):
    base = Evaluation.load(Path("runs/run/eval/base.json")).sharpness
    assert run["second"]["sharpness"]["base"]["mean"] == pytest.approx(base.mean())
    assert f"the base's {base.mean():.4g}" in Page(Path("runs/run/gallery/index.html")).text("span")


def test_a_reward_that_cannot_judge_a_training_caption_is_refused_before_anything_is_drawn(place: Path):
    prepare(place)
    text = "import flowrl\n\nCARD = flowrl.Card(outputs=('known',), requires=('answer',))\n"
    (place / "known.py").write_text(
        f"{text}\n\ndef score(images, prompts, metadata):\n    return images.mean((1, 2, 3))\n"
    )
    (place / "held.jsonl").write_text(json.dumps({"prompt": "a green circle", "answer": 1}))
    make_pairs(place / "pairs", 2)
    words = (SCENE[0].replace("shapes:heldout", "held.jsonl"), *SCENE[1:], "algorithm={name: sft, kl: {coef: 0.1}}")
    words = (*words, "eval={rewards: [{path: known.py}], best_guidance: [2.0]}")
    with pytest.raises(ConfigError, match=r"eval.best_guidance.* captions of data.pairs: prompt 1.*'answer'") as raised:
        train(*words)
    assert [remedy.settings for remedy in raised.value.remedies] == [{"eval.best_guidance": []}]
    assert not list(Path("runs/run/eval").glob("*.json"))


def test_a_method_on_pairs_searches_on_their_captions(place: Path):
    make_pairs(place / "pairs", 3)
    words = [*SCENE[:3], "eval={rewards: [{path: brightness.py}], batch_size: 8, best_guidance: [2.0]}", *SCENE[4:]]
    found = train(*words, "algorithm={name: sft, kl: {coef: 0.1}}", "iterations=1")
    search = Evaluation.load(Path("runs/run/guidance/tuned-search-2.json"))
    assert search.prompts == tuple(f"a red circle {k}" for k in range(3))
    assert found["guidance_search"]["captions"] == 3
    assert found["difference_best_guidance"]["brightness"]["n"] == 2
