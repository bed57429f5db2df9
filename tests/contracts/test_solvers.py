"""What every solver must satisfy."""

import pytest

from flowrl.contracts.laws import ContractError
from flowrl.contracts.orders import SOLVER_LAWS
from flowrl.diffusion.solvers import SOLVERS, Dpm, SolverName


@pytest.mark.parametrize("law", SOLVER_LAWS, ids=str)
@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_keeps_the_law(name: SolverName, law):
    law.hold(SOLVERS[name])


@pytest.mark.parametrize("name", SOLVERS)
def test_an_order_that_is_too_high_is_refused(name: SolverName, monkeypatch):
    solver = SOLVERS[name]
    order = solver.order + 1
    monkeypatch.setattr(type(solver), "order", order)
    with pytest.raises(ContractError, match=f"declares order {order}"):
        SOLVER_LAWS[0].hold(solver)


def test_a_correction_of_the_wrong_size_is_of_order_1():
    with pytest.raises(ContractError, match=r"declares order 2, .*\n.*order = 1, or"):
        SOLVER_LAWS[0].hold(Dpm(lambda gone, h: gone))
