"""Memory and compute of a run, before anything is downloaded: no weights, only a model's JSON files.

Counts come from modules on the meta device. Peaks come from running the network, the VAE and the text
encoders on fake tensors (shapes and dtypes, no values) and adding up the storages that are alive.

    peak(phase) = resident(phase) + transient(phase)

    resident  frozen denoiser + trained weights (4 bytes each) + VAE (float32) + snapshots and EMA (4 each)
              + Adam's moments (8 each) + embeddings of the prompts at work (those of all prompts, where they
              are cached, lie in host memory);
              in `encode` the text encoders instead of moments, EMA and embeddings
    transient encode      one batch of prompts through the largest text encoder
              rollout     a forward without gradients at rollout.batch_size, doubled by CFG
              decode      the VAE at rollout.batch_size
              evaluation  the larger of those two at eval.batch_size
              update      forward, the reference's forward if there is a KL, and backward at optim.batch_size;
                          at least the gradient with its three flat copies (16 bytes per trained weight)

Not in it: reward models, the backbone of saliency maps, the CUDA context (about 0.5 GB), library workspaces
and fragmentation. Attention is counted as a fused kernel, without its matrix of weights. Add 10 to 20 %.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from flowrl.config import Resolved, RunConfig
from flowrl.distributed import shard
from flowrl.models.base import asset_folder, asset_roots, loading, torch_dtype
from flowrl.models.weights import Weights
from flowrl.plan import StepPlan
from flowrl.types import Condition, SampleId

TEXT_BATCH = 64  # prompts per forward of the text encoders, as in flowrl.prompts.Texts
_FLOAT, _HEADER_PER_TENSOR, _LONG = 4, 140, 1000


class UnknownModel(ValueError):
    """Nothing can be said about a model before it is there."""


def locate(path: str) -> Path:
    """Folder with a model's JSON files: an embedded asset, a local folder, or what is embedded for a hub id.

    Raises:
        UnknownModel: the files are not on this machine.
    """
    asset = asset_folder(path)
    if asset is not None:
        return asset
    local = Path(path).expanduser()
    if (local / "model_index.json").is_file():
        return local
    for root in asset_roots():
        index = root / "model_configs" / "index.json"
        known = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
        if path in known:
            return index.parent / known[path]
    raise UnknownModel(
        f"model.path={path!r}: its configuration is not embedded, so schedule and memory are not known before the "
        "model is here; give a folder that holds it"
    )


def skeleton(resolved: Resolved) -> Any:
    """The run's adapter on the meta device.

    Raises:
        UnknownModel: its JSON files are not here, or its family cannot be built without weights.
    """
    make = getattr(resolved.model.module, "skeleton", None)
    if make is None:
        raise UnknownModel(f"model.name={resolved.model.name!r} cannot be measured without its weights")
    path = resolved.model.config.path
    folder = locate(path)
    with loading("model.path", path):
        return make(resolved.model.config, folder)


_ATEN = torch.ops.aten
_FLOP = {
    **flop_registry,
    # torch counts attention on a GPU only.
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
}


class Meter(TorchDispatchMode):
    """Bytes of the storages made inside the block: `now` still alive, `peak` the most at any moment; and `flop`.

    torch's own FlopCounterMode keeps activations alive under gradient checkpointing, so it cannot run beside this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flop = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = _FLOP.get(func._overloadpacket)
        if formula is not None:
            self.flop += formula(*args, **kwargs, out_val=result)
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self._alive:
                continue  # a view, or written in place
            self._alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size)
        return result

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes on the device while a phase runs."""

    name: str
    resident: int
    transient: int

    @property
    def peak(self) -> int:
        return self.resident + self.transient


@dataclass(frozen=True, slots=True)
class Estimate:
    """All sizes in bytes; counts are of values. Per process."""

    parameters: dict[str, int]
    """Of every part of the pipeline, as published; without the adapter."""
    trained: int
    lora_modules: int
    """Modules the adapter binds to; 0 for full fine-tuning."""
    saved: int
    """File of the trained weights."""
    prompt: int
    """Embeddings of one prompt."""
    embeddings: int
    """Host memory: embeddings of all prompts, where they are cached."""
    moments: int
    ema: int
    snapshots: int
    latents: int
    """Host memory: latents of a rollout that the update will need."""
    pictures: int
    """Host memory: decoded pictures of a rollout."""
    phases: tuple[Phase, ...]
    rollout_flop: float
    """Floating-point operations of the network in a rollout; a multiply-add counts as 2."""
    update_flop: float

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak)


def count(module: nn.Module | None) -> int:
    """Number of parameters; buffers such as position embeddings are not among them."""
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def size(module: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def nodes_per_sample(plan: StepPlan) -> int:
    """Latents kept per sample: both ends of every trained step, shared where steps are neighbours.

    >>> from flowrl.plan import window
    >>> from flowrl.schedules import Schedule
    >>> grid = Schedule(torch.linspace(1, 0, 9), torch.arange(8.0))
    >>> nodes_per_sample(window(grid, 0.7, [0, 1, 2])), nodes_per_sample(window(grid, 0.7, [0, 3]))
    (4, 4)
    """
    return len(plan.train) + sum(k - 1 not in plan.train for k in plan.train)


def trained_share(resolved: Resolved, plan: StepPlan) -> float:
    """Share of a rollout's edges that is trained where no group is dead: a method may select samples and steps."""
    run, algorithm = resolved.run, resolved.algorithm.build()
    size, rule = run.rollout.group_size, getattr(algorithm.config, "advantages", None)
    samples = 1.0 if rule is None or rule.select is None else rule.select.keep / size
    kept = algorithm.kept_edges([SampleId(0, k) for k in range(size)], plan, 1, run.seed)
    return samples if kept is None else samples * float(kept.float().mean())


