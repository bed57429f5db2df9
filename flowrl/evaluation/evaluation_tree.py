"""One tree at every evaluation, for the report: of the first evaluated prompt, as a training rollout.

The plan is that of the iteration, guidance and rewards are the run's, the weights those of the evaluation. The noise
has a purpose of its own and no iteration, so it is the same at every evaluation; credit comes from a copy of the
method. The first process draws the tree, or all of them if a forward needs all processes.

`eval/tree-<tag>.json`, numbers with six digits, null where there is none; K steps, N nodes, E edges, L leaves:

    tag, iteration, method, prompt, guidance_scale
    sigmas    [K + 1], noise level at each place
    splits    steps at which a node has several children
    nodes     place [N] and leaf [N], the first of its leaves; reward [N], that of the edge to the node, of the root
              the mean of the leaves
    edges     parent [E] and child [E], numbers of nodes; noisy [E], stochastic; reward [E], fused from the leaves
              of the child; advantage [E], null without noise or credit; pruned [E], noisy and not trained
    leaves    reward [L], the weighted sum of the trained rewards; raw, name of an output -> [L]
    sheet     columns, width, height: of the images in eval/tree-<tag>.png or .webp, row by row, in pixels
    note      reason for no advantage, or for none that trains; null otherwise
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod, Method
from flowrl.config.resolved import Resolved
from flowrl.core.errors import Diverged, RewardError
from flowrl.core.files import json_ready, write_atomically
from flowrl.core.types import SampleId
from flowrl.credit.advantages import Advantages, aggregate
from flowrl.credit.tree_credit import LeafRewards, fuse, log_probs_on_paths
from flowrl.diffusion.plan import StepPlan
from flowrl.display.console import log
from flowrl.display.display import Progress
from flowrl.evaluation.evaluator import Evaluator
from flowrl.media import media
from flowrl.reward import Images
from flowrl.rollout.loop import RunOptions
from flowrl.rollout.noise import Noise
from flowrl.rollout.recorder import Recording
from flowrl.rollout.trajectories import Rollout
from flowrl.scoring.build import build_scorer
from flowrl.scoring.weighted import WeightedReward
from flowrl.training.divergence import Health
from flowrl.training.sampling import latents_of
from flowrl.training.signals import NEVER, Stop

LEAF_PX = 128
"""Longest side of a leaf's image on the sheet, in pixels."""


@dataclass(frozen=True, slots=True)
class EvalTree:
    """Rolls out and writes the tree of an evaluation.

    Does nothing for a method whose plan has none, nor where people judge: they are asked in training alone.
    """

    resolved: Resolved
    method: Method
    rewards: Sequence[WeightedReward]
    """Rewards that are trained on."""
    evaluator: Evaluator
    """Evaluator of the same evaluations."""

    def __call__(self, tag: str, iteration: int, stop: Stop = NEVER) -> None:
        """Draw, score and write a tree with the weights that are in the network.

        `iteration` is the finished one; 0 has the plan of the first.

        Raises Abandoned: on all processes, and nothing is written; Elsewhere: the first process failed.
        """
        evaluator, sampling, seed = self.evaluator, self.evaluator.sampling, self.resolved.run.seed
        plan = self.method.plan(sampling.schedule, sampling.sampler, max(iteration, 1), seed)
        if plan.tree is None or not evaluator.prompts or evaluator.folder is None:
            return
        if any(entry.reward.card.by_people for entry in self.rewards):  # its credit would be that of other rewards
            return
        folder = evaluator.folder / "eval"
        drawn = self._roll_out(plan, tag, stop) if sampling.sharded else None

        def write() -> None:
            if sampling.world.main:
                self._write(folder, tag, iteration, drawn or self._roll_out(plan, tag, stop), stop)

        sampling.world.in_step(write)

    def _write(self, folder: Path, tag: str, iteration: int, rollout: Rollout, stop: Stop) -> None:
        """Score a rollout and write its tree."""
        health, sampling = Health(), self.evaluator.sampling
        images = sampling.images(rollout, self.resolved.run.rollout.batch_size, health=health, stop=stop)
        try:
            if health.spoiled:
                raise Diverged(f"{health.message('in it')}: the evaluation says more")
            rollout, weights = self._scored(rollout, images, stop)
        except (Diverged, RewardError) as error:
            # The evaluation that follows fails in the same way, and ends the run on all processes.
            log.warning("the tree of %s is not drawn: %s", tag, error)
            return
        # A copy of the method: its memory is read, and nothing is added to it.
        method: EdgeMethod = self.resolved.algorithm.build()
        method.load_state_dict(self.method.state_dict())
        credit, note = credit_tree(method, rollout, weights, max(iteration, 1))
        columns = math.ceil(math.sqrt(len(images)))
        sheet, (height, width) = media.contact_sheet(images.floats(), columns, LEAF_PX)
        record = {
            "tag": tag,
            "iteration": iteration,
            "method": self.resolved.algorithm.name,
            "prompt": self.evaluator.prompts[0].text,
            "guidance_scale": sampling.policy.guidance_scale,
            **tree_record(rollout, weights, credit, method.path_weight),
            "sheet": {"columns": columns, "width": width, "height": height},
            "note": note,
        }
        media.write(sheet, folder / f"tree-{tag}", fps=sampling.adapter.fps)
        write_atomically(folder / f"tree-{tag}.json", json.dumps(record))

    def _roll_out(self, plan: StepPlan, tag: str, stop: Stop) -> Rollout:
        """One tree, not scored yet."""
        sampling, method = self.evaluator.sampling, self.method
        assert isinstance(method, EdgeMethod)  # its plan has a tree
        prompt, ids = self.evaluator.prompts[0], [SampleId(0, leaf) for leaf in range(plan.leaves)]
        noise = Noise(self.evaluator.seed, "tree", None, sampling.adapter.latent_shape())
        recording, size = Recording(method.log_prob_form(sampling.sampler)), self.resolved.run.rollout.batch_size
        with Progress(plan.leaves, f"drawing the tree of {tag}", show=sampling.world.main) as bar:
            bar.update(0)
            options = RunOptions(recording=recording, progress=bar.update, stop=stop.in_step)
            drawn = sampling.draw(plan, noise, sampling.asked([prompt], ids), batch_size=size, options=options)
        paths = None
        if method.weighs_paths:
            paths = log_probs_on_paths(drawn.edges, ids, plan, sampling.path_scale(plan)).T[None]
        return drawn.scored(torch.empty(0), prompts=(prompt,), paths=paths)

    def _scored(self, rollout: Rollout, images: Images, stop: Stop) -> tuple[Rollout, Tensor]:
        """The rollout with rewards [R, 1, L] and outputs [1, L], and the weights [R]."""
        prompt, count = self.evaluator.prompts[0], len(images)
        # A scorer of its own: the trained one counts calls and failures for the row of an iteration.
        scorer = build_scorer(self.rewards)
        scorer.stop = stop.here
        scores = scorer.score(images, [prompt.text] * count, [prompt.metadata] * count, latents_of(rollout))
        raw = {name: values[None] for name, values in scores.raw.items()}
        return replace(rollout, rewards=scores.values[:, None], raw=raw), scores.weights


