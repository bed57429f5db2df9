"""The result of an evaluation: scores by prompt and seed, and the agreement with held-out pairs."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.files import evaluation_remedy, json_ready, parsed, write_atomically
from flowrl.media import digests

SOURCES = "sources"
"""Folder in `eval` of what the evaluated prompts edit: PPPPP-0.png, and PPPPP-reference.png for a known result."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of the network with the preferences of N held-out pairs."""

    right: np.ndarray
    """[N] float64: 1 for agreement, 0 for none, 1/2 without a preference, NaN for a pair that cannot be read."""
    captions: np.ndarray
    """[N] int64: pairs of one number share a caption, so they are not independent."""

    def mean(self) -> float:
        return float(np.nanmean(self.right))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of P prompts x S fixed seeds, with the ODE sampler.

    `scores[metric]` is [P, S] float64, NaN where a reward could not score; empty without a reward.
    """

    tag: str
    iteration: int
    guidance_scale: float
    num_inference_steps: int
    prompts: tuple[str, ...]
    seeds: int
    scores: dict[str, np.ndarray]
    digests: np.ndarray
    """Digest of each sample in 8 bits (`EightBitImages.digests`), [P, S] of text."""
    sharpness: np.ndarray
    """Of each sample (evaluation/sharpness.py), [P, S] float64, NaN where it is not finite."""
    distinct: tuple[int, ...]
    """[P] number of the distinct prompt."""
    diversity: np.ndarray | None = None
    """Of the first Q prompts (evaluation/diversity.py), [Q] float64; None: not measured."""
    made_with: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the model, the prompts and each score (run/inputs.py)."""
    agreement: Agreement | None = None
    source_distance: np.ndarray | None = None
    """Of each sample from the image that it edits (evaluation/copying.py), [P, S] float64, NaN where it is not known;
    None: nothing is edited."""

    @property
    def groups(self) -> np.ndarray:
        """[P] int64, counted from 0 in order: prompts of one number are the same, so they are not independent."""
        return np.asarray(self.distinct, dtype=np.int64)

    def of(self, rows: np.ndarray) -> "Evaluation":
        """The same evaluation on the prompts of `rows`, [P] bool; agreement with held-out pairs stays as it is."""
        texts = tuple(text for text, kept in zip(self.prompts, rows, strict=True) if kept)
        groups = np.unique(self.groups[rows], return_inverse=True)[1]
        scores = {name: table[rows] for name, table in self.scores.items()}
        known: dict[str, Any] = {"digests": self.digests[rows], "sharpness": self.sharpness[rows]}
        if self.diversity is not None:
            known["diversity"] = self.diversity[rows[: len(self.diversity)]]
        if self.source_distance is not None:
            known["source_distance"] = self.source_distance[rows]
        return replace(self, prompts=texts, scores=scores, distinct=tuple(groups.tolist()), **known)

    def unlike(self, other: "Evaluation", score: str | None = None) -> list[str]:
        """Differences between the settings of two evaluations, in words; with `score` only those of that score."""
        both = {
            "prompts": (self.prompts, other.prompts),
            "seeds": (self.seeds, other.seeds),
            "guidance scale": (self.guidance_scale, other.guidance_scale),
            "num inference steps": (self.num_inference_steps, other.num_inference_steps),
        }
        result = [what for what, (own, others) in both.items() if own != others]
        for what in sorted(self.made_with.keys() & other.made_with.keys()):
            words = {"model": "the model", "prompts": what, "dial": "the strength"}.get(
                what, f"the reward of {what[6:]}"
            )
            wanted = score is None or not what.startswith("score ") or what == f"score {score}"
            if wanted and words not in result and self.made_with[what] != other.made_with[what]:
                result.append(words)
        return result

    def save(self, folder: Path) -> None:
        """Write `eval/<tag>.json` with every digit: a number from the file is bitwise the one in memory."""
        record = {
            "tag": self.tag,
            "iteration": self.iteration,
            "guidance_scale": self.guidance_scale,
            "num_inference_steps": self.num_inference_steps,
            "seeds": list(range(self.seeds)),
            "prompts": list(self.prompts),
            "distinct": self.groups.tolist(),
            "scores": json_ready({name: table.tolist() for name, table in self.scores.items()}),
            "images": f"eval/{self.tag}",
            "made_with": self.made_with,
            "digests": self.digests.tolist(),
            "sharpness": json_ready(self.sharpness.tolist()),
        }
        for name, table in (("diversity", self.diversity), ("source_distance", self.source_distance)):
            if table is not None:
                record[name] = json_ready(table.tolist())
        if self.agreement is not None:
            record["agreement"] = json_ready(self.agreement.right.tolist())
            record["agreement_captions"] = self.agreement.captions.tolist()
        write_atomically(folder / f"{self.tag}.json", json.dumps(record))

    @staticmethod
    def load(file: Path) -> "Evaluation":
        """Read the file of `save`. Raises ConfigError: the file is damaged, or of another version."""
        return parsed(file, evaluation_remedy(file), _evaluation)


def _evaluation(record: dict[str, Any]) -> Evaluation:
    scores = {name: np.asarray(table, dtype=np.float64) for name, table in record["scores"].items()}
    agreement = None
    if "agreement" in record:
        right = np.asarray(record["agreement"], dtype=np.float64)
        agreement = Agreement(right, np.asarray(record["agreement_captions"], dtype=np.int64))
    prompts, seeds = tuple(record["prompts"]), len(record["seeds"])
    known = {name: np.asarray(record[name], np.float64) for name in ("diversity", "source_distance") if name in record}
    for name, table in scores.items():
        if len(table) != len(prompts) or (prompts and table.shape != (len(prompts), seeds)):
            raise ValueError(f"scores.{name} is {list(table.shape)} for {len(prompts)} prompts and {seeds} seeds")
    if len(record["distinct"]) != len(prompts):
        raise ValueError(f"distinct has {len(record['distinct'])} numbers for {len(prompts)} prompts")
    return Evaluation(
        tag=record["tag"],
        iteration=int(record["iteration"]),
        guidance_scale=float(record["guidance_scale"]),
        num_inference_steps=int(record["num_inference_steps"]),
        prompts=prompts,
        seeds=seeds,
        scores=scores,
        digests=digests.table(record["digests"], len(prompts), seeds),
        sharpness=np.asarray(record["sharpness"], dtype=np.float64).reshape(len(prompts), seeds),
        distinct=tuple(map(int, record["distinct"])),
        made_with=dict(record["made_with"]),
        agreement=agreement,
        **known,
    )
