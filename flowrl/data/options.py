"""The options of `data`: prompts, held-out prompts, given pairs, and given images beside the prompts."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from flowrl.core.errors import OptionError
from flowrl.core.paths import CACHE, PAIRS, PROMPTS
from flowrl.core.strict import Options, require_positive

_EVAL_SHARE = 0.1
_POSITIVE = ("per_iteration", "max_eval", "per_update", "coef")


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """Columns of a preference set, and the largest share of broken records."""

    prompt: str | None = None
    """Column of the text; null: `prompt` or `caption`."""
    chosen: str = "chosen"
    """Column of the preferred image: a path, or the file's bytes; of a video: a path of a file or of a folder."""
    rejected: str = "rejected"
    """Column of the other image."""
    source: str | None = None
    """Column of the image that the prompt edits, or a list of images: paths, or files' bytes; null: none."""
    source_fit: Literal["own", "cover"] = "own"
    """Fit of the sources to the model: `own`, the pipeline's; `cover`: scaled, cropped and mirrored as their results
    are, so that all stay aligned."""
    ranked: str | None = None
    """Column of a list of images, the best first, of which every two are a pair; null: a record is one pair."""
    scores: str | None = None
    """Column of the scores of `ranked`, the larger the better; their differences are margins. Null: none."""
    ranks: str | None = None
    """Column of the ranks of `ranked`, 1 the best, equal ones allowed; their differences are margins. Null: none."""
    first: str = "jpg_0"
    """Column of the first of two images with a label (Pick-a-Pic), for a set without `chosen`."""
    second: str = "jpg_1"
    """Column of the second image."""
    label: str = "label_0"
    """Column of the label; 1: the first image is preferred, 0: the second, 0.5: neither."""
    other_label: str = "label_1"
    """Column of 1 - label, compared with the label if the set has it."""
    labelled: str = "has_label"
    """Column of a flag; records where it is false have no judgement and are skipped. A set need not have it."""
    first_id: str = "image_0_uid"
    """Column of the first image's name, which identifies it in other pairs; a set without it has its bytes hashed."""
    second_id: str = "image_1_uid"
    """Column of the second image's name."""
    subset: str | None = None
    """Subset of a data set that has several; null: its only one."""
    max_broken: float = 0.1
    """Largest share of skipped records, 0 to 1, ties not counted. A tenth is more than a scraped set loses to dead
    links, and far less than a wrong folder or an incomplete copy."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_broken <= 1:
            raise ValueError(f"max_broken={self.max_broken} is a share: give 0 to 1")
        if (self.scores or self.ranks) and (self.ranked is None or (self.scores and self.ranks)):
            raise ValueError(f"scores={self.scores!r}, ranks={self.ranks!r}: give one of them, with the list in ranked")
        if self.source_fit != "own" and self.source is None:
            raise OptionError(f"source_fit={self.source_fit}: there is no source", {"source_fit": "own"})


@dataclass(frozen=True, kw_only=True)
class GivenConfig:
    """Given images or videos with captions."""

    path: Annotated[str, PAIRS]
    """Set to train on (docs/preferences.md): a file, folder or pattern, or `hf:PATH:SPLIT`."""
    records: PreferenceOptions = field(default_factory=PreferenceOptions)
    """Columns of the set, and the largest share of broken records."""
    caption_dropout: float = 0.2
    """Share of the pairs, 0 to 1, whose caption is replaced by the empty one, which guidance needs."""
    crop: Literal["center", "random"] = "center"
    """Position of the crop after the image covers the model's size, and of a part of a longer video in time: the
    middle, or random for each pair."""
    frames: Literal["exact", "cut"] = "exact"
    """Videos that are longer than model.num_frames: `exact` leaves their records out, `cut` takes so many of their
    frames."""
    posterior: Literal["sample", "mean"] = "sample"
    """Latents of an image: a draw of the VAE's posterior, or its mean, for a model trained on means (tiny-sd3,
    tiny-wan)."""
    flip: bool = True
    """Mirroring of half of the pairs, at random; false: where captions say left or right, or images hold text."""

    def __post_init__(self) -> None:
        require_positive(vars(self), *(name for name in _POSITIVE if name in vars(self)))
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout={self.caption_dropout} is a share: give 0 to 1")
        if self.records.source is not None and not self.covers and (self.flip or self.crop == "random"):
            raise OptionError(
                f"records.source={self.records.source!r}: flip={self.flip}, crop={self.crop} would change the results "
                "and not the sources",
                [{"flip": False, "crop": "center"}, {"records.source_fit": "cover"}],
            )

    @property
    def covers(self) -> bool:
        """Whether sources are cropped with their results."""
        return self.records.source_fit == "cover"


@dataclass(frozen=True, kw_only=True)
class PriorityConfig:
    by: Literal["spread", "ucb"] = "spread"
    """`spread`: prompts whose samples differ most in reward; `ucb` (DUMP): kinds of large advantages or few samples."""
    group: str = "prompt"
    """Kinds, which share their statistics: `prompt`, each by itself, or a key of the metadata, by its value."""
    floor: float = 0.05
    """Share of the chances that all prompts have alike, above 0; 1: all."""
    temperature: float = 0.1
    """Of `ucb`; lower is greedier."""
    window: int = 300
    """Newest samples of a kind that the mean is of, in whole groups."""

    def __post_init__(self) -> None:
        if not (0 < self.floor <= 1 and self.temperature > 0 and self.window > 0):
            raise ValueError(f"{self}: floor must be in (0, 1], temperature and window positive")


@dataclass(frozen=True, kw_only=True)
class PairsConfig(GivenConfig):
    """Given images or videos, as preference pairs."""

    eval: Annotated[str | None, PAIRS] = None
    """Held-out pairs, with the same columns: evaluations report the share that the network prefers as the data do;
    null: none."""
    per_iteration: int = 64
    """Pairs of an iteration over all processes; single images for a method that takes those."""
    max_eval: int | None = None
    """Largest number of held-out pairs, a random subset by the seed, whose latents stay in memory; null: 500."""


@dataclass(frozen=True, kw_only=True)
class DataAnchorConfig(GivenConfig):
    """Given images beside the prompts, to which the network is fitted in every optimizer step."""

    per_update: int = 32
    """Images of an optimizer step over all processes."""
    coef: float = 0.01
    """Weight of the network's mean squared error on the noised images beside the method's own loss of a row."""
    times: Options | None = None
    """Rule of the times that the images are noised to, as of `sft`; `{name: subset, count: 1, fraction: 1}` draws among
    the rollout's noise levels."""

    def pairs(self, updates: int) -> PairsConfig:
        """The images of an iteration of so many optimizer steps."""
        shared = {item.name: vars(self)[item.name] for item in fields(GivenConfig)}
        return PairsConfig(per_iteration=self.per_update * updates, **shared)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training prompts or pairs, and the prompts of evaluations."""

    prompts: Annotated[str | None, PROMPTS] = None
    """Training prompts: a .txt (one a line), a .jsonl, a .json list, a .csv, .tsv or .parquet (further columns are
    metadata for the rewards; those that others sample by, such as `seed`, are named in a warning), `hf:PATH` or
    `hf:PATH:SPLIT` for a data set (hub id or folder), `shapes:train`, or `shapes:motion-train` for videos. Null: none,
    with pairs alone."""
    eval_prompts: Annotated[str | None, PROMPTS] = None
    """Held-out prompts, same forms; null: `eval_share` of the training prompts, or none with pairs."""
    eval_share: float = _EVAL_SHARE
    """Share of the distinct training prompts, 0 to below 1, held out for evaluation if `eval_prompts` is null; a random
    subset by the seed. With 0, or fewer than 32 prompts, training prompts are evaluated, and every result says so."""
    pairs: PairsConfig | None = None
    """Given images for methods that learn from them; null: the network draws its samples from prompts."""
    priority: PriorityConfig | None = None
    """Prompts are drawn by what was learned of them so far; null: each once an epoch."""
    anchor: DataAnchorConfig | None = None
    """Given images beside the prompts, whose matching error is added to the loss; null: none."""
    max_prompts: int | None = None
    """Number of training prompts that are used, the first ones, `eval_share` of them held out; null: all."""
    max_eval_prompts: int | None = None
    """Number of held-out prompts that are used, the first ones (of `eval_share`: in random order); null: all."""
    prompt_column: str = "prompt"
    """Column or key with the text of a record."""
    image_column: str | None = None
    """Column or key with the image of a record, or a list of images; null: `image` or `images`, if it has one."""
    subset: str | None = None
    """Subset of a data set that has several; null: its only one."""
    cache_text: bool | None = None
    """True: all prompts are embedded at the start and the text encoders freed; false: they are embedded when drawn.
    Null: true with prompts, false with pairs, as a large set has more captions than memory."""
    text_cache: Annotated[str | None, CACHE] = None
    """Folder of embeddings that all processes and later runs share, or `memory`: every process holds all of them.
    Null: the folder `.text_cache` in `output` if they are more than 1 GiB, else memory (docs/files.md)."""

    def __post_init__(self) -> None:
        require_positive(vars(self), "max_prompts", "max_eval_prompts")
        if self.text_cache == "":
            raise ValueError("text_cache='' is no folder; give a path, or memory")
        if self.text_cache is not None and not self.caches_text:
            raise OptionError(
                f"text_cache={self.text_cache!r} has no effect: texts are embedded when they are drawn",
                [{"cache_text": True}, {"text_cache": None}],
            )
        if not 0 <= self.eval_share < 1:
            raise ValueError(f"eval_share={self.eval_share} is a share of the prompts: give 0 to below 1")
        if self.prompts is None and self.pairs is None:
            raise ValueError("prompts is required; give training prompts, or pairs for a method that learns from them")
        if self.pairs is not None and self.prompts is not None:
            raise ValueError(
                f"prompts={self.prompts!r}: captions of the pairs are the prompts; leave it out, or leave out pairs"
            )
        if self.pairs is not None and self.anchor is not None:
            raise OptionError("anchor: pairs are given images already", {"anchor": None})
        if self.caches_text and any(given is not None and given.covers for given in (self.pairs, self.anchor)):
            raise OptionError(
                "records.source_fit=cover: a source is cropped when it is drawn, so nothing is embedded ahead",
                {"cache_text": False},
            )
        if self.pairs is not None and self.eval_share not in (0, _EVAL_SHARE):
            raise ValueError(f"eval_share={self.eval_share} has no meaning with pairs; give pairs.eval or eval_prompts")

    @property
    def caches_text(self) -> bool:
        """`cache_text`, or its default for prompts or pairs."""
        return self.pairs is None if self.cache_text is None else self.cache_text
