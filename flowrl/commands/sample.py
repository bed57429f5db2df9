"""`flowrl sample`: images or videos of a model, or of a run's tuned weights."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flowrl.commands._arguments import argument, option

if TYPE_CHECKING:
    from flowrl.core.types import Gaussians
    from flowrl.data.prompts import Prompt
    from flowrl.rollout.learned_noise import LearnedNoise

_OURS = ("self", "prompt", "image", "last_image", "generator", "output_type", "return_dict")


Model = Annotated[str, argument("MODEL", "Run folder, model folder, hub id, or embedded asset (tiny-sd3).")]
Prompts = Annotated[
    list[str], argument("PROMPT", "Prompts, or files of prompts (.txt, .jsonl, .json, .csv, .tsv, .parquet).")
]
Images = Annotated[
    list[Path] | None,
    option(
        "Image that every prompt edits or begins with; may be given again for a model that takes several.",
        "A .jsonl of prompts may name images of its own instead.",
        name="--image",
    ),
]
Out = Annotated[Path, option("Folder for the results; only an equal call overwrites a file in it.")]
Count = Annotated[int, option("Samples of each prompt.", least=1)]
Seed = Annotated[int, option("Seed of the initial noise; sample k of a prompt takes seed + k.")]
Steps = Annotated[int | None, option("Denoising steps.", "Default: the run's; for a model its pipeline's.", least=1)]
Guidance = Annotated[
    float | None,
    option("Guidance scale in the pipeline's own units.", "Default: the run's; for a model its pipeline's."),
]
Settings = Annotated[
    list[str] | None,
    option("Argument of the pipeline's call, key=value, such as num_frames=33; may be given again.", name="--set"),
]


def command(
    model: Model,
    prompts: Prompts,
    image: Images = None,
    out: Out = Path("samples"),
    count: Count = 1,
    seed: Seed = 0,
    steps: Steps = None,
    guidance: Guidance = None,
    options: Settings = None,
) -> None:
    """Sample images (PNG) or videos (animated WebP) from a model or a run, by the pipeline's own call.

    Each file holds its prompt, seed and settings.
    """
    import torch

    from flowrl.commands._drawn import origin
    from flowrl.core.errors import ConfigError
    from flowrl.core.files import out_folder
    from flowrl.core.phases import phase
    from flowrl.models.generic.images import image_arguments
    from flowrl.models.generic.options import guidance_arguments
    from flowrl.run.export import learned_noise, load_run_pipeline

    if guidance is not None and not math.isfinite(guidance):
        raise ConfigError(f"--guidance {guidance}: must be a finite number")
    records = _records(prompts, image or [])
    out_folder(out)
    noise = learned_noise(Path(model))
    distributions = None if noise is None else _distributions(noise, records)
    with phase("loading"):
        pipeline, call = load_run_pipeline(model)
    for record in records:
        image_arguments(pipeline, record.images)
    with phase("loading"):
        pipeline.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    pipeline.set_progress_bar_config(disable=True)
    if steps is not None:
        call["num_inference_steps"] = steps
    if guidance is not None:
        call |= guidance_arguments(pipeline, guidance, call)
    call |= _settings(pipeline, options or [])
    made = origin(model, pipeline, call, guidance)
    with phase("sampling", "; smaller images (--set height=512 --set width=512) and videos of fewer frames take less"):
        _draw(pipeline, call, records, made, distributions, out, count, seed)


def _draw(
    pipeline: Any,
    call: dict[str, Any],
    records: list[Prompt],
    made: dict[str, Any],
    distributions: Gaussians | None,
    out: Path,
    count: int,
    seed: int,
) -> None:
    """Write `count` samples of each prompt into the folder `out` and print their files; `made` is `_drawn.origin`'s."""
    import torch

    from flowrl.commands._drawn import provenance, stem
    from flowrl.core import media
    from flowrl.core.console import Progress
    from flowrl.core.errors import ConfigError
    from flowrl.models.generic.images import image_arguments

    bar = Progress(len(records) * count, "sampling", show=True)
    for i, record in enumerate(records):
        images = image_arguments(pipeline, [media.open_image(file) for file in record.images])
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
            note = provenance(made, record.text, record.images, seed + k)
            file = media.write(drawn.float().cpu(), out / stem(i, k, note), note)
            bar.update(1)
            print(file)
    bar.close()


def _distributions(noise: LearnedNoise, records: list[Prompt]) -> Gaussians:
    """The learned noise distribution of each prompt.

    Raises:
        ConfigError: a prompt that the run did not train on.
    """
    from flowrl.core.errors import ConfigError
    from flowrl.data.prompts import identity
    from flowrl.rollout.learned_noise import UnknownPrompt

    try:
        return noise.drawn_from(noise.numbers([identity(record) for record in records]))
    except UnknownPrompt as error:
        raise ConfigError(
            f"{error.args[0]!r}: this run learned the initial noise of its own {len(noise.prompts)} prompts, such as "
            f"{noise.prompts[0][0]!r}, and this is none of them; for other prompts sample the model itself"
        ) from None


def _settings(pipeline: Any, words: list[str]) -> dict[str, Any]:
    """Arguments of the pipeline's call from key=value words.

    Raises:
        ConfigError: an argument that the call does not have, or that the command sets itself.
    """
    import inspect

    from flowrl.core.errors import ConfigError
    from flowrl.core.registry import suggest
    from flowrl.core.strict import overridden

    result = overridden({}, words)
    known = [name for name in inspect.signature(type(pipeline).__call__).parameters if name not in _OURS]
    for name in result:
        if name in _OURS:
            raise ConfigError(f"--set {name}: the command sets it by itself; leave it out")
        if name not in known:
            raise ConfigError(
                f"--set {name}: {type(pipeline).__name__} takes no such argument; {suggest(name, known)}"
                f"there are: {', '.join(known)}"
            )
    steps = result.get("num_inference_steps", 1)
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"--set num_inference_steps={steps}: must be a whole number, at least 1")
    return result


def _records(words: list[str], images: list[Path]) -> list[Prompt]:
    """Prompts of the command line with their images, each of which was opened.

    Raises:
        ConfigError: a file or an image that cannot be read, or images from --image and from a file at once.
    """
    from flowrl.core.errors import ConfigError
    from flowrl.core.media import UNREADABLE, open_image
    from flowrl.data.prompt_files import named_as_file
    from flowrl.data.prompt_sources import load_prompts
    from flowrl.data.prompts import Prompt

    for file in images:
        try:
            open_image(file)
        except UNREADABLE as error:
            raise ConfigError(f"--image {str(file)!r} cannot be read as an image: {error}") from None
    paths = tuple(str(file.resolve()) for file in images)
    records: list[Any] = []
    for word in words:
        # os.path: Path.is_file() raises for a prompt that is too long to be a name.
        if not named_as_file(word) and not os.path.isfile(word):
            records.append(Prompt(word, {}, paths))
            continue
        for record in load_prompts(word, "prompts"):
            if paths and record.images:
                raise ConfigError(f"--image with {word!r}, whose records name their own images; leave --image out")
            records.append(Prompt(record.text, record.metadata, record.images or paths))
    return records
