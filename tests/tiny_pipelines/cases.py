"""The tiny pipelines by name, and how each is called."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from tests.tiny_pipelines.recipes import RECIPES, Recipe

PROMPTS = ["a red circle", "two blue squares on the left"]


@dataclass(frozen=True)
class Case:
    """A pipeline and how it is called."""

    build: Recipe
    sizes: tuple[tuple[int, int], ...]
    call: dict[str, Any] = field(default_factory=dict)
    fast: bool = False
    """Part of the default suite, for its code path."""
    free: float = 1.0
    """Guidance scale without guidance."""
    batches: Sequence[int] = (1, 2)
    own: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline's own call, which the table of families gives the adapter."""
    scale: str | None = "guidance_scale"
    """Its argument for guidance; None: the guider's."""
    images: int = 0
    """With each prompt."""
    listed: bool = False
    """They are a list under one argument."""
    enlarged: int = 0
    """Pixels by which their sides are longer than in other cases."""

    def own_call(
        self, pipe: Any, size: tuple[int, int], scale: float, steps: int, batch: int | None = None
    ) -> dict[str, Any]:
        """Arguments of the pipeline's own call at that guidance, for a list of prompts; batch None: for one alone."""
        call: dict[str, Any] = {"height": size[0], "width": size[1], **self.call, **self.own}
        call |= {"num_inference_steps": steps, "output_type": "pt", "return_dict": False}
        if self.scale is None:
            pipe.guider.guidance_scale = scale
        else:
            call[self.scale] = scale
        if self.scale == "true_cfg_scale" and scale > 1:
            call["negative_prompt"] = ""
        if "negative_prompt" in call and batch is not None:
            call["negative_prompt"] = [call["negative_prompt"]] * batch
        return {name: value for name, value in call.items() if value is not None}


def _case(name: str, *, recipe: str = "", sizes: Sequence[Sequence[int]] = ((16, 16), (24, 16)), **given: Any) -> Case:
    return Case(RECIPES[recipe or name], sizes=tuple((height, width) for height, width in sizes), **given)


def _read(kind: str) -> dict[str, Case]:
    """The cases of a kind in cases.yaml."""
    table = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text(encoding="utf-8"))[kind]
    return {name: _case(name, **given) for name, given in table.items()}


CASES = _read("texts")
IMAGED = _read("images")
"""Those that are called with images; the pipelines' own calls take the same ones for a whole batch."""
SOUNDING = _read("sounds")
"""Those that step two tensors, which are refused."""


def make(name: str, seed: int = 0) -> Any:
    """The pipeline of a case: random weights, none of them zero."""
    torch.manual_seed(seed)
    made = (CASES | IMAGED | SOUNDING)[name].build()
    for part in made.components.values():
        if isinstance(part, nn.Module):
            part.eval()
            for p in part.parameters():
                if not bool(p.any()):
                    # Gates and last layers that start at zero would hide everything before them.
                    nn.init.normal_(p, std=0.1)
    made.set_progress_bar_config(disable=True)
    return made


@contextmanager
def stepped(pipe: Any, given: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """What leaves each step of the pipeline's own calls inside; `given` is made of their first latents."""
    left: list[Tensor] = []
    step, prepare = pipe.scheduler.step, pipe.prepare_latents

    def stepping(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        left.append(result[0] if isinstance(result, tuple) else result.prev_sample)
        return result

    def preparing(*args: Any, **kwargs: Any) -> Any:
        found = prepare(*args, **kwargs)
        assert given is not None
        return (given(found[0]), *found[1:]) if isinstance(found, tuple) else given(found)

    pipe.scheduler.step = stepping
    if given is not None:
        pipe.prepare_latents = preparing
    try:
        yield left
    finally:
        del pipe.scheduler.step
        if given is not None:
            del pipe.prepare_latents
