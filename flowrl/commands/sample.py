"""`flowrl sample`: pictures from a model, or from a run's tuned weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[str, typer.Argument(help="Run folder, model folder, hub id or embedded asset.")],
    prompts: Annotated[list[str], typer.Argument(help="Prompts.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the pictures.")] = Path("samples"),
    count: Annotated[int, typer.Option("--count", help="Pictures per prompt.", min=1)] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of the starting noise.")] = 0,
    steps: Annotated[int | None, typer.Option("--steps", help="Denoising steps; default: the pipeline's.")] = None,
    guidance: Annotated[float | None, typer.Option("--guidance", help="CFG scale; default: the pipeline's.")] = None,
) -> None:
    """Draw pictures with the pipeline's own call."""
    import torch

    from flowrl.evaluate import save_png
    from flowrl.export import load_run_pipeline
    from flowrl.metrics import Progress

    pipeline, defaults = load_run_pipeline(model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    call = dict(defaults)
    if steps is not None:
        call["num_inference_steps"] = steps
    if guidance is not None:
        call["guidance_scale"] = guidance
    out.mkdir(parents=True, exist_ok=True)
    bar = Progress(len(prompts) * count, "sampling", show=True)
    for i, prompt in enumerate(prompts):
        for k in range(count):
            generator = torch.Generator().manual_seed(seed + k)
            image = pipeline(prompt, output_type="pt", generator=generator, **call).images[0]
            file = out / f"{i:05d}-{k}.png"
            save_png(image.float().cpu(), file)
            bar.update(1)
            print(file)
    bar.close()
