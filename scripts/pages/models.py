"""docs/models.md, from the table of families and the tiny pipelines of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowrl.core.errors import ModelError
from flowrl.data.given_samples import require_encoder
from flowrl.models.generic.adapter import Config, Generic
from flowrl.models.generic.families import FAMILIES, Family, Guidance
from flowrl.models.generic.options import find_networks
from flowrl.models.pipelines.classes import natives
from tests import tiny_pipelines as tiny

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "models.md"
GUIDANCE: dict[Guidance, str] = {
    "cfg": "`guidance_scale`: CFG",
    "true_cfg": "`true_cfg_scale`: CFG with a negative prompt",
    "embedded": "`guidance_scale`: an input of the network",
    "guider": "the scale of the guider",
    "none": "none",
}
HEAD = """# Models

Written by `python -m scripts.pages` from `flowrl/models/generic/families.py` and the tiny pipelines of the
tests; do not edit.

`model.name: generic` trains any diffusers pipeline that ends each denoising step with `scheduler.step`. Each class
below is tested with a tiny pipeline that has random weights; no real weights were run. In these pipelines the denoiser,
the VAE, CLIP and T5 are those of the libraries. Larger language models (Qwen, Gemma, Llama, Mistral, GLM) are replaced
by a stub. `flowrl doctor --model PATH` compares any class with the pipeline's own call and prints what it read.

If a class is not listed, `flowrl train`, `eval` and `pairs` check the class when they load a model: the pipeline's own
call and flowrl take the same two steps, with one sample and the recipe's guidance, without the decoder. If the
predictions differ by more than 1e-3 of the largest value (5e-2 in half precision), the command stops with both numbers.
A class that passes is noted in `~/.cache/flowrl/own_calls` (or below `FLOWRL_CACHE`), with the libraries' versions and
the model's options.
A class that steps more than one tensor, such as the LTX-2 classes with their sound, is refused by name.

Parity means that flowrl and the pipeline's own call give the same latents and images from the same noise, within 1e-4
(fp32). It is tested with the plain solver, with and without guidance, at two sizes, for batches of one and two.
`default` is checked by `scripts/test.sh`, `slow` by `.ci/run`. For a class with a native adapter `model.name` chooses
the native or the generic adapter. If `model.name` is left out, flowrl takes the native adapter if it can use the
checkpoint (text prompts only, a scheduler that it knows), else `generic`. For VP models and their options see
[noise_prediction.md](noise_prediction.md), for models of few steps [distilled.md](distilled.md).

Given images are those of a preference set, from which `sft`, `diffusion_dpo`, `diffusion_kto` and `seppo` learn. A
class has *yes* if its tiny pipeline makes latents of an image: flowrl reads from the class's own code where each value
of the VAE's latents comes from, and a random sample must come back within 1e-3. The same is done when a model is loaded
for given images, and what cannot be undone is refused by name. Videos are given through `wan` alone.

| pipeline | process, prediction | meaning of `guidance_scale` | network's timestep | native | given images | parity |
|---|---|---|---|---|---|---|
"""
TAIL = """
`t` is the scheduler's timestep. The process and the prediction follow from the scheduler; the table has those of the
tiny pipeline. Of a multistep scheduler flowrl uses only the grid of noise levels, and takes its own steps.

## Remarks

Arguments of the pipeline's call are set under `model.call`. Arguments that flowrl decides (prompt, size, steps,
guidance, seed), embeddings and callbacks are refused for every class. Dead modules are those whose output the network
drops: they can have a LoRA, but never get a gradient. `{last}` is the number of the last block.

"""

ABOUT_IMAGES = """
## Images in a prompt record

A record of a prompt file (a `.jsonl`, a `.json` list, a `.csv` or `.tsv` with a header) may name reference images or a
first frame, with paths relative to the file. A `.parquet` file or a data set of Hugging Face (`data.prompts: hf:PATH`)
may have the images in a column:

```json
{"prompt": "make the circle blue", "image": "images/0001.png"}
{"prompt": "it starts to roll", "images": ["first.png", "last.png"]}
```

`data.image_column` names another key or column. Either all records have an image or none has.

- The images are opened when the file is read, so a missing or unreadable one, or an animation, ends the run before a
  model is loaded. A record without the image that its model needs, or with one that its model does not take, ends the
  run before training. So does a source that does not reach the network: its negative must change the prediction.
- FLUX Kontext without images makes images of the prompts alone, and the run says so.
- Transparent areas become white, and 16-bit grey becomes 8 bits; grey of 32 bits or of floats is refused.
- The features that a pipeline computes from the images are computed once and cached with the text.
- Rewards find the absolute paths, in their order, in `metadata["images"]` (a list also if the record has `image`).
- Images from inside a data set are written to `~/.cache/flowrl/images` (or below `FLOWRL_CACHE`) under the hash of
  their content.

Images of one size go through the network together, those of different sizes do not. If the pipeline embeds the image by
itself (Wan 2.1), only samples of the same image go together. Native adapters take text only and refuse such records, as
do all classes without a remark on images above.

## Image to video

For the classes with `ImageToVideo` in their names, the image of a record is the video's first frame. Where the model
takes two images, the second is the last frame.

**Size.** An image may have any size. It is scaled (Lanczos) until it just covers `model.height` x `model.width`, and
its middle is cut out: the aspect ratio is kept, where diffusers' pipelines would stretch the image. An image that would
be enlarged more than twice is refused with its path, before training. `model.first_frame: exact` also refuses an image
that would be cropped. A model's own image encoder (Wan 2.1, HunyuanVideo) sees the fitted image. `flowrl sample` fits
images in the same way. Edit models (Kontext, Qwen-Image-Edit, FLUX.2) get their images as they are.

