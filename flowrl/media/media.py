"""Images and videos as files: an image is a PNG, a video an animated WebP or an MP4 (mp4.py, the extra `video`).

A video's file has its frame rate, and a WebP of `encode_video` its number of frames too: WebP joins equal neighbouring
frames, and a video that does not move at all would be read as an image.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, ImageOps
from PIL import Image as Pillow
from PIL.Image import Image
from PIL.PngImagePlugin import PngInfo

from flowrl.core.errors import ConfigError
from flowrl.core.files import is_mapping, loads, writing
from flowrl.media import mp4

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".png", ".webp", ".mp4")
"""Suffixes of the files that `write` makes."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
"""Suffixes of the images of other programs that are read, some of which may be videos."""
MAY_MOVE = (".webp", ".gif", ".avif")
"""Those of them that may be videos; an animated PNG is read as one, and nobody writes videos so."""
VIDEO_FORMATS = ("webp", "mp4")
"""Kinds of video files that `write` makes; the first needs no extra."""
SMALL_PX = 128
"""Longest side, in pixels, from which on videos are saved with loss, and embedded images too."""
FPS = 16.0
"""Frames a second of a video whose rate nobody says: Wan's."""
_ANIMATED = ("WEBP", "GIF", "PNG", "AVIF")
"""Formats of Pillow whose frames are a video's."""
_QUALITY = 90
_NOTE = "flowrl"
"""Key of the note in a PNG's text."""
SELECTED = "selected"
"""Key in the note of an image that was selected among several by a score."""


def write(
    sample: Tensor, stem: Path, note: Mapping[str, Any] | None = None, *, fps: float = FPS, form: str = VIDEO_FORMATS[0]
) -> Path:
    """Save a sample as `<stem>.png`, `<stem>.webp` or `<stem>.mp4`, and return the file.

    Scoring the file repeats the logged score for images and small videos in WebP. Videos of `SMALL_PX` and more are
    saved with loss, a tenth as large; MP4 always is.

    The sample is an image [3, H, W] or video [F, 3, H, W] in [0, 1], rounded by `eight_bit`, or in 8 bits already;
    `note` is plain data about it, for the PNG's text or for `<stem>.json` next to a video; `fps` frames a second and
    `form`, one of `VIDEO_FORMATS`, are those of a video.

    Raises WriteError: the disk is full or not writable. ConfigError: an MP4 without the extra `video`, or of an odd
    height or width; a frame rate of 0.
    """
    from flowrl.media.eight_bits import eight_bit

    frames = eight_bit(sample if sample.ndim == 4 else sample[None])
    file = stem.with_name(f"{stem.name}.{'png' if len(frames) == 1 else form}")
    with writing(file):
        stem.parent.mkdir(parents=True, exist_ok=True)
        if len(frames) == 1:
            info = PngInfo()
            if note is not None:
                info.add_text(_NOTE, json.dumps(note))
            Pillow.fromarray(frames[0].permute(1, 2, 0).numpy()).save(file, pnginfo=info)
        else:
            encode_video(file, frames, fps)
            if note is not None:
                _note_file(file).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    return file


def read_note(file: Path) -> dict[str, Any]:
    """The note of a file that `write` made; {} if there is none, as for files of other programs."""
    try:
        if file.suffix == ".png":
            with Pillow.open(file) as opened:
                text = opened.info.get(_NOTE, "{}")
        else:
            text = _note_file(file).read_text(encoding="utf-8") if _note_file(file).is_file() else "{}"
        result = loads(text)
    # Not an image, or text of another program: whoever reads the pixels reports what is wrong with them.
    except (OSError, SyntaxError, ValueError, TypeError, Pillow.DecompressionBombError):
        return {}
    return result if is_mapping(result) else {}


def selection(file: Path) -> str:
    """How an image was selected, such as "best of 4 by NAME"; "" for others. No measure of a model is one of such."""
    how = read_note(file).get(SELECTED)
    return str(how.get("how")) if is_mapping(how) else ""


