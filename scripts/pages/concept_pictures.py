"""The pictures of docs/concepts/, drawn from the code itself: plans, trees, noise, credit, clip, KL, hacked rewards.

Nothing is loaded or downloaded: grids, rewards and latents are small tables, methods and samplers those of `flowrl
list`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.base import EdgeMethod, Method
from flowrl.config.load import load_config
from flowrl.contracts.grids import flow_schedule
from flowrl.core import registry
from flowrl.core.types import Prediction, SampleId
from flowrl.credit.advantages import AdvantageConfig, advantages
from flowrl.credit.tree_credit import LeafRewards
from flowrl.diffusion.plan import StepPlan, window
from flowrl.diffusion.process import FlowProcess
from flowrl.diffusion.schedules import Schedule, shifted_linspace
from flowrl.diffusion.tree_shapes import Branching
from flowrl.losses.ratio import clipped_ratio_loss
from flowrl.samplers.base import Sampler, StepDistribution
from scripts.pages.svg import Panel, Picture, label

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "concepts"
STEPS = 10
ITERATION, SEED = 30, 0
"""Of the plans: late enough for MixGRPO's window to have moved."""


def method(name: str, **options: Any) -> Any:
    module = registry.load("algorithms", name)
    return module.build(module.Config(**options))


def sampler(name: str) -> Sampler:
    module = registry.load("samplers", name)
    return module.build(module.Config())


def grid(steps: int) -> Schedule:
    """Equal steps from noise to image."""
    sigmas = shifted_linspace(steps, 1.0)
    return Schedule(sigmas=sigmas, timesteps=1000 * sigmas[:-1])


def plan(made: Method[Any], how: str = "flow_sde", steps: int = STEPS) -> StepPlan:
    return made.plan(grid(steps), sampler(how), ITERATION, SEED)


# ---- the iteration


def iteration() -> Picture:
    """The round of an iteration, with the numbers of the quickstart."""
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    rollout, optim = config.rollout, config.optim
    prompts, group = rollout.prompts_per_iteration, rollout.group_size
    boxes = [
        ("Prompts", f"{prompts} of the training prompts", "data/"),
        ("Rollout", f"{group} samples of each, {rollout.num_inference_steps} steps a sample", "Session.roll_out"),
        ("Reward", f"{prompts * group} images, one number for each", "scoring/"),
        ("Credit", f"rewards [{prompts}, {group}] to advantages [{prompts}, {group}]", "Session.credit"),
        ("Update", f"{optim.updates_per_iteration} optimizer steps", "Session.update"),
    ]
    picture = Picture(64 * len(boxes) + 20, "The parts of an iteration, in a round")
    for place, (name, text, where) in enumerate(boxes):
        top = 16 + 64 * place
        picture.rect((60, top), (400, 44), "box", 5)
        picture.text(74, top + 19, name, "head")
        picture.text(74, top + 36, text)
        picture.text(448, top + 19, where, "soft small", "end")
        if place:
            picture.arrow((260, top - 20), (260, top))
    last, first = 16 + 64 * (len(boxes) - 1) + 22, 16 + 64 + 22
    picture.path([(60, last), (30, last), (30, first), (52, first)], "line thin a")
    picture.path([(53, first - 4), (60, first), (53, first + 4)], "line thin a fa")
    picture.parts.append(f'<text transform="translate(22 {(first + last) / 2:.0f}) rotate(-90)" '
                         'class="soft small" text-anchor="middle">new weights</text>')  # fmt: skip
    return picture


# ---- plans