def credit_tree(
    algorithm: EdgeMethod, rollout: Rollout, weights: Tensor, iteration: int
) -> tuple[Advantages | None, str | None]:
    """Credit by edge of one tree, and a remark on it; no credit if the method compares more than one tree.

    The method is a copy, which may remember the rewards [R, 1, L] of the rollout; `weights` is [R].
    """
    if algorithm.config.least_trees > 1:
        return None, "The method compares the trees of a prompt with each other, and this is one of them."
    try:
        algorithm.config.check_group(rollout.plan.leaves)
    except ValueError as error:
        return None, f"One tree alone has no advantages: {error}"
    credit = algorithm.advantages(rollout.rewards, weights, rollout.identities)
    dead = bool(credit.dead[0])
    credit = algorithm.on_tree(credit, rollout.leaf_rewards(weights), iteration)
    return credit, "All leaves have the same reward, so no edge is trained." if dead else None


def tree_record(rollout: Rollout, weights: Tensor, credit: Advantages | None, path_weight: float) -> dict[str, Any]:
    """Sigmas, splits, nodes, edges and leaves of a scored tree, as in the file."""
    tree, total = rollout.plan.tree, aggregate(rollout.rewards, weights)
    assert tree is not None
    by_path = LeafRewards(tree, rollout.rewards, weights, rollout.paths).path_weights(path_weight)
    fused = fuse(total, tree, by_path)[0]
    places = [(k, leaf) for k in range(tree.num_steps + 1) for leaf in tree.at(k).tolist()]
    number, scored = {place: row for row, place in enumerate(places)}, total[0][total[0].isfinite()]
    rewards = [float(scored.mean()) if len(scored) else math.nan] + [math.nan] * (len(places) - 1)
    edges: dict[str, list] = {name: [] for name in ("parent", "child", "noisy", "reward", "advantage", "pruned")}
    steps, pruned = (None, None) if credit is None else (credit.steps, credit.pruned)
    for k, leaf in [(step, first) for step in range(tree.num_steps) for first in tree.children(step).tolist()]:
        child, noisy = number[int(tree.ends[k, leaf]), leaf], bool(tree.noisy[k, leaf])
        rewards[child] = float(fused[leaf, k])
        edges["parent"].append(number[k, int(tree.node[k, leaf])])
        edges["child"].append(child)
        edges["noisy"].append(noisy)
        edges["reward"].append(rewards[child])
        edges["advantage"].append(float(steps[0, leaf, k]) if noisy and steps is not None else math.nan)
        left_out = k not in rollout.plan.train or (pruned is not None and bool(pruned[0, leaf, k]))
        edges["pruned"].append(noisy and left_out)
    several = [k for k in range(tree.num_steps) if len(tree.children(k)) > len(tree.at(k))]
    return {
        "sigmas": _rounded(rollout.plan.schedule.sigmas.tolist()),
        "splits": several,
        "nodes": {"place": [k for k, _ in places], "leaf": [leaf for _, leaf in places], "reward": _rounded(rewards)},
        "edges": edges | {name: _rounded(edges[name]) for name in ("reward", "advantage")},
        "leaves": {
            "reward": _rounded(total[0].tolist()),
            "raw": {name: _rounded(values[0].tolist()) for name, values in rollout.raw.items()},
        },
    }


def _rounded(values: Sequence[float]) -> list[float | None]:
    return json_ready([round(v, 6) for v in values])