**What is trained.** Wan 2.2 TI2V-5B, LTX and Sana hold the first frame among their latents. That part stays clean and
has timestep 0: no noise is drawn for it, and log-probs, losses and KL are over the other frames alone. The other models
(Wan 2.1, Wan 2.2 A14B, HunyuanVideo, CogVideoX) get the frame next to the latents, and all latents are trained.

**TI2V-5B.** Its published folder names the class of text to video. To give it a first frame, name the other class:

```yaml
model:
  path: Wan-AI/Wan2.2-TI2V-5B-Diffusers
  pipeline: WanImageToVideoPipeline
  height: 704
  width: 1280
  call: {num_frames: 121}
```

`flowrl plan` estimates such a model too, with stand-ins for its VAE's encoding and its image encoder, and of
Qwen-Image-Edit for the processor that reads the image. Kontext can do without a source, so its estimate has none.
"""


@dataclass
class Found:
    """What one class shows through its tiny pipelines."""

    model: Generic
    """Around the first of them."""
    cases: list[tiny.Case]
    networks: int = 1
    """Most of them that one case trains."""


def examples() -> dict[str, Found]:
    """The tiny pipelines by class."""
    result: dict[str, Found] = {}
    for name, case in (tiny.CASES | tiny.IMAGED).items():
        pipeline = tiny.make(name)
        kind = type(pipeline).__name__
        if kind not in result:
            height, width = case.sizes[0]
            model = Generic(pipeline, Config(path="tiny", height=height, width=width, call=case.call))
            result[kind] = Found(model, [])
        result[kind].cases.append(case)
        result[kind].networks = max(result[kind].networks, len(find_networks(pipeline)))
    return result


def time_map(model: Generic) -> str:
    slope, offset = model.time_map()
    size = abs(slope)
    part = "t" if abs(size - 1) < 1e-6 else f"t / {1 / size:.4g}"
    if abs(offset) < 1e-6:
        return part
    return f"{offset:.4g} {'-' if slope < 0 else '+'} {part}"


def parity(found: Found) -> str:
    when = "default" if any(case.fast for case in found.cases) else "slow"
    largest = max(case.batches[-1] for case in found.cases)
    return when if largest > 1 else f"{when}, batch {largest} only"


def given(model: Generic, native: str) -> str:
    """Whether it is fitted to given images or videos, as tried."""
    try:
        require_encoder(model)
    except ModelError:
        return f"videos, by `{native}`" if native else "no"
    return "yes"


def row(kind: str, found: Found | None, native: str) -> str:
    if found is None:
        return f"| {kind} | | | | {native} | | not tested |"
    model, family = found.model, FAMILIES[kind]
    guidance = GUIDANCE[model.guidance]
    if family.free_at == 0:
        guidance += "; s means s + 1 elsewhere, 0 is none"
    process = type(model.process).__name__.removesuffix("Process")
    cells = [kind, f"{process}, {model.prediction_type}", guidance, time_map(model), native]
    cells += [given(model, native), parity(found)]
    return f"| {' | '.join(cells)} |"


def remarks(family: Family, found: Found | None) -> Iterator[str]:
    """Sentences on a class, none where there is nothing to say."""
    if found is not None:
        if not all(hasattr(network, "add_adapter") for network in found.model.networks.values()):
            yield "its network takes no LoRA in diffusers: full weights only"
        if found.networks > 1:
            yield "two trainable networks, one for each part of the steps, where the model has both"
    yield from image_remarks(family)
    if family.singly:
        yield f"samples are predicted one by one: {family.singly}"
    if family.decode_singly:
        yield f"images are decoded one by one: {family.decode_singly}"
    if family.per_step:
        yield f"samples of different steps cannot share a forward: {family.per_step}"
    for name, value in family.call.items():
        yield f"called with `{name}={value}`"
    reasons: dict[str, list[str]] = {}
    for name, reason in family.refused.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    for reason, names in reasons.items():
        yield f"refused: {', '.join(names)} ({reason})"
    for entry, (value, reason) in family.unfit.items():
        yield f"refused: a model with `{entry}={value}`, which {reason}"
    if family.note:
        yield family.note
    if family.dead:
        yield f"dead modules: {', '.join(f'`{name}`' for name in family.dead)}"


def image_remarks(family: Family) -> Iterator[str]:
    """Sentences on the images that a class takes."""
    if not family.images:
        return
    count = len(family.images)
    many = "an image" if count == 1 else f"an image, or {count} where the model needs them"
    if family.image_list:
        many = "one image or more" if family.needs_image else "any number of images"
    yield f"with each prompt it {'needs' if family.needs_image else 'may have'} {many} (see below)"
    if family.holds:
        yield "the image's frame stays as it is: flowrl's latents are the other frames"
    if family.mask is not None:
        yield f"with `{family.mask[0]}` (Wan 2.2 TI2V-5B) the image's frame stays as it is, its tokens at timestep 0"
    if family.sized_by_image:
        yield "its call has no size: `model.height` x `model.width` is one of its own sizes"


def pages() -> dict[Path, str]:
    """The page and its whole text."""
    result, native = examples(), natives()
    rows = [row(kind, result.get(kind), native.get(kind, "")) for kind in FAMILIES]
    said = {kind: list(remarks(family, result.get(kind))) for kind, family in FAMILIES.items()}
    lines = [f"- **{kind}**: {'; '.join(sentences)}." for kind, sentences in said.items() if sentences]
    text = HEAD + "\n".join(rows) + "\n" + TAIL + "\n".join(lines) + "\n" + ABOUT_IMAGES
    return {FILE: text}