def unselected(file: Path) -> Path:
    """The file, which a set of a model's images may have. Raises ConfigError: it was selected by a score."""
    if how := selection(file):
        raise ConfigError(f"{file} was selected ({how}): no evaluation of a model has it; take the plain images")
    return file


def _note_file(video: Path) -> Path:
    return video.with_suffix(".json")


def encode_video(path: Path, frames: Tensor, fps: float) -> None:
    """Write a video as the suffix of `path` says: `.webp`, without loss where it is small, or `.mp4`. Frames are
    [F, 3, H, W] uint8, `fps` a second; of a WebP a frame's time is a whole number of ms, and the exact rate is kept as
    a mark.

    Raises ConfigError: another suffix, a frame rate of 0, an MP4 without the extra `video` or of an odd height or
    width; OSError: the file cannot be written.
    """
    rate, suffix = mp4.require_rate(fps, "fps"), path.suffix.lower()
    if suffix == ".mp4":
        mp4.write(path, frames, rate)
    elif suffix == ".webp":
        images = [Pillow.fromarray(frame) for frame in frames.permute(0, 2, 3, 1).contiguous().numpy()]
        settings = {"lossless": True} if max(images[0].size) < SMALL_PX else {"quality": _QUALITY}
        settings |= {"save_all": True, "append_images": images[1:], "loop": 0, "xmp": _mark(len(images), rate)}
        images[0].save(path, "WEBP", duration=_frame_ms(rate), **settings)
    else:
        raise ConfigError(f"{path.name}: a video is written as .webp or .mp4")


def decode_video(path: Path) -> tuple[Tensor, float]:
    """(frames [F, 3, H, W] uint8, frames a second) of a video file: MP4 and its kin, animated WebP, GIF.

    Raises UNREADABLE: as `opened`; an image; an empty or broken file; a frame rate of 0. ConfigError (a ValueError): a
    file that needs the extra `video`, which is not installed.
    """
    levels, rate = _levels(path)
    if rate is None:
        raise ValueError("it is an image, not a video")
    return levels, rate


def is_video_file(path: Path) -> bool:
    """Whether a file is of the kinds that need the extra `video`, by its suffix."""
    return path.suffix.lower() in mp4.SUFFIXES


def facts(path: Path) -> tuple[int, float | None]:
    """(number of frames, frames a second; None: an image) of a file, without its pixels.

    Raises UNREADABLE: as `opened`; no video in it; a frame rate of 0. ConfigError (a ValueError): a file that needs the
    extra `video`, which is not installed.
    """
    if is_video_file(path):
        frames, rate, _ = mp4.facts(path)
        return frames or len(mp4.read(path)[0]), rate  # some headers do not say how many
    with opened(path) as image:
        marked = _marked(image)
        if marked is not None or frames_in(image) == 1:
            mp4.require_room(marked[0] if marked else 1, *image.size)
            return marked or (1, None)
    frames, rate = _frames(path)  # of another program: its times are beside its frames
    return len(frames), rate


def frames_in(image: Image) -> int:
    """Frames of an opened file; 1 for an image, also one with a preview (a camera's MPO) or pages (TIFF)."""
    return getattr(image, "n_frames", 1) if image.format in _ANIMATED else 1


def is_animation(path: Path) -> bool:
    """Whether an image file has several frames, by its header; false where that cannot be read."""
    try:
        with opened(path) as image:
            return frames_in(image) > 1
    except UNREADABLE:
        return False


def upright_size(image: Image) -> tuple[int, int]:
    """(width, height) of an opened image as `plain` turns it, without its pixels."""
    width, height = image.size
    return (height, width) if image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8) else (width, height)


def size(path: Path) -> tuple[int, int]:
    """(width, height) of a file as it is stored, without its pixels; raises as `facts` does."""
    if is_video_file(path):
        return mp4.facts(path)[2]
    with opened(path) as image:
        return image.size


def _frame_ms(fps: float) -> int:
    return max(1, int(1000 / fps))


def _mark(frames: int, fps: float) -> bytes:
    """Number of frames and frame rate as XMP, which a WebP may hold."""
    return (
        f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        f'<rdf:Description xmlns:flowrl="flowrl:video" flowrl:frames="{frames}" flowrl:fps="{fps!r}"/>'
        "</rdf:RDF></x:xmpmeta>"
    ).encode()


