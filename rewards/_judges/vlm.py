"""A vision-language model of transformers as a judge, on this machine. A helper, not a reward.

Batches are padded on the left, so that the answer of every row begins at the last position; probabilities are taken
from float32 logits over the whole vocabulary, before any sampling rule.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from flowrl.rewards._judges.base import Counters, Question, Writing, joined
from flowrl.rewards._vision import checkpoints
from flowrl.rewards._vision.arrays import jpeg
from PIL import Image
from torch import Tensor

from flowrl.core.paths import NAME_OR_PATH
from flowrl.reward import RewardError

_FORMER_NAMES = {
    r"^visual\.": "model.visual.",
    r"^model\.(?=layers\.|embed_tokens\.|norm\.)": "model.language_model.",
    r"^language_model\.model\.": "model.language_model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(vision_tower|multi_modal_projector)\.": r"model.\1.",
}
"""Modules of Qwen-VL and LLaVA before transformers 4.52 -> now. transformers renames weights itself, adapters not."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """A judge on this machine."""

    model: Annotated[str | None, NAME_OR_PATH] = None
    """Weights and processor: a folder or a hub id of any image-text-to-text model of transformers; none takes the
    reward's own."""
    adapter: Annotated[str | None, NAME_OR_PATH] = None
    """A LoRA on it (peft): a folder or a hub id."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str | None = None
    """None takes the GPU if there is one."""
    batch_size: int = 8
    """Questions in one forward pass."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")


class LocalJudge:
    """The loaded model; see `base.Judge`."""

    def __init__(self, model: Any, processor: Any, batch_size: int, reward: str) -> None:
        self.model, self.processor, self.batch_size, self.reward = model, processor, batch_size, reward
        self.counters, self.family = Counters(), str(model.config.model_type)
        template = processor.chat_template or getattr(processor.tokenizer, "chat_template", None)
        if not template:
            raise RewardError(
                f"reward {reward!r}: the judge's processor has no chat template; choose an instruct model"
            )
        # A hybrid model would otherwise begin its answer with <think>.
        self._template_options = {"enable_thinking": False} if "enable_thinking" in str(template) else {}
        known = inspect.signature(processor.apply_chat_template).parameters
        if "sanitize_control_tokens" in known:
            # A prompt that holds "<image>" or an end-of-turn mark stays plain text.
            self._template_options["sanitize_control_tokens"] = True
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def memory_gib(self) -> float:
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters()) / 2**30

    def token_ids(self, options: Mapping[str, tuple[str, ...]]) -> list[list[int]]:
        """Ids of the forms of each option that are a single token.

        Raises:
            RewardError: an option has none, or two options share one.
        """
        tokenizer, result = self.processor.tokenizer, []
        vocabulary = tokenizer.get_vocab()
        for option, forms in options.items():
            pieces = [tokenizer.encode(form, add_special_tokens=False) for form in forms]
            ids = {piece[0] for piece in pieces if len(piece) == 1}
            # SentencePiece cuts a lone digit into its space mark and the digit, yet has both as one token.
            marked = [form.replace(" ", mark) for form in forms for mark in ("\u2581", "\u0120")]
            ids |= {vocabulary[form] for form in marked if form in vocabulary}
            ids.discard(tokenizer.unk_token_id)
            if not ids:
                raise RewardError(
                    f"reward {self.reward!r}: the judge's tokenizer has no single token for the answer {option!r} "
                    f"(tried {', '.join(map(repr, forms))}); use a rubric of scale 'score', or another model"
                )
            result.append(sorted(ids))
        if len({i for ids in result for i in ids}) != sum(map(len, result)):
            raise RewardError(
                f"reward {self.reward!r}: the judge's tokenizer takes two of the answers {list(options)} for one; "
                "choose another model"
            )
        return result

    def check_options(self, options: Mapping[str, tuple[str, ...]]) -> None:
        self.token_ids(options)

    def option_logprobs(self, questions: Sequence[Question], options: Mapping[str, tuple[str, ...]]) -> Tensor:
        ids = self.token_ids(options)

        def ask(inputs: Any) -> list[Tensor]:
            last = self._last_logprobs(inputs, 1)[:, 0]
            return list(torch.stack([last[:, group].logsumexp(dim=1) for group in ids], dim=1))

        return _stacked(self._batched(questions, ask), len(ids))

    def answer_logprobs(self, questions: Sequence[Question], answer: str) -> Tensor:
        ids = torch.tensor(self.processor.tokenizer.encode(answer, add_special_tokens=False))
        if not len(ids):
            raise RewardError(f"reward {self.reward!r}: answer={answer!r} has no tokens; give a word")

        def ask(inputs: Any) -> list[Tensor]:
            # The last answer token is only predicted, never read.
            forced = _with_answer(inputs, ids[:-1])
            logprobs = self._last_logprobs(forced, len(ids))
            rows = ids.expand(len(logprobs), -1).to(logprobs.device)
            return list(logprobs.gather(2, rows[:, :, None])[:, :, 0].mean(dim=1))

        return _stacked(self._batched(questions, ask), None)

    def write(self, questions: Sequence[Question], writing: Writing) -> list[str | None]:
        # Draws would depend on the other rows of a batch.
        size = self.batch_size if writing.temperature == 0 else 1
        return list(self._batched(questions, lambda inputs: self._generate(inputs, writing), size))

    def _batched(self, questions: Sequence[Question], ask: Any, size: int | None = None) -> list[Any]:
        """Answers in the order of the questions; equal questions are asked once."""
        group = joined(questions)
        self.counters.add(questions=len(group.unique))
        answers: list[Any] = []
        step = size or self.batch_size
        for start in range(0, len(group.unique), step):
            inputs = self._inputs(group.unique[start : start + step])
            self.counters.add(requests=1, prompt_tokens=int(inputs["attention_mask"].sum()))
            with torch.inference_mode(), torch.autocast(self.model.device.type, enabled=False):
                answers += ask(inputs)
        return [answers[place] for place in group.places]

    def _inputs(self, questions: Sequence[Question]) -> Any:
        """Tokens and pixels of a batch, on the model's device."""
        conversations = []
        for question in questions:
            turns = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in question.turns()]
            shown = [_seen(image, question.jpeg_quality) for image in question.images]
            images = [{"type": "image", "image": image} for image in shown]
            turns[0]["content"] = [*images, *turns[0]["content"]]
            conversations.append(turns)
        inputs = self.processor.apply_chat_template(
            conversations,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
            processor_kwargs={"padding": True, "padding_side": "left"},
            **self._template_options,
        )
        assert bool(inputs["attention_mask"][:, -1].all()), "padding must be on the left"
        return inputs.to(self.model.device, self.model.dtype)

    def _last_logprobs(self, inputs: Any, count: int) -> Tensor:
        """Log-probabilities after each of the last `count` positions, [B, count, V] float32."""
        keep = {"logits_to_keep": count} if self._keeps_logits else {}
        logits = self.model(**inputs, **keep, use_cache=False).logits
        return logits[:, -count:].float().log_softmax(dim=-1)

    def _generate(self, inputs: Any, writing: Writing) -> list[str]:
        from transformers import GenerationConfig

        own, tokenizer = self.model.generation_config, self.processor.tokenizer
        end = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
        draws = {"temperature": writing.temperature, "top_k": 0, "top_p": 1.0} if writing.temperature else {}
        how = GenerationConfig(
            max_new_tokens=writing.max_tokens,
            do_sample=bool(writing.temperature),
            eos_token_id=end,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **draws,
        )
        device = self.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(writing.seed)
            tokens = self.model.generate(**inputs, generation_config=how)
        new = tokens[:, inputs["input_ids"].shape[1] :]
        self.counters.add(completion_tokens=int((new != how.pad_token_id).sum()))
        return tokenizer.batch_decode(new, skip_special_tokens=True)


