"""Video files: frames, frame rate and number of frames come back, and what cannot be read says why."""

import sys
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.data.preference_records import StoredImage
from flowrl.media import media, mp4

pytest.importorskip("av", reason="needs the extra video")

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (200, 100, 50), (0, 0, 0)]


def plain_frames(height: int = 32, width: int = 48) -> Tensor:
    """A frame of one colour each, [F, 3, H, W] uint8: halved colour resolution loses nothing."""
    return torch.tensor(COLOURS, dtype=torch.uint8)[..., None, None].expand(-1, 3, height, width).contiguous()


@pytest.mark.parametrize("fps", [16.0, 24.0, 7.5, 24000 / 1001])
@pytest.mark.parametrize("suffix", [".mp4", ".webp"])
def test_frames_and_rate_come_back(tmp_path: Path, suffix: str, fps: float):
    file, frames = tmp_path / f"a{suffix}", plain_frames()
    media.encode_video(file, frames, fps)
    found, rate = media.decode_video(file)
    assert (found.dtype, found.shape, rate) == (torch.uint8, frames.shape, pytest.approx(fps))
    assert media.facts(file) == (len(frames), pytest.approx(fps))
    assert media.size(file) == (48, 32)
    # Limited range has 219 levels for 256, and the matrix rounds once more: 2 levels a channel.
    assert int((found.int() - frames.int()).abs().max()) <= (0 if suffix == ".webp" else 3)
    assert torch.equal(media.read_levels(file), found)
    np.testing.assert_array_equal(np.asarray(media.read_frames(file)[3]), found[3].permute(1, 2, 0))


def test_a_picture_with_detail_survives_mp4(tmp_path: Path):
    ramp = torch.linspace(0, 255, 160).expand(5, 3, 128, 160) * torch.linspace(0.4, 1, 5).view(5, 1, 1, 1)
    file = media.write(ramp / 255, tmp_path / "ramp", {"prompt": "a ramp"}, fps=24, form="mp4")
    assert file == media.find(tmp_path / "ramp") == tmp_path / "ramp.mp4"
    assert media.read_note(file) == {"prompt": "a ramp"}
    assert file.stat().st_size < 0.05 * ramp.numel()
    assert float((media.read(file) * 255 - ramp).abs().mean()) < 2
    again = media.write(ramp / 255, tmp_path / "again", fps=24, form="mp4")
    assert again.read_bytes() == file.read_bytes()


def test_a_video_that_does_not_move_stays_a_video(tmp_path: Path):
    """WebP joins equal frames: without its mark a frozen video would be scored as an image."""
    frames = plain_frames()[4:5].repeat(9, 1, 1, 1)
    media.encode_video(tmp_path / "frozen.webp", frames, 16)
    with Image.open(tmp_path / "frozen.webp") as image:
        assert getattr(image, "n_frames", 1) == 1
    found, rate = media.decode_video(tmp_path / "frozen.webp")
    assert torch.equal(found, frames)
    assert rate == 16
    assert media.read(tmp_path / "frozen.webp").shape == (9, 3, 32, 48)


def test_files_of_other_programs_are_read(tmp_path: Path):
    images = [Image.fromarray(frame) for frame in plain_frames().permute(0, 2, 3, 1).numpy()]
    images.insert(2, images[1])  # joined
    settings = {"save_all": True, "append_images": images[1:], "lossless": True}
    images[0].save(tmp_path / "other.webp", duration=[100, 40, 40, 100, 100, 100, 120], **settings)
    found, rate = media.decode_video(tmp_path / "other.webp")
    assert (len(found), rate) == (6, pytest.approx(10))
    images[0].save(tmp_path / "still.webp")
    assert media.facts(tmp_path / "still.webp") == (1, None)
    with pytest.raises(ValueError, match="an image, not a video"):
        media.decode_video(tmp_path / "still.webp")