def _marked(image: Image) -> tuple[int, float] | None:
    """What `_mark` wrote into a file; None: nothing. ValueError: no frames, or a frame rate of 0."""
    found = re.search(rb'flowrl:frames="(\d+)" flowrl:fps="([0-9.e+-]+)"', image.info.get("xmp") or b"")
    if found is None:
        return None
    count, rate = int(found[1]), float(found[2])
    if not count or not rate:
        raise ValueError(f"it says that it has {count} frames, {rate:g} a second; write it again")
    return count, rate


def _frames(file: Path) -> tuple[list[Image], float | None]:
    """(RGB frames, frames a second; None: one frame that is an image) of a file that Pillow reads.

    Joined frames are split again where the file says how many there were.
    """
    frames: list[Image] = []
    times: list[int] = []
    with opened(file) as image:
        marked = _marked(image)
        mp4.require_room(max(frames_in(image), marked[0] if marked else 1), *image.size)
        for number in range(frames_in(image)):
            image.seek(number)
            mp4.require_room(number + 1, *image.size)  # frames of a GIF may be larger than its header says
            frames.append(plain(image))
            times.append(image.info.get("duration") or 0)
    if marked is not None:
        count, rate = marked
        copies = [round(time / _frame_ms(rate)) for time in times] if len(frames) > 1 else [count]
        if sum(copies) != count:
            raise ValueError(f"it says that it has {count} frames, and it has {sum(copies)}; write it again")
        return [frame for frame, number in zip(frames, copies, strict=True) for _ in range(number)], rate
    if len(frames) == 1:
        return frames, None
    # Browsers show a frame without a time for 0.1 s.
    return frames, len(frames) / sum((time or 100) / 1000 for time in times)


def contact_sheet(samples: Tensor, columns: int, limit_px: int) -> tuple[Tensor, tuple[int, int]]:
    """Samples row by row in one image or video; the rest of the last row is black.

    Samples are images [B, 3, H, W] or videos [B, F, 3, H, W] in [0, 1], `columns` in a row; those whose longest side is
    above `limit_px` are averaged down to it. Returns the sheet [3, H', W'] or [F, 3, H', W'], and (height, width) of a
    sample in it.
    """
    import torch
    from torch.nn.functional import adaptive_avg_pool2d, pad

    height, width = samples.shape[-2:]
    scale = min(1.0, limit_px / max(height, width))
    height, width = max(1, round(height * scale)), max(1, round(width * scale))
    pooled: Tensor = adaptive_avg_pool2d(samples.flatten(0, -4), (height, width))
    small = pooled.reshape(*samples.shape[:-3], *pooled.shape[1:])
    padded: Tensor = pad(small.movedim(0, -1), (0, -len(small) % columns))
    filled = padded.movedim(-1, 0)
    rows = filled.reshape(-1, columns, *filled.shape[1:]).unbind(0)
    return torch.cat([torch.cat(row.unbind(0), dim=-1) for row in rows], dim=-2), (height, width)


def find(stem: Path) -> Path | None:
    """The file that `write` made of a stem; None if there is none, or one that was selected by a score."""
    found = next((f for suffix in SUFFIXES if (f := stem.with_name(stem.name + suffix)).is_file()), None)
    return None if found is None or selection(found) else found


def read_frames(file: Path) -> list[Image]:
    """RGB frames (`plain`) of a file, one of an image; raises as `decode_video` does, but for images."""
    if is_video_file(file):
        return [Pillow.fromarray(frame) for frame in mp4.read(file)[0].permute(0, 2, 3, 1).contiguous().numpy()]
    return _frames(file)[0]


def read_levels(file: Path) -> Tensor:
    """The image [3, H, W] or video [F, 3, H, W] of a file, uint8; raises as `decode_video` does, but for images."""
    levels, rate = _levels(file)
    return (levels[0] if rate is None else levels).contiguous()


