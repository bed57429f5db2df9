"""What the lab stands on, made anew from a seed: `python -m scripts.pretraining WHAT`, from the repository root.

tiny-sd3: builds a real StableDiffusion3Pipeline (sd3.py), trains it on the shapes world, and saves it to
`assets/tiny-sd3`. tiny-sd: the same with a StableDiffusionPipeline (sd.py), which takes over the VAE of tiny-sd3. Two
single-thread processes by default: on a small machine they use two cores better than two threads do. About an hour on
two cores each.

tiny-sd3-student: distils tiny-sd3 to four network evaluations (student.py) and measures both (student_measure.py). One
thread, under ten minutes of CPU, and a few more for the measurement.

tiny-clip: trains an open_clip model on the same world (clip.py) and measures on samples of tiny-sd3 how far it agrees
with the verifier (clip_measure.py). One thread, a few minutes.

tiny-judge: teaches tiny-sd3's transformer to judge its latents (judge.py), in rounds with runs that climb it, and
measures how far it agrees with the verifier (judge_measure.py). One thread, under half an hour.

tiny-wan: a real WanPipeline of 9 frames at 32 px (wan.py) on the shapes world in motion, in two stages that resume
where they were stopped (wan_stages.py). The second one needs the output folder alone of the first; a full training on
two cores is

    python -m scripts.pretraining tiny-wan --stage vae
    python -m scripts.pretraining tiny-wan --stage denoiser
    python -m scripts.pretraining tiny-wan --measure

tiny-kontext: a real FluxKontextPipeline (kontext.py) on edits of the shapes world, with the VAE of tiny-sd3. It goes on
where it was stopped (kontext_stages.py):

    python -m scripts.pretraining tiny-kontext
    python -m scripts.pretraining tiny-kontext --measure

shapes-prompts, edit-prompts, sd3-prompts, geneval-prompts: the lists of `assets/prompts/`, in seconds. Making them
again changes nothing; tests compare them. edit-pairs: a preference set of edits that needs no sampling.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torch.multiprocessing as mp

from flowrl.edited_shapes import OPERATIONS
from scripts.pretraining import (
    clip,
    clip_measure,
    edit_prompts,
    geneval_prompts,
    judge,
    judge_measure,
    kontext,
    kontext_stages,
    sd3_prompts,
    shapes_prompts,
    student,
    student_measure,
    wan,
    wan_stages,
)
from scripts.pretraining.pipelines import MODELS, worker
from scripts.pretraining.report import record
from scripts.pretraining.training import Settings

ASSETS = Path(__file__).resolve().parents[2] / "assets"
WAN_HELP = """A full training on two cores; a stage that was stopped goes on when its command is given again:

    python -m scripts.pretraining tiny-wan --stage vae
    python -m scripts.pretraining tiny-wan --stage denoiser
    python -m scripts.pretraining tiny-wan --measure

