"""Judges of latents, renewed on the run's own samples: what they are asked about moves away from what they learned."""

import io

import torch
from torch import Tensor

from flowrl.core.errors import RewardError
from flowrl.reward import LatentReward, Trainer
from flowrl.rollout.trajectories import Rollout
from flowrl.scoring.options import Renewal
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Conduct, kept
from flowrl.training.metrics import Sums
from flowrl.training.sampling import Sampling


class Renewing:
    """Takes a judge's own optimizer steps at the end of every n-th iteration, the same on every process.

    Raises RewardError: a judge that is to be renewed has no trainer.
    """

    def __init__(self, scorer: Scorer | None, sampling: Sampling) -> None:
        self.sampling = sampling
        self.judges: dict[str, tuple[LatentReward, Trainer, Renewal]] = {}
        for entry in () if scorer is None else scorer.distinct:
            judge = entry.reward.on_latents
            if entry.renew is None or judge is None:
                continue
            if judge.trainer is None:
                raise RewardError(f"reward {entry.name!r}: what it builds has no `trainer`, which renew needs")
            self.judges[entry.reward.card.outputs[0]] = judge, judge.trainer, entry.renew

    def __call__(self, iteration: int, rollout: Rollout, sums: Sums) -> None:
        """Renew the judges that are due after an iteration, on all its samples."""
        due = [name for name, (_, _, renewal) in self.judges.items() if iteration % renewal.every == 0]
        x0 = self._gathered(rollout) if due else torch.empty(0)
        for name in due:
            found = self.sampling.world.in_step(lambda name=name: self._renewed(name, x0, rollout))
            for metric, value in found.items():
                sums.add(f"renewal/{name}/{metric}", value)

    def _renewed(self, name: str, x0: Tensor, rollout: Rollout) -> dict[str, float]:
        judge, trainer, renewal = self.judges[name]
        scores, device = rollout.raw[renewal.by], self.sampling.world.device
        finite = scores.flatten().isfinite() & x0.flatten(1).isfinite().all(dim=1)
        rows = finite.nonzero().flatten()
        if not len(rows):
            return {}
        cond = self.sampling.texts.lookup(rollout.prompts).index(rows // scores.shape[1])
        labels = (scores.flatten()[rows] >= renewal.at_least).float()
        network = judge.network or torch.nn.Module()
        network.to(device)
        with kept(Conduct()), torch.enable_grad():
            found = trainer.renew(x0[rows].to(device), cond, labels.to(device))
        network.eval().requires_grad_(False)
        return {"share_true": float(labels.mean())} | {metric: float(value) for metric, value in found.items()}

    def _gathered(self, rollout: Rollout) -> Tensor:
        """Clean latents of all processes by identity, [P * G, ...] on the CPU; NaN where no process has the sample."""
        own, group = rollout.samples.x0.float().cpu(), rollout.rewards.shape[2]
        table = torch.full((len(rollout.prompts) * group, *own.shape[1:]), torch.nan)
        for ids, part in self.sampling.world.gather((rollout.samples.ids, own)):
            table[[i.slot * group + i.sample for i in ids]] = part
        return table

    def state(self) -> dict[str, Tensor]:
        """What each trainer says of itself, by output: the bytes of one file, [n] uint8."""
        result = {}
        for name, (_, trainer, _) in self.judges.items():
            torch.save(trainer.state_dict(), file := io.BytesIO())
            result[name] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        return result

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`; a judge that it lacks stays as it is."""
        for name in state.keys() & self.judges.keys():
            file = io.BytesIO(state[name].cpu().numpy().tobytes())
            self.judges[name][1].load_state_dict(torch.load(file, "cpu", weights_only=True))
