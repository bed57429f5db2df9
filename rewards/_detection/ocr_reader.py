"""RapidOCR for rewards: in this process, or in a pool of processes. A helper, not a reward.

It is one of two packages with weights inside: `rapidocr_onnxruntime` (PP-OCRv4, Python below 3.13), which comes first
where both are installed, and its successor `rapidocr` (PP-OCRv6). They read differently.

Imports no torch, so that a worker of the pool starts soon and stays small. Every image is read by itself, on one
thread of onnxruntime: what is read does not depend on the other images or on the number of workers.
"""

from __future__ import annotations

import importlib
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np

Read = Callable[[np.ndarray], str]
"""[H, W, 3] uint8 RGB -> all the text read, in reading order; "" if there is none."""
Lines = Callable[[np.ndarray], list[str]]
"""[H, W, 3] uint8 BGR -> the lines that were read."""


def package() -> str | None:
    """The package that reads; None: none is installed."""
    return next((name for name in ("rapidocr_onnxruntime", "rapidocr") if find_spec(name) is not None), None)


def engine(min_confidence: float, detection_side: int) -> Read:
    """One reader on one thread.

    Raises:
        ModuleNotFoundError: no reader is installed.
    """
    lines = (_v4 if package() == "rapidocr_onnxruntime" else _v6)(min_confidence, detection_side)
    # The packages keep what they know of the current image in the engine.
    lock = threading.Lock()

    def read(pixels: np.ndarray) -> str:
        with lock:
            # OpenCV's order of channels.
            return "".join(lines(np.ascontiguousarray(pixels[:, :, ::-1])))

    return read


def _v4(min_confidence: float, detection_side: int) -> Lines:
    from rapidocr_onnxruntime import RapidOCR

    # Upright lines only, as in Flow-GRPO (use_angle_cls=False).
    options = {"text_score": min_confidence, "det_limit_side_len": detection_side, "use_cls": False}
    ocr = RapidOCR(**options, intra_op_num_threads=1, inter_op_num_threads=1)
    return lambda pixels: [text for _, text, _ in ocr(pixels)[0] or ()]


def _v6(min_confidence: float, detection_side: int) -> Lines:
    # The same; and its log has a warning for every image without text.
    options = {"text_score": min_confidence, "use_cls": False, "log_level": "error"}
    threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
    detection = {"Det.limit_type": "min", "Det.limit_side_len": detection_side}
    rapidocr = importlib.import_module("rapidocr")  # on newer Pythons alone
    ocr = rapidocr.RapidOCR(params={f"Global.{key}": value for key, value in options.items()} | threads | detection)
    return lambda pixels: list(ocr(pixels).txts or ())


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
