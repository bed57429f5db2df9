"""Qwen2-VL with a regression head on marked tokens: how HPSv3 and VideoAlign score. A helper, not a reward.

Rows are run one by one, so that a score cannot depend on the others. The frozen backbone runs in the chosen dtype,
the head in float32. Images go in as 8-bit values, or as floats that have a gradient, in patches of 14 x 14, two frames
deep, four patches to a token.

Source: MizzenAI/HPSv3:hpsv3/model/qwen2vl_trainer.py and dataset/utils.py; KwaiVGI/VideoAlign; Qwen2-VL
(arXiv:2409.12191) of transformers.
"""

from __future__ import annotations

import ast
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from flowrl.rewards._vision import checkpoints
from flowrl.rewards._vision.pixels import normalised
from torch import Tensor, nn

from flowrl.reward import RewardError

if TYPE_CHECKING:
    from transformers import Qwen2VLConfig

FACTOR = 28
"""Pixels to a token's side: sizes are multiples of it."""
_MAX_ASPECT = 200
_TRIAL_CAPTION = "a photo of a cat"

Kind = Literal["image", "video"]
Dtype = Literal["bfloat16", "float32"]
Positions = Literal["sequential", "mrope"]


def smart_resize(height: int, width: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) that Qwen2-VL is fed for an image: multiples of 28, about as many pixels as asked for.

    The bounds are not exact: enlarging rounds up, past `max_pixels` where both are equal, as the released code does.

    Raises:
        ValueError: one side is more than 200 times the other.

    >>> smart_resize(720, 1280, min_pixels=200704, max_pixels=200704)
    (336, 588)
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise ValueError(f"an image of {height} x {width} is longer than {_MAX_ASPECT} times its width")
    sides = (height, width)
    near = [max(FACTOR, round(side / FACTOR) * FACTOR) for side in sides]
    if near[0] * near[1] > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        # A side that rounds to nothing keeps one token.
        near = [max(FACTOR, math.floor(side / scale / FACTOR) * FACTOR) for side in sides]
    elif near[0] * near[1] < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        near = [math.ceil(side * scale / FACTOR) * FACTOR for side in sides]
    return near[0], near[1]