def plans() -> Picture:
    """Which steps of a grid are noisy and trained, for methods without a tree; a row each."""
    listed = [("flow_grpo", "flow_sde"), ("dance_grpo", "dance_sde"), ("flow_grpo_fast", "flow_sde")]
    listed += [("mix_grpo", "flow_sde"), ("mix_grpo_flash", "flow_sde"), ("awm", "flow_sde")]
    picture = Picture(34 * len(listed) + 74, "Steps of several methods: noisy and trained, or deterministic")
    left, right = 128, 464
    picture.text(left, 22, "noise, \u03c3 = 1", "soft small")
    picture.text(right, 22, "image, \u03c3 = 0", "soft small", "end")
    for row, (name, how) in enumerate(listed):
        made, y = method(name, **({"shift": 1.0} if name == "mix_grpo_flash" else {})), 48 + 34 * row
        its = plan(made, how)
        sigmas = [left + (right - left) * (1 - float(s)) for s in its.schedule.sigmas]
        trained = set(its.train)
        if isinstance(made, EdgeMethod):
            kept = made.kept_edges([SampleId(0, 0)], its, ITERATION, SEED)
            trained = trained if kept is None else {k for k, on in zip(its.train, kept.tolist(), strict=True) if on}
        picture.text(14, y + 4, name)
        for k in range(len(its)):
            kind = "fa" if k in trained else "fa half" if its.stochastic[k] else "hollow"
            picture.rect((sigmas[k] + 1, y - 9), (sigmas[k + 1] - sigmas[k] - 2, 18), kind, 3)
    y = 34 * len(listed) + 56
    for x, kind, text in (
        (14, "fa", "noisy, trained"),
        (136, "fa half", "noisy, not trained here"),
        (314, "hollow", "deterministic"),
    ):
        picture.rect((x, y - 10), (16, 12), kind, 2)
        picture.text(x + 22, y, text, "small")
    return picture


def noise() -> Picture:
    """Std of each step under each sampler at its default noise level, on a grid of ten steps with SD3's shift."""
    names = [name for name in registry.names("samplers") if sampler(name).default_noise_level() > 0]
    picture = Picture(300, "Std of the noise that each sampler adds, by step")
    stds = {name: _stds(sampler(name)) for name in names}
    panel = Panel(picture, ((42, 40), (464, 220)), (0, STEPS - 2), (0, 1.6))
    panel.axes(range(STEPS - 1), (0, 0.4, 0.8, 1.2, 1.6))
    picture.text(14, 22, "std of the step's noise", "soft small")
    picture.text(464, 250, "step, from noise to image", "soft small", "end")
    colors = ("a", "b", "c", "d", "e", "f", "plain", "a dash")
    for color, name in zip(colors, names, strict=True):
        panel.draw(range(STEPS - 1), stds[name], color)
    shown = [(color, name) for color, name in zip(colors, names, strict=True)]
    picture.legend(268, shown[:4])
    picture.legend(287, shown[4:])
    return picture


def _stds(how: Sampler) -> list[float]:
    steps = window(flow_schedule(STEPS), how.default_noise_level()).steps(torch.arange(STEPS - 1), FlowProcess())
    still = torch.zeros(STEPS - 1, 1)
    return how.transition(FlowProcess(), Prediction(still, still, still), still, steps).std.tolist()


# ---- trees


def trees() -> Picture:
    """Three shapes of trees, from the plans of their methods on eight steps."""
    listed = [
        ("branch_grpo", method("branch_grpo", splits=[0, 2, 4])),
        ("tempflow_grpo", method("tempflow_grpo", children=2, steps=[0, 2, 4])),
        ("tp_grpo", method("tp_grpo", window=4)),
    ]
    made = [(name, plan(one, steps=8).tree) for name, one in listed]
    heights = [40 + 15 * tree.leaves for _, tree in made]
    picture = Picture(sum(heights) + 40, "Trees of rollouts: which steps samples share")
    top = 8.0
    for (name, tree), height in zip(made, heights, strict=True):
        words = f"{tree.leaves} samples, {tree.forwards} network evaluations instead of {tree.chain_forwards}"
        picture.text(14, top + 16, f"{name}: {words}", "small")
        _draw_tree(picture, tree, (24, top + 36), (432, 15))
        top += height
    picture.line((14, top + 12), (34, top + 12), "line b")
    picture.text(40, top + 16, "noisy step, which has an advantage of its own", "small")
    picture.line((314, top + 12), (334, top + 12), "plain")
    picture.text(340, top + 16, "deterministic step", "small")
    return picture


