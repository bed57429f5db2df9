"""Embeddings of a run's prompts: on demand, in the memory of each process, or in files that the processes share."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from flowrl.config.resolved import Resolved
from flowrl.data.prompts import Prompt
from flowrl.data.text_cache import Texts, batches, encoded
from flowrl.data.text_files import TextFiles, text_folder
from flowrl.data.text_identity import text_identity
from flowrl.display.console import log
from flowrl.display.display import working
from flowrl.evaluation.held_out import RunPrompts
from flowrl.models.base import ModelAdapter, ModelConfig, torch_dtype
from flowrl.training.world import World

_LOOKED_AT = 256
"""Prompts of each list whose tokens are counted: a share of them is enough, and it takes milliseconds."""
_ENDLESS = 10**6
"""Of a tokenizer that states no limit transformers says 10^30."""


def text_lengths(adapter: ModelAdapter, config: ModelConfig, prompts: RunPrompts) -> dict[str, dict[str, float]]:
    """Facts for `provenance.json`: how much of the prompts each text encoder reads. Nothing is encoded.

    The tokenizers of the adapter count; its text encoders may have left the device. Of the prompts the first of each
    list are counted.

    Returns:
        Name of a tokenizer -> `limit` in tokens, `longest` prompt, `cut`, the share of the prompts beyond the limit,
        and `prompts` that were counted. Empty without a pipeline, or where no limit is known.
    """
    from transformers import CLIPTokenizer, PreTrainedTokenizerBase

    listed = [prompt.text for part in (prompts.train, prompts.evaluated) for prompt in part[:_LOOKED_AT]]
    options, result = asdict(config), {}
    own = options.get("max_sequence_length") or (options.get("call") or {}).get("max_sequence_length")
    for name, part in {} if adapter.pipeline is None or not listed else adapter.pipeline.components.items():
        if not isinstance(part, PreTrainedTokenizerBase):
            continue
        # CLIP has a table of positions; the length of a language model is the pipeline's own option.
        limit = part.model_max_length if isinstance(part, CLIPTokenizer) or own is None else own
        if limit >= _ENDLESS:
            continue
        counts = [len(row) for row in part(listed, verbose=False)["input_ids"]]
        cut = sum(count > limit for count in counts) / len(counts)
        result[name] = {"limit": limit, "longest": max(counts), "cut": round(cut, 4), "prompts": len(counts)}
    return result


@working("encoding the prompts")
def embedded(resolved: Resolved, adapter: ModelAdapter, prompts: Sequence[str | Prompt], world: World) -> Texts:
    """The embeddings of a run; each process encodes a share of those that no file holds yet.

    Raises ConfigError: `data.text_cache` is a folder, and these embeddings cannot be kept; WriteError: the disk is full
    or not writable.
    """
    run, config = resolved.run, resolved.model.config
    listed = batches(prompts)
    keys = [key for batch in listed for key in batch]
    size = None if adapter.pipeline is None else len(keys) * _prompt_size(adapter, torch_dtype(config.dtype))
    folder = text_folder(run.data, run.output, size, images=any(images for _, images in keys))
    if folder is None:
        return Texts(adapter, prompts, cache=run.data.caches_text)
    identity = text_identity(adapter, config, world.device)
    files = TextFiles(folder, identity, listed, adapter, partial(encoded, adapter), world.device)
    made = sum(world.together(lambda: files.make(range(world.rank, len(files), world.size))))
    # A folder of another machine does not have what this one wrote.
    world.together(lambda: files.make(files.missing()))
    if world.main:
        log.info("embeddings of %d texts: %d of %d files in %s were made", len(keys), made, len(files), folder)
    return Texts(adapter, (), cache=True, files=files)


def _prompt_size(adapter: ModelAdapter, dtype: torch.dtype) -> int:
    """Bytes of a prompt's embeddings, at most where lengths differ; 0 where the adapter does not know their shapes."""
    try:
        shapes = adapter.condition_shapes()
    except NotImplementedError:  # of a family of the user's own
        return 0
    return sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
