"""Picture files as RGB of 8 bits, whatever they were saved as."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def open_picture(path: str | Path | IO[bytes]) -> Image:
    """See `plain`.

    Raises:
        ValueError: grey of 32 bits or of floats.
        OSError, SyntaxError, and whatever else a decoder meets in broken bytes.
    """
    from PIL import Image

    with Image.open(path) as picture:
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
