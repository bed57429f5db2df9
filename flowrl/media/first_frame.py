"""The first frame of a video from an image of any size: the one rule by which it is fitted to the video's size."""

from PIL import ImageOps
from PIL.Image import Image, Resampling

from flowrl.core.errors import OptionError

MOST_ENLARGED = 2.0
"""Largest factor by which an image is enlarged: a smaller one has no detail for a frame of that size."""


def require_frame(size: tuple[int, int], height: int, width: int, *, crop: bool = True) -> None:
    """Raise ValueError, with the reason and the remedy, for an image that is no frame of that size by the rule. `size`
    is (width, height) of the image; all are pixels. `crop`: one of another aspect ratio is cropped; False: refused.
    """
    factor = max(width / size[0], height / size[1])
    if factor > MOST_ENLARGED:
        raise ValueError(
            f"its {size[0]} x {size[1]} pixels (width x height) are too few for a frame of {width} x {height}: they "
            f"would be enlarged {factor:.3g} times, and {MOST_ENLARGED:g} is the most; give a larger image, or set "
            "model.height and model.width to less"
        )
    if not crop and size[0] * height != size[1] * width:
        raise OptionError(
            f"its {size[0]} x {size[1]} pixels (width x height) have not the aspect ratio of a frame of {width} x "
            f"{height}, and model.first_frame=exact crops nothing",
            {"model.first_frame": "crop"},
        )


def fitted_frame(image: Image, height: int, width: int, *, crop: bool = True) -> Image:
    """The image as a frame of a video: scaled (Lanczos) until it just covers the size, its middle cut out.

    The aspect ratio is kept, and an image of that size already is unchanged. An image of the video's aspect ratio comes
    out as diffusers' pipelines scale it by themselves; one of another they would stretch.

    Raises ValueError: as `require_frame`.

    Source: Wan-Video/Wan2.2:wan/textimage2video.py (scaled by Lanczos to cover the size, centre crop).
    """
    require_frame(image.size, height, width, crop=crop)
    return ImageOps.fit(image, (width, height), Resampling.LANCZOS)
