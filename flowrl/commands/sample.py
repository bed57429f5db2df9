"""`flowrl sample`: pictures or clips from a model, or from a run's tuned weights."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flowrl.commands._drawn import Origin
    from flowrl.core.types import Gaussians
    from flowrl.data.prompts import Prompt
    from flowrl.rollout.learned_noise import LearnedNoise

_OURS = ("self", "prompt", "image", "last_image", "generator", "output_type", "return_dict")


def command(
    model: Annotated[str, typer.Argument(help="Run folder, model folder, hub id or embedded asset.")],
    prompts: Annotated[
        list[str], typer.Argument(help="Prompts, or files of them (.txt, .jsonl, .json, .csv, .tsv, .parquet).")
    ],
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", help="Picture to edit or to begin with, for every prompt; again for a second one."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("samples"),
    count: Annotated[int, typer.Option("--count", help="Samples per prompt.", min=1)] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of the starting noise.")] = 0,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Denoising steps; default: the pipeline's.", min=1)
    ] = None,
    guidance: Annotated[
        float | None, typer.Option("--guidance", help="Scale, in the pipeline's units; default: the pipeline's.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Option("--set", help="key=value arguments of the pipeline's call: num_frames=33.")
    ] = None,
) -> None:
    """Draw with the pipeline's own call: a PNG for a picture, an animated WebP for a clip, with how each was drawn."""
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
    with phase("sampling", "; smaller pictures (--set height=512 --set width=512) and clips of fewer frames take less"):
        _draw(pipeline, call, records, made, distributions, out, count, seed)


def _draw(
    pipeline: Any,
    call: dict[str, Any],
    records: list[Prompt],
    made: Origin,
    distributions: Gaussians | None,
    out: Path,
    count: int,
    seed: int,
) -> None:
    """`count` samples of each prompt into the folder `out`; prints their files."""
    import torch

    from flowrl.commands._drawn import stem
    from flowrl.core import media
    from flowrl.core.console import Progress
    from flowrl.core.errors import ConfigError
    from flowrl.core.media import open_image
    from flowrl.models.generic.images import image_arguments

    bar = Progress(len(records) * count, "sampling", show=True)
    for i, record in enumerate(records):
        images = image_arguments(pipeline, [open_image(file) for file in record.images])
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
            told = made.provenance(record.text, record.images, seed + k)
            file = media.write(drawn.float().cpu(), out / stem(i, k, told), told)
            bar.update(1)
            print(file)
    bar.close()


def _distributions(noise: LearnedNoise, records: list[Prompt]) -> Gaussians:
    """The learned distribution of each prompt.

    Raises:
        ConfigError: one has none.
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
        ConfigError: it takes no such argument, or the command decides it.
    """
    import inspect

    from flowrl.core.errors import ConfigError
    from flowrl.core.registry import suggest
    from flowrl.core.strict import apply_override

    result: dict[str, Any] = {}
    for word in words:
        apply_override(result, word)
    known = [name for name in inspect.signature(type(pipeline).__call__).parameters if name not in _OURS]
    for name in result:
        if name in _OURS:
            raise ConfigError(f"--set {name}: the command line decides it")
        if name not in known:
            raise ConfigError(
                f"--set {name}: {type(pipeline).__name__} takes no such argument; {suggest(name, known)}"
                f"there are: {', '.join(known)}"
            )
    steps = result.get("num_inference_steps", 1)
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"--set num_inference_steps={steps}: at least 1, a whole number")
    return result


def _records(words: list[str], images: list[Path]) -> list[Prompt]:
    """Prompts of the command line, with their pictures, which can be read.

    Raises:
        ConfigError: a file that is none, a picture that cannot be read, or pictures from two sides.
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
            raise ConfigError(f"--image {str(file)!r} cannot be read as a picture: {error}") from None
    paths = tuple(str(file.resolve()) for file in images)
    records: list[Any] = []
    for word in words:
        # os.path: Path.is_file() raises of a prompt that is too long to be a name.
        if not named_as_file(word) and not os.path.isfile(word):
            records.append(Prompt(word, {}, paths))
            continue
        for record in load_prompts(word, "prompts"):
            if paths and record.images:
                raise ConfigError(f"--image beside {word!r}, whose records name their own pictures; leave it out")
            records.append(Prompt(record.text, record.metadata, record.images or paths))
    return records
