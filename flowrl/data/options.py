"""The options of `data`: prompts, held-out prompts, and given pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from flowrl.core.paths import PAIRS, PROMPTS
from flowrl.core.strict import require_positive
from flowrl.data.preferences import PreferenceOptions

_EVAL_SHARE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PairsConfig:
    path: Annotated[str, PAIRS]
    """Preference set (docs/preferences.md): a file, folder or pattern, or `hf:PATH:SPLIT`."""
    eval: Annotated[str | None, PAIRS] = None
    """Held-out pairs, same forms: what the network prefers of them is told at every evaluation."""
    records: PreferenceOptions = field(default_factory=PreferenceOptions)
    """Columns of both sets, and the share of their records that may be broken."""
    per_iteration: int = 64
    """Pairs (or pictures, where a method takes single ones) drawn per iteration, over all processes."""
    max_eval: int | None = None
    """Look at no more than so many of the held-out pairs, drawn by the seed; null: 500. Latents stay in memory."""
    caption_dropout: float = 0.2
    """Share of the pairs whose caption is replaced by the empty one."""
    crop: Literal["center", "random"] = "center"
    """Which part of a picture is taken, after its short side is brought to the model's size."""
    posterior: Literal["sample", "mean"] = "sample"
    """Latents of a picture: a draw of the VAE's posterior, or its mean. A model that was trained on means (tiny-sd3)
    wants these."""
    flip: bool = True
    """Mirror half of the pairs. Set it to false where captions say left or right, or pictures hold text."""

    def __post_init__(self) -> None:
        require_positive(per_iteration=self.per_iteration, max_eval=self.max_eval)
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout={self.caption_dropout} is a share: give 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    prompts: Annotated[str | None, PROMPTS] = None
    """Training prompts: a .txt (one a line), a .jsonl, a .json list, a .csv, .tsv or .parquet (further columns are
    metadata), `hf:PATH` or `hf:PATH:SPLIT` for a data set (hub id or folder), or `shapes:train`. Required, unless there
    are pairs."""
    eval_prompts: Annotated[str | None, PROMPTS] = None
    """Held-out prompts, same forms; null: `eval_share` of the training prompts, with pairs none."""
    eval_share: float = _EVAL_SHARE
    """Of the distinct training prompts, where there are no `eval_prompts`: held out for evaluation and never trained
    on, drawn by the seed. 0, or fewer than 32 prompts: evaluated on the training prompts, as every number then says."""
    pairs: PairsConfig | None = None
    """Given pictures, for methods that learn from them; null: the network draws its samples from prompts."""
    max_prompts: int | None = None
    """Use only the first so many training prompts, `eval_share` of them held out."""
    max_eval_prompts: int | None = None
    """Evaluate only the first so many held-out prompts; those of `eval_share` are in random order."""
    prompt_column: str = "prompt"
    """Of a record: the text."""
    image_column: str | None = None
    """Of a record: its picture, or a list of them; null: `image` or `images`, where it has one."""
    subset: str | None = None
    """Of a data set that has several."""
    cache_text: bool | None = None
    """Embed every prompt at the start and free the text encoders; false: when it is drawn. Null: true, but with pairs
    false, since a large set has more captions than memory."""

    def __post_init__(self) -> None:
        require_positive(max_prompts=self.max_prompts, max_eval_prompts=self.max_eval_prompts)
        if not 0 <= self.eval_share < 1:
            raise ValueError(f"eval_share={self.eval_share} is a share of the prompts: give 0 to below 1")
        if self.prompts is None and self.pairs is None:
            raise ValueError("prompts is required; give training prompts, or pairs for a method that learns from them")
        if self.pairs is not None and self.prompts is not None:
            raise ValueError(
                f"prompts={self.prompts!r}: captions of the pairs are the prompts; leave it out, or leave out pairs"
            )
        if self.pairs is not None and self.eval_share not in (0, _EVAL_SHARE):
            raise ValueError(f"eval_share={self.eval_share} has no meaning with pairs; give pairs.eval or eval_prompts")

    @property
    def caches_text(self) -> bool:
        """`cache_text`, where it is null by what is drawn from."""
        return self.pairs is None if self.cache_text is None else self.cache_text