def test_previews_and_pages_are_no_frames_and_slow_gifs_keep_theirs(tmp_path: Path):
    """A camera's MPO has its preview as a second picture."""
    images = [Image.fromarray(frame) for frame in plain_frames().permute(0, 2, 3, 1).numpy()[:3]]
    images[0].save(tmp_path / "camera.jpg", "MPO", save_all=True, append_images=[images[1].resize((8, 8))])
    images[0].save(tmp_path / "pages.tif", save_all=True, append_images=images[1:])
    for name in ("camera.jpg", "pages.tif"):
        assert media.facts(tmp_path / name) == (1, None)
        assert media.read(tmp_path / name).shape == (3, 32, 48)
        assert StoredImage(tmp_path / name, name).open().size == (48, 32)
    images[0].save(tmp_path / "slow.gif", save_all=True, append_images=images[1:], duration=310)
    assert media.facts(tmp_path / "slow.gif") == (3, pytest.approx(1 / 0.31))


def test_a_mark_of_no_rate_is_refused(tmp_path: Path):
    file = tmp_path / "a.webp"
    media.encode_video(file, plain_frames(), 16)
    file.write_bytes(file.read_bytes().replace(b'fps="16.0"', b'fps="00.0"'))
    for reads in (media.facts, media.decode_video):
        with pytest.raises(ValueError, match="6 frames, 0 a second; write it again"):
            reads(tmp_path / "a.webp")


def test_frames_that_a_header_does_not_count_are_counted(tmp_path: Path, monkeypatch):
    media.encode_video(tmp_path / "a.mp4", plain_frames(), 16)
    monkeypatch.setattr(mp4, "facts", lambda file: (0, 16.0, (48, 32)))
    assert media.facts(tmp_path / "a.mp4") == (6, 16)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "it is empty: it has 0 bytes; write it again"), (b"junk" * 99, "it is not a readable video")],
)
def test_an_empty_or_broken_mp4_says_so(tmp_path: Path, content: bytes, words: str):
    (tmp_path / "a.mp4").write_bytes(content)
    for reads in (media.facts, media.decode_video, media.read, media.read_frames):
        with pytest.raises(OSError, match=words):
            reads(tmp_path / "a.mp4")


def test_a_cut_off_mp4_and_one_without_video_say_so(tmp_path: Path):
    import av

    moving = (torch.rand(9, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 255).byte()
    media.encode_video(tmp_path / "whole.mp4", moving, 16)
    data = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 3])
    with pytest.raises(OSError, match=r"bytes are broken after \d frames .*write it again"):
        media.decode_video(tmp_path / "cut.mp4")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    with pytest.raises(ValueError, match="there is no video in it"):
        media.decode_video(tmp_path / "sound.mp4")


@pytest.mark.parametrize("fps", [0, -1.0, float("nan"), float("inf"), True])
@pytest.mark.parametrize("suffix", [".mp4", ".webp"])
def test_a_frame_rate_of_0_is_refused_by_both(tmp_path: Path, suffix: str, fps: float):
    with pytest.raises(ConfigError, match="a frame rate must be above 0"):
        media.encode_video(tmp_path / f"a{suffix}", plain_frames(), fps)


@pytest.mark.parametrize("suffix", [".mp4", ".webp"])
def test_a_rate_that_files_cannot_hold_is_refused_and_the_ends_of_the_range_come_back(tmp_path: Path, suffix: str):
    """Below it an MP4 became one of 24 frames a second, and a WebP's times an overflow."""
    for fps in (1e-9, 1e-4, 1e4):
        with pytest.raises(ConfigError, match=r"files hold 0\.01 to 1000 frames a second"):
            media.encode_video(tmp_path / f"a{suffix}", plain_frames(), fps)
    for fps in (0.01, 1000.0):
        media.encode_video(tmp_path / f"a{suffix}", plain_frames(), fps)
        assert media.facts(tmp_path / f"a{suffix}")[1] == pytest.approx(fps)


