"""Train the tiny models of the lab from a seed: `python scripts/pretrain_tiny.py tiny-sd3` (or tiny-sd, tiny-clip).

tiny-sd3: builds a real StableDiffusion3Pipeline (scripts/_tiny_sd3.py), trains it on the shapes world, and saves it
to `assets/tiny-sd3`. tiny-sd: the same with a StableDiffusionPipeline (scripts/_tiny_sd.py), which takes over
the VAE of tiny-sd3. Two single-thread processes by default: on a small machine they use two cores better than two
threads do. About an hour on two cores each.

tiny-clip: trains an open_clip model on the same world (scripts/_tiny_clip.py) and measures on samples of tiny-sd3
how far it agrees with the verifier (scripts/_tiny_clip_measure.py). One thread, a few minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _tiny_clip
import _tiny_clip_measure
import _tiny_sd
import _tiny_sd3
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _tiny_report import record, report
from _tiny_training import Model, Settings, save, train_denoiser, train_vae

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MODELS = {"tiny-sd3": _tiny_sd3.MODEL, "tiny-sd": _tiny_sd.MODEL}
VAE_FROM = {"tiny-sd3": None, "tiny-sd": ASSETS / "tiny-sd3"}


def worker(rank: int, model: Model, settings: Settings, port: int) -> None:
    """One process of the training; the first of them saves, measures and tells."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=settings.processes)
    if settings.first_cycle == 0:
        pipe = model.build(settings.seed)
        if settings.vae_from is None:
            train_vae(pipe, settings, rank)
        else:
            donor = diffusers.AutoencoderKL.from_pretrained(settings.vae_from, subfolder="vae")
            pipe.vae.load_state_dict(donor.state_dict())
    for cycle in range(settings.first_cycle, len(settings.cycles)):
        if cycle > 0:
            pipe = model.load(settings.output)
        pipe.vae.eval()
        train_denoiser(pipe, model, settings, rank, cycle, lambda pipe, when: report(pipe, model, when, 256))
        if rank == 0:
            save(pipe, model, settings.output)
        dist.barrier()
    if rank == 0:
        record(model, settings.output, settings)
    dist.barrier()
    dist.destroy_process_group()


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = parser.add_subparsers(dest="name", required=True)
    for name in MODELS:
        model = names.add_parser(name)
        model.add_argument("--seed", type=int, default=0)
        model.add_argument("--processes", type=int, default=2)
        model.add_argument("--steps", type=int, default=None, help="steps of every cycle (default: the recipe's)")
        model.add_argument("--first-cycle", type=int, default=0, help="go on from the pipeline in the output folder")
        model.add_argument("--vae-from", type=Path, default=VAE_FROM[name], help="take the VAE of this pipeline folder")
        model.add_argument("--vae-steps", type=int, default=Settings.vae_steps)
        model.add_argument("--images", type=int, default=Settings.images)
        model.add_argument("--port", type=int, default=29617)
        model.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
        model.add_argument("--output", type=Path, default=ASSETS / name)
    clip = names.add_parser("tiny-clip")
    clip.add_argument("--seed", type=int, default=0)
    clip.add_argument("--steps", type=int, default=_tiny_clip.Settings.steps)
    clip.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
    clip.add_argument("--output", type=Path, default=ASSETS / "tiny-clip")
    return parser.parse_args(words)


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of a denoiser's training."""
    return Settings(
        seed=args.seed,
        processes=args.processes,
        output=args.output,
        cycles=tuple((args.steps or steps, *rest) for steps, *rest in MODELS[args.name].cycles),
        first_cycle=args.first_cycle,
        vae_from=args.vae_from,
        vae_steps=args.vae_steps,
        images=args.images,
    )


def main() -> None:
    args = parse()
    if args.name == "tiny-clip":
        wanted = _tiny_clip.Settings(seed=args.seed, steps=args.steps, output=args.output)
        _tiny_clip_measure.make(wanted, only_measure=args.measure)
        return
    model, settings = MODELS[args.name], settings_of(args)
    if args.measure:
        torch.set_num_threads(1)
        record(model, settings.output)
        return
    mp.spawn(worker, args=(model, settings, args.port), nprocs=settings.processes)


if __name__ == "__main__":
    main()