def _places(
    tree: Branching, corner: tuple[float, float], size: tuple[float, float]
) -> dict[tuple[int, int], tuple[float, float]]:
    """(place, node) -> where it is drawn: at the height of the middle of its leaves. `size` is (width, pitch)."""
    (left, top), (width, pitch) = corner, size
    result = {}
    for k in range(tree.num_steps + 1):
        for node in tree.at(k).tolist():
            below = (tree.node[k] == node).nonzero().squeeze(1).double()
            result[k, node] = (left + width * k / tree.num_steps, top + pitch * float(below.mean()))
    return result


def _draw_tree(picture: Picture, tree: Branching, corner: tuple[float, float], size: tuple[float, float]) -> None:
    at = _places(tree, corner, size)
    drawn = set()
    for noisy in (False, True):
        for k in range(tree.num_steps):
            for leaf in range(tree.leaves):
                node, end = int(tree.node[k, leaf]), int(tree.ends[k, leaf])
                if node < 0 or bool(tree.noisy[k, leaf]) != noisy:
                    continue
                way = (k, node), (end, int(tree.node[end, leaf]))
                if way not in drawn:
                    drawn.add(way)
                    start, stop = at[way[0]], at[way[1]]
                    picture.curve(start, (start[0] + stop[0]) / 2, stop, "line b" if noisy else "plain")
    for leaf in range(tree.leaves):
        picture.dot(at[tree.num_steps, leaf], 3.5, "fa")


# ---- credit

TABLE = torch.tensor([[[0.1, 0.3, 0.2, 0.9, 0.4, 0.2], [0.70, 0.74, 0.72, 0.78, 0.71, 0.73], [0.5] * 6]])
"""Rewards of three prompts with six samples, [1, 3, 6]."""


def credit() -> Picture:
    """Rewards of three groups, and their advantages by the std of the group and of the whole iteration."""
    picture = Picture(372, "Rewards of three prompts, and the advantages of their samples")
    rules = [
        (name, _advantages(std)) for name, std in (("std of the group", "group"), ("std of the iteration", "global"))
    ]
    _bars(picture, (44, 136), TABLE[0], (0, 1), "reward; the line is the mean of the group")
    for place, (name, values) in enumerate(rules):
        _bars(picture, (166 + 106 * place, 238 + 106 * place), values, (-2.2, 2.2), f"advantage, {name}")
    for place, name in enumerate(("prompt 1", "prompt 2", "prompt 3: dead")):
        picture.text(104 + 146 * place, 362, name, "soft small", "middle")
    return picture


def _advantages(std: str) -> Tensor:
    return advantages(TABLE, torch.ones(1), AdvantageConfig(std=std)).values[:, :, 0]  # pyright: ignore


def _bars(picture: Picture, band: tuple[float, float], table: Tensor, ends: tuple[float, float], title: str) -> None:
    """A group of bars for each row of `table` [P, G]."""
    panel = Panel(picture, ((40, band[0]), (466, band[1])), (0, 1), ends)
    panel.axes((), (ends[0], (ends[0] + ends[1]) / 2, ends[1]) if ends[0] >= 0 else (-2, 0, 2))
    picture.text(14, band[0] - 12, title, "soft small")
    zero = panel.at(0, 0)[1]
    for p, row in enumerate(table.tolist()):
        for g, value in enumerate(row):
            x, y = 48 + 146 * p + 19 * g, panel.at(0, value)[1]
            color = "fa" if ends[0] >= 0 or value > 0 else "fb"
            picture.rect((x, min(y, zero)), (13, abs(zero - y)), color, 1)
        if ends[0] >= 0:
            mean = panel.at(0, sum(row) / len(row))[1]
            picture.line((46 + 146 * p, mean), (160 + 146 * p, mean), "line b")


LEAVES = torch.tensor([[[1.0, 0.6, 0.5, 0.1]]])
"""Rewards of the four leaves of a tree, [1, 1, 4]."""


