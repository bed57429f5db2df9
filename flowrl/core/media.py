"""Images and videos as files: an image is a PNG, a video an animated WebP, which every browser plays."""

from __future__ import annotations

import json
import struct
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flowrl.core.files import is_mapping, writing

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

SUFFIXES = (".png", ".webp")
"""Suffixes of the files that `write` makes."""
SMALL_PX = 128
"""Longest side, in pixels, from which on videos are saved with loss, and embedded images too."""
FRAME_MS = 62
"""Time of a frame in the player, in ms: 16 a second, Wan's rate."""
_QUALITY = 90
_NOTE = "flowrl"
"""Key of the note in a PNG's text."""


def write(sample: Tensor, stem: Path, note: Mapping[str, Any] | None = None) -> Path:
    """Save a sample as `<stem>.png` or `<stem>.webp`, and return the file.

    Scoring the file repeats the logged score for images and small videos. Videos of `SMALL_PX` and more are saved with
    loss, a tenth as large.

    Args:
        sample: image [3, H, W] or video [F, 3, H, W] in [0, 1], rounded by `eight_bit`; or in 8 bits already.
        stem: path without suffix.
        note: plain data about the sample, for the PNG's text or for `<stem>.json` next to a WebP.

    Raises:
        WriteError: the disk is full or not writable.
    """
    from PIL import Image as Pillow
    from PIL.PngImagePlugin import PngInfo

    from flowrl.core.eight_bits import eight_bit

    frames = sample if sample.ndim == 4 else sample[None]
    pixels = eight_bit(frames).permute(0, 2, 3, 1).numpy()
    images = [Pillow.fromarray(frame) for frame in pixels]
    file = stem.with_name(f"{stem.name}.{'png' if len(images) == 1 else 'webp'}")
    with writing(file):
        stem.parent.mkdir(parents=True, exist_ok=True)
        if len(images) == 1:
            info = PngInfo()
            if note is not None:
                info.add_text(_NOTE, json.dumps(note))
            images[0].save(file, pnginfo=info)
        else:
            write_video(images, file, quality=_QUALITY)
            if note is not None:
                _note_file(file).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    return file


def read_note(file: Path) -> dict[str, Any]:
    """The note of a file that `write` made; {} if there is none, as for files of other programs."""
    from PIL import Image as Pillow

    try:
        if file.suffix == ".png":
            with Pillow.open(file) as opened:
                text = opened.info.get(_NOTE, "{}")
        else:
            text = _note_file(file).read_text(encoding="utf-8") if _note_file(file).is_file() else "{}"
        result = json.loads(text)
    # Not an image, or text of another program: whoever reads the pixels reports what is wrong with them.
    except (OSError, SyntaxError, ValueError, TypeError, Pillow.DecompressionBombError):
        return {}
    return result if is_mapping(result) else {}


def _note_file(video: Path) -> Path:
    return video.with_suffix(".json")


def write_video(images: Sequence[Image], file: Path | IO[bytes], *, quality: int, frame_ms: int = FRAME_MS) -> None:
    """Write frames of one size as an animated WebP, without loss if they are small."""
    settings = {"lossless": True} if max(images[0].size) < SMALL_PX else {"quality": quality}
    images[0].save(file, "WEBP", save_all=True, append_images=images[1:], duration=frame_ms, loop=0, **settings)


def contact_sheet(samples: Tensor, columns: int, limit_px: int) -> tuple[Tensor, tuple[int, int]]:
    """Samples row by row in one image or video; the rest of the last row is black.

    Args:
        samples: images [B, 3, H, W] or videos [B, F, 3, H, W] in [0, 1].
        columns: samples in a row.
        limit_px: longest side of a sample in pixels; larger ones are averaged down to it.

    Returns:
        (sheet [3, H', W'] or [F, 3, H', W'], (height, width) of a sample in it).
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
    """The file that `write` made of a stem; None if there is none."""
    return next((f for suffix in SUFFIXES if (f := stem.with_name(stem.name + suffix)).is_file()), None)


def read_frames(file: Path) -> list[Image]:
    """RGB frames (`plain`) of a file, one of an image.

    WebP joins equal neighbouring frames; those of `write` are split again, except where all frames are equal.

    Raises:
        UNREADABLE (`opened`): not an image, or too many pixels.
        ValueError: grey of an unknown range.
    """
    frames: list[Image] = []
    times: list[int] = []
    with opened(file) as image:
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            frames.append(plain(image))
            times.append(image.info.get("duration") or 0)
    if any(not time or time % FRAME_MS for time in times):
        return frames
    return [frame for frame, time in zip(frames, times, strict=True) for _ in range(round(time / FRAME_MS))]


def read(file: Path) -> Tensor:
    """The image [3, H, W] or video [F, 3, H, W] of a file, float32 in [0, 1]; raises as `read_frames` does."""
    import torch

    frames = [pixels(frame) for frame in read_frames(file)]
    return frames[0] if len(frames) == 1 else torch.stack(frames)


def pixels(image: Image) -> Tensor:
    """An RGB image as a tensor [3, H, W], float32 in [0, 1]."""
    import numpy as np
    import torch

    from flowrl.core.eight_bits import unit_floats

    # Laid out as the images of a run are: a sum over other strides may differ in its last bit.
    return unit_floats(torch.as_tensor(np.array(image)).permute(2, 0, 1).contiguous())


def fitted(image: Image, height: int, width: int, place: tuple[float, float] = (0.5, 0.5), *, mirror: bool) -> Image:
    """The image at a size: scaled (bilinear) to the smallest one that covers it, cropped, and mirrored if asked.

    Args:
        image: of any size.
        height: in pixels.
        width: in pixels.
        place: position of the crop, (down, across) in [0, 1]; (0.5, 0.5) is the middle.
        mirror: flip left to right after the crop.

    Source: SalesforceAIResearch/DiffusionDPO:train.py (torchvision's Resize and CenterCrop, for squares).
    """
    from PIL import Image as Pillow

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
def opened(path: str | Path | IO[bytes]) -> Generator[Image]:
    """The image of a file, decoded inside the block.

    Raises:
        ValueError: a broken header, or more pixels than an image may have (a decompression bomb).
        SyntaxError: a broken PNG.
        OSError: there is no file, it is not an image, or it is cut off.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has more pixels than an image may have ({error}); make it smaller") from None
    # Errors of decoders about broken bytes; the block only decodes, so none of them is a fault of its own code.
    except (EOFError, struct.error, IndexError, KeyError, TypeError, OverflowError) as error:
        raise OSError(f"its bytes are broken ({type(error).__name__}: {error})") from error


def open_image(path: str | Path | IO[bytes]) -> Image:
    """The image of a file, as `plain` makes it; raises as `opened` and `plain` do."""
    with opened(path) as image:
        return plain(image)


def plain(image: Image) -> Image:
    """The present frame in RGB of 8 bits, upright, on white where it is transparent.

    Raises:
        ValueError: grey of 32 bits or of floats, whose white is not known.
    """
    import numpy as np
    from PIL import Image, ImageOps

    # Pillow before 10.3 opens the 16-bit grey of a PNG, which knows no 32 bits, as "I".
    wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if image.mode in ("I", "F") and not wide:
        kind = "32-bit grey" if image.mode == "I" else "grey of floats"
        raise ValueError(f"it is {kind}, whose range is not known; save it with 8 or 16 bits")
    upright = ImageOps.exif_transpose(image)
    if wide:  # convert() would clip it at 255
        return Image.fromarray(((np.asarray(upright).astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        # The colour of a transparent pixel is arbitrary.
        return Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA")).convert("RGB")
    return upright.convert("RGB")
