"""The aesthetic predictor: heads of the published architectures at random, on towers as wide as they take."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flowrl.rewards.aesthetic import PUBLISHED, Config, Version, build
from torch import nn

from flowrl.reward import Reward
from tests import toy_clip

SIZE = 16
"""Width of the towers' embeddings."""


class V2(nn.Module):
    """The class of the published v2 file, without its training."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        sizes = ((width, 1024), (1024, 128), (128, 64), (64, 16), (16, 1))
        linear = [nn.Linear(*size) for size in sizes]
        drop = [nn.Dropout(0.2), nn.Dropout(0.2), nn.Dropout(0.1)]
        self.layers = nn.Sequential(linear[0], drop[0], linear[1], drop[1], linear[2], drop[2], linear[3], linear[4])


class V25(nn.Module):
    """The class of the v2.5 file."""

    def __init__(self, width: int = 1152) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for inside, outside, drop in ((width, 1024, 0.5), (1024, 128, 0.5), (128, 64, 0.5), (64, 16, 0.2)):
            parts += [nn.Linear(inside, outside), nn.Dropout(drop)]
        self.scoring_head = nn.Sequential(*parts, nn.Linear(16, 1))


def network(version: str, seed: int = 0, **size: int) -> nn.Module:
    """A head of the published architecture at random."""
    kinds = {"v1": lambda: nn.Linear(size.get("width", 768), 1), "v2": lambda: V2(**size), "v2.5": lambda: V25(**size)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kinds[version]().eval().requires_grad_(False)


def siglip(folder: Path) -> str:
    """Both towers, as the published folder has them."""
    from transformers import SiglipConfig, SiglipModel

    size = {"hidden_size": SIZE, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = SiglipConfig(
        text_config=size | {"vocab_size": 20}, vision_config=size | {"image_size": 32, "patch_size": 8}
    )
    toy_clip.drawn(lambda: SiglipModel(config), 0).save_pretrained(folder)
    return str(folder)


def save_towers(folder: Path) -> dict[str, str]:
    """Both towers by the name that the table of published heads has for them."""
    return {"clip": toy_clip.save(folder / "clip"), "siglip": siglip(folder / "siglip")}


def tiny(
    version: Version, folder: Path, towers: dict[str, str], patch: pytest.MonkeyPatch, **options: Any
) -> tuple[Reward, dict[str, torch.Tensor], str]:
    """(reward, weights of its head, its tower) of a version, with a head for embeddings of SIZE numbers."""
    known = PUBLISHED[version]
    patch.setitem(PUBLISHED, version, replace(known, widths=(SIZE, *known.widths[1:])))
    file = folder / f"{version}.pth"
    weights = {name: 4 * value for name, value in network(version, width=SIZE).state_dict().items()}
    torch.save(weights, file)
    tower = towers[known.tower]
    given: dict[str, Any] = {"head": str(file), "published": False, "backbone": tower, "device": "cpu"}
    return build(Config(version=version, **(given | options))), weights, tower


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    towers = save_towers(folder)
    with pytest.MonkeyPatch.context() as patch:
        exact = {version: tiny(version, folder, towers, patch)[0] for version in ("v1", "v2", "v2.5")}
        fast = {f"{v} fast": tiny(v, folder, towers, patch, preprocess="fast")[0] for v in ("v2", "v2.5")}
    return exact | fast
