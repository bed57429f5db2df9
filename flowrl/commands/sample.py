"""`flowrl sample`: images or videos of a model, or of a run's tuned weights.

A file is named `<prompt>-<sample>-<mark>`: two numbers of the call, and eight digits of a hash over all that decides
the image: prompt, images, seed, model, adapter, steps, guidance and all other arguments. So a file is overwritten by
the same call alone, which makes the same image again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowrl.commands._arguments import showing
from flowrl.core.errors import ConfigError, ModelError, Remedy
from flowrl.core.files import file_sha256, out_folder
from flowrl.media import media, mp4

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowrl.apps.selection import BestOf
    from flowrl.core.types import Gaussians
    from flowrl.data.prompts import Prompt


def command(
    model: str,
    prompts: list[str],
    image: list[Path] | None = None,
    out: Path = Path("samples"),
    count: int = 1,
    best_of: int | None = None,
    keep: int | None = None,
    reward: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    guidance: float | None = None,
    options: list[str] | None = None,
    lora: list[str] | None = None,
    base: bool = False,
    strength: float | None = None,
    lora_scale: float | None = None,
    mix: list[str] | None = None,
    config: str | None = None,
    form: Literal["webp", "mp4"] = "webp",
    fps: float | None = None,
    quiet: bool = False,
) -> None:
    """Sample images or videos of a model or a run. They are PNG, animated WebP or MP4, by the pipeline's own call.

    Each file holds its prompt, seed and settings, those of a video in a .json next to it.
    """
    video = Video(form, fps)
    with showing(quiet):
        import torch

        from flowrl.apps import selection
        from flowrl.apps.command_line import call_of, require_finite
        from flowrl.display.phases import phase
        from flowrl.run import dial, judged
        from flowrl.run.trained import frame_rate

        require_finite(guidance)
        if not -(2**63) <= seed < 2**64 - max(count, best_of or 1):
            raise ConfigError(f"--seed {seed}: torch takes seeds of 64 bits; give a smaller number")
        records = _records(prompts, image or [])
        turned = dial.dial_of(model, strength, lora_scale, mix or [])
        chooser = selection.best_of(best_of, keep, reward, model, records, count)
        out_folder(out)
        distributions = None if base else _distributions(model, records)
        with phase("loading"):
            loaded = judged.load(model, base=base, loras=lora or [], config=config, dial=turned)
        pipeline = loaded.pipeline
        video.require_kind(pipeline)
        call = call_of(pipeline, loaded.call, steps, guidance, options or [], loaded.distilled)
        rate = frame_rate(model, pipeline, call) if video.fps is None else video.fps
        for record in records:
            _image_arguments(pipeline, record, call)
        with phase("loading"):
            pipeline.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        pipeline.set_progress_bar_config(disable=True)
        made = loaded.origin(call, guidance)
        less = "; smaller images (--set height=512 --set width=512) and videos of fewer frames take less"
        with phase("sampling", less):
            _draw(pipeline, call, records, made, distributions, out, best_of or count, seed, video, rate, chooser)


@dataclass(frozen=True)
class Video:
    """How videos are written."""

    form: str
    fps: float | None
    """Frames a second; None: nobody said."""

    def __post_init__(self) -> None:
        if self.fps is not None:
            mp4.require_rate(self.fps, "--fps")
        if self.form == "mp4":
            mp4.library("--format mp4")

    @property
    def asked(self) -> str | None:
        """The option that asks for a kind or a rate of videos; None: none does."""
        if self.form == "mp4":
            return "--format mp4"
        return None if self.fps is None else f"--fps {self.fps:g}"

    def require_kind(self, pipeline: Any) -> None:
        """Raise ConfigError where the command asks for videos and the pipeline's call knows no frames and no video."""
        known = signature(type(pipeline).__call__).parameters
        if not any(part in name for name in known for part in ("frame", "video")):
            self.require(pipeline, 1, "makes images, which are written as PNG")

    def require(self, pipeline: Any, frames: int, what: str = "made an image, which is written as PNG") -> None:
        """Raise ConfigError for an image where the command asks for a kind or a rate of videos."""
        if frames == 1 and self.asked is not None:
            raise ConfigError(
                f"{self.asked}: it is for videos, and {type(pipeline).__name__} {what}", Remedy(without=self.asked)
            )


