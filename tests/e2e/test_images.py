"""Prompt records with pictures through the real loop."""

import json
from functools import wraps
from pathlib import Path

import pytest

from tests import tiny_pipelines as tiny
from tests.e2e.conftest import digest, train, with_images
from tests.e2e.test_bad_input import command

REWARD = """
from pathlib import Path

def score(images, prompts, metadata):
    names = [[Path(name).name for name in record["images"]] for record in metadata]
    assert all(name == [prompt + ".png"] for name, prompt in zip(names, prompts)), names
    return images.mean(dim=(1, 2, 3))
"""


@pytest.fixture
def records(place: Path) -> Path:
    """The folder of a run, with `pictures.jsonl`: two prompts with a picture each."""
    return with_images(place, "pictures.jsonl", 12, 20, REWARD)


def test_a_pipeline_with_pictures_is_trained_and_its_rewards_find_them(records: Path):
    tiny.make("flux_kontext").save_pretrained(records / "kontext")
    summary = train(
        "iterations=2",
        "model={name: generic, path: ./kontext, height: 16, width: 16, lora: {rank: 2, alpha: 4}, "
        f"call: {{max_sequence_length: {tiny.TOKENS}, _auto_resize: false}}}}",
        "data={prompts: pictures.jsonl, eval_prompts: pictures.jsonl}",
        "eval={num_inference_steps: 2, batch_size: 2}",
    )
    assert summary["status"] == "finished"
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["reward/masked"] for row in rows] == [0, 0]
    assert all(row["grad/norm"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["diffusion_nft", "awm"])
def test_edits_are_learned_from_the_images_tokens_alone_at_the_embedded_guidance_of_the_rollout(
    records: Path, monkeypatch, name: str
):
    """Edit-R1 (arXiv 2510.16888): the source's tokens lengthen the sequence, and no loss sees what becomes of them."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    tiny.make("flux_kontext").save_pretrained(records / "kontext")
    forward, scales, graded = FluxTransformer2DModel.forward, set[float](), list[bool]()

    def run(title: str, spoilt: float | None) -> None:
        @wraps(forward)
        def watched(self, *args, **kwargs):
            (made,) = forward(self, *args, **kwargs)
            of_source = kwargs["img_ids"][:, 0] == 1
            assert of_source.any()
            scales.update(kwargs["guidance"].tolist())
            graded.append(made.requires_grad)
            return (made if spoilt is None else made.masked_fill(of_source[:, None], spoilt),)

        monkeypatch.setattr(FluxTransformer2DModel, "forward", watched)
        train(
            f"name={title}",
            "iterations=2",
            "model={name: generic, path: ./kontext, height: 16, width: 16, lora: {rank: 2, alpha: 4}, "
            f"call: {{max_sequence_length: {tiny.TOKENS}, _auto_resize: false}}}}",
            "data={prompts: pictures.jsonl, eval_share: 0}",
            "rollout.guidance_scale=2.5",
            "rollout.sampler=null",
            f"algorithm={{name: {name}, guidance_scale: 2.5, kl: {{coef: 0.01}}, times: {{name: subset, count: 1}}}}",
            "eval={num_inference_steps: 2, batch_size: 2}",
        )

    run("plain", None)
    assert scales == {2.5}, "policy, old and reference alike"
    assert {False, True} == set(graded)
    run("spoilt", 1e4)
    assert digest("plain", 2) == digest("spoilt", 2)
    assert digest("plain", 2) != digest("plain", 1)


@pytest.mark.slow
def test_a_native_adapter_refuses_pictures_before_training(records: Path, monkeypatch, capsys):
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", "data.prompts=pictures.jsonl")
    assert code == 2, printed
    assert "data.prompts: prompt 1, 'red', has 1 image(s), but StableDiffusion3Pipeline takes none" in printed
    (records / "blue.png").write_text("broken")
    code, printed = command(monkeypatch, capsys, "train", "run.yaml", "data.prompts=pictures.jsonl")
    assert code == 2
    assert "line 2: 'blue.png' cannot be read as an image" in printed
