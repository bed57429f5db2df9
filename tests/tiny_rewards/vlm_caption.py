"""vlm_caption on a tiny random LLaVA, compared by a tiny random RoBERTa."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flowrl.rewards._judges.bert import Options
from flowrl.rewards.vlm_caption import Config, build

from flowrl.contracts.rewards import trial_batch
from flowrl.reward import Reward
from flowrl.scoring.surroundings import Batch
from tests.tiny_rewards import judges, records
from tests.toy_clip import drawn

LAYERS, LAYER, POSITIONS = 3, 2, 24
RECORD = {"questions": ["what is it?"], "answers": ["-"]}
"""What this network happens to answer for most of the samples."""


def save_roberta(folder: Path) -> str:
    """A RoBERTa of LAYERS layers that knows letters and a few words."""
    from tokenizers import pre_tokenizers
    from transformers import RobertaConfig, RobertaModel, RobertaTokenizer

    merges: list[Any] = [("\u0120", "a"), ("r", "e"), ("re", "d"), ("\u0120", "red")]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    RobertaTokenizer(vocab=vocabulary, merges=merges).save_pretrained(folder)
    config = RobertaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        vocab_size=len(vocabulary), max_position_embeddings=POSITIONS + 2, pad_token_id=1,
    )  # fmt: skip
    drawn(lambda: RobertaModel(config, add_pooling_layer=False), 0).save_pretrained(folder)
    return str(folder)


def options(folder: str, **own: Any) -> Options:
    return Options(**({"model": folder, "layer": LAYER, "device": "cpu", "batch_size": 2} | own))


def samples(reward: Reward, folder: Path) -> Batch:
    """Four samples, since an answer is written token by token."""
    return records(trial_batch(reward.card).pick(range(4)), RECORD if reward.card.requires else {})


def cases(folder: Path, stack: ExitStack) -> dict[str, Reward]:
    llava, roberta = judges.local(folder / "llava"), options(save_roberta(folder / "roberta"))
    return {
        "bertscore": build(Config(local=llava, bertscore=roberta, max_tokens=6)),
        "strict": build(Config(local=llava, mode="strict", max_tokens=6)),
    }
