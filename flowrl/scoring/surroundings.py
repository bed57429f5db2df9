"""The state that a reward shares with a run: handed out as copies, compared after a call, and put back.

    its batch           a copy for every call, so that work in place spoils no other reward, saved image or retry
    settings            grad mode, default dtype, working directory, ...: put back after every call
    random numbers      put back and moved on, whatever was seeded or drawn; nothing of flowrl draws from them

In a thread next to others only what belongs to the thread can be put back: another may need the rest at that moment.
"""

import copy
import hashlib
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.backends import cudnn

from flowrl.core.errors import RewardError
from flowrl.core.types import Condition
from flowrl.media.eight_bits import EightBitImages
from flowrl.reward import Images, Reward

BESIDE: ContextVar[bool] = ContextVar("flowrl_beside", default=False)
"""True in a thread next to others that work."""

MEND = "set it in a `with` block inside score(), or put it back there"
"""The remedy for a setting that was left changed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Something that one call can leave changed for all that follow."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


_LOG = logging.getLogger("flowrl")
_STATUS = Path("/proc/self/status")


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None


def _set_autocast(values: Sequence[tuple[str, bool, torch.dtype]]) -> None:
    for kind, enabled, dtype in values:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _set_cudnn(values: tuple[bool, bool, bool, bool]) -> None:
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = values


def _handlers() -> dict[int, Any]:
    """Handlers of signals by number; none in another thread than the main one, which alone may set them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_handlers(values: dict[int, Any]) -> None:
    for number, handler in values.items():
        # None: set by another language, which Python can neither name nor put back.
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _umask() -> int:
    if _STATUS.exists():  # reading it in Python would set it, while other threads write files
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(fields["Umask"], 8)
    value = os.umask(0o077)
    os.umask(value)
    return value


def _set_logging(values: tuple[int, bool, int]) -> None:
    logging.disable(values[0])
    _LOG.disabled = values[1]
    _LOG.setLevel(values[2])


