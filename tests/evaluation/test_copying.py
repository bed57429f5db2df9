"""The copy index: known distances, rendered edits, sources as pipelines fit them, evaluations, the words.

`python -m tests.evaluation.test_copying [COUNT]` prints the table of docs/gallery.md.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards._shapes.eye import detect_all
from flowrl.rewards.shapes_edit import in_cells, judge
from PIL import Image
from torch import Tensor

from flowrl import edited_shapes, shapes
from flowrl.data.prompts import Prompt
from flowrl.evaluation import copying
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.sources import Sources, distance, largest
from flowrl.media import media
from flowrl.media.eight_bits import eight_bit, unit_floats
from tests import tiny_pipelines as tiny
from tests.evaluation.test_evaluate import CPU, call, evaluator, record
from tests.native import entered
from tests.toys import OneOf, ToyAdapter

VAE = Path(__file__).resolve().parents[2] / "assets" / "tiny-sd3"


@cache
def vae() -> Any:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return AutoencoderKL.from_pretrained(VAE, subfolder="vae").eval()


@torch.no_grad()
def through_vae(images: Tensor, noise: float = 0.0) -> Tensor:
    """Images [B, 3, H, W] encoded and decoded, with noise of so many of the latents' std between; in 8 bits."""
    latents = vae().encode(2 * images - 1).latent_dist.mean
    drawn = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    decoded = vae().decode(latents + noise * latents.std() * drawn).sample / 2 + 0.5
    return unit_floats(eight_bit(decoded.clamp(0, 1)))


def rendered(pairs: list[edited_shapes.Pair], size: int = 32) -> tuple[Tensor, Tensor]:
    """(sources, results) [N, 3, H, W] in [0, 1]."""
    both = ([pair.source for pair in pairs], [pair.result for pair in pairs])
    first, second = (torch.from_numpy(np.stack([shapes.render(p, size) for p in side])).float() for side in both)
    return first, second


def drawn(count: int) -> list[edited_shapes.Pair]:
    """Pairs of all operations in turn."""
    rng, names = np.random.default_rng(0), edited_shapes.OPERATIONS
    return [edited_shapes.draw(names[k % len(names)], rng) for k in range(count)]


def near(images: Tensor, sources: Tensor, trips: Tensor) -> np.ndarray:
    """Whether each of [N] is a copy of its source by pixels."""
    return np.asarray([distance(*each) < copying.NEAR for each in zip(images, sources, trips, strict=True)])


def judged(pairs: list[edited_shapes.Pair], images: Tensor, sources: Tensor) -> np.ndarray:
    """The same by the judge."""
    found, old = (detect_all(each.numpy()) for each in (images, sources))
    size = images.shape[-2:]
    rows = zip(pairs, old, found, strict=True)
    return np.asarray([judge(p.edit, in_cells(a, *size), in_cells(b, *size)).unchanged for p, a, b in rows])


# ---- pixels


def test_it_is_the_largest_cell_in_units_of_the_round_trip():
    source = torch.full((3, 16, 24), 0.5)
    image, trip = source.clone(), source + 0.05
    image[:, 2:4, 3:6] = 0.8  # one cell of 2 x 3 pixels
    assert largest(image, source) == pytest.approx(0.3)
    assert distance(image, source, trip) == pytest.approx(6)
    image[:, 2:4, 3:5] = 0.5
    assert distance(image, source, trip) == pytest.approx(2)
    assert distance(source, source, trip) == 0
    assert distance(trip, source, source) == pytest.approx(0.05 * 2 * 255), "a perfect VAE: what 8 bits leave"


def test_copies_through_the_vae_are_copies_and_edits_are_not():
    pairs = drawn(56)
    sources, results = rendered(pairs)
    trips = through_vae(sources)
    for images in (sources, through_vae(trips), through_vae(sources, 0.1)):
        assert near(images, sources, trips).all()
    for images in (results, through_vae(results)):
        assert near(images, sources, trips).mean() <= 0.02
        assert not judged(pairs, images, sources).any()


def test_an_edit_of_a_sixteenth_of_the_image_is_no_copy_though_the_whole_image_hardly_changes():
    sources, results = rendered(drawn(16))
    old, new = tiled(sources, 4), tiled(torch.cat([results[:1], sources[1:]]), 4)
    trip = through_vae(old[None])[0]
    assert (new - old).abs().mean() < 2 * (trip - old).abs().mean()
    assert distance(new, old, trip) > copying.NEAR
    assert distance(trip, old, trip) == pytest.approx(1)


# ---- sources

