"""A network of many equal blocks, measured on a few of them: equal to the whole to the byte, or measured whole."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.models.memory.meter import measured
from flowrl.planning import folding
from flowrl.planning.folding import folded

ROWS = 3


class Block(nn.Module):
    def __init__(self, width: int, inner: int, *, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.up.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Network(nn.Module):
    """Rows of equal blocks, then a head; `states` keeps every block's output."""

    def __init__(
        self,
        *rows: tuple[int, int],
        head: int = 4,
        recompute: bool = False,
        states: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        width = 8
        self.recompute, self.states = recompute, states
        self.lists = nn.ModuleList([Block(width, inner, frozen=frozen) for count, inner in rows for _ in range(count)])
        self.head = nn.Linear(width, head)
        self.used = 0

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        self.used = len(self.lists)
        for block in self.lists:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            kept += [x] if self.states else []
        return self.head(x)


def forward(network: Network) -> None:
    network(torch.ones(ROWS, 8))


def backward(network: Network) -> None:
    network(torch.ones(ROWS, 8)).sum().backward()


def twice(network: Network) -> None:
    """A forward with gradient, one of a reference, and two backward passes through separate forwards."""
    output = network(torch.ones(ROWS, 8)) + network(torch.ones(ROWS, 8))
    with torch.no_grad():
        reference = network(torch.ones(ROWS, 8))
    (output - reference).square().mean().backward()


def prepared(network: Network) -> Network:
    for p in network.parameters():
        p.grad = torch.zeros_like(p)  # an earlier microbatch has made them
    return network


@pytest.mark.parametrize(
    ("make", "short"),
    [
        (lambda: Network((9, 16)), True),
        (lambda: Network((7, 16), (6, 24), (1, 8), head=64), True),
        (lambda: Network((12, 16), recompute=True), True),
        (lambda: Network((9, 16), states=True), True),
        (lambda: Network((9, 16), frozen=True), True),
        (lambda: Network((4, 16)), True),
        # The first blocks are so wide that the peak is among them while the others are few.
        (lambda: Network((6, 800), (40, 16), recompute=True), False),
    ],
    ids=["one row", "three rows", "recomputed", "kept states", "frozen", "short", "an early peak"],
)
@pytest.mark.parametrize(("work", "grad"), [(forward, False), (backward, True), (twice, True)])
def test_a_short_network_gives_what_the_whole_gives(
    make: Callable[[], Network], short: bool, work: Callable[[Network], None], grad: bool
):
    network = prepared(make())
    whole = measured(lambda: work(network), grad=grad)
    with mock.patch.object(folding, "measured", side_effect=measured) as again:
        assert folded(lambda: work(network), [network], grad=grad) == whole
    if short and not (work is twice and network.states):  # there no graph holds the states
        assert not again.called
    assert len(network.lists) == len(make().lists), "the network is whole again"


def test_few_blocks_are_run():
    network = Network((50, 16))
    folded(lambda: forward(network), [network], grad=False)
    assert network.used == folding.KEPT


def test_blocks_that_differ_in_work_are_measured_whole():
    class Uneven(Network):
        def forward(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.lists):
                x = block(torch.cat([x] * (1 + number % 2)))[:ROWS]
            return x

    network = Uneven((9, 16))
    whole = measured(lambda: forward(network), grad=False)
    assert folded(lambda: forward(network), [network], grad=False) == whole
