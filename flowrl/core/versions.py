"""Versions of Python, flowrl and the libraries that affect its numbers."""

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """Name -> version, or "not installed"."""
    names = ("flowrl", "torch", "torchvision", "diffusers", "transformers", "accelerate", "peft", "numpy")
    result = {"python": platform.python_version()}
    for name in names:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = "not installed"
    return result
