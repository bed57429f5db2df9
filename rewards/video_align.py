"""VideoAlign (VideoReward): visual quality, motion quality and text alignment of a video, by a Qwen2-VL 2B.

raw: three values read at three tokens of one text, brought to mean 0 and deviation 1 by the checkpoint's constants,
and their sum, which is trained on. The caption stands after the first two tokens and so cannot change their values.
Frames are sampled by time, two a second: the video's frame rate comes from metadata["fps"] or the option `fps`.

The checkpoint's model_config.json says what to sample, how large, which outputs the head has, and how to normalise.
The text that the model was trained with is not part of flowrl: `prompt_file` takes prompt_template.py of
KwaiVGI/VideoAlign (MIT), which is read, never run, and known by its sha256.

Differences from the released code: LoRA is folded into the weights, the head runs in float32, and videos are not
written to a video file and read again. As there, the language model counts tokens one by one (`positions`).

Source: arXiv:2501.13918; KwaiVGI/VideoAlign:inference.py, vision_process.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from flowrl.rewards._judges import folded_lora, qwen_vl
from flowrl.rewards._vision import checkpoints
from flowrl.rewards._vision.arrays import to_uint8
from torch import Tensor, nn

from flowrl.core.paths import NAME_OR_PATH, PATH
from flowrl.reward import Card, Images, Reward, RewardError

LEVEL = "experimental"
DIMENSIONS = ("VQ", "MQ", "TA")
MARKS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS)
PROMPT_SHA256 = "9d1d713c81a2a7bcce7f2c664b072885afe3320f7fcc000dde0fc9b19075543f"
MIN_PIXELS = 128 * 28 * 28
_MIN_FRAMES, _MAX_FRAMES, _FRAME_FACTOR = 4, 768, 2

CARD = Card(
    outputs=("video_align", *(f"video_align_{name.lower()}" for name in DIMENSIONS)),
    modality="video",
    resolution="two frames a second, each in its own aspect at the checkpoint's number of pixels",
    requires=("fps",),
    memory_gib=5.0,
    level=LEVEL,
    licence="Apache-2.0 (weights), MIT (code)",
    source="arXiv:2501.13918",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    model: Annotated[str, NAME_OR_PATH] = "KwaiVGI/VideoReward"
    """Folder or hub id with model_config.json and checkpoint-N, of which the last is taken."""
    prompt_file: Annotated[str | None, PATH] = None
    """prompt_template.py of KwaiVGI/VideoAlign, or its text for three special tokens in a file of its own."""
    base: Annotated[str | None, NAME_OR_PATH] = None
    """Qwen2-VL's folder or hub id; none takes the one that model_config.json names."""
    fps: float | None = None
    """Frames a second of videos whose metadata says nothing: the rate they are generated for."""
    use_norm: bool = True
    """Normalise each value with the checkpoint's constants, as published; false gives the head's own."""
    dtype: qwen_vl.Dtype = "bfloat16"
    """Precision of the backbone; the head is float32."""
    positions: qwen_vl.Positions = "sequential"
    """"sequential": as released; "mrope": Qwen2-VL's own, with which scores differ."""
    device: str | None = None
    """Where the network runs; none takes the GPU if there is one."""

    def __post_init__(self) -> None:
        if self.fps is not None and not (math.isfinite(self.fps) and self.fps > 0):
            raise ValueError(f"fps={self.fps} must be above 0, in frames a second")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of scoring in model_config.json."""

    base: str
    output_dim: int
    max_frame_pixels: int
    fps: float | None
    num_frames: int | None
    lora_scale: float
    """0 where there is no LoRA."""
    norms: tuple[tuple[float, float], ...] | None
    """(mean, deviation) of VQ, MQ and TA; none where the file has none."""


def read_settings(path: Path) -> Settings:
    """The settings in a model_config.json.

    Raises:
        RewardError: a key is missing, or asks for what this reward does not do.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        data, model, lora = content["data_config"], content["model_config"], content["peft_lora_config"]
        needed = {
            "data_config.prompt_template_type": (data["prompt_template_type"], "detailed_special"),
            "data_config.sample_type": (data["sample_type"], "uniform"),
            "data_config.eval_dim": (list(data["eval_dim"]), list(DIMENSIONS)),
            "model_config.use_special_tokens": (model["use_special_tokens"], True),
        }
        for key, (value, wanted) in needed.items():
            if value != wanted:
                raise RewardError(f"reward 'video_align': {path}: {key} is {value!r}, only {wanted!r} can be scored")
        if data["fps"] is None and data["num_frames"] is None:
            raise RewardError(f"reward 'video_align': {path}: data_config has neither fps nor num_frames to sample by")
        if model["output_dim"] not in (1, len(DIMENSIONS)):
            raise RewardError(
                f"reward 'video_align': {path}: model_config.output_dim={model['output_dim']} is not 1 or 3"
            )
        rank = math.sqrt(lora["lora_r"]) if lora.get("use_rslora") else lora["lora_r"]
        norms = content.get("inference_config")
        return Settings(
            base=model["model_name_or_path"],
            output_dim=model["output_dim"],
            max_frame_pixels=data["max_frame_pixels"],
            fps=data["fps"],
            num_frames=data["num_frames"],
            lora_scale=lora["lora_alpha"] / rank if lora["lora_enable"] else 0.0,
            norms=norms and tuple((float(norms[f"{n}_mean"]), float(norms[f"{n}_std"])) for n in DIMENSIONS),
        )
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise RewardError(
            f"reward 'video_align': {path} is not the model_config.json of a VideoAlign checkpoint: "
            f"{type(error).__name__}: {error}"
        ) from error