def patches(frames: Tensor, *, patch: int = 14, depth: int = 2, merge: int = 2) -> tuple[Tensor, Tensor]:
    """Network input of frames [F, 3, H, W], 8-bit or floats in [0, 1], H and W multiples of patch * merge.

    Returns:
        Normalised patches, [N, 3 * depth * patch^2], the merge^2 of a token next to each other; and the grid (time,
        height, width) in patches, [1, 3]. The last frame is repeated where `depth` does not divide F.
    """
    values = normalised(frames if frames.is_floating_point() else frames.float() / 255)
    values = torch.cat([values, values[-1:].expand(-len(values) % depth, -1, -1, -1)])
    time, height, width = len(values) // depth, values.shape[2] // patch, values.shape[3] // patch
    cells = values.view(time, depth, 3, height // merge, merge, patch, width // merge, merge, patch)
    ordered = cells.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(time * height * width, -1), torch.tensor([[time, height, width]])


def read_prompt(path: Path, digest: str, *, reward: str) -> str:
    """The text that a model was trained with, "{text_prompt}" where the caption goes.

    A .py file is read, never run: each of its strings is tried.

    Args:
        path: a text file, or a Python file that has the text as one string.
        digest: sha256 of the text with the caption "a photo of a cat".
        reward: its name, for messages.

    Raises:
        RewardError: the file cannot be read, or holds another text.
    """
    try:
        content = path.read_bytes().decode("utf-8")
        tree = ast.parse(content) if path.suffix == ".py" else None
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise RewardError(f"reward {reward!r} cannot read its prompt {path}: {error}") from error
    texts = [content]
    if tree is not None:
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for text in texts:
        if hashlib.sha256(with_caption(text, _TRIAL_CAPTION).encode()).hexdigest() == digest:
            return text
    raise RewardError(
        f"reward {reward!r}: {path} does not hold the text that the model was trained with (another sha256); take the "
        f"authors' file unchanged, line ends and trailing spaces included"
    )


def with_caption(prompt: str, caption: str) -> str:
    """The prompt with its caption, whatever the caption holds; other braces stay.

    >>> with_caption("Textual prompt - {text_prompt}", "a {cat}")
    'Textual prompt - a {cat}'
    """
    return prompt.replace("{text_prompt}", caption)


def local_name(name: str) -> str | None:
    """A published tensor's name in transformers' present Qwen2VLModel; none for lm_head, which takes no part.

    Published files have the layout of transformers 4.45 ("visual.", "model."), where PEFT saved them under
    "base_model.model."; the present one ("model.visual.", "model.language_model.") is taken as well.

    >>> local_name("base_model.model.model.layers.0.mlp.up_proj.weight"), local_name("visual.merger.ln_q.bias")
    ('language_model.layers.0.mlp.up_proj.weight', 'visual.merger.ln_q.bias')
    """
    name = name.removeprefix("base_model.model.")
    if name.startswith("lm_head."):
        return None
    if name.startswith(("visual.", "language_model.", "rm_head.")):
        return name
    inner = name.removeprefix("model.")
    return inner if inner.startswith(("visual.", "language_model.")) else f"language_model.{inner}"


@dataclass(frozen=True, slots=True)
class Regressor:
    """A loaded Qwen2-VL whose head is read at marked tokens."""

    backbone: Any
    head: nn.Module
    tokenizer: Any
    marks: tuple[int, ...]
    """Ids of the tokens that are read, in the order in which they stand in the text."""
    positions: Positions
    reward: str

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def tokens(self, text: str, kind: Kind) -> list[int]:
        """Ids of one user turn, the image before the text, with one place for the image.

        Raises:
            RewardError: a mark or the image's place stands there twice, as where a caption spells it.
        """
        message = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}]
        chat = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(chat, add_special_tokens=False)["input_ids"]
        config = self.backbone.config
        result = tuple(i for i in ids if i in self.marks)
        places = [i for i in ids if i in (config.image_token_id, config.video_token_id)]
        if result != self.marks or places != [self._place(kind)]:
            names = self.tokenizer.convert_ids_to_tokens([*self.marks, self._place(kind)])
            raise RewardError(
                f"reward {self.reward!r}: the text for the model must hold each of {', '.join(names)} exactly once; "
                f"remove them from the prompt, whose text ends in {text[-300:]!r}"
            )
        return ids

    def outputs(self, tokens: Sequence[int], frames: Tensor, kind: Kind) -> Tensor:
        """The head at each mark, [marks, outputs] float32, of one row: frames as of `patches`, and its `tokens`."""
        values, grid = patches(frames)
        place = tokens.index(self._place(kind))
        # Four patches make a token.
        ids = [*tokens[:place], *[tokens[place]] * (len(values) // 4), *tokens[place + 1 :]]
        row = torch.tensor([ids], device=self.device)
        inputs: dict[str, Any] = {"input_ids": row, "use_cache": False}
        inputs["pixel_values" if kind == "image" else "pixel_values_videos"] = values.to(self.device)
        inputs[f"{kind}_grid_thw"] = grid.to(self.device)
        if self.positions == "sequential":
            inputs["position_ids"] = torch.arange(len(ids), device=self.device).expand(3, 1, -1)
        else:
            inputs["mm_token_type_ids"] = (row == self._place(kind)).int() * (1 if kind == "image" else 2)
        with torch.autocast(self.device.type, enabled=False):  # all weights are frozen
            hidden = self.backbone(**inputs).last_hidden_state[0]
            marked = torch.isin(row[0], torch.tensor(self.marks, device=self.device))
            return self.head(hidden[marked].float()).cpu()

    def _place(self, kind: Kind) -> int:
        config = self.backbone.config
        return config.image_token_id if kind == "image" else config.video_token_id


def load(
    tensors: Mapping[str, Tensor],
    head: Callable[[int], nn.Module],
    *,
    base: str,
    marks: Sequence[str],
    dtype: Dtype,
    positions: Positions,
    device: str | None,
    reward: str,
    source: Path,
) -> Regressor:
    """A frozen regressor.

    Args:
        tensors: all weights, named as `local_name` names them.
        head: makes the head for a hidden size; its weights are named "rm_head.".
        base: folder or hub id that sizes and tokenizer are taken from; no weights are read there.
        marks: tokens that are added to the tokenizer, in the order in which the model learnt them.
        dtype: of the backbone.
        positions: how the language model counts tokens: one by one, or as Qwen2-VL does.
        device: where it runs; none takes the GPU if there is one.
        reward: its name, for messages.
        source: where the tensors come from, for messages.

    Raises:
        RewardError: the base cannot be found, or does not fit the weights.
    """
    from transformers import Qwen2VLModel

    config, tokenizer = _base(base, reward)
    tokenizer.add_tokens(list(marks), special_tokens=True)
    embedding = tensors.get("language_model.embed_tokens.weight")
    if embedding is not None and len(embedding) != len(tokenizer):
        raise RewardError(
            f"reward {reward!r}: {source} embeds {len(embedding)} tokens, the tokenizer of {base!r} with "
            f"{', '.join(marks)} has {len(tokenizer)}; take the base that the model was trained from"
        )
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)

    def body() -> nn.Module:
        return Qwen2VLModel(config)

    backbone = checkpoints.hollow(body)
    rated = checkpoints.hollow(lambda: head(text.hidden_size))
    in_head = {n.removeprefix("rm_head."): t.float() for n, t in tensors.items() if n.startswith("rm_head.")}
    weights = {n: t.to(getattr(torch, dtype)) for n, t in tensors.items() if not n.startswith("rm_head.")}
    checkpoints.fill(backbone, weights, reward=reward, source=source)
    checkpoints.fill(rated, in_head, reward=reward, source=source)
    place = checkpoints.place(device)
    ids = tuple(tokenizer.convert_tokens_to_ids(list(marks)))
    return Regressor(backbone.to(place), rated.to(place), tokenizer, ids, positions, reward)


def _base(base: str, reward: str) -> tuple[Qwen2VLConfig, Any]:
    """(configuration, tokenizer) of a folder or hub id.

    Raises:
        RewardError: they cannot be loaded, or the tokenizer has no chat template.
    """
    from transformers import AutoTokenizer, Qwen2VLConfig

    try:
        config = Qwen2VLConfig.from_pretrained(base)
        tokenizer = AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load configuration and tokenizer of {base!r}; give a folder or a hub id that "
            f"can be reached: {error}"
        ) from error
    if not tokenizer.chat_template:
        raise RewardError(f"reward {reward!r}: the tokenizer of {base!r} has no chat template; take Qwen's own folder")
    return config, tokenizer
