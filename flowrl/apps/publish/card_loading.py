"""How the weights next to a model card are loaded: a sentence and Python code that runs in their folder."""

import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.apps.publish.card_facts import Facts
from flowrl.core import registry
from flowrl.core.errors import ModelError
from flowrl.models.generic.options import rate_of
from flowrl.models.pipelines.classes import pipeline_class
from flowrl.models.pipelines.declared import declared
from flowrl.models.pipelines.paths import asset_folder
from flowrl.models.weights.roles import lora_file
from flowrl.rollout.learned_noise import FILE as NOISE

Layout = Literal["adapter", "diffusers", "kohya", "comfyui", "merged"]
"""`adapter`: a run's own folder, a LoRA, full weights or learned noise; the others are those of `flowrl export`."""

_EDITS = re.compile(r"Edit|Kontext|Img2Img|ImageToVideo|Image2Video|Pix2Pix|Inpaint|ImageToImage")
_VIDEOS = re.compile(r"Video|Wan|LTX|Mochi|CogVideoX|Sky[Rr]eels|AnimateDiff")
_PLAIN = re.compile(r"[\w ,.'-]{1,120}")
_OPTIONS = ("height", "width", "max_sequence_length", "num_frames", "negative_prompt", "guidance_rescale")


@dataclass(frozen=True, slots=True)
class Base:
    """The model that a run began with, and what it makes."""

    path: str
    kind: str
    """Its pipeline's class in diffusers; "" where it is not known here."""
    loads: str = "DiffusionPipeline"
    """The class to load it with: its own, but where the configuration names another."""

    @classmethod
    def of(cls, facts: Facts) -> "Base":
        path, named = str(facts.at("model", "path")), facts.at("model", "pipeline")
        if named is not None:
            return cls(path, str(named), str(named))
        try:
            return cls(path, pipeline_class(path, facts.at("model", "revision"), offline=True))
        except ModelError:  # a folder that has moved, a hub out of reach: a native adapter is of one class
            name = facts.at("model", "name")
            known = vars(registry.load("models", name)).get("PIPELINE") if name in registry.names("models") else None
            return cls(path, str(known or ""))

    @property
    def is_asset(self) -> bool:
        return "/" not in self.path and asset_folder(self.path) is not None

    @property
    def hub_id(self) -> str | None:
        """Its name on the hub; None for an asset, a folder or a file."""
        here = self.is_asset or self.path.startswith(("/", "~", ".")) or self.path.endswith(".safetensors")
        return None if here or Path(self.path).exists() or self.path.count("/") != 1 else self.path

    @property
    def task(self) -> str:
        """The hub's pipeline tag."""
        source = "image" if _EDITS.search(self.kind) else "text"
        return f"{source}-to-{'video' if _VIDEOS.search(self.kind) else 'image'}"

    @property
    def takes_lora(self) -> bool:
        """Whether its pipeline has `load_lora_weights`."""
        import diffusers
        from diffusers.loaders.lora_base import LoraBaseMixin

        return issubclass(getattr(diffusers, self.kind, LoraBaseMixin), LoraBaseMixin)

    def loaded(self) -> tuple[list[str], str]:
        """(imports, expression of its path)."""
        if self.is_asset:
            return ["from flowrl.models.pipelines.paths import resolve_path"], f'resolve_path("{self.path}")'
        return [], json.dumps(self.hub_id or Path(self.path).name)


def how(facts: Facts, base: Base, layout: Layout, folder: Path) -> dict[str, Any]:
    """What the template says about the files, the programs that read them, and a distilled model."""
    place = "an asset of flowrl" if base.is_asset else "a model of the hub" if base.hub_id else "a folder of its own"
    return {
        "distilled": declared(base.path, facts.at("model", "revision"), facts.at("model", "distilled")),
        "layout": layout,
        "place": place,
        "foreign": layout in ("kohya", "comfyui") and not _is_read_here(base, layout),
        "file": _one(folder),
        "noise": NOISE,
    }


