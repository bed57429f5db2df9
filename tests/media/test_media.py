"""Pictures and clips as files: exact where they are small, playable everywhere."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from torch import Tensor
from torch.testing import assert_close

from flowrl.core.wire import WireImage, read_image, write_image
from flowrl.media import media
from flowrl.media.transport import unpack


def noise(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def test_a_saved_picture_has_the_nearest_of_256_levels(tmp_path):
    image = noise(3, 5, 7)
    image[:, 0, :2] = torch.tensor([0.0, 1.0])
    file = media.write(image, tmp_path / "00000-0")
    assert file == media.find(tmp_path / "00000-0") == tmp_path / "00000-0.png"
    found = np.asarray(Image.open(file))
    assert found.shape == (5, 7, 3)
    np.testing.assert_array_equal(found, (image * 255).round().permute(1, 2, 0).numpy())
    assert torch.equal(media.read(file), (image * 255).round() / 255)


def test_a_picture_from_elsewhere_is_read_as_it_looks(tmp_path):
    """Pillow's own conversion shows what lies under transparent places, and 16-bit grey as white."""
    Image.new("RGBA", (2, 1), (200, 0, 0, 0)).save(tmp_path / "a.png")
    Image.fromarray(np.array([[0, 257 * 51]], dtype=np.uint16)).save(tmp_path / "b.png")
    assert torch.equal(media.read(tmp_path / "a.png"), torch.ones(3, 1, 2))
    assert_close(media.read(tmp_path / "b.png"), torch.tensor([0, 0.2]).expand(3, 1, 2))


def test_a_small_clip_is_kept_to_the_last_bit(tmp_path):
    clip = noise(5, 3, 16, 24)
    clip[2] = clip[1]  # WebP joins them
    file = media.write(clip, tmp_path / "a.b")
    assert file.name == "a.b.webp"
    assert torch.equal(media.read(file), (clip * 255).round() / 255)
    with Image.open(file) as opened:
        assert opened.info["loop"] == 0
        assert opened.size == (24, 16)


def test_a_large_clip_is_saved_with_little_loss(tmp_path):
    ramp = torch.linspace(0, 1, 160).expand(4, 3, 128, 160) * torch.linspace(0.4, 1, 4).view(4, 1, 1, 1)
    file = media.write(ramp, tmp_path / "clip")
    assert file.stat().st_size < 0.05 * ramp.numel()
    assert_close(media.read(file), ramp, atol=0.05, rtol=0)


def test_one_frame_is_a_picture_and_nothing_is_no_file(tmp_path):
    assert media.write(noise(1, 3, 8, 8), tmp_path / "one").suffix == ".png"
    assert media.find(tmp_path / "two") is None
    (tmp_path / "bad.png").write_text("no picture")
    with pytest.raises(OSError, match="cannot identify"):
        media.read(tmp_path / "bad.png")


def test_frames_of_other_programs_are_read_as_they_are(tmp_path):
    frames = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (10, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=[100, 500])
    assert media.read(tmp_path / "a.gif").shape == (2, 3, 8, 8)


def test_a_contact_sheet_holds_every_picture_row_by_row(tmp_path):
    images = noise(5, 3, 4, 6)
    sheet, size = media.contact_sheet(images, 2, 128)
    assert (sheet.shape, size) == ((3, 12, 12), (4, 6))
    for number, image in enumerate(images):
        row, column = divmod(number, 2)
        assert torch.equal(sheet[:, 4 * row : 4 * row + 4, 6 * column : 6 * column + 6], image)
    assert not sheet[:, 8:, 6:].any()


def test_large_pictures_of_a_sheet_are_averaged_down_and_clips_play_together(tmp_path):
    sheet, size = media.contact_sheet(noise(3, 3, 64, 256), 3, 128)
    assert (sheet.shape, size) == ((3, 32, 384), (32, 128))
    assert_close(sheet[:, :, :128].mean(), noise(3, 3, 64, 256)[0].mean(), atol=1e-5, rtol=0)
    clips, size = media.contact_sheet(noise(4, 7, 3, 8, 8), 2, 128)
    assert (clips.shape, size) == ((7, 3, 16, 16), (8, 8))
    assert torch.equal(clips[5, :, 8:, :8], noise(4, 7, 3, 8, 8)[2, 5])
    assert torch.equal(media.read(media.write(clips, tmp_path / "tree-base")), (clips * 255).round() / 255)


def png_of_headers(*sizes: tuple[int, int]) -> bytes:
    """A PNG with several headers, (width, height) each, and the pixels of the last one."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    heads = [part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) for width, height in sizes]
    width, height = sizes[-1]
    rows = part(b"IDAT", zlib.compress(bytes((3 * width + 1) * height)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(heads) + rows + part(b"IEND", b"")


def test_the_limit_of_pixels_is_that_of_the_header_which_is_decoded(tmp_path, monkeypatch):
    """The last one; a reward server has compared the first one with its limits."""
    (tmp_path / "a.png").write_bytes(png_of_headers((4, 4), (60, 60)))
    assert media.read(tmp_path / "a.png").shape == (3, 60, 60)
    monkeypatch.setattr(PngImageFile, "load", lambda image: pytest.fail("it was decoded"))
    sent = read_image(write_image(WireImage("png", (3, 4, 4), (tmp_path / "a.png").read_bytes())), "image")
    assert sent.pixels == 16
    with pytest.raises(ValueError, match=r"the PNG holds \(60, 60\) pixels of RGB, not the shape \[3, 4, 4\]"):
        unpack(sent)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # twice as many are refused
    for reads in (media.read, media.facts, media.size, media.open_image, media.read_frames):
        with pytest.raises(ValueError, match="more pixels than an image may have"):
            reads(tmp_path / "a.png")
