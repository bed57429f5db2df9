"""A judge of latents: how probable it is that a sample shows its prompt, as a logit, without a decoder.

The blocks of the model that it judges, a small head, and the model's own embeddings of the prompt: clean latents and
noisy ones (timestep = 1000 sigma). Gradients reach the latents. `tiny-judge` comes with the package: it judges tiny-sd3
on the shapes world at `max_sequence_length: 9`, agrees with the verifier `shapes` as far as its `pretraining.json`
tells, and can be fooled by a model that is trained on it alone.

A folder holds `config.json` (`kind: LatentJudge`, the configuration of the blocks, the width of the head) and
`model.safetensors`. `trainer` renews a judge on labelled latents of a run.

Source: this project, after HY-Video-PRFL (arXiv:2511.21541); weights: `python -m scripts.pretraining tiny-judge`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flowrl.rewards._latent_judge.network import CONFIG, ENTRIES, Judge, load
from flowrl.rewards._latent_judge.training import Trainer
from torch import Tensor

from flowrl.core.assets import asset_folder
from flowrl.core.paths import NAME_OR_PATH
from flowrl.core.types import Condition
from flowrl.reward import Card, LatentReward, RewardError

__all__ = ["CARD", "LEVEL", "Config", "Trainer", "build"]

LEVEL = "tested"
CARD = Card(
    outputs=("judge",),
    modality="latents",
    resolution="all latents of a sample",
    differentiable=True,
    level=LEVEL,
    licence="Apache-2.0 (this project)",
    source="flowrl lab",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[str, NAME_OR_PATH] = "tiny-judge"
    """A folder of a judge, or the embedded tiny-judge."""


def build(config: Config) -> LatentReward:
    network = load(asset_folder(config.model, CONFIG) or Path(config.model).expanduser(), "reward 'latent_judge'")

    def value(x: Tensor, sigma: Tensor, cond: Condition) -> Tensor:
        return network(x.float(), sigma.float(), *(cond[name].float() for name in _entries(network, x, cond)))

    return LatentReward(value, CARD, network.shape, network, Trainer(network))


def _entries(network: Judge, x: Tensor, cond: Condition) -> tuple[str, ...]:
    """Names of what the judge reads of the prompts, once they and the latents fit it."""
    missing = [name for name in ENTRIES if name not in cond.tensors]
    if missing:
        raise RewardError(
            f"reward 'latent_judge': the model's prompts have no {missing[0]!r}, which this judge reads; they have "
            f"{', '.join(cond.tensors)}. It judges models of the family sd3"
        )
    widths = network.widths
    for name in ENTRIES:
        if cond[name].shape[-1] != widths[name]:
            raise RewardError(
                f"reward 'latent_judge': the model's {name} has {cond[name].shape[-1]} values a token, the judge was "
                f"trained with {widths[name]}; a judge belongs to one model"
            )
    if tuple(x.shape[1:]) != network.shape:
        raise RewardError(
            f"reward 'latent_judge': latents of shape {tuple(x.shape[1:])}, but the judge was trained on "
            f"{network.shape}; sample at its resolution"
        )
    return ENTRIES