def _draw(
    pipeline: Any,
    call: dict[str, Any],
    records: list[Prompt],
    made: dict[str, Any],
    distributions: Gaussians | None,
    out: Path,
    count: int,
    seed: int,
    video: Video,
    fps: float,
    chooser: BestOf | None,
) -> None:
    """Write `count` samples of each prompt, or the chosen ones, into `out` and print their files; `made`: origin."""
    import torch

    from flowrl.display.display import Progress
    from flowrl.media.eight_bits import eight_bit
    from flowrl.models.weights.whole import require_finite

    bar = Progress(len(records) * count, "sampling", show=True)
    for i, record in enumerate(records):
        images, held = _image_arguments(pipeline, record, call), list[torch.Tensor]()

        def write(k: int, levels: torch.Tensor, more: dict[str, Any], i: int = i, record: Prompt = record) -> None:
            note = provenance(made, record.text, record.images, seed + k) | more
            if levels.ndim == 4:
                note["fps"] = fps
            print(media.write(levels, out / stem(i, k, note), note, fps=fps, form=video.form))

        for k in range(count):
            generator = torch.Generator().manual_seed(seed + k)
            arguments = {**call, **images, "output_type": "pt", "generator": generator, "return_dict": False}
            if distributions is not None:
                distribution = distributions.at(torch.tensor([i]))
                arguments["latents"] = distribution.sample(torch.randn(distribution.mean.shape, generator=generator))
            try:
                drawn = pipeline(prompt=record.text, **arguments)[0][0]
            except ValueError as error:  # how pipelines refuse what they are called with
                raise ConfigError(f"{type(pipeline).__name__}: {error}") from error
            require_finite(pipeline, drawn[None], [record.text])
            frames = len(drawn) if drawn.ndim == 4 else 1
            video.require(pipeline, frames)
            held.append(eight_bit(drawn if frames > 1 else drawn.reshape(drawn.shape[-3:])).cpu())
            bar.update(1)
            if chooser is None:
                write(k, held.pop(), {})
        for k, more in ({} if chooser is None else chooser(held, record, seed)).items():
            write(k, held[k], more)
    bar.close()


def provenance(made: dict[str, Any], prompt: str, images: Iterable[str], seed: int) -> dict[str, Any]:
    """Plain data of one file: `origin` of its call, prompt, seed, and the contents of the image files."""
    hashes = [{"file": Path(path).name, "sha256": file_sha256(Path(path))} for path in images]
    return {"prompt": prompt, "seed": seed, **made, "images": hashes}


def stem(number: int, sample: int, note: dict[str, Any]) -> str:
    """Name of a file without its suffix; `note` is its provenance.

    >>> stem(3, 0, {"prompt": "a red circle"})
    '00003-0-79564736'
    """
    mark = hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()[:8]
    return f"{number:05d}-{sample}-{mark}"


def _image_arguments(pipeline: Any, record: Prompt, call: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the call for the images of a record, fitted to the size where they are frames.

    Raises ConfigError: an image that cannot be a frame of this size; ModelError: too few images, or too many.
    """
    from flowrl.models.generic.images import image_arguments

    try:
        return image_arguments(pipeline, [media.open_image(file) for file in record.images], call)
    except ModelError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"the prompt {record.text[:60]!r} has an image that cannot be its first frame: {error}"
        ) from error


def _distributions(model: str, records: list[Prompt]) -> Gaussians | None:
    """The noise distribution of each prompt; None: none is learned. Raises ConfigError: there is none for a prompt."""
    from flowrl.data.prompts import identity
    from flowrl.rollout.learned_noise import UnknownPrompt
    from flowrl.run.trained import learned_noise

    noise = learned_noise(Path(model))
    if noise is None:
        return None
    try:
        return noise.drawn_from(noise.numbers([identity(record) for record in records]))
    except UnknownPrompt as error:
        raise ConfigError(
            f"{error.args[0]!r}: this run learned the initial noise of its own {len(noise.prompts)} prompts, such as "
            f"{noise.prompts[0][0]!r}, and this is none of them; for other prompts sample the model itself"
        ) from None


def _records(words: list[str], images: list[Path]) -> list[Prompt]:
    """Prompts of the command line with their images, each of which was opened.

    Raises ConfigError: a file or an image that cannot be read, or images from --image and from a file at once.
    """
    from flowrl.data.prompt_files import TEXTS, named_as_file
    from flowrl.data.prompt_sources import Columns, load_prompts
    from flowrl.data.prompts import Prompt

    for file in images:
        try:
            media.open_image(file)
        except media.UNREADABLE as error:
            raise ConfigError(f"--image {str(file)!r} cannot be read as an image: {error}") from None
    paths = tuple(str(file.resolve()) for file in images)
    records: list[Any] = []
    for word in words:
        # os.path: Path.is_file() raises for a prompt that is too long to be a name.
        if not named_as_file(word) and not os.path.isfile(word):
            records.append(Prompt(word, {}, paths))
            continue
        for record in load_prompts(word, "prompts", Columns(TEXTS)):
            if paths and record.images:
                raise ConfigError(
                    f"--image with {word!r}, whose records name their own images", Remedy(without="--image")
                )
            records.append(Prompt(record.text, record.metadata, record.images or paths))
    return records