def tree_credit() -> Picture:
    """A tree with four leaves, their rewards and the advantage of every noisy step."""
    made = method("branch_grpo", splits=[0, 1])
    tree = plan(made, steps=3).tree
    weights = torch.ones(1)
    by_edge = made.on_tree(made.advantages(LEAVES, weights), LeafRewards(tree, LEAVES, weights), ITERATION).steps[0]
    picture = Picture(212, "Advantages of the steps of a tree, from the rewards of its leaves")
    picture.text(14, 22, "advantage of a step", "soft small")
    picture.text(466, 22, "reward", "soft small", "end")
    at = _places(tree, (28, 48), (390, 46))
    _draw_tree(picture, tree, (28, 48), (390, 46))
    for k in range(tree.num_steps):
        for node in tree.noisy_children(k).tolist():
            (x, y), value = at[k + 1, node], float(by_edge[node, k])
            color = "fa" if value > 0 else "fb"
            # Of two siblings the upper one's number stands above its line.
            below = -7 if node % (4 >> k) == 0 else 17
            picture.text(
                x - 12, y + below, f"{'+' if value > 0 else ''}{label(round(value, 2))}", f"{color} head", "end"
            )
    for leaf, reward in enumerate(LEAVES.flatten().tolist()):
        x, y = at[tree.num_steps, leaf]
        picture.text(x + 14, y + 4, f"{reward:.1f}")
    return picture


# ---- clip and KL

CLIP = 0.2


def clip() -> Picture:
    """The clipped loss and the push that it gives the log-probability, for a good and a bad sample."""
    picture = Picture(356, "The clipped loss and its gradient, for a good and a bad sample")
    ratios = torch.linspace(0.5, 1.6, 112, dtype=torch.float64)
    for column, (advantage, name) in enumerate(((1.0, "A = +1, a good sample"), (-1.0, "A = \u22121, a bad sample"))):
        log_ratio = ratios.log().requires_grad_()
        loss, _ = clipped_ratio_loss(log_ratio, torch.full_like(ratios, advantage), (CLIP, CLIP))
        (slope,) = torch.autograd.grad(loss.sum(), log_ratio)
        left = 44 + 226 * column
        picture.text(left, 22, name, "head")
        for top, values, ends, title in (
            (58, loss.detach(), (-2.0, 2.0), "loss"),
            (206, -slope, (-2.0, 2.0), "push on log \u03c0 (\u2212gradient)"),
        ):
            panel = Panel(picture, ((left, top), (left + 190, top + 100)), (0.5, 1.6), ends)
            (low, high), (_, bottom) = (panel.at(1 - CLIP, 0)[0], panel.at(1 + CLIP, 0)[0]), panel.box[1]
            picture.rect((low, top), (high - low, bottom - top), "band")
            panel.axes((0.5, 0.8, 1, 1.2, 1.5), (-2, 0, 2))
            panel.draw(ratios.tolist(), values.tolist(), "a" if advantage > 0 else "b")
            picture.text(left, top - 8, title, "soft small")
    picture.text(14, 342, f"ratio \u03c0 / \u03c0_old; the grey band is 1 \u00b1 {CLIP:g}", "soft small")
    return picture


def kl() -> Picture:
    """Loss against the shift of a Gaussian step's mean, for a pair of samples: bare, clipped, with a KL."""
    shifts = torch.linspace(0, 3, 121, dtype=torch.float64)
    held = {"nothing": (None, 0.0), f"clip {CLIP:g}": (CLIP, 0.0), "KL 0.2": (None, 0.2), "KL 1": (None, 1.0)}
    picture = Picture(300, "Loss against the shift of the mean, by what holds the policy")
    panel = Panel(picture, ((44, 40), (464, 222)), (0, 3), (-0.8, 0.8))
    panel.axes((0, 1, 2, 3), (-0.8, -0.4, 0, 0.4, 0.8))
    picture.text(14, 22, "loss of a pair: one good sample, one bad", "soft small")
    picture.text(464, 252, "shift of the mean, in std of the step", "soft small", "end")
    for color, (bound, coef) in zip("abcd", held.values(), strict=True):
        loss = shifted_loss(shifts, bound, coef)
        shown = loss <= 0.8
        panel.draw(shifts[shown].tolist(), loss[shown].tolist(), color)
        least = int(loss.argmin())
        picture.dot(panel.at(float(shifts[least]), float(loss[least])), 4, f"f{color}")
    picture.legend(276, list(zip("abcd", held, strict=True)))
    picture.text(14, 293, "a dot is where the loss is least", "soft small")
    return picture


