"""RapidOCR (PP-OCRv4) for rewards: in this process, or in a pool of processes. A helper, not a reward.

Imports no torch, so that a worker of the pool starts soon and stays small. Every image is read by itself, on one
thread of onnxruntime: what is read does not depend on the other images or on the number of workers.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import numpy as np

Read = Callable[[np.ndarray], str]
"""[H, W, 3] uint8 RGB -> all the text read, in reading order; "" if there is none."""


def engine(min_confidence: float, detection_side: int) -> Read:
    """One reader on one thread.

    Raises:
        ModuleNotFoundError: rapidocr-onnxruntime is not installed.
    """
    from rapidocr_onnxruntime import RapidOCR

    # Upright lines only, as in Flow-GRPO (use_angle_cls=False).
    options = {"text_score": min_confidence, "det_limit_side_len": detection_side, "use_cls": False}
    ocr = RapidOCR(**options, intra_op_num_threads=1, inter_op_num_threads=1)
    # The package keeps what it knows of the current image in the engine.
    lock = threading.Lock()

    def read(pixels: np.ndarray) -> str:
        with lock:
            # OpenCV's order of channels.
            lines, _ = ocr(np.ascontiguousarray(pixels[:, :, ::-1]))
        return "".join(text for _, text, _ in lines or ())

    return read


_worker: Read | None = None


def _start(min_confidence: float, detection_side: int) -> None:
    global _worker
    _worker = engine(min_confidence, detection_side)


def _read(pixels: np.ndarray) -> str:
    assert _worker is not None
    return _worker(pixels)


@dataclass(slots=True)
class Pool:
    """`workers` processes with an engine each; they start at the first image."""

    min_confidence: float
    detection_side: int
    workers: int
    _executor: ProcessPoolExecutor | None = field(default=None, init=False)

    def __call__(self, images: Sequence[np.ndarray]) -> list[str]:
        """The text of each image.

        Raises:
            BrokenProcessPool: a worker died; the next call starts new ones.
        """
        if self._executor is None:
            # A fork of a process that has run CUDA or onnxruntime's threads may hang.
            self._executor = ProcessPoolExecutor(
                self.workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start,
                initargs=(self.min_confidence, self.detection_side),
            )
        try:
            return list(self._executor.map(_read, images))
        except BrokenProcessPool:
            self.close()
            raise

    def close(self) -> None:
        """End the workers."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
