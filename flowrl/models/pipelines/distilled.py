"""Distillation to few steps: how a checkpoint says it, and what a model without CFG and with its own steps refuses.

    evidence, the first that speaks                                             kind
    the option `model.distilled`                                                as it says
    model_index.json or modular_model_index.json: `is_distilled`,               `distilled_kind`, else nodes
        `distilled_sigmas`, `distilled_kind`
    Flux2KleinKVPipeline, whose `is_distilled` is true by default               nodes
    scheduler  FlowMapEulerDiscrete, TCD                                        flow_map
               LCM, FlowMatchLCM, SCM (SANA-Sprint)                             consistency
               Piflow                                                           nodes
               Euler, EulerAncestral: eps, trailing (SD-Turbo, SDXL-Turbo)      adversarial
    UNet with `time_cond_proj_dim`                                              consistency (LCM)
    FluxPipeline with `guidance_embeds: false` (FLUX.1-schnell)                 nodes

A name (turbo, schnell, lightning, distill) proves nothing, and is only told. diffusers drops entries of
model_index.json that it does not know, so the file itself is read, and written again after `save_pretrained`.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from flowrl.core.assets import table
from flowrl.core.errors import ModelError, Remedy

Kind = Literal["nodes", "flow_map", "consistency", "adversarial"]
Said = Literal["none", "nodes", "flow_map", "consistency", "adversarial"]
"""What the option `model.distilled` says."""
FLAG, SIGMAS, KIND = "is_distilled", "distilled_sigmas", "distilled_kind"
"""Entries of a checkpoint's index; the first two are Cosmos3's."""
INDICES = ("modular_model_index.json", "model_index.json")
_TABLES = table(Path(__file__).with_suffix(".yaml"))
_WORDS, _SCHEDULERS = _TABLES["words"], _TABLES["schedulers"]
_EULER = ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")


@dataclass(frozen=True, kw_only=True, slots=True)
class Distilled:
    """How a checkpoint was distilled to few steps."""

    kind: Kind
    """`nodes`: to the steps of one grid; `flow_map`, `consistency`: to any; `adversarial`: on noise-prediction models,
    to 1 to 4 steps of their own grid."""
    sigmas: tuple[float, ...] | None = None
    """Listed noise levels at which its steps begin, falling in (0, 1]; None: no list."""
    evidence: str
    """What says so."""
    declared: bool = False
    """The checkpoint or the user says so; otherwise it is concluded from other settings, and may be wrong."""

    @property
    def nodes(self) -> tuple[float, ...] | None:
        """The only noise levels at which its network may be called; None: not known, or there are others."""
        return self.sigmas if self.kind == "nodes" else None

    def __str__(self) -> str:
        levels = "" if self.nodes is None else f" {', '.join(f'{sigma:g}' for sigma in self.nodes)}"
        return f"{_TABLES['words'][self.kind]}{levels} ({self.evidence})"

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of an index that say the same; none where other settings of the checkpoint do."""
        if not self.declared:
            return {}
        named = self.sigmas is not None or self.kind != "nodes"
        levels = {} if self.sigmas is None else {SIGMAS: list(self.sigmas)}
        return {FLAG: True} | levels | ({KIND: self.kind} if named else {})

    def write(self, folder: Path) -> None:
        """Write `entries` into the model_index.json of a folder that `save_pretrained` wrote."""
        file = folder / "model_index.json"
        values = json.loads(file.read_text(encoding="utf-8")) | self.entries
        file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def require_steps(self, steps: int, key: str) -> None:
        """Raise ModelError for another number of steps than that of the nodes; `key` is the option or flag."""
        if self.nodes is not None and steps != len(self.nodes):
            raise ModelError(
                f"{_given(key, steps)}: the model is distilled {self}, and its network knows these steps alone",
                _remedy(key, len(self.nodes)),
            )

    def refuse_cfg(self, guidance_scale: float, free_at: float, key: str) -> None:
        """Raise ModelError for CFG; `free_at` is the scale without it, `key` the option or flag that gives it."""
        instead = [] if key.startswith("-") else [Remedy({"model.distilled": "none"})]
        raise ModelError(
            f"{_given(key, guidance_scale)}: the model is distilled {self} and takes no CFG, whose scale is "
            f"{free_at:g} then; one that is not distilled takes it",
            [_remedy(key, free_at), *instead],
        )


