"""Picture files as RGB of 8 bits, whatever they were saved as."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

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
        with Image.open(path) as picture:
            yield picture
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has more pixels than a picture is taken to have ({error}); make it smaller") from None
    # What decoders let through of broken bytes; of the block's own code these would be faults, so it only decodes.
    except (EOFError, struct.error, IndexError, KeyError, TypeError, OverflowError) as error:
        raise OSError(f"its bytes are broken ({type(error).__name__}: {error})") from error


def open_picture(path: str | Path | IO[bytes]) -> Image:
    """See `plain`.

    Raises:
        ValueError: grey of 32 bits or of floats.
        UNREADABLE: see `opened`.
    """
    with opened(path) as picture:
        return plain(picture)


def plain(picture: Image) -> Image:
    """RGB of 8 bits, turned upright, on white where it is transparent; of several frames that it was sought to.

    Raises:
        ValueError: grey of 32 bits or of floats, which does not say what its white is.
    """
    import numpy as np
    from PIL import Image, ImageOps

    # Pillow before 10.3 opens the 16-bit grey of a PNG, which knows no 32 bits, as "I".
    wide = picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG")
    if picture.mode in ("I", "F") and not wide:
        kind = "32-bit grey" if picture.mode == "I" else "grey of floats"
        raise ValueError(f"it is {kind}, whose range is not known; save it with 8 or 16 bits")
    upright = ImageOps.exif_transpose(picture)
    if wide:  # convert() would cut it off at 255
        return Image.fromarray(((np.asarray(upright).astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        # The colour under a transparent place is whatever the program left there.
        return Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA")).convert("RGB")
    return upright.convert("RGB")
