"""TreeGRPO: a k-ary tree over a short window of noisy steps, ODE elsewhere; leaf advantages flow back to the edges.

    1. window of w steps from step i, drawn in every iteration with a chance that falls by `decay` from step to step
    2. in the window every node has k children, so a tree has k^w leaves; ODE before and after it
    3. A(leaf) = (r - mean of the prompt) / (std of the prompt + eps); A(edge) = mean of A after it
    4. loss as Flow-GRPO on the window's edges

Published weights of the mean are softmax(log p_old) of the edges, which is uniform for a mean over latent dims and
picks one for their sum; `path_weight` offers it on standardised log-probs.

Source: arXiv 2512.08153; no released code.
"""

from dataclasses import dataclass, field

import numpy as np

from flowrl.algorithms._options import PathOptions, RatioOptions
from flowrl.algorithms.base import EdgeMethod, Networks
from flowrl.algorithms.flow_grpo import ClipOptions, clipped_loss
from flowrl.core.rng import stream
from flowrl.credit.advantages import RuleConfig
from flowrl.diffusion.tree_shapes import Branching, splits
from flowrl.losses.batches import LossOutput, Microbatch

LEVEL = "tested"


@dataclass(frozen=True, kw_only=True)
class Config(PathOptions, ClipOptions, RatioOptions):
    children: int = 3
    """k; the tree has k^window leaves."""
    window: int = 3
    """w: neighbouring steps that split."""
    decay: float = 0.5
    """r: a window that starts one step later is drawn r times as often; 1 draws all alike."""
    advantages: RuleConfig = field(default_factory=lambda: RuleConfig(std="group"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.children < 2 or self.window < 1:
            raise ValueError(f"children={self.children} must be at least 2 and window={self.window} at least 1")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} must be in (0, 1]")

    def tree(self, num_steps: int, iteration: int, seed: int) -> Branching:
        starts = num_steps - self.window
        if starts < 1:
            raise ValueError(
                f"window={self.window} of {num_steps} steps: at most {num_steps - 1}, the last has no noise"
            )
        chance = self.decay ** np.arange(starts)
        start = int(stream(seed, "tree_window", iteration).choice(starts, p=chance / chance.sum()))
        steps = range(start, start + self.window)
        return splits(num_steps, dict.fromkeys(steps, self.children), steps)


class TreeGrpo(EdgeMethod[Config]):
    def loss(self, batch: Microbatch, networks: Networks) -> LossOutput:
        return clipped_loss(self, batch, networks)


build = TreeGrpo
