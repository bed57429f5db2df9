"""tiny-clip: a small open_clip CLIP that has learned the shapes world, the lab's learned reward.

A ModifiedResNet at 32 px and a text transformer, trained contrastively on rendered pictures and their captions,
none of the held-out scenes among them. A batch is made of families: a scene and scenes that differ from it by one
colour, shape, number or relation. What else is true of a picture is no negative for it.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl import shapes
from flowrl.shapes import COLORS, NUMBERS, RELATIONS, SHAPES, ObjectSpec, Placed, Scene
from scripts.pretraining.text import CLIP_LENGTH, clip_tokenizer

TASK_WEIGHTS = {"single": 0.03, "color": 0.10, "counting": 0.25, "two": 0.10, "binding": 0.26, "position": 0.26}
FAMILY = 4
"""Scenes of a family, the first one included."""
MAX_LOGIT_SCALE = math.log(100)


@dataclass(frozen=True, kw_only=True)
class Settings:
    seed: int
    output: Path
    steps: int = 220
    families: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    warmup: int = 40
    images_per_scene: int = 4
    noise: float = 0.06
    """Pixels get noise of a std drawn up to this."""
    fade: float = 0.15
    """And are multiplied by a number drawn from 1 - fade to 1."""


def model_config(vocabulary: int) -> dict[str, Any]:
    """`open_clip_config.json`. With a tokenizer's name in it, `local-dir:` reads the tokenizer beside it."""
    return {
        "model_cfg": {
            "embed_dim": 64,
            "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 16, "head_width": 64, "patch_size": None},
            "text_cfg": {
                "context_length": CLIP_LENGTH,
                "vocab_size": vocabulary,
                "hf_tokenizer_name": "tiny-clip",
                "tokenizer_kwargs": {"clean": "lower"},
                "width": 64,
                "heads": 4,
                "layers": 2,
            },
        },
        "preprocess_cfg": {
            "mean": [0.48145466, 0.4578275, 0.40821073],
            "std": [0.26862954, 0.26130258, 0.27577711],
            "interpolation": "bicubic",
            "resize_mode": "shortest",
        },
    }


# ---- the world


@cache
def training_scenes() -> dict[str, tuple[Scene, ...]]:
    """Every scene by task but the held-out ones."""
    held_out = set(shapes.split("heldout"))
    return {task: tuple(s for s in group if s not in held_out) for task, group in shapes.scenes().items()}


@cache
def known() -> frozenset[str]:
    """Plain captions of the training scenes."""
    return frozenset(scene.caption for group in training_scenes().values() for scene in group)


def _variants(spec: ObjectSpec) -> Iterator[ObjectSpec]:
    """The object in another colour, or of another shape."""
    if spec.color is not None:
        yield from (ObjectSpec(spec.shape, color) for color in COLORS if color != spec.color)
    yield from (ObjectSpec(shape, spec.color) for shape in SHAPES if shape != spec.shape)


def _edits(scene: Scene) -> Iterator[Scene]:
    """Scenes one edit away; some are none of this world's."""
    objects, task = scene.objects, scene.task
    if task == "counting":
        counts = [n for n in NUMBERS.values() if n != len(objects)]
        yield from (Scene("counting", objects[:1] * n) for n in counts)
        yield from (Scene("counting", (variant,) * len(objects)) for variant in _variants(objects[0]))
        yield Scene("color", objects[:1])
        return
    for place, spec in enumerate(objects):
        for variant in _variants(spec):
            yield Scene(task, (*objects[:place], variant, *objects[place + 1 :]), scene.relation)
    if len(objects) == 1:
        yield from (Scene("counting", objects * n) for n in NUMBERS.values())
        return
    yield from (Scene("color", (spec,)) for spec in objects)
    a, b = objects
    yield Scene(task, (ObjectSpec(a.shape, b.color), ObjectSpec(b.shape, a.color)), scene.relation)
    if scene.relation:
        yield from (Scene(task, objects, relation) for relation in RELATIONS if relation != scene.relation)
        yield Scene(task, (b, a), scene.relation)


@cache
def near_misses(scene: Scene) -> tuple[Scene, ...]:
    """Training scenes that differ from `scene` by one colour, shape, number, relation or object.

    Other relations of the same objects are few among them and hard to learn, so they stand there three times.
    """
    captions = dict.fromkeys(edit.caption for edit in _edits(scene) if edit != scene)
    result = [shapes.parse(caption) for caption in captions if caption in known()]
    related = [s for s in result if s.relation and set(s.objects) == set(scene.objects)]
    return tuple(result + 2 * related)


def true_captions(placed: tuple[Placed, ...]) -> set[str]:
    """Plain captions that are true of a picture, by its objects."""
    specs = [ObjectSpec(p.shape, p.color) for p in placed]
    scenes = []
    if len({s.shape for s in specs}) == 1:
        task = "single" if len(specs) == 1 else "counting"
        scenes.append(Scene(task, (ObjectSpec(specs[0].shape),) * len(specs)))
        if len(set(specs)) == 1:
            scenes.append(Scene("color" if len(specs) == 1 else "counting", tuple(specs)))
    if len(specs) == 2:
        for (a, b), (p, q) in zip(itertools.permutations(specs), itertools.permutations(placed), strict=True):
            scenes.append(Scene("two", (a, b)))
            scenes += [Scene("position", (a, b), r) for r in RELATIONS if shapes.holds(r, (p.x, p.y), (q.x, q.y))]
    return {scene.caption for scene in scenes}