def frame_indices(total: int, video_fps: float, *, fps: float | None = 2.0, num_frames: int | None = None) -> list[int]:
    """Indices of the frames that are looked at, evenly from the first to the last.

    Args:
        total: frames of the clip.
        video_fps: frames a second of the clip.
        fps: frames a second that are looked at; at least 4 frames, at most 768, an even number.
        num_frames: how many in all, instead of `fps`.

    Raises:
        RewardError: a video of fewer than two frames.

    >>> frame_indices(16, 8)
    [0, 5, 10, 15]
    """
    if total < _FRAME_FACTOR:
        raise RewardError(f"reward 'video_align' needs videos of at least 2 frames, got {total}")
    if num_frames is not None:
        count = float(num_frames)
    elif fps is None:
        raise ValueError("give fps or num_frames")
    else:
        most = min(_MAX_FRAMES, total) // _FRAME_FACTOR * _FRAME_FACTOR
        count = min(max(total / video_fps * fps, _MIN_FRAMES), most)
    used = min(round(count / _FRAME_FACTOR) * _FRAME_FACTOR, total)
    return torch.linspace(0, total - 1, used).round().long().tolist()


def _frame_rate(metadata: dict, config: Config) -> float:
    rate = metadata.get("fps", config.fps)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not (math.isfinite(rate) and rate > 0):
        raise RewardError(
            f"reward 'video_align' needs each video's frames a second, got {rate!r}: set fps in the reward's entry, or "
            f'"fps" in a .jsonl prompt file'
        )
    return float(rate)


def _folder(where: str) -> Path:
    """The checkpoint's folder, from the hub where it is not one."""
    if Path(where).expanduser().is_dir():
        return Path(where).expanduser()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(where))
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward 'video_align' cannot load {where!r}; give a folder or a hub id that can be reached: {error}"
        ) from error


def read_weights(folder: Path, base: str, scale: float) -> tuple[dict[str, Tensor], Path]:
    """All weights of a checkpoint with LoRA folded in, named for the present Qwen2VLModel, and where they lay.

    A checkpoint is one model.pth, or adapter_model.safetensors and non_lora_state_dict.pth on top of the base's own.

    Raises:
        RewardError: there is no checkpoint, or it is broken.
    """
    steps = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    if not steps:
        raise RewardError(f"reward 'video_align': {folder} has no checkpoint-N; take the folder of KwaiVGI/VideoReward")
    last = max(steps, key=lambda path: int(path.name.removeprefix("checkpoint-")))
    files = [last / "model.pth"]
    if not files[0].is_file():
        files = [last / "non_lora_state_dict.pth", last / "adapter_model.safetensors"]
        files = [*sorted(_folder(base).glob("*.safetensors")), *files]
    result: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise RewardError(f"reward 'video_align': {last} has neither model.pth nor {file.name}")
        for name, value in checkpoints.read(file, reward="video_align").items():
            if (new := qwen_vl.local_name(name)) is not None:
                result[new] = value
    return folded_lora.merged_weights(result, scale=scale, reward="video_align"), last


