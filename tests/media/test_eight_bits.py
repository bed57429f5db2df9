"""Images in 8 bits: the rounding of a saved PNG, in one tensor, and what a reward is given of it."""

import numpy as np
import pytest
import torch

from flowrl.media import media
from flowrl.media.eight_bits import Album, EightBitImages, eight_bit, unit_floats

ALL = torch.ones(3, dtype=torch.bool)


def test_every_level_is_kept_and_what_lies_between_goes_to_the_nearest():
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(eight_bit(unit_floats(levels)), levels)
    assert eight_bit(levels) is levels
    values = torch.linspace(-0.1, 1.1, 10_001)
    assert eight_bit(values).numpy().tolist() == np.clip(np.rint(values.numpy() * np.float32(255)), 0, 255).tolist()
    assert float((unit_floats(eight_bit(values)) - values.clamp(0, 1)).abs().max()) <= 0.5 / 255 + 1e-7


def test_it_is_the_rounding_of_a_saved_png(tmp_path):
    image = torch.rand(3, 9, 7, generator=torch.Generator().manual_seed(0))
    kept = unit_floats(eight_bit(image))
    assert torch.equal(media.read(media.write(image, tmp_path / "floats")), kept)
    assert torch.equal(media.read(media.write(eight_bit(image), tmp_path / "levels")), kept)
    assert media.read(tmp_path / "levels.png").is_contiguous(), "sums over other strides may differ in a bit"


def test_a_reward_gets_copies_in_floats_and_nan_for_what_is_not_finite():
    levels = torch.randint(256, (3, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = EightBitImages(levels, torch.tensor([True, False, True]))
    floats = images.floats()
    assert floats.isnan().flatten(1).all(dim=1).tolist() == [False, True, False]
    assert torch.equal(floats[0], levels[0].float() / 255)
    floats.zero_()
    assert torch.equal(images[2], levels[2].float() / 255)
    assert torch.equal(images[-1], images[2])
    assert [bool(image.isnan().all()) for image in images] == [False, True, False]
    assert (len(images[1:]), images[1:].finite.tolist()) == (2, [False, True])
    assert images.pick([2, 0]).levels.tolist() == levels[[2, 0]].tolist()
    with pytest.raises(ValueError, match="uint8"):
        EightBitImages(levels.float(), ALL)


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5)])
def test_batches_lie_in_one_tensor_of_a_byte_a_value(shape):
    album, made = Album(3), torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    parts = [album.add(made[:2], ALL[:2]), album.add(made[2:], torch.tensor([False]))]
    whole = album.whole()
    assert whole.levels.untyped_storage().nbytes() == made.numel()
    assert {part.levels.untyped_storage().data_ptr() for part in parts} == {whole.levels.untyped_storage().data_ptr()}
    assert torch.equal(whole.levels, eight_bit(made))
    assert whole.finite.tolist() == [True, True, False]
    with pytest.raises(ValueError, match="4 images came, and 3 were to come"):
        album.add(made[:1], ALL[:1])


def test_an_album_is_given_once_it_is_full():
    album = Album(3)
    album.add(torch.zeros(2, 3, 4, 4), ALL[:2])
    with pytest.raises(ValueError, match="2 of 3 images have come"):
        album.whole()