def jittered(placed: tuple[Placed, ...], rng: np.random.Generator) -> tuple[Placed, ...]:
    """Off the raster, and of other sizes: samples of a generator are."""
    scale = rng.uniform(0.88, 1.06)
    return tuple(
        Placed(p.shape, p.color, p.x + rng.uniform(-1, 1), p.y + rng.uniform(-1, 1), p.radius * scale) for p in placed
    )


@dataclass(frozen=True, slots=True)
class Pool:
    """Pictures of every training scene, drawn once."""

    images: Tensor
    """[N, 3, 32, 32] uint8."""
    truths: list[set[str]]
    rows: dict[Scene, range]

    @staticmethod
    def draw(settings: Settings) -> Pool:
        rng, images, truths, rows = np.random.default_rng((settings.seed, 1)), [], [], {}
        for scene in itertools.chain.from_iterable(training_scenes().values()):
            # The easy tasks have few scenes, and as many batches ask for them.
            count = settings.images_per_scene * (10 if scene.task in ("single", "color", "counting") else 1)
            rows[scene] = range(len(images), len(images) + count)
            for _ in range(count):
                placed = jittered(shapes.place(scene, rng), rng)
                images.append((shapes.render(placed) * 255).round().astype(np.uint8))
                truths.append(true_captions(placed) | {scene.caption})
        return Pool(torch.from_numpy(np.stack(images)), truths, rows)


def draw_family(rng: np.random.Generator) -> list[Scene]:
    """A scene of a task drawn by weight, and near misses of it."""
    tasks, weights = zip(*TASK_WEIGHTS.items(), strict=True)
    group = training_scenes()[tasks[rng.choice(len(tasks), p=weights)]]
    scene = group[rng.integers(len(group))]
    near = near_misses(scene)
    return [scene, *(near[k] for k in rng.choice(len(near), size=FAMILY - 1, replace=len(near) < FAMILY))]


def draw_batch(pool: Pool, settings: Settings, rng: np.random.Generator) -> tuple[Tensor, list[str], Tensor]:
    """Pictures [B, 3, 32, 32] in [0, 1], captions, and [B, B]: is caption j true of picture i?"""
    scenes = [scene for _ in range(settings.families) for scene in draw_family(rng)]
    rows = [pool.rows[scene][rng.integers(len(pool.rows[scene]))] for scene in scenes]
    images = pool.images[rows].float() / 255
    count = len(rows)
    fade = torch.from_numpy(rng.uniform(1 - settings.fade, 1, size=(count, 1, 1, 1)).astype(np.float32))
    std = torch.from_numpy(rng.uniform(0, settings.noise, size=(count, 1, 1, 1)).astype(np.float32))
    noise = torch.from_numpy(rng.standard_normal(images.shape, dtype=np.float32))
    captions = [scene.forms[rng.integers(len(scene.forms))] for scene in scenes]
    true = torch.tensor([[scene.caption in pool.truths[row] for scene in scenes] for row in rows])
    return (images * fade + std * noise).clamp(0, 1), captions, true


def contrastive_loss(logits: Tensor, true: Tensor) -> Tensor:
    """CLIP's symmetric cross entropy of [B, B] logits, rows pictures; other true pairs are left out of the sums."""
    logits = logits.masked_fill(true & ~torch.eye(len(true), dtype=torch.bool), -torch.inf)
    target = torch.arange(len(true))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


# ---- training


def load(folder: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of a saved folder, as open_clip loads it; frozen."""
    import open_clip

    name = f"local-dir:{folder}"
    return open_clip.create_model(name).eval().requires_grad_(False), open_clip.get_tokenizer(name)


def normalised(images: Tensor) -> Tensor:
    """Pictures in [0, 1] as the vision tower wants them."""
    preprocess = model_config(0)["preprocess_cfg"]
    mean, std = (torch.tensor(preprocess[key]).view(3, 1, 1) for key in ("mean", "std"))
    return (images - mean) / std


def cosines(model: Any, tokenizer: Any, images: Tensor, captions: list[str]) -> Tensor:
    """[B] cosine of each 32 px picture in [0, 1] with its caption; differentiable in the pictures."""
    texts = model.encode_text(tokenizer(captions), normalize=True)
    return (model.encode_image(normalised(images), normalize=True) * texts).sum(dim=-1)


def save(model: Any, config: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    clip_tokenizer().save_pretrained(folder)
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "open_clip_model.safetensors")


def train(settings: Settings) -> dict[str, float]:
    """Train and save; what it took."""
    from open_clip.model import CLIP

    torch.manual_seed(settings.seed)
    tokenizer, started = clip_tokenizer(), time.process_time()
    config = model_config(len(tokenizer))
    model = CLIP(**config["model_cfg"]).train()
    pool, rng = Pool.draw(settings), np.random.default_rng((settings.seed, 2))
    print(f"{len(pool.images)} pictures, {time.process_time() - started:.0f} s of CPU", flush=True)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6)
    options = {"padding": "max_length", "truncation": True, "max_length": CLIP_LENGTH, "return_tensors": "pt"}
    shown = 0.0
    for step in range(1, settings.steps + 1):
        falling = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / settings.warmup) * falling
        images, captions, true = draw_batch(pool, settings, rng)
        seen, read, scale = model(normalised(images), tokenizer(captions, **options).input_ids)
        logits = scale * seen @ read.T
        loss = contrastive_loss(logits, true)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=MAX_LOGIT_SCALE)
        shown = loss.item() if step == 1 else 0.97 * shown + 0.03 * loss.item()
        if step % 50 == 0:
            spent = time.process_time() - started
            print(f"{step}/{settings.steps} loss {shown:.3f} scale {scale.item():.1f} {spent:.0f} s of CPU", flush=True)
    save(model, config, settings.output)
    return {"cpu_seconds": round(time.process_time() - started), "loss": round(shown, 4)}
