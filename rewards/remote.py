"""A reward that runs on servers started with `flowrl serve`, for what wants a GPU or packages of its own.

The servers' card is taken over; scores are those of the reward itself on pictures of 8 bits.
What fails is tried again, on the other servers too, until `deadline_s`; then the sample is NaN. A server that computes
something else than the others stops the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from flowrl.core.paths import SECRET
from flowrl.reward import Card, Reward

LEVEL = "tested"
CARD = Card(
    outputs=("as_served",),
    modality="any",
    resolution="as served",
    overlap=True,
    level=LEVEL,
    licence="Apache-2.0 (this project); that of the reward behind it",
    source="flowrl serve",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    servers: list[str]
    """Addresses, as http://127.0.0.1:8100; requests go to the least busy one."""
    reward: str
    """Its name there."""
    encoding: Literal["png", "uint8", "float32"] = "png"
    """Of the pictures: 8 bits, packed ("png") or plain ("uint8", quicker in a fast network), or exactly as here
    ("float32", about four times as large as "uint8")."""
    max_items: int = 64
    """Samples of a request; the server's own limit holds too."""
    max_megabytes: float = 16.0
    """Of a request's body; the server's own limit holds too."""
    concurrency: int = 8
    """Requests under way at once, to all servers together."""
    timeout_s: float = 150.0
    """Of one request: longer than the server gives a batch (--score-s)."""
    deadline_s: float = 900.0
    """Of a call with all its tries; samples without a score are then NaN."""
    start_s: float = 60.0
    """How long to wait for a first server when the run starts."""
    token_file: Annotated[str | None, SECRET] = None
    """File that holds the bearer token."""
    token_env: str | None = None
    """Environment variable that holds it."""

    def __post_init__(self) -> None:
        if not self.servers or not all(s.startswith(("http://", "https://")) for s in self.servers):
            raise ValueError(f"servers={self.servers} must be addresses that begin with http:// or https://")
        least = {"max_items": 1, "concurrency": 1, "max_megabytes": 0.01, "timeout_s": 0.01, "deadline_s": 0.01}
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        if self.token_file is not None and self.token_env is not None:
            raise ValueError("give token_file or token_env, not both")


def card_of(config: Config) -> None:
    """The servers know it."""


def build(config: Config) -> Reward:
    from flowrl.rewards._client import Client

    client = Client(config)
    return Reward(client.score, client.card)
