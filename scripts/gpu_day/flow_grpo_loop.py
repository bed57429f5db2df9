"""Flow-GRPO's loop as its own script makes it, on the same random SD3 network as `scripts.bench gpu --random`.

    python3 -m scripts.gpu_day.flow_grpo_loop configs/sd3/flow_grpo-pickscore.yaml --json FILE --batch 8

In the manner of yifan123/flow_grpo:scripts/train_sd3.py and flow_grpo/diffusers_patch/sd3_sde_with_logprob.py: base
weights in float32 under autocast, LoRA by peft, noise drawn on the device, log-probs and metrics kept there, one
synchronisation an optimizer step. Not its code: only what it does, for a comparison of speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.models.base import LoraSettings, torch_dtype
from scripts.bench.gpu.clock import WARMUPS, Clock, device_name, peak_gib, reset_peak, timed
from scripts.bench.gpu.records import Records, middle
from scripts.bench.random_weights import random_adapter

MICROBATCHES = 3


class Loop:
    """The network with its inputs for one batch."""

    def __init__(self, config: str, words: list[str], batch: int, device: torch.device) -> None:
        rewards = "rewards=[{name: scripts.bench.gpu.reward}]"
        self.resolved = resolve(load_config(config, [*words, rewards, "eval.rewards=[]"]))
        options = self.resolved.model.config
        if self.resolved.model.name != "sd3":
            raise ConfigError(f"model.name={self.resolved.model.name}: this loop is that of SD3; give a recipe of sd3")
        self.dtype, self.device, self.batch = torch_dtype(options.dtype), device, batch
        wide = dataclasses.replace(options, dtype="float32")
        self.adapter: Any = random_adapter(self.resolved.model.module, wide, device)
        self.network: Any = self.adapter.network.requires_grad_(False)
        lora = options.lora or LoraSettings()
        names = list(lora.targets or self.adapter.lora_targets)
        made = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=names, init_lora_weights="gaussian")
        self.network.add_adapter(made)
        self.adapter.to(device)
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-4, weight_decay=1e-4)
        cond = self.adapter.encode(["a photo"] * batch)
        negative = self.adapter.encode([""] * batch)
        self.embeds = torch.cat([negative["prompt_embeds"], cond["prompt_embeds"]])
        self.pooled = torch.cat([negative["pooled"], cond["pooled"]])
        grid = self.adapter.schedule(self.resolved.run.rollout.num_inference_steps)
        self.sigmas, self.timesteps = grid.sigmas.to(device), grid.timesteps.to(device)
        self.guidance, self.clip = self.resolved.run.rollout.guidance_scale, 1e-4
        self.noise_level = 0.7
        self.clock = Clock(device)
        """Two marks for each optimizer step."""

    def velocity(self, x: Tensor, k: int) -> Tensor:
        """The guided prediction of a batch, [B, ...]."""
        with nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype):
            output = self.network(
                hidden_states=torch.cat([x] * 2),
                timestep=self.timesteps[k].expand(2 * len(x)),
                encoder_hidden_states=self.embeds,
                pooled_projections=self.pooled,
                return_dict=False,
            )[0]
        negative, positive = output.float().chunk(2)
        return negative + self.guidance * (positive - negative)

    def transition(self, x: Tensor, velocity: Tensor, k: int, x_next: Tensor | None = None) -> tuple[Tensor, ...]:
        """(next latents, log-prob [B], mean, std) of one SDE step; drawn on the device unless given."""
        sigma, following = self.sigmas[k], self.sigmas[k + 1]
        dt = following - sigma
        std = (sigma / (1 - torch.where(sigma == 1, self.sigmas[1], sigma))).sqrt() * self.noise_level
        drift = x * (1 + std**2 / (2 * sigma) * dt)
        mean = drift + velocity * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
        scale = std * (-dt).sqrt()
        if x_next is None:
            x_next = mean + scale * torch.randn(x.shape, device=self.device)
        density = -((x_next.detach() - mean) ** 2) / (2 * scale**2) - scale.log() - 0.5 * math.log(2 * math.pi)
        return x_next, density.mean(dim=tuple(range(1, x.ndim))), mean, scale

    def roll_out(self) -> Callable[[], None]:
        """A function that makes one step of a rollout."""
        state = {"x": torch.randn(self.batch, *self.adapter.latent_shape(), device=self.device), "k": 0}
        kept: list[Tensor] = []

        def step() -> None:
            with torch.no_grad():
                k = int(state["k"])
                x, log_prob, *_ = self.transition(state["x"], self.velocity(state["x"], k), k)
            kept.append(log_prob)
            restart = k + 2 >= len(self.timesteps)
            state["x"] = torch.randn_like(x) if restart else x
            state["k"] = 0 if restart else k + 1

        return step

    def update(self, count: int, coef: float) -> None:
        """An optimizer step of `count` microbatches, each with the KL to the reference if `coef` is not 0."""
        metrics: list[Tensor] = []
        for k in range(count):
            x = torch.randn(self.batch, *self.adapter.latent_shape(), device=self.device)
            with torch.no_grad():
                x_next, old, *_ = self.transition(x, torch.zeros_like(x), k % (len(self.timesteps) - 1))
            advantage = torch.randn(self.batch, device=self.device)
            _, log_prob, mean, scale = self.transition(x, self.velocity(x, k % 2), k % 2, x_next)
            ratio = (log_prob - old).clamp(-1, 1).exp()
            clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
            loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()
            if coef:
                with torch.no_grad():
                    self.network.disable_adapters()
                    *_, reference, _ = self.transition(x, self.velocity(x, k % 2), k % 2, x_next)
                    self.network.enable_adapters()
                kl = ((mean - reference) ** 2).mean(dim=tuple(range(1, x.ndim))) / (2 * scale**2)
                loss = loss + coef * kl.mean()
            (loss / count).backward()
            metrics += [loss.detach(), (0.5 * (log_prob - old) ** 2).mean().detach()]
        self.clock.mark()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.mark()
        torch.stack(metrics).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a recipe of sd3")
    parser.add_argument("words", nargs="*", help="key=value")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_intermixed_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = {"config": given.config, "variant": "flow_grpo", "batch": given.batch}
    records = Records(given.json, device=device_name(device), torch=torch.__version__, **names)
    loop = Loop(given.config, given.words, given.batch, device)
    reset_peak(device)
    times = timed(loop.roll_out(), device, given.repeats)
    records.add(what="rollout", ms_per_forward=middle(times), peak_gib=peak_gib(device))
    kl = loop.resolved.run.algorithm.get("kl") or {}
    coef = float(kl.get("coef", 0.0))
    reset_peak(device)
    loop.update(WARMUPS, coef)
    loop.clock = Clock(device)
    whole = timed(lambda: loop.update(MICROBATCHES, coef), device, given.repeats, warmups=0)
    steps = loop.clock.spans()[::2]
    each = middle([(ms - step) / MICROBATCHES for ms, step in zip(whole, steps, strict=True)])
    row = {"ms_per_microbatch": each, "ms_per_optimizer_step": middle(steps), "kl": coef}
    print(json.dumps(records.add(what="update", **row, peak_gib=peak_gib(device)), indent=1))


if __name__ == "__main__":
    main()
