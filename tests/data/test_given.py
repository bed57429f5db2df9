"""Given pictures on their way into a rollout: what fills a slot, how a picture is looked at, what cannot be read."""

import json
import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from flowrl.algorithms import diffusion_dpo, diffusion_kto, seppo, sft
from flowrl.algorithms._pairs import MarginConfig
from flowrl.config.schema import to_tree
from flowrl.core.errors import ConfigError
from flowrl.core.types import SampleId
from flowrl.data.given_samples import PAIR, Given, Look, Slot, latents_of, slot_of
from flowrl.data.options import DataConfig, PairsConfig, PreferenceOptions
from flowrl.data.prompts import open_named
from flowrl.media.media import fitted, pixels
from flowrl.rollout.noise import Noise
from flowrl.run.changes import differences
from flowrl.run.given_collector import PairCollector
from tests.toys import ToyAdapter

COUNT = 6
METHODS = {"diffusion_dpo": diffusion_dpo, "diffusion_kto": diffusion_kto, "seppo": seppo, "sft": sft}


def picture(seed: int, height: int = 4, width: int = 4) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pairs: the chosen picture of pair k is picture k, the rejected one picture 100 + k."""
    lines = []
    for k in range(COUNT):
        for name, seed in (("chosen", k), ("rejected", 100 + k)):
            picture(seed).save(tmp_path / f"{name}-{k}.png")
        lines.append({"prompt": f"prompt {k}", "chosen": f"chosen-{k}.png", "rejected": f"rejected-{k}.png"})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def given(folder: Path, method: str = "diffusion_dpo", **options) -> Given:
    module = METHODS[method]
    return Given(PairsConfig(path=str(folder / "pairs.jsonl"), **options), module.build(module.Config()), seed=3)


def encoded(found: Given, ids: list[SampleId], batch_size: int = 3, look: Look | None = None):
    return latents_of(
        lambda slot: slot_of(found.records, slot, found.members), ids, ToyAdapter(), batch_size=batch_size, look=look
    )


def both(*slots: int) -> list[SampleId]:
    return [SampleId(slot, sample) for slot in slots for sample in (0, 1)]


def latent(seed: int) -> Tensor:
    """Of a picture of the model's size, at the posterior's mean."""
    return ToyAdapter().encode_images(pixels(picture(seed))[None])[0]


# ---- what fills a slot


@pytest.mark.parametrize(
    ("method", "ids", "images", "rewards"),
    [
        ("diffusion_dpo", both(0, 4), [0, 100, 4, 104], [1, 0, 1, 0]),
        ("sft", [SampleId(2, 0)], [2], [1]),
        ("seppo", both(2), [2, None], [1, 0]),  # a sample to be drawn
    ],
)
def test_a_slot_holds_a_pair_a_winner_alone_or_a_place_for_a_drawn_sample(folder, method, ids, images, rewards):
    found = encoded(given(folder, method), ids)
    assert torch.equal(found.x0, torch.stack([torch.zeros(2, 4, 4) if k is None else latent(k) for k in images]))
    assert found.rewards.tolist() == rewards
    assert found.texts == {each.slot: (f"prompt {each.slot}", ()) for each in ids}


def test_single_pictures_have_their_label_as_reward(folder):
    found = given(folder, "diffusion_kto", per_iteration=10)
    numbers = found.source.draw(1)
    slots = [slot_of(found.records, number, found.members) for number in numbers]
    assert sum(slot.rewards == (1.0,) for slot in slots) == 8  # liked_share 0.8
    x0 = encoded(found, [SampleId(number, 0) for number in numbers[:1]]).x0
    expected = {1.0: [latent(k) for k in range(COUNT)], 0.0: [latent(100 + k) for k in range(COUNT)]}
    assert any(torch.equal(x0[0], one) for one in expected[slots[0].rewards[0]])


def test_batches_and_processes_change_no_latent(folder):
    found = given(folder)
    look = Look(found.options, 3, 7)
    whole = encoded(found, both(*range(COUNT)), batch_size=64, look=look)
    single = encoded(found, both(*range(COUNT)), batch_size=1, look=look)
    part = encoded(found, both(3, 4), look=look)
    assert torch.equal(whole.x0, single.x0)
    assert torch.equal(whole.x0[6:10], part.x0)


def test_no_more_pictures_than_a_batch_are_in_memory():
    """They are opened when their batch comes, and gone when it is encoded."""
    opened: list[weakref.ref] = []
    seen: list[weakref.ref] = []

    def alive(those: list[weakref.ref]) -> int:
        return sum(one() is not None for one in those)

    class Watched:
        def open(self) -> Image.Image:
            image = picture(0)
            opened.append(weakref.ref(image))
            return image

    class Counting(ToyAdapter):
        sizes: tuple[int, ...] = ()

        def encode_images(self, pictures: Tensor, noise: Tensor | None = None) -> Tensor:
            assert alive(opened) <= 1, "decoded files are not held beside the tensors"
            self.sizes += (len(pictures),)
            seen.append(weakref.ref(pictures))
            assert alive(seen) == 1
            return ToyAdapter.encode_images(self, pictures, noise)

    adapter = Counting()
    pair: tuple[Any, ...] = Watched(), Watched()
    slots = [Slot(("", ()), pair, (1.0, 0.0)) for _ in range(5)]
    latents_of(slots.__getitem__, both(*range(5)), adapter, batch_size=4)
    assert adapter.sizes == (4, 4, 2)


def test_a_source_stands_beside_its_caption_also_where_that_is_dropped(folder):
    lines = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    for k, line in enumerate(lines):
        line |= {"prompt": "make it blue", "image": f"chosen-{k % 2}.png"}
    lines[4]["image"], lines[5]["image"] = "gone.png", None
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = given(folder, records=PreferenceOptions(source="image", max_broken=0.4), flip=False)
    files = [(str(folder / f"chosen-{k}.png"),) for k in (0, 1)]
    assert found.pairs.report.counts == {"missing image": 2}
    assert found.captions() == [("", files[0]), ("", files[1]), ("make it blue", files[0]), ("make it blue", files[1])]
    texts = encoded(found, both(2, 3)).texts
    assert texts == {2: ("make it blue", files[0]), 3: ("make it blue", files[1])}
    always = Look(PairsConfig(path="x", caption_dropout=1.0), 0, 1)
    assert always.caption(3, texts[3]) == ("", files[1])
    assert found.pairs.read(1).prompt.metadata["images"] == list(files[1])
    plain = given(folder)
    assert plain.pairs.fingerprint != found.pairs.fingerprint
    assert plain.captions() == [("", ()), ("make it blue", ())]


def test_sources_are_cropped_and_mirrored_as_their_results_where_they_are_to_be(folder):
    """The result is the source itself, so that both are the same pixels under every box."""
    for k in range(2):
        picture(k, 24, 48).save(folder / f"chosen-{k}.png")
        picture(9, 48, 96).save(folder / f"rejected-{k}.png")
    Image.new("RGB", (30, 20)).save(folder / "narrow.png")
    record = {"prompt": "make it blue"}
    lines = [record | {"image": f"chosen-{k}.png", "chosen": f"chosen-{k}.png", "rejected": f"rejected-{k}.png"}
        for k in (0, 1, 0)]  # fmt: skip
    lines += [lines[0] | {"image": "narrow.png"}, lines[0] | {"rejected": "narrow.png"}]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = PreferenceOptions(source="image", source_fit="cover", max_broken=0.4)
    found = given(folder, records=options, crop="random", flip=True, posterior="mean")
    assert found.pairs.report.counts == {"aspects differ": 2}
    assert "line 4 (source narrow.png has 30x20 pixels, chosen has 48x24)" in str(found.pairs.report)
    seen = set()
    for iteration in range(6):
        look = Look(found.options, 3, iteration)
        result = encoded(found, both(0, 1), look=look)
        for row, slot in ((0, 0), (2, 1)):
            text, (name,) = result.texts[slot]
            assert text == "make it blue"
            assert torch.equal(ToyAdapter().encode_images(pixels(open_named(name))[None])[0], result.x0[row])
            seen.add(name)
    assert {name[-1] for name in seen} == set("01")
    assert len(seen) == 12
    (middle,) = slot_of(found.pairs, 0, PAIR).asked(ToyAdapter(), (0.5, 0.5), mirror=False)[1]
    assert encoded(found, both(0)).texts[0][1] == (middle,)
    assert open_named(str(folder / "chosen-0.png")).size == (48, 24)


def test_cropped_sources_go_with_their_results_or_are_refused():
    edits = {"path": "x", "flip": False}
    with pytest.raises(ValueError, match="there is no source"):
        PreferenceOptions(source_fit="cover")
    with pytest.raises(ValueError, match="would change the results and not the sources"):
        PairsConfig(path="x", records=PreferenceOptions(source="image"))
    covered = PairsConfig(**edits, records=PreferenceOptions(source="image", source_fit="cover"))
    assert not DataConfig(pairs=covered).caches_text
    with pytest.raises(ValueError, match="nothing is embedded ahead"):
        DataConfig(pairs=covered, cache_text=True)


# ---- how a picture is looked at


@pytest.mark.parametrize(("height", "width"), [(40, 40), (37, 64), (96, 33), (16, 21)])
def test_resize_and_centre_crop_are_torchvisions(height, width):
    """As the official code prepares its pictures, for a square model."""
    image = picture(1, height, width)
    expected = transforms.Compose(
        [transforms.Resize(32, transforms.InterpolationMode.BILINEAR), transforms.CenterCrop(32)]
    )
    assert np.array_equal(np.array(fitted(image, 32, 32, mirror=False)), np.array(expected(image)))
    assert np.array_equal(np.array(fitted(image, 32, 32, mirror=True)), np.array(expected(image))[:, ::-1])


def test_a_picture_covers_a_model_that_is_not_square_and_its_part_is_chosen():
    wide = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8)[None, :, None], (32, 1, 3)))
    assert fitted(wide, 16, 40, mirror=False).size == (40, 16)
    left, right = (np.array(fitted(wide, 32, 32, (0.5, place), mirror=False)) for place in (0.0, 1.0))
    assert (left[0, 0, 0], left[0, -1, 0]) == (0, 31)
    assert (right[0, 0, 0], right[0, -1, 0]) == (32, 63)


def test_both_pictures_of_a_pair_are_looked_at_alike_so_that_equal_ones_stay_equal(folder):
    for k in range(COUNT):
        picture(k).save(folder / f"rejected-{k}.png")
    found = given(folder, crop="random")
    x0 = encoded(found, both(*range(COUNT)), look=Look(found.options, 0, 1)).x0
    assert torch.equal(x0[::2], x0[1::2])


def test_a_look_is_keyed_by_seed_iteration_and_slot():
    data, keys = PairsConfig(path="x", crop="random"), ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1))
    looks = [Look(data, seed, iteration).place(slot) for seed, iteration, slot in keys]
    assert len({place for place, _ in looks}) == 4
    assert Look(data, 0, 1).place(0) == looks[0]
    assert Look(PairsConfig(path="x", flip=False), 0, 1).place(0) == ((0.5, 0.5), False)


def test_captions_are_dropped_and_pictures_mirrored_as_often_as_asked():
    """Of 2000 draws: std 8.9 at a share of 0.2, 22.4 at 0.5."""
    look = Look(PairsConfig(path="x"), 0, 1)
    dropped = sum(look.caption(slot, ("text", ("a",))) == ("", ("a",)) for slot in range(2000))
    assert abs(dropped - 400) < 4 * 17.9
    assert abs(sum(look.place(slot)[1] for slot in range(2000)) - 1000) < 4 * 22.4
    never = Look(PairsConfig(path="x", caption_dropout=0.0, flip=False), 0, 1)
    assert all(never.caption(slot, ("text", ())) == ("text", ()) and not never.place(slot)[1] for slot in range(50))


def test_the_posterior_is_drawn_anew_in_every_iteration(folder):
    found = given(folder, flip=False)
    first, again, second = (encoded(found, both(0), look=Look(found.options, 0, k)).x0 for k in (1, 1, 2))
    assert torch.equal(first, again)
    noise = (first[0] - latent(0)) / 0.1  # the toy's std
    assert abs(float(noise.std()) - 1) < 0.5
    assert not torch.equal(first, second)
    mean = given(folder, flip=False, posterior="mean")
    assert torch.equal(encoded(mean, both(0), look=Look(mean.options, 0, 1)).x0, torch.stack([latent(0), latent(100)]))


# ---- noise of their own


def own_noise(folder: Path, made: dict[str, Any] | None = None, *, flip: bool = False) -> Given:
    """The pairs as `flowrl pairs` keeps them: pair k is of round 2, prompt 10 + k, candidates 3 and 1."""
    lines = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    for k, line in enumerate(lines):
        line["drawn"] = {"seed": 5, "round": 2, "prompt": 10 + k, "chosen": 3, "rejected": 1}
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "pairs.json").write_text(json.dumps({"made_with": made or {"sampler": None}}))
    method = diffusion_dpo.build(diffusion_dpo.Config(noise="own"))
    return Given(PairsConfig(path=str(folder), flip=flip), method, seed=3)


def test_own_noise_is_bit_for_bit_that_which_the_pairs_were_drawn_from(folder):
    found = own_noise(folder)
    ids, adapter = both(4, 1), ToyAdapter()
    latents = latents_of(lambda slot: slot_of(found.records, slot, found.members, own=True), ids, adapter, batch_size=3)
    drawn = Noise(5, "pairs", 2, tuple(latents.x0.shape[1:]))
    prompts = [SampleId(14, 3), SampleId(14, 1), SampleId(11, 3), SampleId(11, 1)]
    assert latents.initial is not None
    assert torch.equal(latents.initial, drawn.initial(prompts))
    assert encoded(found, ids).initial is None


def test_own_noise_belongs_to_images_of_the_size_that_was_drawn(folder):
    found = own_noise(folder)
    picture(3, 8, 8).save(folder / "chosen-2.png")
    with pytest.raises(ConfigError, match=r"chosen-2\.png\) has \(8, 8\) pixels, and the model makes \(4, 4\)"):
        latents_of(
            lambda slot: slot_of(found.records, slot, found.members, own=True), both(2), ToyAdapter(), batch_size=3
        )


def test_own_noise_needs_records_that_know_it_a_solver_without_noise_and_images_as_drawn(folder):
    for made, options, message in (
        ({"sampler": {"name": "flow_sde"}}, {}, "was drawn by rollout.sampler=flow_sde"),
        (None, {"flip": True}, "images would be mirrored, and not their noise"),
    ):
        with pytest.raises(ConfigError, match=message):
            own_noise(folder, made, **options)
    (folder / "pairs.json").unlink()
    method = diffusion_dpo.build(diffusion_dpo.Config(noise="own"))
    with pytest.raises(ConfigError, match=r"algorithm\.noise=own: data\.pairs\.path=.* is no folder of `flowrl pairs`"):
        Given(PairsConfig(path=str(folder), flip=False), method, seed=3)


# ---- what cannot be read


def test_an_unreadable_picture_masks_itself_and_is_named(folder, caplog):
    (folder / "rejected-1.png").write_bytes(b"no picture")
    found = given(folder)
    with caplog.at_level("WARNING", logger="flowrl"):
        latents = encoded(found, both(0, 1, 2))
    assert latents.rewards.isnan().tolist() == [False, False, False, True, False, False]
    assert torch.equal(latents.x0[2], latent(1))
    assert any("rejected-1.png" in record.getMessage() for record in caplog.records)


def test_a_set_at_its_limit_does_not_stop_by_chance(folder):
    """A rule on single iterations, more than 6 of 64, stops every such run."""
    found = given(folder)
    for seed in range(20):
        found.asked = found.lost = 0
        for lost in np.random.default_rng(seed).binomial(64, 0.1, size=500):
            found.require_readable(int(lost), 64)
    assert found.asked == 500 * 64


def test_a_larger_share_of_all_pairs_so_far_than_allowed_stops_the_run(folder):
    found = given(folder)
    found.require_readable(17, 64)  # 6.4 + 4 * 2.4 + 1
    found.require_readable(7, 64)  # of 128 up to 27.4
    with pytest.raises(ConfigError, match=r"49 of 192 pairs .* more than data\.pairs\.records\.max_broken=0\.1"):
        found.require_readable(25, 64)
    for share, borne in ((0.0, 1), (1.0, 64)):
        strict = given(folder, records=PreferenceOptions(max_broken=share))
        strict.require_readable(borne, 64)
    with pytest.raises(ConfigError, match="go on with --resume"):
        given(folder, records=PreferenceOptions(max_broken=0.0)).require_readable(2, 64)


def test_the_share_that_may_be_broken_does_not_make_another_set_or_another_run(folder):
    """So a stopped run can go on with a larger one, whether the line is added, changed or left out."""
    options = [PreferenceOptions(), PreferenceOptions(max_broken=0.5)]
    one, two = (given(folder, records=option) for option in options)
    two.source.load_state_dict(one.source.state_dict())
    trees = [to_tree(PairsConfig(path="x", records=option)) for option in options]
    assert differences({"data": {"pairs": trees[0]}}, {"data": {"pairs": trees[1]}}) == {}
    other = to_tree(PairsConfig(path="x", records=PreferenceOptions(chosen="good")))
    found = differences({"data": {"pairs": trees[0]}}, {"data": {"pairs": other}})
    assert found["data.pairs.records.chosen"] == "data.pairs.records.chosen was 'chosen', now 'good'"


def test_a_record_that_has_gone_masks_its_slot(folder):
    found = given(folder)
    (folder / "pairs.jsonl").unlink()
    slot = slot_of(found.records, 0, found.members)
    assert slot.images == (None, None)
    assert all(math.isnan(reward) for reward in slot.rewards)


def test_facts_and_counts_are_those_of_the_sets(folder):
    found = given(folder, eval=str(folder / "pairs.jsonl"), max_eval=4)
    assert len(found.held_out_numbers) == 4
    assert found.facts()["eval_pairs"]["usable"] == COUNT
    assert found.captions()[0] == ("", ())
    assert len(set(found.captions())) == COUNT + 1


def test_held_out_pairs_are_a_random_part_in_the_sets_order(folder, monkeypatch):
    """Sets are often sorted by source or time: their head is no sample of them."""
    found, again = (given(folder, eval=str(folder), max_eval=3) for _ in range(2))
    assert found.held_out_numbers == again.held_out_numbers
    seen = set()
    for seed in range(30):
        found.seed = seed
        numbers = found.held_out_numbers
        assert numbers == sorted(set(numbers))
        assert len(numbers) == 3
        seen |= {tuple(numbers)}
    assert len(seen) > 10
    monkeypatch.setattr("flowrl.data.given_samples.HELD_OUT", 5)
    assert len(given(folder, eval=str(folder)).held_out_numbers) == 5
    assert given(folder, eval=str(folder), max_eval=99).held_out_numbers == list(range(COUNT))
    assert given(folder).held_out_numbers == []


def test_epochs_of_labelled_pictures_are_told_of_each_class(folder):
    """Eight of ten draws are of the liked ones, of which there are as many as of the others."""

    def epochs(method: str) -> dict[str, float]:
        found = given(folder, method, per_iteration=12)
        collector: Any = SimpleNamespace(given=found)
        rollout, credit = cast("Any", None), cast("Any", SimpleNamespace(dead=torch.zeros(1, dtype=torch.bool)))
        return PairCollector.metrics_row(collector, rollout, credit)

    expected = {"pairs/liked_epochs_per_iteration": 1.6, "pairs/disliked_epochs_per_iteration": 0.4}
    assert epochs("diffusion_kto") == pytest.approx({"pairs/unreadable": 0} | expected)
    assert epochs("diffusion_dpo") == {"pairs/unreadable": 0, "pairs/epochs_per_iteration": 2.0}


def test_the_chosen_image_of_a_graded_pair_has_its_margin_as_reward(folder):
    lines = [json.loads(line) | {"margin": k / 4} for k, line in enumerate((folder / "pairs.jsonl").open())]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = diffusion_dpo.Config(margin=MarginConfig(gamma=2.0))
    found = Given(PairsConfig(path=str(folder / "pairs.jsonl")), diffusion_dpo.build(config), seed=3)
    slots = [slot_of(found.records, k, found.members, graded=found.graded) for k in range(COUNT)]
    assert [slot.rewards for slot in slots] == [(k / 4, 0.0) for k in range(COUNT)]
    plain = given(folder)
    assert len(plain.records) == COUNT - 1, "the tie is left out"
    assert slot_of(plain.records, 0, plain.members, graded=plain.graded).rewards == (1.0, 0.0)
