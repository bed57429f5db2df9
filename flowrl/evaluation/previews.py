"""Images of the user's own prompts at every evaluation (`eval.preview_prompts`): never scored, in no statistic.

The noise of an image is keyed by the prompt's text and the seed, so it is the same at every evaluation, for any batch
size, number of processes and order of the list. In the run folder:

    previews/TAG/PPPPP-0.png     images, or videos (.webp), of an evaluation: number of the prompt, from 0
    previews/TAG.json            tag, iteration, guidance_scale, num_inference_steps, prompts, sources of edits
    previews/sources/SHA.png     those, by their contents
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.config.schema import RunConfig
from flowrl.core.errors import ConfigError, Diverged
from flowrl.core.files import file_sha256, read_object, write_atomically
from flowrl.core.rng import derive
from flowrl.data.prompt_sources import Columns, load_prompts
from flowrl.data.prompts import Prompt, identity, require_images
from flowrl.data.text_cache import Texts
from flowrl.display.console import log
from flowrl.display.display import Progress
from flowrl.evaluation.evaluator import Evaluator, Setting, keep_image
from flowrl.evaluation.held_out import key_of
from flowrl.evaluation.results import SOURCES
from flowrl.models.base import ModelAdapter, ModelConfig
from flowrl.rollout.learned_noise import LearnedNoise
from flowrl.training.signals import NEVER, Stop

KEY, PLACE, MOST = "eval.preview_prompts", "previews", 64


def preview_prompts(config: RunConfig) -> tuple[Prompt, ...]:
    """The preview prompts of a run, in their order.

    Raises ConfigError: too many, an empty one, or one that is there twice; for a file as `load_prompts`.
    """
    given = config.eval.preview_prompts
    if isinstance(given, str):
        columns = Columns(config.data.prompt_column, config.data.image_column, config.data.subset)
        prompts = load_prompts(given, KEY, columns, MOST + 1)
    else:
        prompts = [Prompt(text) for text in given]
    if len(prompts) > MOST:
        raise ConfigError(f"{KEY} has more than {MOST} prompts: each is drawn at every evaluation; leave some out")
    require_own(prompts, KEY)
    return tuple(prompts)


def require_own(prompts: Sequence[Prompt], key: str) -> None:
    """Refuse empty and doubled prompts with ConfigError."""
    first: dict[object, int] = {}
    for number, prompt in enumerate(prompts, 1):
        if not prompt.text.strip():
            raise ConfigError(f"{key}: prompt {number} is empty; give it a text, or leave it out")
        known = first.setdefault(identity(prompt), number)
        if known != number:
            raise ConfigError(f"{key}: prompt {number}, {prompt.text[:60]!r}, is prompt {known} again; leave it out")


def require_fit(
    prompts: Sequence[Prompt], adapter: ModelAdapter, options: ModelConfig, key: str = KEY, *, edits: bool
) -> None:
    """Refuse prompts that the model, of these options, cannot take: too long, or without the images that it needs.

    `edits`: the run edits images. Raises ConfigError: with the prompt and the remedy.
    """
    if not prompts:
        return
    bare = next((number for number, prompt in enumerate(prompts, 1) if edits and not prompt.images), None)
    if bare is not None:
        raise ConfigError(
            f"{key}: prompt {bare}, {prompts[bare - 1].text[:60]!r}, has no image, and this run edits images; name "
            f"in {KEY} a .jsonl file whose records have 'image'"
        )
    require_images(prompts, adapter, key, prompts[0])
    most = asdict(options).get("max_sequence_length")  # of a family whose text encoder reads that many
    for number, prompt in enumerate(prompts, 1):
        excess = _excess(adapter, prompt.text, most)
        if excess is not None:
            count, room = excess
            raise ConfigError(
                f"{key}: prompt {number}, {prompt.text[:60]!r}, is too long: it has {count} tokens, and {adapter.kind} "
                f"reads {room}; shorten it"
            )


def _excess(adapter: ModelAdapter, text: str, most: int | None) -> tuple[int, int] | None:
    """(tokens of a text, tokens that are read) if no text encoder of the model reads all of it; else None."""
    from transformers import PreTrainedTokenizerBase

    parts = () if adapter.pipeline is None else adapter.pipeline.components.values()
    found = []
    for part in parts:
        if isinstance(part, PreTrainedTokenizerBase):
            count = len(part(text)["input_ids"])
            room = min(part.model_max_length, most or part.model_max_length)
            if count <= room:
                return None
            found.append((count, room))
    return max(found, key=lambda each: each[1], default=None)


def require_learned(prompts: Sequence[Prompt], noise: LearnedNoise | None, key: str = KEY) -> None:
    """Refuse with ConfigError a prompt without a learned noise distribution, where the run learns those."""
    for prompt in prompts:
        if noise is not None and identity(prompt) not in noise.rows:
            raise ConfigError(
                f"{key}: {prompt.text[:60]!r} is none of the training prompts, and this method learns the initial "
                "noise of those alone; leave it out"
            )


@dataclass(frozen=True, slots=True)
class Previews:
    """Draws the preview prompts with the weights that are in the network; does nothing without prompts."""

    evaluator: Evaluator
    """Evaluator of the same run."""
    prompts: tuple[Prompt, ...]
    texts: Texts | None
    """Their embeddings; None: there are no prompts."""

    def __call__(
        self, tag: str, iteration: int, guidance_scale: float, num_inference_steps: int, stop: Stop = NEVER
    ) -> None:
        """Draw the images of an evaluation into the run folder.

        Raises Abandoned: on all processes; there is no record of the evaluation then. Elsewhere: another process
        failed.
        """
        run = self.evaluator.folder
        if run is None or self.texts is None:
            return
        setting = Setting(tag, iteration, guidance_scale, num_inference_steps, save="images")
        try:
            self.draw(setting, self.prompts, self.texts, PLACE, stop=stop)
        except Diverged as error:
            # An evaluation of the run's own prompts says whether the model has diverged.
            log.warning("%s at %s: %s", KEY, tag, error)
            return
        if self.evaluator.world.main:
            record = self._record(setting)
            for prompt, stems in zip(self.prompts, record.get("sources", ()), strict=False):
                for file, stem in zip(prompt.images, stems, strict=True):
                    keep_image(file, run / PLACE / SOURCES / stem)
            write_atomically(run / PLACE / f"{tag}.json", json.dumps(record, indent=1) + "\n")

    def has(self, tag: str, guidance_scale: float, num_inference_steps: int) -> bool:
        """Whether the run folder has the images of an evaluation as they would be drawn now; on all processes."""
        run, setting = self.evaluator.folder, Setting(tag, 0, guidance_scale, num_inference_steps)
        if run is None or self.texts is None:
            return True
        file, main = run / PLACE / f"{tag}.json", self.evaluator.world.main
        there = main and file.is_file() and read_object(file, "delete it") == self._record(setting)
        return self.evaluator.world.gather(there)[0]

    def draw(
        self,
        setting: Setting,
        prompts: Sequence[Prompt],
        texts: Texts,
        place: str,
        *,
        seed: int = 0,
        stop: Stop = NEVER,
    ) -> None:
        """Draw images of prompts into the folder `place`/TAG of the run.

        Raises Abandoned, Diverged: on all processes; Elsewhere: another process failed.
        """
        drawn = replace(
            self.evaluator,
            sampling=replace(self.evaluator.sampling, texts=texts),
            scorer=None,
            prompts=tuple(prompts),
            options=replace(self.evaluator.options, samples_per_prompt=1, save_images=None, diversity=0),
            seed=derive(seed, "preview"),
            place=place,
            sources=None,
            names=tuple(key_of(*identity(prompt)) >> 193 for prompt in prompts),  # 63 bits
        )
        world = self.evaluator.world
        share, words = -(-len(prompts) // world.size), f"drawing the preview prompts of {setting.tag}"
        with Progress(share, words, show=world.main) as bar:
            drawn(setting, progress=bar.update, stop=stop)

    def _record(self, setting: Setting) -> dict[str, Any]:
        sources = [[file_sha256(Path(file))[:16] for file in prompt.images] for prompt in self.prompts]
        return {
            "tag": setting.tag,
            "iteration": setting.iteration,
            "guidance_scale": setting.guidance_scale,
            "num_inference_steps": setting.num_inference_steps,
            "prompts": [prompt.text for prompt in self.prompts],
        } | ({"sources": sources} if any(sources) else {})


def forget_after(run: Path, iteration: int) -> None:
    """Drop the records of evaluations after a checkpoint; they will be made again."""
    for file in (run / PLACE).glob("*.json"):
        if read_object(file, "delete it: the report leaves the images out").get("iteration", 0) > iteration:
            file.unlink()
