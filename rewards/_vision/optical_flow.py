"""Optical flow and VBench's dynamic degree, for rewards of clips. A helper, not a reward.

The network is torchvision's RAFT. Its weights `C_T_V1` (raft_large_C_T_V1-22a6c225.pth) are those of the original
code trained on chairs and things, the checkpoint that VBench uses.

Sources: RAFT, arXiv:2003.12039; Vchitect/VBench:vbench/dynamic_degree.py.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from flowrl.rewards._vision import checkpoints
from torch import Tensor

from flowrl.reward import RewardError

log = logging.getLogger("flowrl")

Magnitude = Callable[[np.ndarray, np.ndarray], float]
"""Two frames [H, W, 3] uint8 -> pixels that the fastest 5 % of the image move, on the mean."""

_DIGEST = "22a6c225"
_UPDATES, _SHARE = 20, 0.05
_LEAST_SIDE = 128  # the coarsest level of RAFT's correlations has an eighth of an eighth of the pixels


def load_raft(file: str, *, device: str | None, reward: str) -> Magnitude:
    """RAFT large with the weights of a file.

    Raises:
        RewardError: there is no such file, or it holds no weights of RAFT large.
    """
    from torchvision.models.optical_flow import raft_large

    # Weights are drawn before they are loaded, from the global random state.
    with torch.random.fork_rng(devices=[]):
        model = raft_large(weights=None, progress=False)
    try:
        content = Path(file).read_bytes()
        model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load RAFT from flow_weights={file!r}; give torchvision's "
            f"raft_large_C_T_V1-{_DIGEST}.pth: {type(error).__name__}: {error}"
        ) from error
    if not sha256(content).hexdigest().startswith(_DIGEST):
        log.warning("reward %r: %s is not the checkpoint that VBench uses (sha256 %s...)", reward, file, _DIGEST)
    place = checkpoints.place(device)
    model.eval().requires_grad_(False).to(place)

    def prepared(pixels: np.ndarray) -> Tensor:
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None].to(place).float() / 127.5 - 1
        height, width = pixels.shape[:2]
        down, right = -height % 8, -width % 8
        # Half of the border on either side, as the original pads for Sintel; VBench keeps it in the flow.
        border = (right // 2, right - right // 2, down // 2, down - down // 2)
        return F.pad(image, border, mode="replicate")

    def magnitude(first: np.ndarray, second: np.ndarray) -> float:
        if min(first.shape[:2]) < _LEAST_SIDE:
            raise RewardError(
                f"reward {reward!r}: RAFT needs frames of at least {_LEAST_SIDE} x {_LEAST_SIDE} pixels, got "
                f"{first.shape[1]} x {first.shape[0]}; leave flow_weights out"
            )
        with torch.autocast(place.type, enabled=False):
            flow = model(prepared(first), prepared(second), num_flow_updates=_UPDATES)[-1]
        speeds = flow[0].norm(dim=0).flatten()
        return speeds.topk(int(_SHARE * len(speeds))).values.mean().item()

    return magnitude


def moving_share(magnitudes: Sequence[float], *, frames: int, shorter_side: int, fps: float) -> float:
    """How many pairs move, over how many must for VBench to call a video dynamic: 1 or more where it is.

    A pair moves above 6 * shorter_side / 256 pixels, more where `fps`, the rate of the video itself and not of the
    frames that were taken of it, is below 8. A quarter of the frames must, one at least: the released code calls videos
    of one or two frames dynamic whatever they show.

    >>> moving_share([9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 9.0], frames=8, shorter_side=256, fps=8.0)
    1.5
    """
    bound = max(1.0, 8.0 / fps) * 6.0 * shorter_side / 256
    return sum(value > bound for value in magnitudes) / max(round(4 * frames / 16), 1)
