"""Prompts with their images and metadata, and their order in a run; flowrl/data/prompt_sources.py reads them."""

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from PIL.Image import Image
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.rng import normal, permutation
from flowrl.credit.advantages import Advantages
from flowrl.display.console import log
from flowrl.media.media import UNREADABLE, fitted, open_image
from flowrl.models.base import ModelAdapter

_OTHER_MODEL = (
    "use a model that edits or animates images (docs/models.md); Wan 2.2 TI2V-5B does with "
    "model.pipeline=WanImageToVideoPipeline"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a record."""

    text: str
    metadata: dict = field(default_factory=dict)
    """All other values of the record, for the rewards."""
    images: tuple[str, ...] = ()
    """Absolute paths of its reference images or first frame, also in metadata["images"] for the rewards."""


def require_images(prompts: Sequence[Prompt], adapter: ModelAdapter, key: str, first: Prompt) -> None:
    """Check the number of images of every prompt against the model.

    All prompts have images, or none, as `first`: their embeddings are in one table.

    Raises:
        ConfigError: too many, too few, images of some prompts alone, or one that is no first frame of the model's size.
    """
    (least, most), kind, fitting = adapter.image_limits, adapter.kind, set[str]()
    for number, prompt in enumerate(prompts, 1):
        count, where = len(prompt.images), f"{key}: prompt {number}, {prompt.text[:60]!r},"
        if count > most:
            remedy = f"leave out {count - most}" if most else _OTHER_MODEL
            raise ConfigError(f"{where} has {count} image(s), but {kind} takes {most or 'none'}; {remedy}")
        if count < least:
            raise ConfigError(
                f"{where} has {count} image(s), but {kind} needs {least}; give the paths under 'image' or 'images' "
                "in a .jsonl, or data.image_column of a data set, or the column of pairs as records.source"
            )
        if bool(count) != bool(first.images):
            raise ConfigError(
                f"{where} has {'an' if count else 'no'} image, unlike the first prompt; give one to all or to none"
            )
        for file in prompt.images if adapter.frame_images else ():
            if file not in fitting:
                try:
                    adapter.require_frame(open_image(file).size)
                except UNREADABLE as error:
                    words = f"{where} has the image {file!r}, which cannot be its first frame: "
                    raise ConfigError.about(error, words) from None
                fitting.add(file)


@torch.no_grad()
def require_reached(named: Iterable[tuple[str, Prompt]], adapter: ModelAdapter, guidance_scale: float) -> None:
    """Refuse a model whose prediction other images in place of a prompt's own do not change; it takes the encoders.

    Of prompts with their keys the first one with images is tried; where none has any, a model of edits says so. Raises
    ConfigError.
    """
    key, prompt = next((entry for entry in named if entry[1].images), ("", None))
    if prompt is None:
        if adapter.image_limits == (0, 1):
            log.warning("%s edits images, and no prompt has one: it makes images of the prompts alone", adapter.kind)
        return
    own, encode = [open_named(file) for file in prompt.images], adapter.encode
    shifted = [(level + 128) % 256 for level in range(256)]  # a negative of grey would be grey
    others = [image.point(shifted * len(image.getbands())) for image in own]
    conds = [encode([prompt.text], [each]) for each in (own, own, others)]
    x = normal(adapter.latent_shape(), 0, "source probe", [()]).to(conds[0].device)
    first = adapter.schedule(4).timesteps[:1].to(x.device)
    one, again, other = (adapter.predict(x, first, cond, guidance_scale).float() for cond in conds)
    if not (other - one).abs().max() > 4 * (again - one).abs().max():  # some kernels do not repeat their last digits
        raise ConfigError(
            f"{key}: prompt {prompt.text[:60]!r}: another image in place of {prompt.images[0]!r} does not change what "
            f"{adapter.kind} predicts: the source does not reach its network, so no edit is learned; {_OTHER_MODEL}"
        )


class PromptSource:
    """An endless, seeded order over prompts: epochs, each a new permutation.

    The draw of an iteration depends on (seed, iteration) and the prompts retired before it alone.
    """

    def __init__(self, prompts: Sequence[Prompt], per_iteration: int, seed: int) -> None:
        self.prompts, self.per_iteration, self.seed = list(prompts), per_iteration, seed
        self.retired: set[int] = set()
        self.since = (0, 0)
        """(iteration of the last retirement, position in the order after it)."""

    @property
    def exhausted(self) -> bool:
        """Whether every prompt is retired."""
        return len(self.retired) == len(self.prompts)

    def draw(self, iteration: int) -> list[int]:
        """Indices of the prompts of an iteration, one per slot; iterations count from 1."""
        return [number for _, number in self._walk(iteration)][-self.per_iteration :]

    def retire(self, iteration: int, numbers: Sequence[int]) -> None:
        """Exclude these prompts from the draws after this iteration."""
        if numbers:
            after = self._walk(iteration)[-1][0] + 1
            self.since, self.retired = (iteration, after), self.retired | set(numbers)

    def learn(self, prompts: Sequence[Prompt], total: Tensor, credit: Advantages) -> None:
        """Take the weighted rewards [P, G] and the credit of an iteration's prompts; this order does not need them."""

    def _walk(self, iteration: int) -> list[tuple[int, int]]:
        """(position in the order, prompt) of the draws since the last retirement, at least those of this iteration."""
        last, place = self.since
        count, orders = len(self.prompts), dict[int, Tensor]()
        if not self.retired:  # no position is skipped, so none before this iteration matters
            last, place = iteration - 1, (iteration - 1) * self.per_iteration
        drawn: list[tuple[int, int]] = []
        while len(drawn) < (iteration - last) * self.per_iteration:
            epoch = place // count
            if epoch not in orders:
                orders[epoch] = permutation(count, self.seed, "prompts", epoch)
            number = int(orders[epoch][place % count])
            if number not in self.retired:
                drawn.append((place, number))
            place += 1
        return drawn

    def state_dict(self) -> dict:
        return {"retired": sorted(self.retired), "since": list(self.since)}

    def load_state_dict(self, state: dict) -> None:
        iteration, place = state["since"]
        self.retired, self.since = set(state["retired"]), (iteration, place)


def identity(prompt: str | Prompt) -> tuple[str, tuple[str, ...]]:
    """Identity of a prompt: text and images, on which its embedding and a learned noise distribution depend."""
    return (prompt, ()) if isinstance(prompt, str) else (prompt.text, prompt.images)


def under_box(file: str, height: int, width: int, place: tuple[float, float], *, mirror: bool) -> str:
    """The name of an image file as `fitted` shows it; `open_named` opens it."""
    return f"{file}#cover={height}x{width},{place[0]!r},{place[1]!r},{mirror:d}"


def open_named(name: str) -> Image:
    """The image of a file, or of a name of `under_box`; raises as `open_image` does."""
    found = re.fullmatch(r"(.*)#cover=(\d+)x(\d+),([-.e\d]+),([-.e\d]+),([01])", name, re.DOTALL)
    if found is None:
        return open_image(name)
    file, height, width, down, across, mirror = found.groups()
    return fitted(open_image(file), int(height), int(width), (float(down), float(across)), mirror=mirror == "1")


def reworded(prompt: Prompt, wording: str) -> Prompt:
    """The prompt in other words: `wording` with its text for {prompt}, and its metadata for their names in braces.

    Raises ConfigError: they lack a name.
    """
    try:
        return replace(prompt, text=wording.format_map({**prompt.metadata, "prompt": prompt.text}))
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        names = ", ".join(("prompt", *prompt.metadata))
        raise ConfigError(
            f"the wording {wording!r} does not fit the prompt {prompt.text[:60]!r} ({error!r}); its record has {names}"
        ) from None


def distinct_numbers(keys: Sequence[Hashable]) -> list[int]:
    """Number of each key among the distinct ones, counted from 0 in order of appearance.

    >>> distinct_numbers(["a cat", "a dog", "a cat"])
    [0, 1, 0]
    """
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]