EDITORS = ("flux_kontext", "flux_2_references", "flux_2_klein_references", "qwen_image_edit", "qwen_image_edit_plus")


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Noise; size is (width, height)."""
    levels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3))
    return Image.fromarray(levels.astype(np.uint8))


@pytest.mark.parametrize(
    "name", [n if tiny.IMAGED[n].fast else pytest.param(n, marks=pytest.mark.slow) for n in EDITORS]
)
def test_a_source_is_what_the_pipeline_gives_its_vae_at_the_size_of_a_sample(name, monkeypatch):
    model, side = entered(name), 16 + tiny.IMAGED[name].enlarged
    model.latent_shape()  # by images of its own
    given: list[Tensor] = []
    encode = model.pipeline.vae.encode
    monkeypatch.setattr(model.pipeline.vae, "encode", lambda x, *_, **__: given.append(x) or encode(x))
    found = model.source_of(picture((side, side)))
    assert found is not None
    assert found.shape == (2, 3, model.height, model.width)
    own = given[0].reshape(1, 3, *given[0].shape[-2:]) / 2 + 0.5
    if own.shape[-2:] == found.shape[-2:]:
        torch.testing.assert_close(found[:1], own)
    else:  # Qwen-Image-Edit has a million pixels
        assert (found[0].mean() - own.mean()).abs() < 0.02
    assert (found[0] - found[1]).abs().mean() > 0.01
    assert model.source_of(picture((2 * side, side))) is None, "another aspect ratio"


def test_a_model_of_videos_has_no_sources():
    for name in ("wan_image", "ltx_image", "wan_2_2_frame"):
        assert entered(name).source_of(picture((40, 40))) is None


class Copier(ToyAdapter):
    """Its pipeline gives the VAE what it is given, and the VAE adds 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def source_of(self, image: Any) -> Tensor:
        self.asked += 1
        pixels = media.pixels(image.resize((4, 4)))
        return torch.stack([pixels, (pixels + 0.1).clamp(0, 1)])

    def encode(self, prompts, images=None):
        return super().encode(prompts)


def test_a_source_is_fitted_once_and_several_or_a_video_have_no_distance(tmp_path):
    adapter, file = Copier(), tmp_path / "a.png"
    picture((4, 4)).save(file)
    found = Sources(adapter)
    levels, alone = media.read_levels(file), (str(file),)
    assert math.isnan(found.distance(levels, alone)), "not fitted yet"
    for _ in range(3):
        found.fit([alone, (), alone, (str(file), "nowhere.png")])
    assert adapter.asked == 1
    assert found.distance(levels, alone) == 0
    assert found.distance(255 - levels, alone) > copying.NEAR
    assert math.isnan(found.distance(levels, ()))
    assert math.isnan(found.distance(levels, alone * 2))
    assert math.isnan(found.distance(levels[None], alone))
    nothing = Sources(ToyAdapter())
    nothing.fit([alone])
    assert math.isnan(nothing.distance(levels, alone))


# ---- evaluations


def test_an_evaluation_compares_every_sample_with_its_source(tmp_path):
    drawn = call(evaluator(tmp_path / "plain", ToyAdapter(), save_images=None))
    assert drawn.source_distance is None
    assert copying.copied(drawn) is None
    assert "source_distance" not in (tmp_path / "plain/eval/base.json").read_text()

    def editing(**options: Any) -> Evaluation:
        """The first prompt edits its own first sample, the third one noise, the fourth several; the rest nothing."""
        which = evaluator(tmp_path / "edits", adapter := Copier(), **options)
        own = tmp_path / "plain/eval/base/00000-0.png"
        picture((4, 4)).save(tmp_path / "noise.png")
        images = [(str(own),), (), (str(tmp_path / "noise.png"),), (str(own), str(own)), ()]
        prompts = tuple(Prompt(p.text, p.metadata, of) for p, of in zip(which.prompts, images, strict=True))
        sampling = replace(which.sampling, texts=toy_texts(adapter, prompts))
        return call(replace(which, prompts=prompts, sampling=sampling, sources=Sources(adapter)))

    found = editing()
    assert found.source_distance is not None
    assert np.isnan(found.source_distance).tolist() == [[k in (1, 3, 4)] * 2 for k in range(5)]
    assert found.source_distance[0, 0] == pytest.approx(0, abs=1e-6)
    copies = copying.copied(found)
    assert copies is not None
    assert copies[0, 0] == 1
    assert copies[2].tolist() == [0, 0]
    loaded = Evaluation.load(tmp_path / "edits/eval/base.json").source_distance
    assert loaded is not None
    np.testing.assert_array_equal(loaded, found.source_distance)
    half = np.asarray([True, False, True, False, False])
    kept = found.of(half).source_distance
    assert kept is not None
    np.testing.assert_array_equal(kept, found.source_distance[half])
    # The missing samples of diversity are not compared, and each process has its share.
    np.testing.assert_array_equal(np.asarray(editing(diversity=3).source_distance), found.source_distance)
    parts = [np.asarray(editing(world=OneOf(rank, 2, CPU)).source_distance) for rank in range(2)]
    np.testing.assert_allclose(np.nansum(np.stack(parts), axis=0), np.nan_to_num(found.source_distance), atol=1e-3)


