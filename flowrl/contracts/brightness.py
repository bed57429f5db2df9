"""A toy reward, for methods under trial: the mean brightness of an image or video."""

from torch import Tensor

from flowrl.reward import Card

CARD = Card(outputs=("brightness",), low=0.0, high=1.0, modality="any", differentiable=True)


def score(images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
    """Mean of all pixels, [B] in [0, 1]."""
    return images.flatten(1).mean(dim=1)
