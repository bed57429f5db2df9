"""Options of the reward `remote`. A helper, not a reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from flowrl.core.paths import SECRET
from flowrl.core.subprocesses import require_patience


@dataclass(frozen=True, kw_only=True)
class Config:
    servers: list[str]
    """Addresses, as http://127.0.0.1:8100; requests go to the least busy one."""
    reward: str
    """Its name there."""
    encoding: Literal["png", "uint8", "float32"] = "png"
    """Encoding of the images: 8 bits, packed ("png") or plain ("uint8", quicker in a fast network), or exactly as here
    ("float32", about four times as large as "uint8")."""
    max_items: int = 64
    """Samples of a request; the server's own limit holds too."""
    max_megabytes: float = 16.0
    """Megabytes of a request's body; the server's own limit holds too."""
    concurrency: int = 8
    """Requests under way at once, to all servers together."""
    timeout_s: float = 150.0
    """Seconds of one request: longer than the server gives a batch (--score-s)."""
    deadline_s: float = 900.0
    """Seconds of a call with all its tries; samples without a score are then NaN."""
    start_s: float = 60.0
    """How long to wait for a first server when the run starts."""
    token_file: Annotated[str | None, SECRET] = None
    """File that holds the bearer token."""
    token_env: str | None = None
    """Environment variable that holds it."""

    def __post_init__(self) -> None:
        if not self.servers or not all(s.startswith(("http://", "https://")) for s in self.servers):
            raise ValueError(f"servers={self.servers} must be addresses that begin with http:// or https://")
        counts = {"max_items": self.max_items, "concurrency": self.concurrency}
        sizes = {"max_megabytes": self.max_megabytes, "timeout_s": self.timeout_s, "deadline_s": self.deadline_s}
        for name, value in (counts | sizes).items():
            least = 1 if name in counts else 0.01
            if not value >= least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if self.start_s < 0:
            raise ValueError(f"start_s={self.start_s} must not be negative; 0 asks once")
        require_patience("deadline_s", self.deadline_s)
        if self.token_file is not None and self.token_env is not None:
            raise ValueError("give token_file or token_env, not both")
