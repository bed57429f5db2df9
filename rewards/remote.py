"""A reward that runs on servers started with `flowrl serve`, for what wants a GPU or packages of its own.

The servers' card is taken over; scores are those of the reward itself on images of 8 bits.
What fails is tried again, on the other servers too, until `deadline_s`; then the sample is NaN. A server that computes
something else than the others stops the run.
"""

from __future__ import annotations

from flowrl.rewards._remote.client import Client
from flowrl.rewards._remote.options import Config

from flowrl.reward import Card, Reward

LEVEL = "tested"
__all__ = ["CARD", "LEVEL", "Config", "build", "card_of"]
CARD = Card(
    outputs=("as_served",),
    modality="any",
    resolution="as served",
    overlap=True,
    level=LEVEL,
    licence="Apache-2.0 (this project); that of the served reward",
    source="flowrl serve",
)


def card_of(config: Config) -> None:
    """The servers know it."""


def build(config: Config) -> Reward:
    client = Client(config)
    return Reward(client.score, client.card)
