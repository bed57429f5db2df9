"""Video files of other programs, through PyAV (the extra `video`): MP4 with H.264 is written, more kinds are read.

PyAV brings FFmpeg's libraries and an H.264 encoder with it. It is imported when the first such file is met, so that
nothing else needs it; animated WebP (media.py) needs no extra.
"""

import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import ConfigError, Remedy

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm")
"""Suffixes of the files that `read` reads; `write` makes the first."""
MOST_BYTES = 2**32
"""Size of a decoded video that is refused, in bytes of uint8: 4 GiB, 3,500 frames of 480 x 832."""
MOST_FRAMES = 2**16
"""Frames of a video that is refused whatever their size: 45 minutes at 24 a second."""
LOWEST_FPS, HIGHEST_FPS = 0.01, 1000.0
"""Frame rates that both kinds of files can hold: a WebP counts in whole ms, an MP4 in fractions."""
_CRF = 16
"""Constant rate factor of libx264: 0 is exact, 18 is called visually lossless by FFmpeg's documentation."""
_RATE_DENOMINATOR = 1001
"""Largest denominator of a frame rate: that of television's 24000 / 1001."""
_BT709 = 1
"""Number of ITU-R BT.709 among FFmpeg's matrices, primaries and transfer curves; and of the limited range."""
_REMEDY = "write it again, or leave it out"


def require_rate(fps: Any, where: str) -> float:
    """A frame rate as a float.

    Raises ConfigError: it is not a finite number above 0, or none that a file can hold.

    >>> require_rate(16, "--fps")
    16.0
    """
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not (math.isfinite(fps) and fps > 0):
        raise ConfigError(f"{where}={fps!r}: a frame rate must be above 0, in frames a second, such as 16")
    if not LOWEST_FPS <= fps <= HIGHEST_FPS:
        raise ConfigError(
            f"{where}={fps!r}: files hold {LOWEST_FPS:g} to {HIGHEST_FPS:g} frames a second; take a rate in this "
            "range, such as 16"
        )
    return float(fps)


def require_room(frames: int, width: int, height: int) -> None:
    """Check a video's decoded size by its header. Raises ValueError: more than `MOST_FRAMES` or `MOST_BYTES`."""
    if frames > MOST_FRAMES or frames * width * height * 3 > MOST_BYTES:
        raise ValueError(
            f"it has {frames} frames of {width} x {height} pixels, more than {MOST_FRAMES} frames or "
            f"{MOST_BYTES / 2**30:g} GiB; cut it shorter"
        )


def library(file: str | Path) -> Any:
    """The package `av`. Raises ConfigError: it is not installed; the message names `file`."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"{Path(file).name} needs a package that is not installed ({error.name}); animated WebP (.webp) needs none",
            Remedy(command="pip install 'flowrl[video]'"),
        ) from None
    return av


def facts(file: Path) -> tuple[int, float, tuple[int, int]]:
    """(number of frames, frames a second, (width, height)) by the header alone; 0 frames where it does not say.

    Raises ConfigError: PyAV is not installed; OSError: there is no file, or it is not a video; ValueError: no video in
    it, or a frame rate of 0.
    """
    av = library(file)
    with _opened(av, file) as container:
        stream = _stream(container)
        return stream.frames, _rate(stream), (stream.width, stream.height)


def read(file: Path) -> "tuple[Tensor, float]":
    """(frames [F, 3, H, W] uint8, upright; frames a second) of a video file.

    Frames are taken as they are stored: a variable rate is not evened out, and the rate is the mean.

    Raises ConfigError: PyAV is not installed; OSError: there is no file, it is not a video, or it is cut off;
    ValueError: no frame in it, a frame rate of 0, or more than `require_room` allows.
    """
    import torch

    av, frames = library(file), list[Any]()
    with _opened(av, file) as container:
        stream = _stream(container)
        rate = _rate(stream)
        require_room(stream.frames, stream.width, stream.height)
        try:
            for frame in container.decode(stream):
                # By its own matrix; where it names none, by that of its size, as players do.
                named = int(frame.colorspace)
                matrix = named if named in (_BT709, 4, 5, 6, 7, 9) else (_BT709 if frame.height >= 720 else 5)
                pixels = torch.as_tensor(frame.reformat(format="rgb24", src_colorspace=matrix).to_ndarray())
                # Phones store the way they were held beside the frames.
                turned = torch.rot90(pixels, frame.rotation // 90) if frame.rotation % 360 else pixels
                frames.append(turned.permute(2, 0, 1).contiguous())
                require_room(len(frames), frame.width, frame.height)  # some headers do not say how many
        except av.FFmpegError as error:
            raise OSError(f"its bytes are broken after {len(frames)} frames ({error.strerror}); {_REMEDY}") from error
    if not frames:
        raise ValueError(f"it is empty: there is no frame in it; {_REMEDY}")
    return torch.stack(frames), rate


def write(file: Path, frames: "Tensor", fps: float) -> None:
    """Write frames [F, 3, H, W] uint8 as an MP4 of H.264 (4:2:0, BT.709, limited range), which every browser plays.

    The same frames give the same bytes. It is lossy: halved colour resolution, and `_CRF`.

    Raises ConfigError: PyAV is not installed, an odd height or width, or a frame rate of 0; OSError: the file cannot be
    written.
    """
    rate, (height, width) = require_rate(fps, "fps"), frames.shape[-2:]
    if height % 2 or width % 2:
        raise ConfigError(
            f"{file.name}: H.264 needs an even height and width, these frames are {height} x {width}; use .webp"
        )
    av = library(file)
    with av.open(str(file), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(rate).limit_denominator(_RATE_DENOMINATOR))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        # Several threads cut the frames elsewhere, and the bytes would depend on the machine.
        stream.thread_count, stream.options = 1, {"crf": str(_CRF)}
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = context.color_range = _BT709
        for pixels in frames.permute(0, 2, 3, 1):
            frame = av.VideoFrame.from_ndarray(pixels.contiguous().numpy(), format="rgb24")
            made = frame.reformat(format="yuv420p", dst_colorspace=_BT709, dst_color_range=_BT709)
            container.mux(stream.encode(made))
        container.mux(stream.encode())


def _opened(av: Any, file: Path) -> Any:
    try:
        return av.open(str(file))
    except av.FFmpegError as error:
        empty = file.is_file() and not file.stat().st_size
        told = "it is empty: it has 0 bytes" if empty else f"it is not a readable video ({error.strerror})"
        raise OSError(f"{told}; {_REMEDY}") from error


def _stream(container: Any) -> Any:
    if not container.streams.video:
        raise ValueError(f"it is empty: there is no video in it; {_REMEDY}")
    return container.streams.video[0]


def _rate(stream: Any) -> float:
    rate = stream.average_rate or stream.guessed_rate
    if not rate or rate <= 0:
        raise ValueError(f"its frame rate is 0; {_REMEDY}")
    return float(rate)
