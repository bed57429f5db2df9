"""The contract of a reward on latents, tried on noise under two captions."""

from collections.abc import Iterator

import torch
from torch import Tensor

from flowrl.contracts.laws import Finding, Law, law, require
from flowrl.core.errors import ConfigError
from flowrl.core.rng import normal
from flowrl.core.types import Condition
from flowrl.reward import LatentReward
from flowrl.rollout.library import load_model
from flowrl.scoring.steadiness import ALONE, BY_ITSELF, REPEATABLE, alone_tolerance, difference

MODEL, PROMPTS, COUNT = "tiny-sd3", ("a red circle", "two blue squares"), 4


class LatentTrial:
    """A judge with the latents on which its laws are tried.

    `judge` is as `build(config)` returns it. `cond`: of two prompts, from the model whose latents it judges; None: from
    tiny-sd3. `name` is for messages.

    Raises ConfigError: there are no conditions, and the judge is of another model than tiny-sd3.
    """

    def __init__(self, name: str, judge: LatentReward, cond: Condition | None = None) -> None:
        if cond is None:
            adapter = load_model(MODEL, max_sequence_length=9).adapter
            if tuple(judge.shape) != tuple(adapter.latent_shape()):
                raise ConfigError(
                    f"{name} judges latents {list(judge.shape)}, and {MODEL} makes {list(adapter.latent_shape())}; "
                    "give conditions of its own model: flowrl.contracts.latents.LatentTrial(name, judge, cond)"
                )
            cond = adapter.encode(PROMPTS)
        self.judge, self.card = judge, judge.card
        self.cond = cond.index(torch.arange(COUNT) % 2)
        self.x = normal(tuple(judge.shape), 0, "latent_trial", [(row,) for row in range(COUNT)]).to(cond.device)
        self.sigma = torch.zeros(COUNT, device=cond.device)

    def value(self, x: Tensor | None = None, sigma: float = 0.0, cond: Condition | None = None) -> Tensor:
        """Logits [B]."""
        return self.judge.value(self.x if x is None else x, self.sigma + sigma, self.cond if cond is None else cond)

    def apart(self, first: Tensor, second: Tensor) -> float:
        return difference({"": first.detach()}, {"": second.detach()})

    def run(self) -> Iterator[Finding]:
        """Findings, one a law."""
        return (each.find(self) for each in LAWS)


@law("values", "return a finite float [B] for latents [B, ...], sigma [B] and a condition of B rows")
def values(trial: LatentTrial) -> str:
    found = trial.value().detach()
    good = found.shape == (COUNT,) and found.is_floating_point() and bool(found.isfinite().all())
    require(good, f"{found.dtype} {list(found.shape)}: {found.tolist()}")
    require(found.unique().numel() > 1, f"all are {float(found[0]):.4g}")
    return f"{float(found.min()):.4g}..{float(found.max()):.4g}"


@law("same twice", REPEATABLE)
def same_twice(trial: LatentTrial) -> str:
    apart = trial.apart(trial.value(), trial.value())
    return require(apart <= ALONE / 100, f"differs by {apart:.2g}")


@law("alone as in a batch", BY_ITSELF)
def alone(trial: LatentTrial) -> str:
    rows = torch.arange(COUNT).split(1)
    parts = [trial.judge.value(trial.x[row], trial.sigma[row], trial.cond.index(row)) for row in rows]
    apart = trial.apart(trial.value(), torch.cat(parts))
    return require(apart <= alone_tolerance(trial.card), f"differs by {apart:.2g}")


@law("noise level and prompt", "they are measured")
def conditioned(trial: LatentTrial) -> str:
    by_noise = trial.apart(trial.value(), trial.value(sigma=0.5))
    by_prompt = trial.apart(trial.value(), trial.value(cond=trial.cond.index(torch.arange(1, COUNT + 1) % 2)))
    noise = f"sigma .5 moves it by {by_noise:.2g}" if by_noise else "no noise level moves it: it has no credit by step"
    return f"{noise}; another prompt by {by_prompt:.2g}"


@law("gradient", "it is finite, reaches each row's own latents, and none of the others")
def gradient(trial: LatentTrial) -> str:
    for sigma in (0.0, 0.5):
        x = trial.x.clone().requires_grad_()
        first, *_ = found = trial.value(x, sigma)
        (own,) = torch.autograd.grad(first, x, retain_graph=True)
        (every,) = torch.autograd.grad(found.sum(), x)
        require(bool(every.isfinite().all() and every.flatten(1).any(dim=1).all()), f"not so at sigma {sigma:g}")
        require(not own[1:].any(), f"that of a row is not 0 at another at sigma {sigma:g}", BY_ITSELF)
    return "reaches every row alone"


@law("weights", "put the network in eval() and requires_grad_(False)")
def weights(trial: LatentTrial) -> str:
    network = trial.judge.network
    if network is None:
        return "none are declared"
    trained = sum(parameter.requires_grad for parameter in network.parameters())
    require(not trained, f"{trained} of its tensors take a gradient")
    require(not network.training, "the network is in train()")
    require(not trial.value().requires_grad, "a graph is kept where the latents ask for none")
    return f"{sum(parameter.numel() for parameter in network.parameters()):,} values, without gradient"


@law("leaves inputs alone", "work on copies of your own, with a random generator of your own")
def inputs_alone(trial: LatentTrial) -> str:
    before, numbers = trial.x.clone(), torch.get_rng_state()
    trial.value()
    require(torch.equal(before, trial.x), "it changed the latents")
    require(torch.equal(numbers, torch.get_rng_state()), "it drew or seeded random numbers of the process")
    return "as they were"


LAWS: tuple[Law[LatentTrial], ...] = (*(values, same_twice, alone, conditioned, gradient, weights, inputs_alone),)