def forward_rows(run: RunConfig, plan: StepPlan, samples: int, slots: int, share: float = 1.0) -> tuple[int, int]:
    """Network evaluations of an iteration's rollout and updates, for `samples` samples of `slots` prompts,
    where `share` of the edges is trained.

    Samples of one start share them up to the first stochastic step; CFG, a reference and dead groups apart.
    """
    steps, trained = len(plan), len(plan.train)
    if not run.rollout.shared_noise or not any(plan.stochastic):
        return samples * steps, round(samples * trained * share)
    first, updates = plan.stochastic.index(True), run.optim.updates_per_iteration
    at_start = updates * min(slots, math.ceil(samples / updates)) if first in plan.train else 0
    behind = round(samples * (trained - (first in plan.train)) * share)
    return slots * (first + 1) + samples * (steps - first - 1), at_start + behind


def estimate(resolved: Resolved, adapter: Any, plan: StepPlan, *, prompts: int, processes: int = 1) -> Estimate:
    """Counts, bytes and operations of a run.

    Args:
        resolved: the run.
        adapter: a fresh one from `skeleton`; it is used up.
        plan: of an iteration; its trained steps decide how many latents are kept.
        prompts: distinct texts whose embeddings are cached.
        processes: over which the samples are spread; everything returned is of one of them.
    """
    run, config, pipeline = resolved.run, resolved.model.config, adapter.pipeline
    dtype, used = torch_dtype(config.dtype), resolved.algorithm.build().roles
    encoders = {name: part for name, part in pipeline.components.items() if name.startswith("text_encoder") and part}
    parameters = {"denoiser": count(adapter.network), "vae": count(pipeline.vae)}
    parameters |= {name: count(part) for name, part in encoders.items()}
    roles = [role for role in used if role != "reference" or config.lora is None]
    with torch.device("meta"):
        weights = Weights(adapter.network, config.lora, adapter.lora_targets, seed=0)
    trained = weights.count
    own = shard(run.rollout.prompts_per_iteration, run.rollout.group_size, 0, processes)
    samples = len(own)
    latent = torch.Size(adapter.latent_shape()).numel()
    prompt = sum(torch.Size(shape).numel() for shape in adapter.condition_shapes().values()) * dtype.itemsize
    embeddings = prompt * prompts if run.data.cache_text else 0
    ema = trained * _FLOAT if run.optim.ema else 0
    snapshots = trained * _FLOAT * len(roles)
    base = size(adapter.network) + size(pipeline.vae)
    at_work = max(run.rollout.prompts_per_iteration, run.eval.batch_size // run.eval.samples_per_prompt)
    loaded = base + prompt * at_work + ema + snapshots + 2 * _FLOAT * trained
    if not run.data.cache_text:
        loaded += sum(size(part) for part in encoders.values())
    sampled, trained_on = forward_rows(
        run, plan, samples, len({slot for slot, _ in own}), trained_share(resolved, plan)
    )
    measured = _measure(adapter, encoders, resolved, reference=bool(used))
    return Estimate(
        parameters=parameters,
        trained=trained,
        lora_modules=sum(".lora_A." in name for name in weights.parameters),
        saved=trained * _FLOAT + _HEADER_PER_TENSOR * len(weights.parameters),
        prompt=prompt,
        embeddings=embeddings,
        moments=2 * _FLOAT * trained,
        ema=ema,
        snapshots=snapshots,
        latents=samples * (nodes_per_sample(plan) + 1) * latent * _FLOAT,
        pictures=samples * 3 * getattr(adapter, "num_frames", 1) * adapter.height * adapter.width * _FLOAT,
        phases=(
            Phase("encode", base + sum(size(part) for part in encoders.values()), measured["encode"]),
            Phase("rollout", loaded, measured["rollout"]),
            Phase("decode", loaded, measured["decode"]),
            Phase("evaluation", loaded, measured["evaluation"]),
            Phase("update", loaded, max(measured["update"], 4 * _FLOAT * trained)),
        ),
        rollout_flop=measured["forward_flop"] * sampled,
        update_flop=measured["edge_flop"] * trained_on,
    )


def _measure(adapter: Any, encoders: dict[str, nn.Module], resolved: Resolved, *, reference: bool) -> dict[str, float]:
    """Transient bytes of every phase, and operations per sample of a forward and of an update's edge."""
    run = resolved.run
    guidance = run.rollout.guidance_scale
    eval_guidance = guidance if run.eval.guidance_scale is None else run.eval.guidance_scale
    batch, edges = run.rollout.batch_size, run.optim.batch_size
    with _faked(adapter.network, adapter.pipeline.vae, *encoders.values()):
        forward = _run(lambda: _predict(adapter, batch, guidance), grad=False)
        latents = (batch, *adapter.latent_shape())
        decode = _run(lambda: adapter.decode(torch.empty(latents)), grad=False)
        update = _run(lambda: _loss(adapter, edges, guidance, reference).backward(), grad=True)
        encode = max((_run(lambda e=e: _encode(e, adapter), grad=False)[0] for e in encoders.values()), default=0)
        held_out = forward
        if eval_guidance != guidance:
            held_out = _run(lambda: _predict(adapter, batch, eval_guidance), grad=False)
    share = run.eval.batch_size / batch
    return {
        "encode": encode,
        "rollout": forward[0],
        "decode": decode[0],
        "evaluation": round(share * max(held_out[0], decode[0])),
        "update": update[0],
        "forward_flop": forward[1] / batch,
        "edge_flop": update[1] / edges,
    }


@contextmanager
def _faked(*modules: nn.Module) -> Iterator[None]:
    """Fake tensors inside the block; the meta parameters of `modules` become fake ones on the CPU."""
    with FakeTensorMode():
        for part in (sub for module in modules for sub in module.modules()):
            for name, p in part._parameters.items():
                if p is not None:
                    part._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
            for name, b in part._buffers.items():
                if b is not None:
                    part._buffers[name] = torch.empty(b.shape, dtype=b.dtype)
            for name, t in vars(part).items():
                if isinstance(t, torch.Tensor):  # tables that are no buffers, as Qwen-Image's rotary ones
                    setattr(part, name, torch.empty(t.shape, dtype=t.dtype))
        yield


def _run(work: Callable[[], Any], *, grad: bool) -> tuple[int, float]:
    """(peak bytes, operations) of some work."""
    with torch.set_grad_enabled(grad), Meter() as meter:
        work()
    return meter.peak, float(meter.flop)


def _predict(adapter: Any, batch: int, guidance_scale: float) -> torch.Tensor:
    """One guided forward of `batch` samples, as the run makes it."""
    dtype = torch_dtype(adapter.config.dtype)
    cond = Condition({k: torch.empty(batch, *shape, dtype=dtype) for k, shape in adapter.condition_shapes().items()})
    adapter.unconditional = cond.index(torch.zeros(1, dtype=torch.int64))
    x, timestep = torch.empty(batch, *adapter.latent_shape()), torch.full((batch,), 500.0)
    return adapter.predict(x, timestep, cond, guidance_scale)


def _loss(adapter: Any, batch: int, guidance_scale: float, reference: bool) -> torch.Tensor:
    output = _predict(adapter, batch, guidance_scale).float()
    if reference:
        with torch.no_grad():
            other = _predict(adapter, batch, guidance_scale).float()
        output = output - other
    return output.square().mean()


def _encode(encoder: nn.Module, adapter: Any) -> Any:
    # CLIP pads to its table of positions; that of a language model is far longer than any prompt.
    positions = getattr(encoder.config, "max_position_embeddings", None) or _LONG
    tokens = positions if positions < _LONG else adapter.config.max_sequence_length
    ids = torch.zeros(getattr(adapter, "text_batch", TEXT_BATCH), tokens, dtype=torch.int64)
    return encoder(ids, output_hidden_states=True)
