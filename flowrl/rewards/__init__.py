"""Built-in rewards: one file, one reward.

Their files lie in the repository's `rewards/` folder, where people look for them; an installed flowrl has them here.
"""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2] / "rewards"
"""The folder of a checkout. Beside an installed flowrl a folder of this name is somebody else's."""

if not (Path(__file__).parent / "shapes.py").is_file():
    __path__ = [str(CHECKOUT)]
