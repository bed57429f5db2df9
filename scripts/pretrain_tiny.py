"""Train the tiny models of the lab from a seed: `python scripts/pretrain_tiny.py NAME`.

tiny-sd3: builds a real StableDiffusion3Pipeline (scripts/_tiny_sd3.py), trains it on the shapes world, and saves it
to `assets/tiny-sd3`. tiny-sd: the same with a StableDiffusionPipeline (scripts/_tiny_sd.py), which takes over
the VAE of tiny-sd3. Two single-thread processes by default: on a small machine they use two cores better than two
threads do. About an hour on two cores each.

tiny-clip: trains an open_clip model on the same world (scripts/_tiny_clip.py) and measures on samples of tiny-sd3
how far it agrees with the verifier (scripts/_tiny_clip_measure.py). One thread, a few minutes.

tiny-wan: a real WanPipeline of 9 frames at 32 px (scripts/_tiny_wan.py) on the shapes world in motion, in two stages
that resume where they were stopped (scripts/_tiny_wan_stages.py). The second one needs the output folder alone of the
first; a full training on two cores is

    python scripts/pretrain_tiny.py tiny-wan --stage vae
    python scripts/pretrain_tiny.py tiny-wan --stage denoiser
    python scripts/pretrain_tiny.py tiny-wan --measure
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import _tiny_clip
import _tiny_clip_measure
import _tiny_sd
import _tiny_sd3
import _tiny_wan
import _tiny_wan_stages
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _tiny_report import record, report
from _tiny_training import Model, Settings, save, train_denoiser, train_vae

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MODELS = {"tiny-sd3": _tiny_sd3.MODEL, "tiny-sd": _tiny_sd.MODEL}
WAN_HELP = """A full training on two cores; a stage that was stopped goes on when its command is given again:

    python scripts/pretrain_tiny.py tiny-wan --stage vae
    python scripts/pretrain_tiny.py tiny-wan --stage denoiser
    python scripts/pretrain_tiny.py tiny-wan --measure

Every 1500 steps a line tells the strict accuracy so far. Where it falls short of two-object captions: the denoiser
alone again, with --two-share 0.15 or 0, another --rate, or --tokens 80, which takes twice as long. Its checkpoint,
denoiser.safetensors, is removed first, and for another --two-share latents-*.safetensors too. The denoiser's stage
takes the VAE in the output folder.
"""
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
    _add_wan(names.add_parser("tiny-wan", epilog=WAN_HELP, formatter_class=argparse.RawDescriptionHelpFormatter))
    return parser.parse_args(words)


def _add_wan(wan: argparse.ArgumentParser) -> None:
    kept = _tiny_wan.Settings
    wan.add_argument("--stage", choices=("vae", "denoiser", "all"), default="all")
    wan.add_argument("--seed", type=int, default=0)
    wan.add_argument("--processes", type=int, default=2)
    wan.add_argument("--vae-scale", type=float, default=1.0, help="factor on the steps of every phase of the VAE")
    wan.add_argument("--steps", type=int, default=kept.steps, help="steps of the denoiser's stage")
    wan.add_argument("--rate", type=float, default=kept.rate, help="the denoiser's peak learning rate")
    wan.add_argument("--videos", type=int, default=kept.videos, help="videos of each pool")
    wan.add_argument("--pools", type=int, default=kept.pools, help="fresh pools, one after another")
    wan.add_argument("--tokens", type=int, choices=tuple(_tiny_wan.PATCHES), default=kept.tokens)
    wan.add_argument("--two-share", type=float, default=kept.two_share, help="share of two-object captions; 0: none")
    wan.add_argument("--save-every", type=int, default=kept.save_every, help="steps between checkpoints")
    wan.add_argument("--check", type=int, default=kept.check, help="held-out captions measured at the end")
    wan.add_argument("--port", type=int, default=29619)
    wan.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
    wan.add_argument("--work", type=Path, default=Path("runs/pretrain-tiny-wan"), help="folder of the checkpoints")
    wan.add_argument("--output", type=Path, default=ASSETS / "tiny-wan")


def wan_settings(args: argparse.Namespace) -> _tiny_wan.Settings:
    """The settings of both stages of tiny-wan."""
    phases = tuple(replace(p, steps=max(1, round(args.vae_scale * p.steps))) for p in _tiny_wan.Settings.vae)
    names = (
        "seed",
        "processes",
        "output",
        "work",
        "steps",
        "rate",
        "videos",
        "pools",
        "tokens",
        "two_share",
        "save_every",
        "check",
    )
    return _tiny_wan.Settings(vae=phases, **{name: getattr(args, name) for name in names})


def make_wan(args: argparse.Namespace) -> None:
    """Train the stages that are asked for, or measure what there is."""
    if args.measure:
        torch.set_num_threads(1)
        _tiny_wan_stages.record(args.output, count=args.check)
        return
    settings = wan_settings(args)
    stages = ("vae", "denoiser") if args.stage == "all" else (args.stage,)
    mp.spawn(_tiny_wan_stages.worker, args=(stages, settings, args.port), nprocs=settings.processes)


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
    if args.name == "tiny-wan":
        make_wan(args)
        return
    model, settings = MODELS[args.name], settings_of(args)
    if args.measure:
        torch.set_num_threads(1)
        record(model, settings.output)
        return
    mp.spawn(worker, args=(model, settings, args.port), nprocs=settings.processes)


if __name__ == "__main__":
    main()
