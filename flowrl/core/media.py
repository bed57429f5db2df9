"""Pictures and clips as files: a picture is a PNG, a clip an animated WebP, which every browser plays."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flowrl.core.files import writing

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

SUFFIXES = (".png", ".webp")
"""Of what `write` makes."""
SMALL_PX = 128
"""Below this side pictures and clips are kept to the last bit wherever they are shown or saved."""
FRAME_MS = 62
"""How long a frame is shown: 16 a second, Wan's rate. Only the player sees it."""
_QUALITY = 90
_TOLD = "flowrl"


def write(sample: Tensor, stem: Path, told: Mapping[str, Any] | None = None) -> Path:
    """Save a picture [3, H, W] or a clip [F, 3, H, W] in [0, 1], rounded to 8 bits, beside the name `stem`.

    Scoring the file repeats the logged score: for pictures and small clips. Clips of `SMALL_PX` and more are saved with
    loss, a tenth as large. What is `told` of it, plain data, goes into the PNG's text under `flowrl`, or beside the
    WebP into `<stem>.json`. Returns the file.

    Raises:
        WriteError: the disk is full or not writable.
    """
    from PIL import Image as Pillow
    from PIL.PngImagePlugin import PngInfo

    frames = sample if sample.ndim == 4 else sample[None]
    pixels = (frames * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    images = [Pillow.fromarray(frame) for frame in pixels]
    file = stem.with_name(f"{stem.name}.{'png' if len(images) == 1 else 'webp'}")
    with writing(file):
        stem.parent.mkdir(parents=True, exist_ok=True)
        if len(images) == 1:
            info = PngInfo()
            if told is not None:
                info.add_text(_TOLD, json.dumps(told))
            images[0].save(file, pnginfo=info)
        else:
            write_video(images, file, quality=_QUALITY)
            if told is not None:
                _note_file(file).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return file


def read_note(file: Path) -> dict[str, Any]:
    """What `write` was told of a picture or a clip; empty where nothing is known, as of anyone else's file."""
    from PIL import Image as Pillow

    try:
        if file.suffix == ".png":
            with Pillow.open(file) as opened:
                result = json.loads(opened.info.get(_TOLD, "{}"))
        else:
            result = json.loads(_note_file(file).read_text(encoding="utf-8")) if _note_file(file).is_file() else {}
    # No picture, or text of another program: whoever reads the pixels says what is wrong with them.
    except (OSError, SyntaxError, ValueError, TypeError, Pillow.DecompressionBombError):
        return {}
    return result if isinstance(result, dict) else {}


def _note_file(video: Path) -> Path:
    return video.with_suffix(".json")


def write_video(images: Sequence[Image], file: object, *, quality: int, frame_ms: int = FRAME_MS) -> None:
    """Frames of one size as an animated WebP, to a path or a binary file; small ones without loss."""
    settings = {"lossless": True} if max(images[0].size) < SMALL_PX else {"quality": quality}
    options = {"save_all": True, "append_images": images[1:], "duration": frame_ms, "loop": 0}
    images[0].save(file, "WEBP", **options, **settings)


def contact_sheet(samples: Tensor, columns: int, limit_px: int) -> tuple[Tensor, tuple[int, int]]:
    """Samples row by row in one picture, or one clip of clips; what is left of the last row is black.

    Args:
        samples: pictures [B, 3, H, W] or clips [B, F, 3, H, W] in [0, 1].
        columns: in a row.
        limit_px: longest side of each; larger ones are averaged down to it.

    Returns:
        The sheet, [3, H', W'] or [F, 3, H', W'], and the (height, width) of a sample there.
    """
    import torch
    from torch.nn.functional import adaptive_avg_pool2d, pad

    height, width = samples.shape[-2:]
    scale = min(1.0, limit_px / max(height, width))
    height, width = max(1, round(height * scale)), max(1, round(width * scale))
    small = adaptive_avg_pool2d(samples.flatten(0, -4), (height, width)).unflatten(0, samples.shape[:-3])
    missing = -len(small) % columns
    rows = pad(small.movedim(0, -1), (0, missing)).movedim(-1, 0).unflatten(0, (-1, columns)).unbind(0)
    return torch.cat([torch.cat(row.unbind(0), dim=-1) for row in rows], dim=-2), (height, width)


def find(stem: Path) -> Path | None:
    """The file that `write` made for that name."""
    return next((f for suffix in SUFFIXES if (f := stem.with_name(stem.name + suffix)).is_file()), None)


def read_frames(file: Path) -> list[Image]:
    """RGB frames (`images.plain`), one for a picture. WebP joins equal neighbours: those of `write` are taken apart
    again, but where all are equal it keeps one.

    Raises:
        UNREADABLE (`images.opened`): no picture, or one of too many pixels.
        ValueError: grey of an unknown range.
    """
    frames, times = [], []
    with opened(file) as image:
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            frames.append(plain(image))
            times.append(image.info.get("duration") or 0)
    if any(not time or time % FRAME_MS for time in times):
        return frames
    return [frame for frame, time in zip(frames, times, strict=True) for _ in range(round(time / FRAME_MS))]


def read(file: Path) -> Tensor:
    """A picture [3, H, W] or a clip [F, 3, H, W], float32 in [0, 1].

    Raises:
        See `read_frames`.
    """
    import torch

    frames = [pixels(frame) for frame in read_frames(file)]
    return frames[0] if len(frames) == 1 else torch.stack(frames)


def pixels(image: Image) -> Tensor:
    """An RGB picture as [3, H, W], float32 in [0, 1]."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def fitted(image: Image, height: int, width: int, place: tuple[float, float] = (0.5, 0.5), *, mirror: bool) -> Image:
    """A picture of that size: made as small as covers it (bilinear), a part cut out, mirrored perhaps.

    Args:
        image: any size.
        height: in pixels.
        width: in pixels.
        place: of the part, (down, across) in [0, 1]; (0.5, 0.5) is the middle.
        mirror: left to right, after the cut.

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
"""What `opened` raises of a file that is no readable picture."""


@contextmanager
def opened(path: str | Path | IO[bytes]) -> Iterator[Image]:
    """The picture of a file, decoded inside the block.

    Raises:
        ValueError: a broken header, or more pixels than a picture may have (a decompression bomb).
        SyntaxError: a broken PNG.
        OSError: there is no file, it is no picture, it is cut off.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has more pixels than a picture is taken to have ({error}); make it smaller") from None
    # What decoders let through of broken bytes; of the block's own code these would be faults, so it only decodes.
    except (EOFError, struct.error, IndexError, KeyError, TypeError, OverflowError) as error:
        raise OSError(f"its bytes are broken ({type(error).__name__}: {error})") from error


def open_image(path: str | Path | IO[bytes]) -> Image:
    """See `plain`.

    Raises:
        ValueError: grey of 32 bits or of floats.
        UNREADABLE: see `opened`.
    """
    with opened(path) as image:
        return plain(image)


def plain(image: Image) -> Image:
    """RGB of 8 bits, turned upright, on white where it is transparent; of several frames that it was sought to.

    Raises:
        ValueError: grey of 32 bits or of floats, which does not say what its white is.
    """
    import numpy as np
    from PIL import Image, ImageOps

    # Pillow before 10.3 opens the 16-bit grey of a PNG, which knows no 32 bits, as "I".
    wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if image.mode in ("I", "F") and not wide:
        kind = "32-bit grey" if image.mode == "I" else "grey of floats"
        raise ValueError(f"it is {kind}, whose range is not known; save it with 8 or 16 bits")
    upright = ImageOps.exif_transpose(image)
    if wide:  # convert() would cut it off at 255
        return Image.fromarray(((np.asarray(upright).astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        # The colour under a transparent place is whatever the program left there.
        return Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA")).convert("RGB")
    return upright.convert("RGB")
