"""Run folders with a fault: really trained tiny runs, and folders written by a simulation of the fault's mechanism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.apps.diagnosis import Diagnosis, diagnose
from flowrl.apps.gallery.runs import load_run
from flowrl.commands.train import AFTER
from tests.apps.folders import write_run, write_scores
from tests.e2e.conftest import inside, train

REWARDS = {
    "same": "def score(images, prompts, metadata):\n    return [0.5] * len(prompts)\n",
    "faint": "def score(images, prompts, metadata):\n    return images[:, 0].mean(dim=(1, 2)) * 1e-4\n",
    "tiny": "def score(images, prompts, metadata):\n    return images.mean(dim=(1, 2, 3)) * 1e-9\n",
    "dark": "def score(images, prompts, metadata):\n    return -images.mean(dim=(1, 2, 3))\n",
    "noise": "import random, flowrl\nDRAWN = random.Random(0)\n"
    "CARD = flowrl.Card(outputs=('noise',), repeatable=False)\n"
    "def score(images, prompts, metadata):\n    return [DRAWN.random() for _ in prompts]\n",
    # Three times what passed since the call before, in a rollout's batch of two: whatever else the machine does.
    "slow": "import time\nLAST = [0.0]\ndef score(images, prompts, metadata):\n    if len(prompts) == 2 and LAST[0]:\n"
    "        time.sleep(min(3 * (time.monotonic() - LAST[0]), 10))\n    LAST[0] = time.monotonic()\n"
    "    return images.mean(dim=(1, 2, 3))\n",
}
LONG = "".join(f"{n} red squares left of a blue circle above a green cross and a yellow triangle\n" for n in range(36))
SHORT = ("checkpoint.every=99", "data.max_eval_prompts=4", "iterations=2")
LEARNS = ("optim.learning_rate=3e-3", "rollout.group_size=8", "iterations=8", "data.max_eval_prompts=16")
FAULTS: dict[str, tuple[str, ...]] = {
    "constant reward": (
        *("rewards=[{path: same.py}]", "rollout.num_inference_steps=2", "algorithm.sde_steps=[0]"),
        "data.max_eval_prompts=20",
    ),
    "no learning rate": ("optim.learning_rate=1e-12", "eval.guidance_scale=4.0", "iterations=10"),
    "tight clip": ("algorithm.clip_range=1e-9", "iterations=4"),
    "huge learning rate": ("optim.learning_rate=0.3", "optim.max_grad_norm=null", "iterations=9"),
    "minute reward": ("rewards=[{path: tiny.py}]", "algorithm.advantages.std=none"),
    "long prompts": ("data.prompts=long.txt", "data.eval_prompts=null"),
    "two aims": (*LEARNS, "iterations=5", "eval.rewards=[{path: dark.py}]"),
    "uneven rewards": ("rewards=[{path: brightness.py}, {path: faint.py}]",),
    "random reward": (
        *("rewards=[{path: noise.py}]", "eval.samples_per_prompt=2", "eval.batch_size=100"),
        *("data.max_eval_prompts=100", "rollout.num_inference_steps=2", "eval.save_images=1"),
    ),
    "three prompts": ("rewards=[{path: noise.py}]", "data.max_eval_prompts=3"),
    "sleeping reward": (
        *("rewards=[{path: slow.py, isolate: false}]", "data.max_eval_prompts=1", "rollout.num_inference_steps=2"),
        *("rollout.group_size=2", "rollout.prompts_per_iteration=1"),
    ),
    "none": LEARNS,
}
"""Options on top of tests/e2e's run; the fault is in them alone."""


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run with the fault, trained once in a session."""
    place, made = tmp_path_factory.mktemp("faults"), dict[str, Path]()

    def of(fault: str) -> Path:
        if fault not in made:
            with inside(place):
                for name, text in REWARDS.items():
                    Path(f"{name}.py").write_text(text)
                Path("long.txt").write_text(LONG)
                name = fault.replace(" ", "-")
                try:
                    train(f"name={name}", *SHORT, *FAULTS[fault], after=AFTER)
                except Exception as error:  # the one that diverges
                    assert type(error).__name__ == "Overshot", error  # noqa: PT017
            made[fault] = place / "runs" / name
        return made[fault]

    return of


def findings(folder: Path) -> dict[str, Any]:
    """Name -> finding, the likeliest first."""
    return {found.name: found for found in diagnosis(folder).findings}


def diagnosis(folder: Path) -> Diagnosis:
    return diagnose(load_run(folder))


class Simulated:
    """A run folder whose rows follow the mechanism of a fault, or of a healthy run, from a seed. Nothing is trained.

    The healthy run: 40 iterations, a linear learning rate, log ratios of a Gaussian policy after one of two updates,
    a gradient norm that grows slowly, a KL that grows like a random walk's, 96 held-out prompts x 2 seeds whose scores
    rise by 0.3 standard deviations, images that change a little.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.rng, self.iterations = folder, np.random.default_rng(seed), 40
        n = self.iterations
        done = np.arange(1, n + 1) / n
        log_ratio = self.rng.normal(0, 3e-4, size=(n, 64))
        self.columns = {
            "reward/total_mean": 0.4 + 0.1 * done + self.rng.normal(0, 0.03, n),
            "reward/group_std": np.full(n, 0.1),
            "advantage/largest": self.rng.normal(2, 0.1, n),
            "advantage/dead_group_share": self.rng.binomial(8, 0.05, n) / 8,
            "policy/ratio_mean": np.exp(log_ratio).mean(axis=1),
            "policy/approx_kl": (log_ratio**2).mean(axis=1) / 2,
            "policy/clip_fraction": (np.abs(log_ratio) > 1e-3).mean(axis=1) + self.rng.binomial(1, 0.3, n) / 64,
            "policy/kl_reference": 1e-3 * done * self.rng.lognormal(0, 0.2, n),
            "grad/norm": 0.05 * (1 + done) * self.rng.lognormal(0, 0.2, n),
            "optim/learning_rate": 4e-4 * (1 - (np.arange(1, n + 1) - 0.5) / n),
            "optim/skipped": np.zeros(n),
            "time/rollout_s": np.full(n, 0.7),
            "time/update_s": np.full(n, 0.3),
            "time/reward_s": np.full(n, 0.05),
            "time/iteration_s": np.full(n, 1.1),
        }
        self.config: dict[str, Any] = {
            "name": "simulated",
            "model": {"path": "tiny-sd3", "lora": {"rank": 4}, "max_sequence_length": 9},
            "rewards": [{"name": "shapes", "weight": 1.0}],
            "rollout": {"num_inference_steps": 6, "guidance_scale": 1.0, "group_size": 16},
            "algorithm": {"name": "flow_grpo", "clip_range": 1e-3, "advantages": {"name": "group"}},
            "optim": {
                "learning_rate": 4e-4,
                "eps": 1e-8,
                "max_grad_norm": 1.0,
                "updates_per_iteration": 2,
                "schedule": "linear",
            },
        }
        prompt = self.rng.normal(0.5, 0.1, size=(96, 1))
        image = prompt + self.rng.normal(0, 0.1, size=(96, 2))
        self.before = image
        self.after = image + 0.3 * image.std() + self.rng.normal(0, 0.05, size=image.shape)
        self.images = self.rng.uniform(0, 255, size=(8, 16, 16))
        self.tuned_images = np.clip(self.images + self.rng.normal(0, 10, size=self.images.shape), 0, 255)

    def learns_nothing(self) -> Simulated:
        """The same with the trained model's scores and images as the base's."""
        self.after, self.tuned_images = self.before, self.images
        return self

    def write(self) -> Path:
        """Write the folder, and return it."""
        rows = [
            {"iteration": i + 1} | {k: float(v[i]) for k, v in self.columns.items()} for i in range(self.iterations)
        ]
        text = {"tokenizer": {"limit": 77, "longest": 12, "cut": 0.0, "prompts": 96}}
        summary = {"status": "finished", "iterations": self.iterations, "evaluated_on": "held-out prompts"}
        summary |= {"primary": "shapes", "lower_is_better": []}
        for tag, scores, images in (("base", self.before, self.images), ("tuned", self.after, self.tuned_images)):
            told: dict[str, Any] = {"iteration": 0 if tag == "base" else self.iterations, "num_inference_steps": 6}
            told["prompts"] = [f"prompt {n}" for n in range(len(scores))]
            write_scores(
                self.folder, tag, {"shapes": scores}, {(n, 0): image for n, image in enumerate(images)}, **told
            )
        return write_run(self.folder, self.config, rows, summary=summary, provenance={"text": text})


@pytest.fixture
def simulated(tmp_path: Path) -> Simulated:
    return Simulated(tmp_path / "simulated")
