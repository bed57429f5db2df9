"""No private attribute of another object is touched: what others need is public, so a reader may trust an underscore.

Where torch, diffusers or another library offers no other way, the name stands here with its reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [file for folder in ("flowrl", "rewards", "scripts") for file in sorted((ROOT / folder).rglob("*.py"))]
MODULES = {part for file in FILES for part in file.relative_to(ROOT).with_suffix("").parts}
"""Names of modules and packages; tests/test_layers.py says who may import those with an underscore."""
_ASKS = ("getattr", "hasattr", "setattr", "delattr")
ALLOWED = {
    "_exit": "os: a process that must not run the handlers of the one that it was forked from, or wait for threads",
    "_foreach_lerp_": "torch: one kernel for all tensors of a moving average; there is no public form",
    "_foreach_div_": "torch: as _foreach_lerp_, for gradients",
    "_foreach_mul_": "torch: as _foreach_lerp_, for gradients",
    "_forward_pre_hooks": "torch: a copy of a network is to have none of the hooks that watch it",
    "_cdata": "torch: the identity of a storage, which has no public one",
    "_destroy": "torch: takes back the kernels of a library at the end of a block; there is no public form",
    "_scaled_dot_product_flash_attention_for_cpu": "torch: an operator that is counted",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch: an operator that is counted",
    "_attention_backend": "diffusers: a processor that has it may take another kernel",
    "_disable_adapters": "peft: the switch of a LoRA layer; its public form also says which weights are trained",
    "_active_adapter": "peft: the adapter of a LoRA layer that adds to it; as _disable_adapters",
    "_keep_in_fp32_modules": "diffusers: parts that a network wants at full precision",
    "_no_split_modules": "diffusers: blocks that a network wants to stay whole",
    "_repeated_blocks": "diffusers: blocks that a network wants to be compiled one by one",
    "_optional_components": "diffusers: parts that a pipeline works without",
    "_pack_latents": "diffusers: FLUX's and Qwen-Image's own layout of latents",
    "_unpack_latents": "diffusers: as _pack_latents",
    "_prepare_latent_image_ids": "diffusers: FLUX's positions of packed latents",
    "_save_lora_weights": "diffusers: writes a LoRA for a family whose pipeline has no public writer",
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _owns(node: ast.expr) -> bool:
    """Whether an expression is the object itself: self, cls or super()."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every private attribute of another object, those asked for by a string among them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _owns(node.value):
            yield node.lineno, node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKS and node.args[1:]:
            name = node.args[1]
            text = name.value if isinstance(name, ast.Constant) else ""
            if isinstance(text, str) and _is_private(text) and not _owns(node.args[0]):
                yield node.lineno, text
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flowrl"):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_private(alias.name))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_private_attribute_of_another_object_is_touched(file):
    found = private(file.read_text(encoding="utf-8"))
    assert [f"line {line}: {name}" for line, name in found if name not in ALLOWED and name not in MODULES] == []


def test_the_search_sees_every_way():
    source = (
        "a._one\nself.b._two()\nself._mine\ncls._mine\nsuper()._mine()\na.__class__\ngetattr(a, '_three', None)\n"
        "hasattr(self, '_mine')\nfrom flowrl.a import _four, five\nimport os\nos.environ\n"
    )
    assert {name for _, name in private(source)} == {"_one", "_two", "_three", "_four"}


def test_every_exception_is_still_needed():
    used = {name for file in FILES for _, name in private(file.read_text(encoding="utf-8"))}
    assert sorted(set(ALLOWED) - used) == []