OF_A_THREAD = (
    Setting("the grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    # Put back by the context that a call runs in.
    Setting("the inference mode", torch.is_inference_mode_enabled, lambda value: None),
    Setting(
        "autocast",
        lambda: [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        _set_autocast,
    ),
    # Without a default torch says that it is the CPU.
    Setting(
        "the default device",
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    Setting("numpy's errors", np.geterr, lambda values: np.seterr(**values)),
)
OF_THE_PROCESS = (
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("the working directory", _working_directory, lambda folder: folder and os.chdir(folder)),
    Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,  # 0 off, 1 warns, 2 refuses
        lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
    Setting("the precision of matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting(
        "cudnn's settings",
        lambda: (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        _set_cudnn,
    ),
    Setting("the handlers of signals", _handlers, _set_handlers),
    Setting("the umask", _umask, os.umask),
    Setting("logging", lambda: (logging.root.manager.disable, _LOG.disabled, _LOG.level), _set_logging),
)


class Settings:
    """Values of some settings, as they are when this is made."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.values = [(setting, setting.read()) for setting in settings]

    def put_back(self) -> list[str]:
        """Names of those that are others now, which then are as they were."""
        changed = [(setting, value) for setting, value in self.values if setting.read() != value]
        for setting, value in changed:
            setting.write(value)
        return [setting.name for setting, _ in changed]


class Numbers:
    """The states of the generators that a process has, as they are when this is made."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.python, self.numpy = random.getstate(), _numpy_state()

    def move_on(self) -> list[str]:
        """Names of those that were drawn from or seeded; each then stands where its state before alone decides.

        So a seed that a reward sets reaches nobody, and one that only draws gets other numbers in the next call.
        """
        changed = []
        if not torch.equal(self.torch, torch.get_rng_state()):
            changed.append("torch's")
            torch.set_rng_state(self.torch)
            torch.default_generator.manual_seed(_seed(self.torch))
        for place, state in enumerate(self.cuda):
            if not torch.equal(state, torch.cuda.get_rng_state(place)):
                changed.append(f"those of GPU {place}")
                torch.cuda.default_generators[place].manual_seed(_seed(state))
        if self.python != random.getstate():
            changed.append("Python's")
            random.seed(_hashed(repr(self.python).encode()))
        if self.numpy != _numpy_state():
            changed.append("numpy's")
            np.random.seed(_hashed(self.numpy[0]) % 2**32)
        return changed


def _numpy_state() -> tuple[bytes, int]:
    state = np.random.get_state(legacy=False)["state"]
    return state["key"].tobytes(), state["pos"]


def _hashed(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def _seed(state: Tensor) -> int:
    return _hashed(state.numpy().tobytes())


@dataclass(slots=True)
class Conduct:
    """Side effects of calls, each name once, and their reasons for samples without a score."""

    looks_at_inputs: bool = False
    """True: the batch is compared with the copy that was handed out, as much work as the copy."""
    settings: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Texts given to `unscored`, in their order."""

    def note(self, *, settings: Sequence[str] = (), random: Sequence[str] = (), inputs: Sequence[str] = ()) -> None:
        for names, new in ((self.settings, settings), (self.random, random), (self.inputs, inputs)):
            names += [name for name in new if name not in names]


@contextmanager
def kept(conduct: Conduct, *, numbers: bool = True) -> Iterator[None]:
    """Other people's code runs in here; what it leaves changed is noted in `conduct` and put back.

    `numbers` False leaves random numbers out: what builds a network draws from them.
    """
    wide = not BESIDE.get()
    before = Settings((*OF_A_THREAD, *OF_THE_PROCESS) if wide else OF_A_THREAD)
    drawn = Numbers() if wide and numbers else None
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    # The second inside the first, which sets the grad mode too.
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        try:
            yield
        finally:
            conduct.note(settings=before.put_back(), random=[] if drawn is None else drawn.move_on())


@dataclass(frozen=True, slots=True)
class Latents:
    """Latents of B samples with the conditions of their prompts."""

    x0: Tensor
    """[B, ...]."""
    cond: Condition
    rows: Tensor
    """Row of `cond` of each sample, [B] int64."""
    sigma: Tensor | None = None
    """Noise levels [B]; None: they are clean."""

    def __getitem__(self, rows: slice | list[int]) -> "Latents":
        sigma = None if self.sigma is None else self.sigma[rows]
        return Latents(self.x0[rows], self.cond, self.rows[rows], sigma)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that are scored together."""

    images: Images
    """Floats in [0, 1], or `EightBitImages`, of which a reward is given its own floats."""
    prompts: Sequence[str]
    metadata: Sequence[dict]
    latents: Latents | None = None
    """Of the same samples; None: only images are at hand."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def needs_gradient(self) -> bool:
        return not isinstance(self.images, EightBitImages) and any(image.requires_grad for image in self.images)

    def seen_by(self, reward: Reward) -> "Batch":
        """The samples as a reward is given them: to one on latents those stand in place of the images, in float32.

        Raises RewardError: it judges latents, and there are none.
        """
        if reward.on_latents is None:
            return self
        if self.latents is None:
            raise RewardError(f"{reward.card.outputs[0]!r} judges a model's latents, and only images are at hand")
        return replace(self, images=self.latents.x0.to(self.latents.cond.device, torch.float32))

    def part(self, start: int, stop: int) -> "Batch":
        latents = None if self.latents is None else self.latents[start:stop]
        return Batch(self.images[start:stop], self.prompts[start:stop], self.metadata[start:stop], latents)

    def pick(self, rows: Sequence[int]) -> "Batch":
        own = self.images
        images = own.pick(rows) if isinstance(own, EightBitImages) else [own[i] for i in rows]
        if isinstance(own, Tensor):
            images = own[list(rows)]
        latents = None if self.latents is None else self.latents[list(rows)]
        return Batch(images, [self.prompts[i] for i in rows], [self.metadata[i] for i in rows], latents)

    def finite(self) -> list[int]:
        """Rows whose images hold no NaN and no inf: one pass over floats, without a copy."""
        if isinstance(self.images, EightBitImages):
            return self.images.finite.nonzero().flatten().tolist()
        if isinstance(self.images, Tensor):
            sums = self.images.detach().sum(dim=tuple(range(1, self.images.ndim)), dtype=torch.float32)
            return sums.isfinite().nonzero().flatten().tolist()
        return [row for row, image in enumerate(self.images) if image.detach().sum(dtype=torch.float32).isfinite()]


class Handed:
    """A batch as a reward is given it: a copy of the images (or latents) in floats, the prompts and every record.

    Gradients go through the copy.
    """

    def __init__(self, batch: Batch, reward: Reward) -> None:
        self.reward, self.original = reward, batch.seen_by(reward)
        own = self.original.images
        if isinstance(own, EightBitImages):
            images: Images = own.floats()
        else:
            images = own.clone() if isinstance(own, Tensor) else [image.clone() for image in own]
        self.copy = Batch(images, list(batch.prompts), copy.deepcopy(list(batch.metadata)), batch.latents)

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        """Of its score function."""
        own, judge, latents = self.copy, self.reward.on_latents, self.copy.latents
        if judge is None or latents is None:
            return own.images, own.prompts, own.metadata
        x = own.images
        assert isinstance(x, Tensor)
        if judge.network is not None:
            judge.network.to(x.device)
        sigma = x.new_zeros(len(x)) if latents.sigma is None else latents.sigma.to(x)
        return x, sigma, latents.cond.index(latents.rows)

    def changed(self) -> list[str]:
        """Names of the parts that the reward has changed."""
        own, now = self.original, self.copy
        same = {
            "images": len(own.images) == len(now.images) and all(map(_equal, own.images, now.images)),
            "prompts": list(own.prompts) == now.prompts,
            # By their text: a record may hold arrays, which no == compares.
            "metadata": repr(list(own.metadata)) == repr(now.metadata),
        }
        return [name for name, unchanged in same.items() if not unchanged]


def _equal(first: Tensor, second: Tensor) -> bool:
    """NaN is equal to itself."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())
