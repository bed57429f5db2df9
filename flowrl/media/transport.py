"""Images and videos between tensors and the messages of reward servers."""

import io
import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.core.wire import WireImage
from flowrl.media.eight_bits import eight_bit
from flowrl.media.media import opened

_DTYPES = {"uint8": "u1", "float32": "<f4"}


def pack(sample: Tensor, kind: str) -> WireImage:
    """An image [3, H, W] or a video [F, 3, H, W] in [0, 1], in 8 bits ("png", "uint8") or exact ("float32").

    NaN and infinity do not exist in 8 bits: a sample with them is sent as "float32".
    """
    values, shape = sample.detach().float().cpu(), tuple(sample.shape)
    if values.ndim not in (3, 4) or shape[-3] != 3:
        raise ValueError(f"a sample must be an image [3, H, W] or a video [F, 3, H, W], got {list(shape)}")
    if kind == "float32" or not values.isfinite().all():
        return WireImage("float32", shape, values.contiguous().numpy().astype("<f4", copy=False).tobytes())
    pixels = eight_bit(values)
    if kind == "uint8":
        return WireImage("uint8", shape, pixels.contiguous().numpy().tobytes())
    rows = pixels.movedim(-3, -1).reshape(-1, shape[-1], 3).contiguous()
    return WireImage("png", shape, png(Image.fromarray(rows.numpy())))


def png(image: Image.Image) -> bytes:
    """An RGB image as a PNG at the fastest level, since time matters more than size."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def unpack(image: WireImage) -> Tensor:
    """float32 [3, H, W] or [F, 3, H, W] in [0, 1]. Raises OSError, ValueError, SyntaxError: these are no image."""
    if image.format in _DTYPES:
        values = np.frombuffer(image.data, _DTYPES[image.format]).reshape(image.shape)
        tensor = torch.as_tensor(values.astype(np.float32))
        return tensor if image.format == "float32" else tensor / 255
    *frames, _, height, width = image.shape
    size = width, math.prod(frames) * height
    with opened(io.BytesIO(image.data), formats=("PNG",)) as found:
        # The limits were those of the first header, and the last one is decoded.
        if found.size != size or found.mode != "RGB":
            raise ValueError(f"the PNG holds {found.size} pixels of {found.mode}, not the shape {list(image.shape)}")
        rows = np.asarray(found)
    tensor = torch.as_tensor(rows.astype(np.float32)).reshape(*frames, height, width, 3)
    return tensor.movedim(-1, -3).contiguous() / 255
