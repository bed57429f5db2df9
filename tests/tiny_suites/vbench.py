"""A short VBench_full_info.json, and results as the official tools write them."""

import json
from collections.abc import Sequence
from pathlib import Path

from flowrl.evaluation.suite import Item

MOVING = ["subject_consistency", "dynamic_degree", "motion_smoothness"]
WHOLE = ["overall_consistency", "aesthetic_quality", "imaging_quality"]
RECORDS = [
    {"prompt_en": "a bird flies over the sea", "dimension": MOVING},
    {"prompt_en": "a dog runs", "dimension": MOVING},
    {"prompt_en": "a horse drinks water from a pond", "dimension": MOVING},
    {"prompt_en": "a ship - slow motion, 4-1", "dimension": WHOLE},
    {"prompt_en": "a red car", "dimension": ["color"], "auxiliary_info": {"color": {"color": "red"}}},
    {"prompt_en": "a forest", "dimension": ["scene", "background_consistency"]},
    {"prompt_en": "a bowl, frozen in time", "dimension": ["temporal_flickering"]},
    {"prompt_en": "a cat and a dog", "dimension": ["multiple_objects"]},
    {"prompt_en": "a boat, watercolor painting", "dimension": ["appearance_style"]},
    {"prompt_en": "a person is juggling", "dimension": ["human_action"]},
    {"prompt_en": "a dog on the left of a bench", "dimension": ["spatial_relationship"]},
    {"prompt_en": "a train", "dimension": ["object_class"]},
    {"prompt_en": "a beach, tilt up", "dimension": ["temporal_style"]},
]


def prompts(folder: Path) -> Path:
    (folder / "vbench").mkdir()
    (folder / "vbench" / "VBench_full_info.json").write_text(json.dumps(RECORDS))
    return folder


def value(item: Item, k: int, dimension: str) -> float | bool:
    """What a tool says of a video; tools of yes and no say so."""
    if dimension in ("dynamic_degree", "human_action"):
        return k % 2 == 0
    own = (len(item.text) + k) % 10 / 20 + 0.4
    return 100 * own if dimension == "imaging_quality" else own


def results(folder: Path, places: Sequence[tuple[Item, int, str]]) -> Path:
    """A file for each dimension, in a folder."""
    out = folder / "evaluation_results"
    out.mkdir(exist_ok=True)
    for file in out.iterdir():
        file.unlink()
    for dimension in dict.fromkeys(tag for item, _, _ in places for tag in item.tags):
        videos = [
            {"video_path": f"exported/{place}", "video_results": value(item, k, dimension)}
            for item, k, place in places
            if dimension in item.tags
        ]
        mean = sum(float(one["video_results"]) for one in videos) / len(videos)
        mean = mean / 100 if dimension == "imaging_quality" else mean
        (out / f"tiny_{dimension}_eval_results.json").write_text(json.dumps({dimension: [mean, videos]}))
    return out
