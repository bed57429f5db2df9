"""Parts that recipes.yaml names: text encoders with their tokenizers, processors, the usual image VAE, schedulers.

CLIP and T5 encoders are transformers' own; `Encoder` replaces larger language models, with a word tokenizer that pads
and truncates as theirs do.
"""

import importlib
import operator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from scripts.pretraining import text as tiny_text

TOKENS = 8
"""Length of prompts in recipes.yaml and cases.yaml."""


class Output(dict):
    """Keys as attributes, and entries by position, as transformers' outputs have them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class Encoder(nn.Module):
    """A language model's hidden states [B, L, width] from token ids; masked tokens reach no other."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(512, width)
        self.mix = nn.Linear(width, width)
        self.layers, self.config = layers, SimpleNamespace(hidden_size=width, d_model=width, use_attention_mask=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.table.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.table.weight.device

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Output:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.table(input_ids % 512) * mask[..., None]
        # The running mean over tokens so far: a causal model, so padding on the right changes nothing.
        x = x + self.mix(x.cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None])
        states = tuple(x * (1 + k) for k in range(self.layers + 1))
        return Output(last_hidden_state=x, hidden_states=states, pooler_output=x.mean(1), text_embeds=x.mean(1))


class Seeing(Encoder):
    """An encoder that also sees the mean colour of a prompt's images, [B or 1, 3] or pixels [B or 1, 3, H, W]."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.look = nn.Linear(3, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **rest: Any) -> Output:
        seen = self.look(
            rest["pixel_values"].flatten(2).mean(2) if rest["pixel_values"].ndim > 2 else rest["pixel_values"]
        )
        text = super().forward(input_ids, attention_mask)
        return Output(hidden_states=tuple(state + seen[:, None] for state in text["hidden_states"]))


class Normed(Encoder):
    """An encoder whose last norm its pipeline looks for; it has none."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.model = nn.Module()
        self.model.norm = nn.Identity()


class Reading:
    """Processor for `Normed`: a word tokenizer whose system message is one token."""

    def __init__(self) -> None:
        self.tokenizer = words(special=("<|image_pad|>",))

    def __call__(self, text: list[str], **options: Any) -> Any:
        return self.tokenizer(text, **options)

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[0]]


class Looking:
    """Processor for `Seeing`: one image for each text, as for Qwen's, or several for one text."""

    def __call__(self, text: list[str], images: Any, **_: Any) -> Any:
        pictures = images if isinstance(images, list) else [images]
        if len(text) > 1 and len(pictures) != len(text):
            raise ValueError(f"{len(text)} texts with {len(pictures)} pictures")
        made = words()(text, padding=True, return_tensors="pt")
        colours: list[Any] = [torch.tensor(list(picture.getdata())).float().mean(0) / 255 for picture in pictures]
        if len(text) == 1:
            colours = [sum(colour / (1 + place) for place, colour in enumerate(colours))]  # their order counts
        made["pixel_values"] = torch.stack(colours)
        return made


@cache
def words(side: str = "right", special: tuple[str, ...] = ()) -> Any:
    """Word tokenizer with a chat template that adds a full stop."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "</s>", "<unk>", *tiny_text.words(), "left", "right", "on", "the", "of"]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(known))}
    made = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", vocab["</s>"])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )
    tokenizer.padding_side = side
    tokenizer.add_tokens(list(special), special_tokens=True)
    text = "{{ m['content'] if m['content'] is string else m['content'][0]['text'] }}"
    tokenizer.chat_template = "{% for m in messages %}" + text + " .{% endfor %}"
    return tokenizer


def t5(width: int = 32) -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel

    tokenizer = tiny_text.t5_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    return T5EncoderModel(config), tokenizer


def clip(*, projection: bool = False, positions: int = 12) -> tuple[Any, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer: Any = tiny_text.clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        projection_dim=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config), tokenizer


def language(width: int, *, sees: bool = False, side: str = "right") -> tuple[Any, Any]:
    """The stand-in for a language model, and its tokenizer."""
    return (Seeing if sees else Encoder)(width), words(side)


def seeing() -> tuple[Any, Any]:
    """The same with a token for the image, and for the ends of the template's parts."""
    tokenizer = words(special=("<image>", "<|end_header_id|>"))
    encoder = Seeing(16)
    encoder.config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
    encoder.config.pad_token_id = tokenizer.pad_token_id
    return encoder, tokenizer


def looking(pipeline: str) -> Looking:
    """The processor of Qwen's pipelines, with images about 16 x 16; their own give an image up to a megapixel."""

    def sizes(area: float, ratio: float) -> tuple[Any, ...]:
        width, height = (max(round(4 * side), 1) * 4 for side in (ratio**0.5, ratio**-0.5))
        return (width, height) if pipeline.endswith("plus") else (width, height, None)

    module: Any = importlib.import_module(f"diffusers.pipelines.qwenimage.{pipeline}")
    module.calculate_dimensions = sizes
    return Looking()


def vision(kind: str) -> Any:
    """The vision tower of that name in transformers."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(image_size=8, patch_size=4, **sizes)
    return getattr(transformers, f"{kind}Model")(config)


def of(name: str, **options: Any) -> Any:
    """An object of a class of diffusers, or of transformers."""
    import diffusers
    import transformers

    place = diffusers if hasattr(diffusers, name.split(".")[0]) else transformers
    return operator.attrgetter(name)(place)(**options)


def vae(blocks: int = 2) -> Any:
    return of(
        "AutoencoderKL",
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8,) * blocks,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        mid_block_add_attention=False,
        scaling_factor=0.7,
        shift_factor=0.1,
    )


def all_frames(kind: str, **options: Any) -> Any:
    """A video VAE that takes all frames at once."""
    made = of(kind, **options)
    made.use_framewise_encoding = made.use_framewise_decoding = False
    return made


def flow(**options: Any) -> Any:
    return of("FlowMatchEulerDiscreteScheduler", **{"shift": 3.0} | options)


def euler_unipc() -> Any:
    """Order 1 without corrector is the Euler step, so that the pipeline's own call can be compared."""
    options = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return of("UniPCMultistepScheduler", **options, solver_order=1, disable_corrector=list(range(100)))
