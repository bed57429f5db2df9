"""What an update keeps for its backward passes: one step of the network at a time, whatever the number of steps."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.training.test_gradient_batches import gradient_of, open_session


class Held:
    """A tensor that a graph keeps."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Peak:
    """The most bytes that graphs kept at one moment."""

    now = most = 0

    def pack(self, value: Tensor) -> Held:
        held, size = Held(value), value.numel() * value.element_size()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(held, self.free, size)
        return held

    def free(self, size: int) -> None:
        self.now -= size


@contextmanager
def watched() -> Iterator[Peak]:
    peak = Peak()
    with saved_tensors_hooks(peak.pack, lambda held: held.value):
        yield peak
    assert peak.now < 1024, "what metrics keep"


def kept(*words: str) -> int:
    with open_session("optim.batch_size=3", *words) as session, watched() as peak:
        assert any(value.any() for value in gradient_of(session, 3).values())
    return peak.most


LONG = "rollout.num_inference_steps=7"


@pytest.mark.parametrize(
    ("few", "many"),
    [
        pytest.param(("rollout.num_inference_steps=3",), (LONG,), marks=pytest.mark.slow, id="of the rollout"),
        pytest.param((LONG, "algorithm.steps=2"), (LONG, "algorithm.steps=5"), id="trained, DRaFT"),
        pytest.param(
            (LONG, "algorithm={name: drtune, steps: 1}"),
            (LONG, "algorithm={name: drtune, steps: 4}"),
            marks=pytest.mark.slow,
            id="trained, DRTune",
        ),
    ],
)
def test_memory_does_not_grow_with_the_number_of_steps(few, many):
    least, most = kept(*few), kept(*many)
    assert most == pytest.approx(least, rel=0.02)
    assert least > 2**20, "the decoder's graph alone has more"
