"""BERTScore: how well two texts match, token by token, in a language model's contextual embeddings. A helper.

With unit embeddings x of the reference and y of the candidate, both with their special tokens:

    recall = mean over x_i of max_j cos(x_i, y_j),  precision = mean over y_j of max_i cos(x_i, y_j)
    F1 = 2 precision recall / (precision + recall)

The means leave the special tokens (the tokenizer's cls and sep) out, the maxima do not, as in the authors' code; no
idf weights, no rescaling by a baseline, which are its defaults. Padding never takes part in a maximum.

Source: arXiv:1904.09675; Tiiiger/bert_score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from flowrl.rewards._vision import checkpoints
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import RewardError

LAYERS = {"roberta-large": 17, "deberta-xlarge-mnli": 40}
"""The layer whose embeddings agree best with people, as the authors have measured it, by the model's own name."""
# Their tokenizers tell a word inside a text from one at its beginning; the first one counts as inside.
_SPACE_BEFORE = {"roberta", "gpt2"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The embeddings that are compared."""

    model: Annotated[str, NAME_OR_PATH] = "FacebookAI/roberta-large"
    """An encoder of transformers, a folder or a hub id; roberta-large is the authors' choice for English."""
    layer: int | None = None
    """Behind this many layers; null: the authors' for roberta-large (17) and deberta-xlarge-mnli (40)."""
    batch_size: int = 64
    """Texts in one forward pass."""
    device: str | None = None
    """Where it runs; none takes the GPU if there is one."""

    def __post_init__(self) -> None:
        if self.layer is not None and self.layer < 0:
            raise ValueError(f"layer={self.layer} must not be negative")
        if self.layer is None and self._published() is None:
            raise ValueError(f"layer is required for model={self.model!r}: known are {', '.join(LAYERS)}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")

    def _published(self) -> int | None:
        return LAYERS.get(self.model.rstrip("/").rpartition("/")[2])

    @property
    def depth(self) -> int:
        """The layer that is taken."""
        result = self.layer if self.layer is not None else self._published()
        assert result is not None
        return result


@dataclass(frozen=True, slots=True)
class BertScore:
    """A loaded encoder."""

    model: Any
    tokenizer: Any
    options: Options

    @property
    def memory_gib(self) -> float:
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters()) / 2**30

    def __call__(self, candidates: Sequence[str], references: Sequence[str]) -> Tensor:
        """Recall, precision and F1 of each pair, [B, 3] float64; F1 is NaN where one of the two is not above 0."""
        texts = list(dict.fromkeys(text.strip() for text in (*candidates, *references)))
        known = dict(zip(texts, self._embedded(texts), strict=True))
        rows = [matched(known[c.strip()], known[r.strip()]) for c, r in zip(candidates, references, strict=True)]
        return torch.stack(rows) if rows else torch.empty(0, 3, dtype=torch.float64)

    def _embedded(self, texts: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        """Unit embeddings of each text's tokens, [L, D], and which of them count, [L]."""
        space = " " if self.model.config.model_type in _SPACE_BEFORE else ""
        special = torch.tensor([self.tokenizer.cls_token_id, self.tokenizer.sep_token_id])
        result: list[tuple[Tensor, Tensor]] = []
        for start in range(0, len(texts), self.options.batch_size):
            part = [space + text for text in texts[start : start + self.options.batch_size]]
            given = self.tokenizer(part, padding=True, truncation=True, max_length=self._longest(), return_tensors="pt")
            device = self.model.device
            with torch.inference_mode(), torch.autocast(device.type, enabled=False):
                states = self.model(**given.to(device), output_hidden_states=True).hidden_states
            units = F.normalize(states[self.options.depth].cpu().double(), dim=-1)
            tokens, masks = given["input_ids"].cpu(), given["attention_mask"].bool().cpu()
            for ids, mask, unit in zip(tokens, masks, units, strict=True):
                result.append((unit[mask], ~torch.isin(ids[mask], special)))
        return result

    def _longest(self) -> int:
        """Tokens of a text with its special ones; a tokenizer that sets no limit says a huge number."""
        positions = self.model.config.max_position_embeddings
        # RoBERTa's positions begin after those of the padding token.
        offset = self.model.config.pad_token_id + 1 if self.model.config.model_type == "roberta" else 0
        return min(self.tokenizer.model_max_length, positions - offset)


def matched(candidate: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> Tensor:
    """(recall, precision, F1) of two texts, [3], from their unit embeddings [L, D] and which tokens count [L]."""
    cosines = candidate[0] @ reference[0].T
    precision = cosines.amax(dim=1)[candidate[1]].mean()
    recall = cosines.amax(dim=0)[reference[1]].mean()
    both = torch.where((precision > 0) & (recall > 0), 2 * precision * recall / (precision + recall), torch.nan)
    return torch.stack([recall, precision, both])


def load(options: Options, reward: str) -> BertScore:
    """A frozen float32 encoder from a folder or the hub.

    Raises:
        RewardError: the weights can neither be found nor downloaded, are of another network, or have fewer layers.
    """
    from transformers import AutoModel, AutoTokenizer

    try:
        model = checkpoints.whole(AutoModel, options.model, reward=reward, unused=("pooler.",), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError, RuntimeError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load bertscore.model={options.model!r}; give a folder or a hub id that can be "
            f"reached: {error}"
        ) from error
    layers = model.config.num_hidden_layers
    if options.depth > layers:
        raise RewardError(f"reward {reward!r}: bertscore.layer={options.depth}, but {options.model!r} has {layers}")
    return BertScore(model.to(checkpoints.place(options.device)), tokenizer, options)
