"""One image, one score: in training, in an evaluation, for pairs, and of the saved file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowrl.commands._scored import scored
from flowrl.evaluation.evaluator import Setting
from flowrl.media import media
from flowrl.run.collector import Collector
from flowrl.run.session import Session
from tests.e2e.test_bad_input import command

# Image by image: the sum over a batch may differ in its last bit with the size of the batch.
BRIGHTNESS = "def score(images, prompts, metadata):\n    return [float(image.mean()) for image in images]\n"
REWARDS = "rewards=[{name: shapes, outputs: {shapes_partial: 1}}, {path: brightness.py}]"


def of_files(session: Session, files: list[Path], prompts: list[str]) -> dict[str, list[Any]]:
    """What `flowrl score` says of saved images."""
    assert isinstance(session.collector, Collector)
    scorer = session.collector.scorer
    samples = [(file, text, {}) for file, text in zip(files, prompts, strict=True)]
    lines = [values for _, values in scored(scorer, [samples])]
    return {name: [line[name] for line in lines] for name in scorer.outputs}


def test_training_and_an_evaluation_score_what_the_files_hold(place):
    """The rounding of the file is that of the score: without it, brightness would move in the sixth digit."""
    (place / "brightness.py").write_text(BRIGHTNESS)
    session = Session("run.yaml", REWARDS, "eval.samples_per_prompt=3", "eval.batch_size=2", "eval.save_images=null")
    rollout = session.roll_out(1)
    assert isinstance(session.collector, Collector)
    numbers = session.parts.data.source.draw(1)
    texts = [session.collector.source.prompts[k].text for k in numbers for _ in range(4)]
    images = session.images(rollout)
    files = [media.write(image, place / "drawn" / f"{i}") for i, image in enumerate(images)]
    assert torch.equal(torch.stack([media.read(file) for file in files]), images)
    found = of_files(session, files, texts)
    assert {name: table.flatten().tolist() for name, table in rollout.raw.items()} == {
        name: torch.tensor(values).tolist() for name, values in found.items()
    }
    assert len(set(found["brightness"])) == len(files)

    evaluator = replace(session.parts.evaluator, folder=place)
    evaluation = evaluator(Setting("base", 0, 1.0, 3))
    files = [place / "eval" / "base" / f"{slot:05d}-{k}.png" for slot in range(4) for k in range(3)]
    found = of_files(session, files, [text for text in evaluation.prompts for _ in range(3)])
    for name, table in evaluation.scores.items():
        assert torch.tensor(table).flatten().tolist() == torch.tensor(found[name]).double().tolist()


def test_the_scores_of_a_pair_are_those_of_its_files(place, monkeypatch, capsys):
    (place / "brightness.py").write_text(BRIGHTNESS)
    code, said = command(monkeypatch, capsys, "pairs", "run.yaml", REWARDS, "--out", "pairs", "--count", "2")
    assert code == 0, said
    lines = [json.loads(line) for line in (place / "pairs" / "pairs.jsonl").read_text().splitlines()]
    assert lines
    session = Session("run.yaml", REWARDS)
    for member in ("chosen", "rejected"):
        files = [place / "pairs" / line[member] for line in lines]
        found = of_files(session, files, [line["prompt"] for line in lines])
        assert found["brightness"] == [line[f"{member}_scores"]["brightness"] for line in lines]