Every 1500 steps a line tells the strict accuracy so far. Where it falls short of two-object captions: the denoiser
alone again, with --two-share 0.15 or 0, another --rate, or --tokens 80, which takes twice as long. Its checkpoint,
denoiser.safetensors, is removed first, and for another --two-share latents-*.safetensors too. The denoiser's stage
takes the VAE in the output folder.
"""
VAE_FROM = {"tiny-sd3": None, "tiny-sd": ASSETS / "tiny-sd3"}
PROMPTS = {
    "shapes-prompts": shapes_prompts,
    "edit-prompts": edit_prompts,
    "sd3-prompts": sd3_prompts,
    "geneval-prompts": geneval_prompts,
}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pretraining",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = parser.add_subparsers(dest="name", metavar="WHAT", required=True)
    for name in MODELS:
        one = names.add_parser(name)
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--processes", type=int, default=2)
        one.add_argument("--steps", type=int, default=None, help="steps of every cycle (default: the recipe's)")
        one.add_argument("--first-cycle", type=int, default=0, help="go on from the pipeline in the output folder")
        one.add_argument("--vae-from", type=Path, default=VAE_FROM[name], help="take the VAE of this pipeline folder")
        one.add_argument("--vae-steps", type=int, default=Settings.vae_steps)
        one.add_argument("--images", type=int, default=Settings.images)
        one.add_argument("--port", type=int, default=29617)
        one.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
        one.add_argument("--output", type=Path, default=ASSETS / name)
        one.set_defaults(make=make_pipeline)
    one = names.add_parser("tiny-sd3-student")
    one.add_argument("--seed", type=int, default=student.Settings.seed)
    one.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
    one.add_argument("--teacher", type=Path, default=ASSETS / "tiny-sd3")
    one.add_argument("--output", type=Path, default=ASSETS / "tiny-sd3-student")
    one.set_defaults(make=make_student)
    one = names.add_parser("tiny-clip")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--steps", type=int, default=clip.Settings.steps)
    one.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
    one.add_argument("--output", type=Path, default=ASSETS / "tiny-clip")
    one.set_defaults(make=make_clip)
    one = names.add_parser("tiny-judge")
    one.add_argument("--seed", type=int, default=judge.Settings.seed)
    one.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
    one.add_argument("--output", type=Path, default=ASSETS / "tiny-judge")
    one.set_defaults(make=make_judge)
    _add_wan(names.add_parser("tiny-wan", epilog=WAN_HELP, formatter_class=argparse.RawDescriptionHelpFormatter))
    _add_kontext(names.add_parser("tiny-kontext"))
    for name, module in PROMPTS.items():
        one = names.add_parser(name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(one)
        one.set_defaults(make=module.write)
    one = names.add_parser("edit-pairs", description=edit_prompts.write_pairs.__doc__)
    edit_prompts.add_pair_arguments(one)
    one.set_defaults(make=edit_prompts.write_pairs)
    return parser.parse_args(words)


def _add_wan(one: argparse.ArgumentParser) -> None:
    kept = wan.Settings
    one.add_argument("--stage", choices=("vae", "denoiser", "all"), default="all")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--processes", type=int, default=2)
    one.add_argument("--vae-scale", type=float, default=1.0, help="factor on the steps of every phase of the VAE")
    one.add_argument("--steps", type=int, default=kept.steps, help="steps of the denoiser's stage")
    one.add_argument("--rate", type=float, default=kept.rate, help="the denoiser's peak learning rate")
    one.add_argument("--videos", type=int, default=kept.videos, help="videos of each pool")
    one.add_argument("--pools", type=int, default=kept.pools, help="fresh pools, one after another")
    one.add_argument("--tokens", type=int, choices=tuple(wan.PATCHES), default=kept.tokens)
    one.add_argument("--two-share", type=float, default=kept.two_share, help="share of two-object captions; 0: none")
    one.add_argument("--save-every", type=int, default=kept.save_every, help="steps between checkpoints")
    one.add_argument("--check", type=int, default=kept.check, help="held-out captions measured at the end")
    one.add_argument("--port", type=int, default=29619)
    one.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
    one.add_argument("--work", type=Path, default=Path("runs/pretrain-tiny-wan"), help="folder of the checkpoints")
    one.add_argument("--output", type=Path, default=ASSETS / "tiny-wan")
    one.set_defaults(make=make_wan)


def _add_kontext(one: argparse.ArgumentParser) -> None:
    kept = kontext.Settings
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--processes", type=int, default=1)
    one.add_argument("--steps", type=int, default=kept.steps)
    one.add_argument("--rate", type=float, default=kept.rate, help="the denoiser's peak learning rate")
    one.add_argument("--batch-size", type=int, default=kept.batch_size, help="pairs of a step, all processes together")
    one.add_argument("--pairs", type=int, default=kept.pairs, help="pairs of each pool")
    one.add_argument("--pools", type=int, default=kept.pools, help="fresh pools, one after another")
    one.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    one.add_argument("--save-every", type=int, default=kept.save_every, help="steps between checkpoints")
    one.add_argument("--vae-from", type=Path, default=ASSETS / "tiny-sd3", help="take the VAE of this pipeline folder")
    one.add_argument("--port", type=int, default=29621)
    one.add_argument("--measure", action="store_true", help="only measure what the output folder holds")
    one.add_argument("--finish", action="store_true", help="save the checkpoint's average as it is, and measure it")
    one.add_argument("--work", type=Path, default=Path("runs/pretrain-tiny-kontext"), help="folder of the checkpoint")
    one.add_argument("--output", type=Path, default=ASSETS / "tiny-kontext")
    one.set_defaults(make=make_kontext)


def kontext_settings(args: argparse.Namespace) -> kontext.Settings:
    """The settings of tiny-kontext's training."""
    names = ("seed", "processes", "output", "work", "vae_from", "steps", "rate", "batch_size", "pairs", "pools")
    given = {name: getattr(args, name) for name in (*names, "save_every")}
    return kontext.Settings(**given, operations=tuple(args.operations))


def make_kontext(args: argparse.Namespace) -> None:
    """Train tiny-kontext, end it at its checkpoint, or measure what there is."""
    if args.measure:
        torch.set_num_threads(1)
        kontext_stages.record(args.output)
        return
    settings = kontext_settings(args)
    mp.spawn(kontext_stages.worker, args=(settings, args.port, args.finish), nprocs=settings.processes)


def wan_settings(args: argparse.Namespace) -> wan.Settings:
    """The settings of both stages of tiny-wan."""
    phases = tuple(replace(p, steps=max(1, round(args.vae_scale * p.steps))) for p in wan.Settings.vae)
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
    return wan.Settings(vae=phases, **{name: getattr(args, name) for name in names})


def make_wan(args: argparse.Namespace) -> None:
    """Train the stages that are asked for, or measure what there is."""
    if args.measure:
        torch.set_num_threads(1)
        wan_stages.record(args.output, count=args.check)
        return
    settings = wan_settings(args)
    stages = ("vae", "denoiser") if args.stage == "all" else (args.stage,)
    mp.spawn(wan_stages.worker, args=(stages, settings, args.port), nprocs=settings.processes)


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


def make_pipeline(args: argparse.Namespace) -> None:
    """Train tiny-sd3 or tiny-sd, or measure what there is."""
    model, settings = MODELS[args.name], settings_of(args)
    if args.measure:
        torch.set_num_threads(1)
        record(model, settings.output)
        return
    mp.spawn(worker, args=(model, settings, args.port), nprocs=settings.processes)


def make_student(args: argparse.Namespace) -> None:
    """Distil and measure tiny-sd3-student, or measure what there is."""
    torch.set_num_threads(1)
    settings = student.Settings(seed=args.seed, teacher=args.teacher, output=args.output)
    if not args.measure:
        student.write(student.distil(settings), settings)
    student_measure.record(settings, anew=not args.measure)


def make_clip(args: argparse.Namespace) -> None:
    """Train and measure tiny-clip, or measure what there is."""
    wanted = clip.Settings(seed=args.seed, steps=args.steps, output=args.output)
    clip_measure.make(wanted, only_measure=args.measure)


def make_judge(args: argparse.Namespace) -> None:
    """Train and measure tiny-judge, or measure what there is."""
    settings = judge.Settings(seed=args.seed, model=ASSETS / "tiny-sd3", output=args.output)
    judge_measure.record(settings, anew=not args.measure)


if __name__ == "__main__":
    chosen = parse()
    chosen.make(chosen)