def toy_texts(adapter: Any, prompts: Any) -> Any:
    from flowrl.data.text_cache import Texts

    return Texts(adapter, prompts, cache=False)


def told(tag: str, table: Any, **scores: Any) -> Evaluation:
    distance = np.asarray(table, dtype=np.float64)
    return replace(record(tag, gold=np.zeros(distance.shape), **scores), source_distance=distance)


def test_the_base_stands_beside_it_and_a_judges_verdict_goes_first():
    base, tuned = told("base", [[0.5], [3.0]] * 20), told("tuned", [[0.5], [1.9]] * 15 + [[0.5], [2.0]] * 5)
    found = copying.facts(base, tuned)
    assert found is not None
    assert (found["base"]["mean"], found["tuned"]["mean"]) == (0.5, 0.875)
    assert found["difference"]["mean"] == pytest.approx(0.375)
    assert found["by"] == "pixels"
    said = copying.sentence(found)
    assert "by pixels" in said
    assert "0.875, the base's 0.500, so +0.375 (95 % interval +0." in said
    assert said.endswith("; a clear rise.")
    alone = copying.facts(base, None)
    assert alone is not None
    assert set(alone) == {"by", "base"}
    both = [told(each.tag, each.source_distance, edit_unchanged=np.zeros((40, 1))) for each in (base, tuned)]
    by_judge = copying.facts(*both)
    assert by_judge is not None
    assert by_judge["by"] == "edit_unchanged"
    assert not copying.risen(by_judge)
    assert by_judge["tuned"]["mean"] == 0
    assert copying.facts(base, both[1]) is None, "two rules"
    assert copying.facts(replace(base, source_distance=None), tuned) is None
    assert copying.facts(base, record("tuned", gold=np.zeros((40, 1)))) is None
    some = copying.copied(told("base", [[np.nan], [1.0]]))
    assert some is not None
    assert np.isnan(some).tolist() == [[True], [False]]


@pytest.mark.parametrize("absent", [None, math.nan])
def test_one_prompt_has_no_interval_also_as_a_file_gives_it(absent):
    found = {name: {"mean": 0.0, "low": absent, "high": absent, "n": 1} for name in ("base", "tuned", "difference")}
    assert copying.sentence({"by": "pixels"} | found).endswith("so +0.000 (no interval).")


# ---- the table


def main(count: int) -> None:
    pairs = drawn(count)
    sources, results = rendered(pairs)
    trips = through_vae(sources)
    whole = lambda x: (x - sources).abs().mean((1, 2, 3)) < 2 * (trips - sources).abs().mean((1, 2, 3))  # noqa: E731
    rows: dict[str, Callable[[], Tensor]] = {
        "source": lambda: sources,
        "source through the VAE": lambda: trips,
        "with noise of 0.1 in the latents": lambda: through_vae(sources, 0.1),
        "of 0.2": lambda: through_vae(sources, 0.2),
        "of 0.3": lambda: through_vae(sources, 0.3),
        "right edit": lambda: results,
        "right edit through the VAE": lambda: through_vae(results),
    }
    print("| image | judge | largest cell | whole image |\n|---|---|---|---|")
    for name, made in rows.items():
        shares = (judged(pairs, made(), sources), near(made(), sources, trips), whole(made()).numpy())
        print(f"| {name} | {' | '.join(f'{100 * share.mean():.1f} %' for share in shares)} |")
    for side in (2, 4, 8):
        mosaics = [
            torch.randint(len(pairs), (side * side,), generator=torch.Generator().manual_seed(k)) for k in range(40)
        ]
        found = []
        for mosaic in mosaics:
            tiles = sources[mosaic].clone()
            old = tiled(tiles, side)
            tiles[0] = results[mosaic[0]]
            new, trip = tiled(tiles, side), through_vae(old[None])[0]
            mean = float((new - old).abs().mean()) < 2 * float((trip - old).abs().mean())
            found.append((distance(new, old, trip) < copying.NEAR, mean))
        cell, mean = 100 * np.mean(found, axis=0)
        print(f"| right edit of one scene of {side * side} in an image | - | {cell:.1f} % | {mean:.1f} % |")


def tiled(images: Tensor, side: int) -> Tensor:
    """Images [side^2, 3, H, W] in one of `side` times their height and width."""
    return torch.cat([torch.cat(list(row), dim=-1) for row in images.split(side)], dim=-2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 700)