def test_a_file_without_a_frame_rate_is_refused(tmp_path: Path, monkeypatch):
    import av

    stream = SimpleNamespace(average_rate=None, guessed_rate=Fraction(0), frames=9, width=32, height=32)
    container = SimpleNamespace(streams=SimpleNamespace(video=[stream]))
    monkeypatch.setattr(av, "open", lambda name: nullcontext(container))
    for reads in (mp4.facts, media.decode_video):
        with pytest.raises(ValueError, match="its frame rate is 0; write it again"):
            reads(tmp_path / "a.mp4")


def test_what_cannot_be_written_says_what_can(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"needs an even height and width, these frames are 31 x 48; use \.webp"):
        media.encode_video(tmp_path / "a.mp4", plain_frames(31), 16)
    with pytest.raises(ConfigError, match=r"written as \.webp or \.mp4"):
        media.encode_video(tmp_path / "a.avi", plain_frames(), 16)


def test_without_the_extra_the_remedy_is_named_and_webp_works(tmp_path: Path, monkeypatch):
    media.encode_video(tmp_path / "a.mp4", plain_frames(), 16)
    monkeypatch.setitem(sys.modules, "av", None)
    reads = partial(media.decode_video, tmp_path / "a.mp4")
    for does in (reads, partial(mp4.write, tmp_path / "b.mp4", plain_frames(), 16)):
        with pytest.raises(ConfigError, match=r"[ab]\.mp4 needs a package .*pip install 'flowrl\[video\]'"):
            does()
    media.encode_video(tmp_path / "a.webp", plain_frames(), 16)
    assert torch.equal(media.decode_video(tmp_path / "a.webp")[0], plain_frames())


def claiming(file: Path, frames: int) -> None:
    """A WebP of a few hundred bytes, of one pixel, whose mark says how many frames it has."""
    mark = f'<x:xmpmeta><a flowrl:frames="{frames}" flowrl:fps="16.0"/></x:xmpmeta>'
    Image.new("RGB", (1, 1)).save(file, "WEBP", xmp=mark.encode())


@pytest.mark.parametrize("frames", [2 * 10**8, mp4.MOST_FRAMES + 1])
def test_a_webp_that_claims_too_many_frames_is_refused_before_they_are_listed(tmp_path: Path, frames: int):
    claiming(tmp_path / "a.webp", frames)
    for reads in (media.facts, media.read_levels, media.decode_video, media.read_frames):
        with pytest.raises(ValueError, match=f"it has {frames} frames of 1 x 1 pixels, more than 65536"):
            reads(tmp_path / "a.webp")
    claiming(tmp_path / "a.webp", 7)
    assert media.read(tmp_path / "a.webp").shape == (7, 3, 1, 1)


def test_files_of_other_programs_make_no_more_frames_than_are_taken(tmp_path: Path, monkeypatch):
    images = [Image.fromarray(frame) for frame in plain_frames().permute(0, 2, 3, 1).numpy()]
    settings = {"save_all": True, "append_images": images[1:], "lossless": True}
    monkeypatch.setattr(mp4, "MOST_BYTES", 3 * 32 * 48 * 5)
    for suffix in (".webp", ".gif", ".png"):
        images[0].save(tmp_path / f"b{suffix}", duration=50, **settings)
        with pytest.raises(ValueError, match="it has 6 frames"):
            media.read_levels(tmp_path / f"b{suffix}")


def test_a_video_too_long_for_memory_is_refused(tmp_path: Path, monkeypatch):
    media.encode_video(tmp_path / "a.mp4", plain_frames(), 16)
    monkeypatch.setattr(mp4, "MOST_BYTES", 3 * 32 * 48 * 5)
    with pytest.raises(ValueError, match=r"it has 6 frames of 48 x 32 pixels, .* cut it shorter"):
        media.decode_video(tmp_path / "a.mp4")
