"""Judges of latents, renewed on the run's own samples: what they are asked about moves away from what they learned."""

from __future__ import annotations

import io

import torch
from torch import Tensor

from flowrl.core.errors import RewardError
from flowrl.rollout.trajectories import Rollout
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.surroundings import Conduct, kept
from flowrl.scoring.weighted import WeightedReward
from flowrl.training.metrics import Sums
from flowrl.training.sampling import Sampling


class Renewing:
    """Takes a judge's own optimizer steps at the end of every n-th iteration, the same on every process.

    Raises:
        RewardError: a judge that is to be renewed cannot be.
    """

    def __init__(self, scorer: Scorer | None, sampling: Sampling) -> None:
        self.sampling = sampling
        entries = [] if scorer is None else [entry for entry in scorer.distinct if entry.renew is not None]
        self.entries = {entry.reward.card.outputs[0]: entry for entry in entries}
        for entry in entries:
            if entry.reward.on_latents is None or entry.reward.on_latents.trainer is None:
                raise RewardError(f"reward {entry.name!r}: what it builds has no `trainer`, which renew needs")

    def __call__(self, iteration: int, rollout: Rollout, sums: Sums) -> None:
        """Renew the judges that are due after an iteration, on all its samples."""
        due = [(name, e) for name, e in self.entries.items() if e.renew is not None and iteration % e.renew.every == 0]
        if not due:
            return
        x0 = self._gathered(rollout)
        for name, entry in due:
            found = self.sampling.world.in_step(lambda entry=entry: self._renewed(entry, x0, rollout))
            for metric, value in found.items():
                sums.add(f"renewal/{name}/{metric}", value)

    def _renewed(self, entry: WeightedReward, x0: Tensor, rollout: Rollout) -> dict[str, float]:
        judge, renewal = entry.reward.on_latents, entry.renew
        assert judge is not None
        assert judge.trainer is not None
        assert renewal is not None
        scores = rollout.raw[renewal.by]
        finite = scores.flatten().isfinite() & x0.flatten(1).isfinite().all(dim=1)
        rows = finite.nonzero().flatten()
        if not len(rows):
            return {}
        cond = self.sampling.texts.lookup(rollout.prompts).index(rows // scores.shape[1])
        labels = (scores.flatten()[rows] >= renewal.at_least).float()
        device = self.sampling.world.device
        if judge.network is not None:
            judge.network.to(device)
        with kept(Conduct()), torch.enable_grad():
            found = dict(judge.trainer.renew(x0[rows].to(device), cond, labels.to(device)))
        if judge.network is not None:
            judge.network.eval().requires_grad_(False)
        return {"share_true": float(labels.mean())} | {name: float(value) for name, value in found.items()}

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
        for name, entry in self.entries.items():
            assert entry.reward.on_latents is not None
            assert entry.reward.on_latents.trainer is not None
            file = io.BytesIO()
            torch.save(entry.reward.on_latents.trainer.state_dict(), file)
            result[name] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        return result

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`; a judge that it lacks stays as it is."""
        for name, value in state.items():
            judge = self.entries[name].reward.on_latents if name in self.entries else None
            if judge is not None and judge.trainer is not None:
                file = io.BytesIO(value.cpu().numpy().tobytes())
                judge.trainer.load_state_dict(torch.load(file, "cpu", weights_only=True))