def snippet(facts: Facts, base: Base, layout: Layout, folder: Path) -> str:
    """Python code that loads the files and samples once, to run in their folder."""
    # The merged folder is the whole model, and `judged.load` knows the assets by name.
    own = layout == "merged" or (layout == "kohya" and _is_read_here(base, layout))
    imports, path = ([], json.dumps(base.path)) if own and base.is_asset else base.loaded()
    lines, extra = list[str](), dict[str, str]()
    dtype = facts.at("model", "dtype")
    options = f", dtype=torch.{dtype}" if dtype in ("bfloat16", "float16") else ""
    imports += ["import torch"] if options or facts.learned_noise else []
    if layout in ("kohya", "comfyui") and not _is_read_here(base, layout):
        imports.append(f"from diffusers import {base.loads}")
        lines.append(f"pipe = {base.loads}.from_pretrained({path}{options})")
    elif layout == "kohya":
        imports.append("from flowrl.run import judged")
        lines.append(f"pipe = judged.load({path}, loras=[{json.dumps(_one(folder))}]).pipeline")
    elif layout == "merged":
        imports.append("from diffusers import DiffusionPipeline")
        lines.append(f'pipe = DiffusionPipeline.from_pretrained("."{options})')
    else:
        imports.append(f"from diffusers import {base.loads}")
        # Denoisers that the folder holds with all their weights.
        whole = () if lora_file(folder).is_file() else ("transformer", "transformer_2", "unet")
        files = [(name, file) for name in whole if (file := folder / name / "config.json").is_file()]
        parts = [(name, json.loads(file.read_text(encoding="utf-8"))["_class_name"]) for name, file in files]
        for name, kind in parts:
            imports.append(f"from diffusers import {kind}")
            lines.append(f'{name} = {kind}.from_pretrained("{name}"{options})')
        given = "".join(f", {name}={name}" for name, _ in parts)
        lines.append(f"pipe = {base.loads}.from_pretrained({path}{options}{given})")
        lines += _lora(base, folder, facts.at("model", "lora", "kind") == "lokr") if lora_file(folder).is_file() else []
    if layout != "kohya" and (shift := facts.at("model", "shift")) is not None:
        lines.append(f"pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, shift={shift})")
    # An evaluated prompt; another where it has characters that a code block would not take.
    prompts = facts.run.after.prompts if facts.run.after else ()
    prompt = f'"{prompts[0] if prompts and _PLAIN.fullmatch(prompts[0]) else "a red circle"}"'
    if facts.learned_noise and layout == "adapter":
        imports += ["from pathlib import Path", "from flowrl.rollout.learned_noise import LearnedNoise"]
        lines += [f'noise = LearnedNoise.load(Path("{NOISE}"))', "distribution = noise.drawn_from(torch.tensor([0]))"]
        prompt, extra = "noise.prompts[0][0]", {"latents": "distribution.sample(torch.randn(distribution.mean.shape))"}
    lines += _called(facts, base, prompt, extra)
    first = sorted(set(imports), key=lambda line: ("flowrl" in line, line.startswith("from"), line))
    helpers = ["export_to_gif"] * base.task.endswith("video") + ["load_image"] * base.task.startswith("image")
    first += [f"from diffusers.utils import {', '.join(helpers)}"] if helpers else []
    return "\n".join([*first, "", *lines])


def _lora(base: Base, folder: Path, is_lokr: bool) -> list[str]:
    if not base.takes_lora or is_lokr:
        name = "unet" if "UNet" in base.kind else "transformer"
        return [f'pipe.{name}.load_lora_adapter(".", prefix="{name}", weight_name="{lora_file(folder).name}")']
    lines = ['pipe.load_lora_weights(".")']
    if lora_file(folder / "transformer_2").is_file():
        lines.append('pipe.load_lora_weights("transformer_2", load_into_transformer_2=True)')
    return lines


def _is_read_here(base: Base, layout: Layout) -> bool:
    """Whether `flowrl.run.judged.load` takes the file."""
    return layout == "kohya" and base.kind in ("", "StableDiffusion3Pipeline")


def _one(folder: Path) -> str:
    """Name of the one .safetensors in a folder."""
    return next((file.name for file in sorted(folder.glob("*.safetensors"))), "lora.safetensors")


def _called(facts: Facts, base: Base, prompt: str, extra: dict[str, str]) -> list[str]:
    """Lines that call the pipeline as the run evaluates it, and save the result."""
    steps = facts.at("eval", "num_inference_steps") or facts.at("rollout", "num_inference_steps")
    scale = facts.at("eval", "guidance_scale")
    scale = facts.at("rollout", "guidance_scale") if scale is None else scale
    guidance = "true_cfg_scale" if base.kind.startswith("QwenImage") else "guidance_scale"
    given: dict[str, Any] = {"num_inference_steps": steps, guidance: scale}
    given |= {name: facts.at("model", name) for name in _OPTIONS}
    own = facts.at("model", "call")
    given |= own if isinstance(own, dict) else {}
    # repr, and not JSON: that has two surrogates for a character such as an emoji, which Python reads as two.
    words = [f"{name}={value!r}" for name, value in given.items() if isinstance(value, int | float | str)]
    words += [f"{name}={value}" for name, value in extra.items()]
    if base.task.startswith("image"):
        words.insert(0, 'image=load_image("input.png")')
    call = f"pipe({prompt}, {', '.join(words)}"
    if base.task.endswith("video"):
        import diffusers

        kind = getattr(diffusers, base.kind, None) if base.kind else None
        known = {} if kind is None else inspect.signature(kind.__call__).parameters
        told = facts.at("model", "fps")
        rate = f"{float(told) if told is not None else rate_of(given, known, 'model.call.'):g}"
        return [f'export_to_gif({call}, output_type="pil").frames[0], "video.gif", fps={rate})']
    return [f'{call}).images[0].save("image.png")']