def _levels(file: Path) -> tuple[Tensor, float | None]:
    """(frames [F, 3, H, W] uint8, frames a second; None: an image)."""
    import torch

    if is_video_file(file):
        return mp4.read(file)
    frames, rate = _frames(file)
    return torch.stack([torch.as_tensor(np.array(frame)).permute(2, 0, 1) for frame in frames]), rate


def read(file: Path) -> Tensor:
    """`read_levels` as float32 in [0, 1]."""
    from flowrl.media.eight_bits import unit_floats

    return unit_floats(read_levels(file))


def pixels(image: Image) -> Tensor:
    """An RGB image as a tensor [3, H, W], float32 in [0, 1]."""
    import torch

    from flowrl.media.eight_bits import unit_floats

    # Laid out as the images of a run are: a sum over other strides may differ in its last bit.
    return unit_floats(torch.as_tensor(np.array(image)).permute(2, 0, 1).contiguous())


def fitted(image: Image, height: int, width: int, place: tuple[float, float] = (0.5, 0.5), *, mirror: bool) -> Image:
    """The image at a size: scaled (bilinear) to the smallest one that covers it, cropped, and mirrored if asked. The
    size is in pixels; `place` is that of the crop, (down, across) in [0, 1]; (0.5, 0.5) is the middle.

    Source: SalesforceAIResearch/DiffusionDPO:train.py (torchvision's Resize and CenterCrop, for squares).
    """
    scale = max(height / image.height, width / image.width)
    size = max(width, int(image.width * scale)), max(height, int(image.height * scale))
    if size != image.size:
        image = image.resize(size, Pillow.Resampling.BILINEAR)
    top, left = round((size[1] - height) * place[0]), round((size[0] - width) * place[1])
    image = image.crop((left, top, left + width, top + height))
    return image.transpose(Pillow.Transpose.FLIP_LEFT_RIGHT) if mirror else image


UNREADABLE = (OSError, SyntaxError, ValueError)
"""Errors of `opened` about a file that is not a readable image."""


@contextmanager
def opened(path: str | Path | IO[bytes], formats: tuple[str, ...] | None = None) -> Generator[Image]:
    """The image of a file, decoded inside the block; `formats` of Pillow that it may have, None: any.

    Raises ValueError: a broken header, or more pixels than an image may have (a decompression bomb), by the last of its
    headers, which is the one that is decoded; SyntaxError: a broken PNG; OSError: there is no file, it is not an image,
    or it is cut off.
    """
    try:
        with Pillow.open(path, formats=formats) as image:
            yield image
    except Pillow.DecompressionBombError as error:
        raise ValueError(f"it has more pixels than an image may have ({error}); make it smaller") from None
    # Errors of decoders about broken bytes; the block only decodes, so none of them is a fault of its own code.
    except (EOFError, struct.error, IndexError, KeyError, TypeError, OverflowError) as error:
        raise OSError(f"its bytes are broken ({type(error).__name__}: {error})") from error


def open_image(path: str | Path | IO[bytes]) -> Image:
    """The image of a file, as `plain` makes it; raises as `opened` and `plain` do, and ValueError for a video."""
    with opened(path) as image:
        if (frames := frames_in(image)) > 1:
            raise ValueError(f"it is a video of {frames} frames, and an image is needed; save one frame as a PNG")
        return plain(image)


def plain(image: Image) -> Image:
    """The present frame in RGB of 8 bits, upright, on white where it is transparent.

    Raises ValueError: grey of 32 bits or of floats, whose white is not known.
    """
    # Pillow before 10.3 opens the 16-bit grey of a PNG, which knows no 32 bits, as "I".
    wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if image.mode in ("I", "F") and not wide:
        kind = "32-bit grey" if image.mode == "I" else "grey of floats"
        raise ValueError(f"it is {kind}, whose range is not known; save it with 8 or 16 bits")
    upright = ImageOps.exif_transpose(image)
    if wide:  # convert() would clip it at 255
        return Pillow.fromarray(((np.asarray(upright).astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        # The colour of a transparent pixel is arbitrary.
        return Pillow.alpha_composite(Pillow.new("RGBA", upright.size, "white"), upright.convert("RGBA")).convert("RGB")
    return upright.convert("RGB")
