"""Videos of a preference set: files or folders of frames, what their headers say, and whether a pair fits the model."""

from dataclasses import dataclass
from pathlib import Path

from PIL.Image import Image

from flowrl.core.errors import ConfigError
from flowrl.data.natural import natural
from flowrl.media import media, mp4

VIDEO = "a video, for a model of images"
FRAME_SUFFIXES = tuple(suffix for suffix in media.IMAGE_SUFFIXES if suffix != ".gif")
"""Suffixes of the images in a folder of frames: a GIF next to them is a preview of the whole."""
_RATE_TOLERANCE = 0.01
"""Relative difference of two equal frame rates: 29.97 and 30 a second are one, and so are 16 and 62 ms a frame."""


class Unfit(Exception):
    """A record, or its videos, cannot be used: (reason, its values and what to do).

    Reasons are keys of provenance.json, so their words stay.
    """


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames that each video of a set must have."""

    count: int | None
    """Frames of the model's videos; None: any number, the same in both of a pair, and images too."""
    cut: bool = False
    """Longer videos are cut to `count` frames; false: they do not fit."""

    def require(self, *sources: Path | bytes | None) -> None:
        """Check the videos of one record by their headers. They are the chosen one, and the rejected one if there is
        one. Raises Unfit: naming the reason, the values and the remedy; ConfigError: a file that needs the extra
        `video`.
        """
        if self.count is None and not all(map(may_be_video, sources)):
            return
        found = [self._facts(source) for source in sources]
        for name, frames, _ in found:
            if self.count is None or frames == self.count or (self.cut and frames > self.count):
                continue
            remedy = "data.pairs.frames=cut takes a part of a longer one"
            remedy = remedy if frames > self.count else "give longer videos"
            raise Unfit(
                "frames the model does not take",
                f"{name} has {frames} frames, and model.num_frames={self.count}; set it to theirs, or {remedy}",
            )
        if len(found) < 2:
            return
        (chosen, frames, rate), (rejected, others, other_rate) = found
        if frames != others:
            raise Unfit(
                "frame counts differ",
                f"{chosen} has {frames} frames, {rejected} has {others}; cut both to the same length",
            )
        if rate is not None and other_rate is not None and abs(rate - other_rate) > _RATE_TOLERANCE * rate:
            raise Unfit(
                "frame rates differ",
                f"{chosen} has {rate:g} frames a second, {rejected} has {other_rate:g}: the same motion would look "
                "faster in one of them; bring both to one rate",
            )

    def _facts(self, source: Path | bytes | None) -> tuple[str, int, float | None]:
        """(name, frames, frames a second or None) of a video."""
        if not isinstance(source, Path):
            raise Unfit(
                "video not given as a path",
                "videos inside a table are not read; save them as files and give their paths",
            )
        try:
            frames, rate = facts(source)
        except ConfigError:  # the package that reads it is not installed
            raise
        except media.UNREADABLE as error:
            raise Unfit("unreadable video", f"{source.name}: {error}") from None
        if rate is None and frames == 1 and self.count is not None:
            raise Unfit("not a video", f"{source.name} is an image, and the model makes videos; set model.num_frames=1")
        return source.name, frames, rate


def may_be_video(source: Path | bytes | None) -> bool:
    """Whether it is a folder, or a file of a kind that may hold a video."""
    if not isinstance(source, Path):
        return False
    return source.is_dir() or media.is_video_file(source) or source.suffix.lower() in media.MAY_MOVE


def facts(source: Path) -> tuple[int, float | None]:
    """(number of frames, frames a second; None: not known) of a file or a folder of frames, without their pixels.

    Raises media.UNREADABLE: it is none, or is broken; ConfigError: a file that needs the extra `video`.
    """
    if source.is_dir():
        return len(frame_files(source)), None
    return media.facts(source)


def frames_of(source: Path) -> list[Image]:
    """RGB frames of a file or folder, in order. Raises media.UNREADABLE: none, broken, or of several sizes."""
    if not source.is_dir():
        return media.read_frames(source)
    files, frames = frame_files(source), list[Image]()
    for file in files:
        mp4.require_room(len(files), *media.size(file))
        frames.append(media.open_image(file))
        sizes = {frames[0].size, frames[-1].size}
        if len(sizes) > 1:
            raise ValueError(f"its frames have several sizes, such as {sorted(sizes)}; make them equal")
    return frames


def frame_files(folder: Path) -> list[Path]:
    """A folder's images in the order of their names, 10 after 9. Raises ValueError: there is none."""
    files = [file for file in folder.iterdir() if file.suffix.lower() in FRAME_SUFFIXES and file.is_file()]
    if not files:
        raise ValueError(f"a folder without frames ({', '.join(FRAME_SUFFIXES)})")
    return sorted(files, key=lambda file: natural(file.name))


def part_of(frames: list[Image], count: int | None, place: float) -> list[Image]:
    """`count` neighbouring frames, None: all; `place` in [0, 1], 0.5 the middle. Raises ValueError: there are fewer."""
    if count is None:
        return frames
    if len(frames) < count:
        raise ValueError(f"it has {len(frames)} frames, and the model makes {count}; give a longer video")
    start = round((len(frames) - count) * place)
    return frames[start : start + count]