def shifted_loss(shifts: Tensor, bound: float | None, coef: float) -> Tensor:
    """Mean loss [N] of the samples +1 (A = 1) and -1 (A = -1) of a step N(0, 1) whose mean has moved to `shifts` [N].

    `bound` is the clip range (None: none), `coef` the weight of the KL to where the mean was.
    """
    one = torch.ones_like(shifts)
    now, before = StepDistribution(shifts[:, None], one), StepDistribution(0 * shifts[:, None], one)
    loss = coef * now.kl(before).double()
    for sign in (1.0, -1.0):
        drawn = torch.full_like(shifts, sign)[:, None]
        log_ratio = now.log_prob(drawn) - before.log_prob(drawn)
        wide = 1e6 if bound is None else bound
        loss = loss + clipped_ratio_loss(log_ratio, sign * one.to(log_ratio), (wide, wide))[0] / 2
    return loss


# ---- hacked rewards


def hacking() -> Picture:
    """A learned reward that pixels are driven up, and runs rewarded for small files, by the goal that was meant."""
    picture = Picture(316, "A reward rises while what was meant falls")
    climbs = json.loads((ROOT / "assets" / "tiny-clip" / "pretraining.json").read_text(encoding="utf-8"))[
        "gradient ascent on the pixels"
    ]
    _climb(picture, climbs)
    cells = json.loads((ROOT / "docs" / "lab" / "guard.json").read_text(encoding="utf-8"))
    panel = Panel(picture, ((286, 48), (464, 200)), (0, 40), (-60, 10))
    panel.axes((0, 20, 40), (-60, -40, -20, 0))
    picture.text(258, 22, "points of accuracy, over the base's", "soft small")
    picture.text(464, 230, "iteration", "soft small", "end")
    for color, name in zip("cd", ("ddpo-compressibility", "sd-ddpo-compressibility"), strict=True):
        for seed in range(3):
            rows = cells[f"hacking/{name}/{seed}"]["curve"]
            panel.draw(
                [0, *(row["iteration"] for row in rows)], [0, *(100 * row["mean"] for row in rows)], f"thin {color}"
            )
    picture.legend(260, [("a", "reward: cosine of tiny-clip"), ("b", "accuracy, of rendered truth")])
    picture.legend(280, [("c", "small files on tiny-sd3"), ("d", "small files on tiny-sd")])
    picture.text(14, 303, "left: Adam on the pixels, up the reward; right: runs that the guard ended", "soft small")
    return picture


def _climb(picture: Picture, climbs: dict[str, Any]) -> None:
    """The reward and the accuracy of rendered truth whose pixels follow the reward's gradient."""
    rows = climbs["rendered truth"]
    panel = Panel(picture, ((44, 48), (226, 200)), (0, 2), (0, 1))
    panel.axes((), (0, 0.5, 1))
    places = [math.log10(1 + row["steps"]) for row in rows]
    for place, row in zip(places, rows, strict=True):
        picture.text(panel.at(place, 0)[0], 215, str(row["steps"]), "soft small", "middle")
    panel.draw(places, [row["clip_cos"] for row in rows], "a")
    panel.draw(places, [row["shapes_strict"] for row in rows], "b")
    picture.text(14, 22, "reward, and share that is right", "soft small")
    picture.text(226, 230, "steps of Adam", "soft small", "end")


def pages() -> dict[Path, str]:
    """File -> SVG."""
    made = (iteration, plans, noise, trees, credit, tree_credit, clip, kl, hacking)
    return {PAGES / f"{draw.__name__}.svg": draw().svg() for draw in made}
