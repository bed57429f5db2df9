"""Run folders for the tests of reports, votes, diagnoses and cards, as `flowrl train` leaves them, and their pages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowrl import shapes
from flowrl.core.files import json_ready
from flowrl.data.prompts import distinct_numbers

NUM_PROMPTS = 40
SEEDS = (0, 1)
EVIL = "<script>alert('prompt')</script> & \"quoted\""
VOID = {"meta", "img", "input", "br", "hr", "link"}


def change(file: Path, **values: object) -> dict:
    """Set values of a JSON file; returns what it held before."""
    before = json.loads(file.read_text())
    file.write_text(json.dumps(before | values))
    return before


def write_run(folder: Path, config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] = (), **files: Any) -> Path:
    """A run folder with its configuration, rows, and other JSON files by their names: summary, provenance."""
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    # JSON is YAML, and needs no help with a hostile name; of escapes YAML would make two surrogates of an emoji.
    (folder / "config.yaml").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def write_scores(
    folder: Path,
    tag: str,
    scores: Mapping[str, np.ndarray],
    images: Mapping[tuple[int, int], np.ndarray] | None = None,
    **values: Any,
) -> None:
    """One `eval/<tag>.json`.

    Args:
        folder: the run.
        tag: of the evaluation.
        scores: metric -> [P, K]; NaN: not scored.
        images: (prompt, sample) -> [H, W] or [H, W, 3] from 0 to 255.
        values: what the file has beside its scores.
    """
    (folder / "eval" / tag).mkdir(parents=True, exist_ok=True)
    for (p, k), image in (images or {}).items():
        Image.fromarray(np.rint(image).astype(np.uint8)).save(folder / "eval" / tag / f"{p:05d}-{k}.png")
    document = {"tag": tag, "iteration": 0, "guidance_scale": 1.0, "num_inference_steps": 4, "images": f"eval/{tag}"}
    count, seeds = next(iter(scores.values())).shape
    document |= {"seeds": list(range(seeds)), "scores": {name: table.tolist() for name, table in scores.items()}}
    document |= {"distinct": distinct_numbers(values["prompts"]), "digests": [[""] * seeds] * count, "made_with": {}}
    document["sharpness"] = [[0.1] * seeds] * count
    (folder / "eval" / f"{tag}.json").write_text(json.dumps(json_ready(document | values)))


def pixels(scene: shapes.Scene, seed: Sequence[int] | int, size: int) -> np.ndarray:
    """A drawn scene, [H, W, 3] from 0 to 255."""
    return 255 * shapes.draw(scene, np.random.default_rng(seed), size).clip(0, 1).transpose(1, 2, 0)


class Page(HTMLParser):
    """Checks that tags nest, and collects what the tests look at."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.deltas: dict[str, list[float]] = {"pair": [], "worst": [], "best": []}
        self.texts: dict[str, list[str]] = {}
        self.feed(self.source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        given = [(name, value or "") for name, value in attrs]
        self.attributes += given
        found = dict(given)
        if found.get("id"):
            self.ids.append(found["id"])
        self.links += [found[key] for key in ("src", "href") if found.get(key)]
        if "data-delta" in found:
            self.deltas[found["id"].split("-")[2]].append(float(found["data-delta"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def text(self, *tags: str) -> str:
        chosen = tags or [tag for tag in self.texts if tag not in ("script", "style")]
        return " ".join(" ".join(self.texts.get(tag, [])) for tag in chosen)


def estimate(values: np.ndarray) -> dict[str, float]:
    """What evaluate.py writes, with a normal interval: the report does not care how it was made."""
    per_prompt = values.mean(axis=1)
    half = 1.96 * per_prompt.std(ddof=1) / len(per_prompt) ** 0.5
    mean = per_prompt.mean()
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": len(per_prompt)}


def shapes_evaluation(
    folder: Path,
    tag: str,
    accuracy: float,
    *,
    prompts: list[str],
    num_pictured: int,
    size: int,
    iteration: int = 0,
    guidance_scale: float = 1.0,
) -> dict[str, np.ndarray]:
    """One evaluation: a picture shows its prompt's scene where it passes, and another scene where it fails."""
    strict = np.zeros((len(prompts), len(SEEDS)))
    partial, drawn, everything = np.zeros_like(strict), {}, shapes.split("train")
    for p, k in np.ndindex(strict.shape):
        # Paired noise: mostly the same draw decides for every tag, so gains outnumber regressions.
        rng, own = (np.random.default_rng([p, SEEDS[k], *last]) for last in ((1,), (iteration, 2)))
        luck = rng.random()
        strict[p, k] = float((luck if own.random() < 0.6 else own.random()) < accuracy)
        partial[p, k] = 1.0 if strict[p, k] else 0.2 + 0.6 * rng.random()
        if p >= num_pictured:
            continue
        try:
            scene = shapes.parse(prompts[p])
        except ValueError:
            scene = everything[p]
        if not strict[p, k]:
            scene = everything[int(rng.integers(len(everything)))]
        pixels = shapes.draw(scene, np.random.default_rng([p, SEEDS[k], 7]), size)
        pixels = pixels + 0.03 * np.random.default_rng([p, SEEDS[k], iteration]).standard_normal(pixels.shape)
        drawn[p, k] = 255 * pixels.clip(0, 1).transpose(1, 2, 0)
    scores = {"shapes_strict": strict, "shapes_partial": partial}
    unscored = partial.copy()
    unscored[-1, -1] = np.nan  # one picture could not be scored
    told = {"iteration": iteration, "guidance_scale": guidance_scale, "num_inference_steps": 20, "prompts": prompts}
    write_scores(folder, tag, scores | {"shapes_partial": unscored}, drawn, **told)
    return scores


def training_rows(iterations: int, done: int, tuned: float) -> list[dict[str, object]]:
    """Lines of metrics.jsonl: a noisy rise, a gap in the gradient norm, and a text that is no curve."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for i in range(1, done + 1):
        level = 0.42 + (tuned - 0.42) * (1 - np.exp(-3 * i / iterations)) + 0.05 * rng.standard_normal()
        rows.append(
            {
                "iteration": i,
                "reward/shapes_strict_mean": level,
                "reward/total_mean": level,
                "policy/clip_fraction": 0.1 + 0.02 * rng.standard_normal(),
                "policy/ratio_mean": 1 + 1e-4 * rng.standard_normal(),
                "grad/norm": None if i == 5 else 0.5 + 0.1 * rng.random(),
                "advantage/dead_group_share": 0.2 * rng.random(),
                "time/iteration_s": 1.2 + 0.3 * rng.random(),
                "note": "text is no curve",
            }
        )
    return rows


def make_run(
    folder: Path,
    *,
    name: str = "quickstart",
    num_prompts: int = NUM_PROMPTS,
    num_pictured: int | None = None,
    finished: bool = True,
    tuned: float = 0.71,
    size: int = 32,
    prompts: list[str] | None = None,
    iterations: int = 120,
) -> Path:
    """A run folder as the trainer leaves it, or as it stands after two thirds of the iterations."""
    prompts = prompts or shapes.prompts("heldout")[:num_prompts]
    config = {
        "name": name,
        "seed": 0,
        "iterations": iterations,
        "model": {"name": "sd3", "path": "tiny-sd3", "lora": {"rank": 16, "alpha": 32}},
        "rollout": {"sampler": {"name": "flow_sde", "noise_level": 0.7}, "num_inference_steps": 10},
        "data": {"prompts": "shapes:train", "eval_prompts": "shapes:heldout"},
        "algorithm": {"name": "flow_grpo", "clip_range": 1.0e-4},
        "rewards": [{"name": "shapes", "weight": 1.0}],
        "eval": {"tie": 0.05},
    }
    done = iterations if finished else 2 * iterations // 3
    rows, files = training_rows(iterations, done, tuned), dict[str, Any]()
    files["provenance"] = {"hardware": "2 CPU cores", "commit": "0123456789abcdef", "versions": {"torch": "2.6.0"}}
    common: dict[str, Any] = {"prompts": prompts, "size": size}
    every: dict[str, Any] = common | {"num_pictured": len(prompts) if num_pictured is None else num_pictured}
    base = shapes_evaluation(folder, "base", 0.46, **every)
    best = shapes_evaluation(folder, "base-guidance-3", 0.55, num_pictured=0, guidance_scale=3.0, **common)
    for i in range(20, done + 1, 20):
        accuracy = 0.46 + (tuned - 0.46) * (1 - np.exp(-3 * i / iterations))
        scores = shapes_evaluation(folder, f"iteration-{i:06d}", accuracy, iteration=i, num_pictured=8, **common)
        rows[i - 1] |= {f"eval/{metric}": table.mean() for metric, table in scores.items()}
    if finished:
        after = shapes_evaluation(folder, "tuned", tuned, iteration=done, **every)
        blocks = {"base": base, "base_best_guidance": best, "tuned": after}
        blocks["difference"] = {metric: after[metric] - base[metric] for metric in base}
        files["summary"] = {"status": "finished", "iterations": done, "seconds": 170.2, "primary": "shapes_strict"}
        files["summary"]["evaluated_on"] = "held-out prompts"
        files["summary"] |= {block: {m: estimate(t) for m, t in tables.items()} for block, tables in blocks.items()}
        files["summary"]["base_best_guidance"]["guidance_scale"] = 3.0
    return write_run(folder, config, rows, **files)
