"""Training of tiny-sd3 and tiny-sd: cycles of denoising on one VAE, in processes of one thread."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scripts.pretraining import sd, sd3
from scripts.pretraining.report import record, report
from scripts.pretraining.training import Model, Settings, save, train_denoiser, train_vae

MODELS = {"tiny-sd3": sd3.MODEL, "tiny-sd": sd.MODEL}


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