def _given(key: str, value: float) -> str:
    return f"{key} {value:g}" if key.startswith("-") else f"{key}={value:g}"


def _remedy(key: str, value: float) -> Remedy:
    return Remedy(flag=_given(key, value)) if key.startswith("-") else Remedy({key: value})


def found(
    index: Mapping[str, Any], scheduler: Mapping[str, Any], network: Mapping[str, Any], said: Said | None = None
) -> Distilled | None:
    """The kind by the JSON of a checkpoint: its index, its scheduler and its denoiser; the first two with their class.

    Raises ModelError: the index has a kind or noise levels that cannot be.
    """
    result, kind = by_index(index, said), scheduler.get("_class_name", "")
    if result is not None or said == "none" or index.get(FLAG) is False:
        return result
    if kind in _SCHEDULERS:
        return Distilled(kind=_SCHEDULERS[kind], evidence=kind)
    if network.get("time_cond_proj_dim") is not None:
        return Distilled(kind="consistency", evidence="time_cond_proj_dim")
    eps = scheduler.get("prediction_type", "epsilon") == "epsilon" and not scheduler.get("rescale_betas_zero_snr")
    if kind in _EULER and scheduler.get("timestep_spacing") == "trailing" and eps:
        # At zero terminal SNR such a network could not start there.
        return Distilled(kind="adversarial", evidence=f"{kind}, trailing")
    if index.get("_class_name") == "FluxPipeline" and network.get("guidance_embeds") is False:
        return Distilled(kind="nodes", evidence="guidance_embeds: false")
    return None


def by_index(index: Mapping[str, Any], said: Said | None) -> Distilled | None:
    """What the index of a checkpoint says, or the user in its place."""
    named = index.get("_class_name") == "Flux2KleinKVPipeline" or any(index.get(key) for key in (SIGMAS, KIND))
    flag = index.get(FLAG, named)
    if said == "none" or not (flag or said):
        return None
    sigmas = None if index.get(SIGMAS) is None else _levels(index[SIGMAS])
    kind = index.get(KIND) or "nodes"
    if kind not in get_args(Kind):
        raise ModelError(f"{INDICES[1]}: {KIND}={kind!r} is not known; there are: {', '.join(get_args(Kind))}")
    if said is not None:
        return Distilled(kind=said, sigmas=sigmas, evidence="model.distilled", declared=True)
    return Distilled(kind=kind, sigmas=sigmas, evidence=FLAG, declared=True)


def _levels(value: Any) -> tuple[float, ...]:
    """A list of noise levels. Raises ModelError: it does not fall strictly, or leaves (0, 1]."""
    numbers = value if isinstance(value, list | tuple) else []
    good = all(isinstance(each, int | float) and not isinstance(each, bool) and 0 < each <= 1 for each in numbers)
    if not numbers or not good or any(a <= b for a, b in pairwise(numbers)):
        raise ModelError(
            f"{INDICES[1]}: {SIGMAS}={json.dumps(value)} must fall strictly and lie in (0, 1]: the noise levels at "
            "which its steps begin, such as [1.0, 0.75, 0.5, 0.25]; mend them in that file",
            {"model.distilled": "none"},
        )
    return tuple(map(float, numbers))


@contextmanager
def without_warnings_of_entries() -> Iterator[None]:
    """Leave out diffusers' warnings, two a load, of index entries that it does not know where they are these alone."""

    def tells(record: logging.LogRecord) -> bool:
        names = re.findall(r"'(\w+)': ", record.getMessage())
        return not names or not {FLAG, SIGMAS, KIND}.issuperset(names)

    loggers = [logging.getLogger(f"diffusers.{name}") for name in ("configuration_utils", "pipelines.pipeline_utils")]
    for each in loggers:
        each.addFilter(tells)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(tells)
