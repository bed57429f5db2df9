"""flowrl: align diffusion and flow-matching generators with rewards.

Importing it loads neither torch nor diffusers; names are resolved when used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "load_config": "flowrl.config.load",
    "load_model": "flowrl.rollout.library",
    "ConfigError": "flowrl.core.errors",
    "Session": "flowrl.run.session",
    "Trainer": "flowrl.run.trainer",
    "Method": "flowrl.algorithms.base",
    "EdgeMethod": "flowrl.algorithms.base",
    "SampleMethod": "flowrl.algorithms.base",
    "GradientMethod": "flowrl.algorithms.base",
    "NoiseMethod": "flowrl.algorithms.base",
    "StateMethod": "flowrl.algorithms.base",
    "Sampler": "flowrl.samplers.base",
    "Reward": "flowrl.reward",
    "LatentReward": "flowrl.reward",
    "check": "flowrl.contracts.checking",
    "Card": "flowrl.reward",
}
__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
