"""The kind of training data of each method."""

from flowrl.algorithms.base import EdgeMethod, GradientMethod, Method, NoiseMethod, SampleMethod, StateMethod
from flowrl.training.adjoint_batches import AdjointTraining
from flowrl.training.base import Training
from flowrl.training.edge_batches import EdgeTraining
from flowrl.training.gradient_batches import GradientTraining
from flowrl.training.noise_batches import NoiseTraining
from flowrl.training.sample_batches import GivenTraining, SampleTraining
from flowrl.training.state_batches import StateTraining
from flowrl.training.transition_batches import TransitionTraining


def training_of(method: Method) -> Training:
    """The training data by the method's base class or kind of samples. Raises TypeError: it has none of the bases."""
    if isinstance(method, EdgeMethod):
        if method.adjoint:
            return AdjointTraining(method)
        return EdgeTraining(method) if method.transitions is None else TransitionTraining(method)
    if isinstance(method, SampleMethod):
        return GivenTraining(method) if method.members else SampleTraining(method)
    if isinstance(method, GradientMethod):
        return GradientTraining(method)
    if isinstance(method, StateMethod):
        return StateTraining(method)
    if isinstance(method, NoiseMethod):
        return NoiseTraining(method)
    raise TypeError(
        f"{type(method).__name__} is not an EdgeMethod, SampleMethod, GradientMethod, StateMethod or NoiseMethod "
        "(flowrl/algorithms/base.py)"
    )
