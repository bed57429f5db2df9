"""The data of a run: its prompts, given images and previews, read first, held against the model, then embedded."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from flowrl.config.resolved import Resolved
from flowrl.core.rng import derive
from flowrl.data.contents import Input, set_of
from flowrl.data.given_samples import Given, GivenSource, require_encoder
from flowrl.data.priority import PrioritySource
from flowrl.data.prompts import Prompt, PromptSource, require_images, require_reached, reworded
from flowrl.data.text_cache import Texts
from flowrl.display.display import working
from flowrl.evaluation import previews
from flowrl.evaluation.held_out import RunPrompts, run_prompts
from flowrl.models.base import ModelAdapter
from flowrl.run.texts import embedded
from flowrl.training.base import Training
from flowrl.training.world import World


@dataclass(frozen=True, slots=True)
class Data:
    """The data that a run learns from and is evaluated on."""

    prompts: RunPrompts
    source: PromptSource | GivenSource
    given: Given | None
    """Images that the run learns from; None: the network draws its samples."""
    previews: tuple[Prompt, ...] = ()
    """The user's own prompts (`eval.preview_prompts`)."""
    anchor: Given | None = None
    """Images to which the network is fitted beside (`data.anchor`)."""
    worded: Sequence[Prompt] = ()
    """Training prompts in the words that judges of latents read in their place."""

    @property
    def images(self) -> list[Given]:
        """The sets of given images."""
        return [each for each in (self.given, self.anchor) if each is not None]

    @property
    def sources(self) -> dict[str, PromptSource | GivenSource]:
        """Name in a checkpoint -> source."""
        return {"source": self.source} | ({} if self.anchor is None else {"anchor": self.anchor.source})

    @property
    def edits(self) -> bool:
        """Whether what is learned from has images that are edited."""
        given = any(each.options.records.source is not None for each in self.images)
        return given or any(prompt.images for prompt in self.prompts.listed[:1])

    def require_fit(self, adapter: ModelAdapter, resolved: Resolved) -> None:
        """Refuse prompts that the model cannot take, with ConfigError that names the prompt and the remedy."""
        listed = [("data.prompts", self.prompts.listed)] if self.given is None else []
        # Captions of given images have no reference images but the one that they edit.
        columns = [(each.key, each.options.records.source) for each in self.images]
        listed += [(key, [Prompt("", {}, () if of is None else (of,))]) for key, of in columns]
        for key, prompts in (*listed, self.prompts.looked_up):
            require_images(prompts, adapter, key, listed[0][1][0])
        previews.require_fit(self.previews, adapter, resolved.model.config, edits=self.edits)

    def require_reached(self, adapter: ModelAdapter, resolved: Resolved) -> None:
        """Refuse a model whose network the images of the prompts do not reach; say where a model of edits has none.

        The adapter is on its device, with its text encoders. Raises ConfigError.
        """
        own = (("data.prompts", prompt) for prompt in self.prompts.train)
        sets = [each for each in self.images if each.pairs.options.source is not None]  # others are not read through
        given = ((each.key, Prompt(text, {}, of)) for each in sets for text, of in each.pairs.captions())
        require_reached(chain(own, given), adapter, resolved.run.rollout.guidance_scale)

    def embed(self, resolved: Resolved, adapter: ModelAdapter, world: World) -> tuple[Texts | None, Texts]:
        """(embeddings of the previews, if there are any; those of the run), once the model is on its device.

        Raises ModelError: the model cannot encode the given images; ConfigError, WriteError: as of `embedded`.
        """
        if self.images:
            require_encoder(adapter)
        # In a table of their own: that of the run stays as it is without them.
        shown = Texts(adapter, self.previews, cache=True, free=False) if self.previews else None
        return shown, embedded(resolved, adapter, self.texts(cache=resolved.run.data.caches_text), world)

    def texts(self, *, cache: bool) -> list[str | Prompt]:
        """All that is embedded ahead, if anything is."""
        captions = [Prompt(text, {}, of) for each in self.images for text, of in each.captions()] if cache else ()
        return [*self.prompts.train, *self.prompts.evaluated, *captions, *(self.worded if cache else ())]

    def describe(self) -> str:
        """Counts, in words."""
        if self.given is None:
            return self.prompts.describe()
        kind = "images" if "labelled" in self.given.members else "pairs"
        return f"{len(self.given.records)} given {kind} and {len(self.prompts.evaluated)} held-out prompts"

    def sets(self, resolved: Resolved) -> list[Input]:
        """Contents of the run's data sets, as they were scanned: pairs, and prompts of data sets."""
        result = [entry for each in self.images for entry in each.contents()]
        data, prompts = resolved.run.data, self.prompts
        named = [("prompts", data.prompts, prompts.listed), ("eval_prompts", data.eval_prompts, prompts.evaluated)]
        for key, source, listed in named:
            if source is not None and source.startswith("hf:"):
                rows = [[prompt.text, prompt.metadata] for prompt in listed]
                result.append(set_of(f"data.{key}", source, f"{len(rows)} prompts", {"rows": rows}))
        return result


def anchor_images(resolved: Resolved) -> Given | None:
    """The images of `data.anchor`, where it is given. Raises ConfigError: a set that cannot be used."""
    run, options = resolved.run, resolved.run.data.anchor
    if options is None or resolved.anchor is None:
        return None
    pairs = options.pairs(run.optim.updates_per_iteration * resolved.method.passes)
    frames, seed = resolved.model.config.frames, derive(run.seed, "anchor")
    return Given(pairs, resolved.anchor.build(), seed, frames, "data.anchor")


@working("reading the prompts and images")
def read(resolved: Resolved, kind: Training) -> Data:
    """Prompts and images of a run, read before all else. Raises ConfigError: a list or a set that cannot be used."""
    config = resolved.run
    prompts = run_prompts(config, kind.own_prompts)
    kind.check_prompts(prompts.train, prompts.evaluated)
    own = previews.preview_prompts(config)
    if config.data.pairs is None:
        order, by = (prompts.train, resolved.slots, config.seed), config.data.priority
        source = PromptSource(*order) if by is None else PrioritySource(*order, by)
        worded = [reworded(prompt, words) for words in kind.method.config.wordings for prompt in prompts.train]
        worded = worded if any(plan.on_latents for plan in resolved.rewards) else []
        return Data(prompts, source, None, own, anchor_images(resolved), worded)
    given = Given(config.data.pairs, kind.method, config.seed, resolved.model.config.frames)
    return Data(prompts, given.source, given, own)
