"""A CUDA stream for a reward that scores on the GPU while it samples: the kernels of both run side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream of its own on a GPU, which waits for what it is told to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """The work that this thread has asked of the GPU so far: a decoded batch, moved or loaded weights."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        """Work of this thread goes into the stream, after what `mark` names.

        At the end the stream is idle: no memory that this thread frees is still read, and scores are there.
        """
        self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                self.stream.synchronize()