def _seen(pixels: np.ndarray, jpeg_quality: int | None) -> Image.Image:
    if jpeg_quality is None:
        return Image.fromarray(pixels)
    return Image.open(io.BytesIO(jpeg(pixels, jpeg_quality))).convert("RGB")


def _stacked(rows: Sequence[Tensor], width: int | None) -> Tensor:
    """[B] or [B, width] float64 on the CPU, also where there are no rows."""
    if not rows:
        return torch.empty((0,) if width is None else (0, width), dtype=torch.float64)
    return torch.stack(list(rows)).double().cpu()


def _with_answer(inputs: Any, ids: Tensor) -> dict[str, Tensor]:
    """The inputs with the same tokens after every row; other tensors by token (types) get zeros there."""
    fillings = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    longer = dict(inputs)
    for name, value in inputs.items():
        if name in fillings or name.endswith("token_type_ids"):
            filling = fillings.get(name, torch.zeros_like(ids)).to(value)
            longer[name] = torch.cat([value, filling.expand(len(value), -1)], dim=1)
    return longer


def load(local: Local, reward: str) -> LocalJudge:
    """A frozen judge from a folder or the hub; safetensors only.

    Raises:
        RewardError: the weights can neither be found nor downloaded, are of no such model, or not whole.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    assert local.model is not None, "Backend.resolved names one"
    try:
        options = {"dtype": getattr(torch, local.dtype), "use_safetensors": True}
        model = checkpoints.whole(AutoModelForImageTextToText, local.model, reward=reward, **options)
        processor = AutoProcessor.from_pretrained(local.model)
        if local.adapter is not None:
            model = _adapted(model, local.adapter, reward)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward {reward!r} cannot load the judge model={local.model!r}"
            f"{f' with adapter={local.adapter!r}' if local.adapter else ''}; give a folder or a hub id of an "
            f"image-text-to-text model that can be reached: {error}"
        ) from error
    return LocalJudge(model.to(checkpoints.place(local.device)), processor, local.batch_size, reward)


def _adapted(model: Any, adapter: str, reward: str) -> Any:
    """The model with a LoRA merged into it.

    Raises:
        RewardError: not every weight of the one belongs to the other; peft scores with the plain model then, and warns.
    """
    from peft import PeftConfig, get_peft_model

    inner = getattr(model, "model", None)
    renamed = _FORMER_NAMES if hasattr(inner, "language_model") else {}
    with torch.random.fork_rng(devices=[]):
        adapted = get_peft_model(model, PeftConfig.from_pretrained(adapter))
        result = adapted.load_adapter(adapter, "default", key_mapping=renamed)
    strange = [*result.missing_keys, *result.unexpected_keys]
    if strange:
        raise RewardError(
            f"reward {reward!r}: adapter={adapter!r} does not fit the judge: {len(result.missing_keys)} of its weights "
            f"are missing and {len(result.unexpected_keys)} are not known, such as {strange[0]!r}; it was trained on "
            "another model, or by a library that names weights otherwise"
        )
    return adapted.merge_and_unload().eval().requires_grad_(False)