def load(config: Config, folder: Path, settings: Settings) -> qwen_vl.Regressor:
    """The network with the checkpoint's weights, frozen."""
    base = config.base or settings.base
    tensors, source = read_weights(folder, base, settings.lora_scale)
    return qwen_vl.load(
        tensors,
        lambda hidden_size: nn.Linear(hidden_size, settings.output_dim, bias=False),
        base=base,
        marks=MARKS,
        dtype=config.dtype,
        positions=config.positions,
        device=config.device,
        reward="video_align",
        source=source,
    )


def sampled(video: Tensor, rate: float, settings: Settings) -> Tensor | None:
    """[n, 3, h, w] uint8: the frames of a video [F, 3, H, W] that are looked at; None where one is not finite."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize

    chosen = frame_indices(len(video), rate, fps=settings.fps, num_frames=settings.num_frames)
    frames = [to_uint8(video[index]) for index in chosen]
    if any(frame is None for frame in frames):
        return None
    size = qwen_vl.smart_resize(*video.shape[-2:], min_pixels=MIN_PIXELS, max_pixels=settings.max_frame_pixels)
    stacked = torch.stack([torch.from_numpy(frame).permute(2, 0, 1) for frame in frames])
    return resize(stacked, list(size), InterpolationMode.BICUBIC, antialias=True)


def values_of(head: Tensor, settings: Settings, use_norm: bool) -> list[float]:
    """(sum, VQ, MQ, TA) of the head at the three marks, [3, output_dim]; of 3 outputs each mark has its own."""
    parts = (head.diagonal() if settings.output_dim == len(DIMENSIONS) else head[:, 0]).tolist()
    if use_norm:
        parts = [(value - mean) / std for value, (mean, std) in zip(parts, settings.norms or (), strict=True)]
    return [sum(parts), *parts]


def build(config: Config) -> Reward:
    if config.prompt_file is None:
        raise RewardError(
            "reward 'video_align' needs the text that the model was trained with: set prompt_file to "
            "prompt_template.py of the repository KwaiVGI/VideoAlign"
        )
    prompt = qwen_vl.read_prompt(Path(config.prompt_file).expanduser(), PROMPT_SHA256, reward="video_align")
    folder = _folder(config.model)
    settings = read_settings(folder / "model_config.json")
    if config.use_norm and settings.norms is None:
        raise RewardError(
            f"reward 'video_align': {folder}/model_config.json has no inference_config to normalise with; set "
            f"use_norm: false"
        )
    model = load(config, folder, settings)

    def one(video: Tensor, tokens: list[int], rate: float) -> list[float]:
        if video.ndim != 4:
            raise RewardError(f"reward 'video_align' takes videos [F, 3, H, W], got {list(video.shape)}")
        frames = sampled(video, rate, settings)
        if frames is None:
            return [math.nan] * len(CARD.outputs)
        return values_of(model.outputs(tokens, frames, "video"), settings, config.use_norm)

    def score(images: Images, prompts: Sequence[str], metadata: Sequence[dict]) -> Mapping[str, Tensor]:
        # All texts and rates first: a prompt or record that cannot be used is found before the slow part.
        asked = [model.tokens(qwen_vl.with_caption(prompt, caption), "video") for caption in prompts]
        rates = [_frame_rate(record, config) for record in metadata]
        rows = [one(video, tokens, rate) for video, tokens, rate in zip(images, asked, rates, strict=True)]
        table = torch.tensor(rows).reshape(-1, len(CARD.outputs))
        return dict(zip(CARD.outputs, table.unbind(dim=1), strict=True))

    requires: dict[str, Any] = {} if config.fps is None else {"requires": ()}
    return Reward(score=score, card=dataclasses.replace(CARD, **requires))
