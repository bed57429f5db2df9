"""A model that makes NaN or inf is found before any reward is asked, with what to lower, on all processes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.config.load import load_config
from flowrl.config.schema import EvalConfig
from flowrl.core.errors import Diverged, Overshot
from flowrl.evaluation.evaluator import Evaluator, Setting
from flowrl.models.base import ModelConfig
from flowrl.scoring.scorer import Scorer
from flowrl.training.divergence import Health, remedy
from tests.scoring.test_overlap import PROMPTS, brightness, draw, entry
from tests.toys import ToyAdapter, sampling_of

NAN, INF = float("nan"), float("inf")


class Spoiled(ToyAdapter):
    """Decodes the rows at `places` of every batch to `value`, or gives them such latents."""

    def __init__(self, value: float, *places: int, latents: bool = False) -> None:
        super().__init__()
        self.value, self.places, self.latents = value, list(places), latents

    def predict(self, x, timestep, cond, guidance_scale):
        found = super().predict(x, timestep, cond, guidance_scale)
        if self.latents:
            found[[k for k in self.places if k < len(found)]] = self.value
        return found

    def decode(self, latents):
        found = super().decode(latents).contiguous()
        if not self.latents:
            found[[k for k in self.places if k < len(found)]] = self.value
        return found


def blamed(images, prompts, metadata):
    assert all(bool(image.isfinite().all()) for image in images), "a reward gets an image that is not finite"
    return brightness(images, prompts, metadata)


def advice(**known: bool) -> tuple[type[Diverged], str]:
    return Diverged, f"lower the rate {known}"


def rolled_out(adapter, overlap: bool):
    return draw(Scorer([entry(blamed, overlap=overlap)]), adapter=adapter, iteration=3, remedy=advice)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("value", "latents", "words"),
    [
        (NAN, False, "images are NaN in iteration 3"),
        (INF, False, "images are inf in iteration 3"),
        (NAN, True, "latents, and so its images, are NaN in iteration 3"),
        (INF, True, "latents, and so its images, are"),
    ],
)
def test_a_rollout_ends_before_it_is_scored(value, latents, words, overlap):
    with pytest.raises(Diverged, match=rf"{words}.*12 of 12.*lower the rate.*'trained': True") as left:
        rolled_out(Spoiled(value, 0, 1, 2, 3, latents=latents), overlap)
    assert left.value.exit_code == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("latents", [False, True])
def test_a_few_samples_are_masked_and_the_others_keep_their_scores(latents, overlap):
    found = rolled_out(Spoiled(INF, 1, latents=latents), overlap)
    whole = draw(Scorer([entry(brightness)]))
    bad = torch.arange(12) % 4 == 1
    assert found.scores.raw["mine"].isnan().tolist() == bad.tolist()
    assert found.scores.failures == 3
    assert torch.isfinite(whole.scores.raw["mine"]).all()


def evaluator(adapter, folder: Path, *, scored: bool = True, save_images: int = 0) -> Evaluator:
    return Evaluator(
        sampling=sampling_of(adapter, PROMPTS, remedy=advice),
        scorer=Scorer([entry(blamed)]) if scored else None,
        folder=folder,
        prompts=tuple(PROMPTS),
        options=EvalConfig(samples_per_prompt=2, batch_size=2, save_images=save_images),
        seed=0,
    )


@pytest.mark.parametrize("scored", [True, False])
def test_an_evaluation_ends_without_scores_and_without_a_reward_too(tmp_path, scored):
    asked = evaluator(Spoiled(NAN, 0, 1), tmp_path, scored=scored)
    with pytest.raises(Diverged, match=r"images are NaN after iteration 4 \(6 of 6 samples\): lower the rate"):
        asked(Setting("tuned", 4, 1.0, 2))
    with pytest.raises(Diverged, match=r"NaN before any update.*'trained': False"):
        asked(Setting("base", 0, 1.0, 2))
    assert not (tmp_path / "eval" / "tuned.json").exists()


def test_an_evaluation_with_a_few_of_them_has_no_score_and_no_file_for_these(tmp_path):
    found = evaluator(Spoiled(NAN, 1), tmp_path, save_images=2)(Setting("tuned", 4, 1.0, 2))
    assert np.isnan(found.scores["mine"]).tolist() == [[False, True]] * 3
    assert sorted(file.name for file in tmp_path.rglob("*.png")) == ["00000-0.png", "00001-0.png"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [("trained", "learning_rate"), ("untrained", "model.dtype"), ("decoder", "model.vae_precision")],
)
def test_the_remedy_names_options_with_their_values(config, expected):
    run, model = load_config("configs/quickstart.yaml", ["optim.learning_rate=0.5"]), ModelConfig(path="x")
    kind, found = remedy(model, run.optim, 1234.5, trained=config == "trained", in_decoder=config == "decoder")
    assert expected in found
    assert kind is (Overshot if config == "trained" else Diverged)
    assert ("1.23e+03" in found and "0.5" in found) == (config == "trained")


def test_no_picture_hides_infinite_latents():
    health, images = Health(), torch.rand(3, 3, 2, 2)
    assert health.check(torch.zeros(3, 4), images).tolist() == [True, True, True]
    latents = torch.tensor([[0.0], [INF], [-INF]])
    assert health.check(latents, images).tolist() == [True, False, False]
    assert (health.count, health.spoiled, health.diverged) == (6, 2, False)
    assert "are inf " in health.message("x")
