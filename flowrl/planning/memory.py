"""Memory and compute of a run, before anything is downloaded: no weights, only a model's JSON files.

Counts come from modules on the meta device. Peaks come from running the network, the VAE and the text
encoders on fake tensors (shapes and dtypes, no values) and adding up the storages that are alive. Dtypes are CUDA's,
also where a forward runs under autocast (cuda_rules.py).

    peak(phase) = resident(phase) + transient(phase)

    resident  frozen denoiser + trained weights (4 bytes each) + VAE (vae_precision) + snapshots and EMA (4 each)
              + Adam's moments (8 each) + embeddings of the prompts at work (those of all prompts, where they
              are cached, are in host memory);
              in `encode` the text encoders instead of moments, EMA and embeddings
    transient encode      one batch of prompts through the largest text encoder
              rollout     a forward without gradients at rollout.batch_size, doubled by CFG
              decode      the VAE at rollout.batch_size; of given images `images`, its encoder
              evaluation  the larger of those two at eval.batch_size
              gradient    of a reward's gradient: the VAE and the rewards' image networks forward and backward at
                          algorithm.decoded_at_once, beside the gradients of an earlier microbatch
              update      forward, the reference's forward if there is a KL, and backward at optim.batch_size, beside
                          the gradients of an earlier microbatch;
                          at least the gradient (4 bytes per trained weight), with several processes and its flat copy

`model.memory` is followed: weights in few bits as the libraries store and compute them (few_bits.py); parts of
group_offload are not resident, their largest leaf is added where they work; slicing and tiling are the VAE's own.

Not included: reward models, the backbone of saliency maps, the CUDA context (about 0.5 GB), library workspaces
and fragmentation. Attention is counted as a fused kernel, without its matrix of weights. Add 10 to 20 %.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from flowrl.config.resolved import Resolved
from flowrl.config.schema import RunConfig
from flowrl.diffusion.plan import StepPlan
from flowrl.models.base import torch_dtype
from flowrl.models.generic.outline import Unmeasurable
from flowrl.models.memory.meter import faked
from flowrl.models.memory.savings import offloaded
from flowrl.models.pipelines import skeletons
from flowrl.models.weights.lora_kinds import adapted_modules
from flowrl.models.weights.roles import Weights, component_names
from flowrl.planning import few_bits, forwards
from flowrl.planning.cuda_rules import cuda_rules
from flowrl.planning.folding import folded
from flowrl.planning.tree_work import tree_work
from flowrl.reward import Card
from flowrl.training.optimizers import state_bytes
from flowrl.training.world import shard

_FLOAT, _HEADER_PER_TENSOR = 4, 140


def skeleton(resolved: Resolved) -> Any:
    """The run's adapter on the meta device; errors as of `skeletons.skeleton`."""
    model = resolved.model
    return skeletons.skeleton(model.name, model.module, model.config)


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes on the device while a phase runs."""

    name: str
    resident: int
    transient: int | None
    """None: not known without weights."""

    @property
    def peak(self) -> int | None:
        return None if self.transient is None else self.resident + self.transient


@dataclass(frozen=True, slots=True)
class Estimate:
    """All sizes in bytes; counts are of values. Per process."""

    parameters: dict[str, int]
    """Values of every part of the pipeline, as published; without the adapter."""
    stored: dict[str, int]
    """Bytes of the same parts, as this run stores them."""
    offloaded: tuple[str, ...]
    """Parts that stay in host memory."""
    trained: int
    lora_modules: int
    """Modules the adapter binds to; 0 for full fine-tuning."""
    saved: int
    """Size of the file of the trained weights."""
    prompt: int
    """Embeddings of one prompt."""
    embeddings: int
    """Embeddings of all prompts, where they are cached: in host memory or in files (`text_folder`)."""
    moments: int
    """The optimizer's state, of which `paged` leaves a full device for the host."""
    paged: int
    ema: int
    snapshots: int
    latents: int
    """Host memory: latents of a rollout that the update will need."""
    images: int
    """Host memory: decoded images of a rollout."""
    phases: tuple[Phase, ...]
    rows: tuple[int, int, int]
    """Network evaluations of a rollout, of its updates without frozen ones, and there of the images of `data.anchor`;
    under CFG one is two."""
    rollout_flop: float | None
    """Floating-point operations of the network in a rollout; a multiply-add counts as 2."""
    update_flop: float | None
    unknown: dict[str, str]
    """Reason by name of what is not known without weights."""

    def spared(self, processes: int, *, full: bool) -> int:
        """Resident bytes that `model.shard` saves each of `processes`.

        It splits the frozen base, or full weights with their moments, EMA and snapshots. About three gathered blocks
        and the gradients of one are needed on top.
        """
        split = self.stored["denoiser"] + (self.moments + self.ema + self.snapshots if full else 0)
        return split - -(-split // processes)

    @property
    def peak(self) -> Phase | None:
        """The largest phase, where all are known."""
        return None if self.unknown else max(self.phases, key=lambda phase: phase.peak or 0)


def count(module: nn.Module | None) -> int:
    """Number of parameters; buffers such as position embeddings are not among them."""
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def size(module: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def forward_rows(
    run: RunConfig, plan: StepPlan, samples: int, slots: int, share: float = 1.0, terms: int | None = None
) -> tuple[int, int]:
    """Network evaluations of a rollout and of its updates, without CFG, a reference and dead groups.

    Samples of one start share them up to the first stochastic step. Trees: `tree_work`. `samples` are those of an
    iteration, `slots` its prompts, `share` the part of the edges or terms that is trained. `terms`: training times of
    each sample; None: the plan's trained steps.
    """
    steps, trained, firsts = len(plan), plan.trained if terms is None else terms, plan.firsts()
    if not run.rollout.shared_noise or not firsts:
        return samples * steps, round(samples * trained * share)
    together, updates = sum(firsts) / len(firsts) + 1, run.optim.updates_per_iteration
    starts = firsts[0] in plan.train
    at_start = updates * min(slots, math.ceil(samples / updates)) if starts else 0
    later = round(samples * (trained - starts) * share)
    return round(slots * together + samples * (steps - together)), at_start + later


def anchor_rows(resolved: Resolved, plan: StepPlan, processes: int = 1) -> int:
    """Network evaluations in an optimizer step of the images of `data.anchor`, on the busiest process."""
    options, fitting = resolved.run.data.anchor, resolved.fitting
    if options is None or fitting is None:
        return 0
    return math.ceil(options.per_update / processes) * fitting.demand(plan, resolved.setting).rows


def estimate(resolved: Resolved, adapter: Any, plan: StepPlan, *, prompts: int, processes: int = 1) -> Estimate:
    """Counts, bytes and operations of a run.

    `adapter` is a fresh one from `skeleton`, which is changed; the trained steps of `plan` decide how many latents are
    kept; `prompts` distinct texts have cached embeddings. The samples are shared by `processes`: the result is per
    process.
    """
    run, config, pipeline = resolved.run, resolved.model.config, adapter.pipeline
    dtype, method, frozen = torch_dtype(config.dtype), resolved.method, resolved.training.frozen
    encoders = {name: part for name, part in pipeline.components.items() if name.startswith("text_encoder") and part}
    parts = {"denoiser": adapter.network, "vae": pipeline.vae} | encoders
    parameters = {name: count(part) for name, part in parts.items()}
    roles = [role for role in method.roles if role != "reference" or config.lora is None]
    weights = _weights(adapter, resolved, prompts)
    trained, away = weights.count, offloaded(pipeline, config)
    stored = {name: size(part) for name, part in parts.items()}
    stored["denoiser"] -= _FLOAT * trained if config.lora else 0
    own = shard(resolved.slots, resolved.group_size, 0, processes, plan.leaves)
    here = {name: 0 if name in away else held for name, held in stored.items()}
    texts = sum(here[name] for name in encoders)
    prompt = sum(torch.Size(shape).numel() for shape in adapter.condition_shapes().values()) * dtype.itemsize
    embeddings = prompt * prompts if run.data.caches_text else 0
    ema, snapshots = (trained * _FLOAT if run.optim.ema else 0), trained * _FLOAT * len(roles)
    base = size(adapter.network) + here["vae"]
    at_work = max(resolved.slots, run.eval.batch_size // run.eval.samples_per_prompt)
    moments, paged = state_bytes(run.optim.name, (p.shape for p in weights.parameters.values()))
    loaded = base + prompt * at_work + ema + snapshots + moments
    loaded += (0 if run.data.caches_text else texts) + (_FLOAT * trained if frozen else 0)
    samples = len(own)
    rows, kept = _work(resolved, plan, samples, len({slot for slot, _ in own}), processes)
    transient, unknown = _measure(adapter, encoders, resolved, reference=bool(method.roles))
    if transient["update"] is not None:
        transient["update"] = max(transient["update"], (1 + (processes > 1)) * _FLOAT * trained)
    return Estimate(
        parameters=parameters,
        stored=stored,
        offloaded=tuple(away),
        trained=trained,
        lora_modules=len(adapted_modules(weights.parameters)),
        saved=trained * _FLOAT + _HEADER_PER_TENSOR * len(weights.parameters),
        prompt=prompt,
        embeddings=embeddings,
        moments=moments + paged,
        paged=paged,
        ema=ema,
        snapshots=snapshots,
        latents=(kept + samples) * torch.Size(adapter.latent_shape()).numel() * _FLOAT,
        images=_images(resolved, adapter, samples),
        phases=(
            Phase("encode", base + texts, transient["encode"]),
            *(Phase(name, loaded, transient[name]) for name in _phases(resolved)),
        ),
        rows=rows,
        rollout_flop=_times(transient["forward_flop"], rows[0]),
        update_flop=_times(transient["edge_flop"], rows[1] + transient["fitted"] * rows[2]),
        unknown=unknown,
    )


def _work(
    resolved: Resolved, plan: StepPlan, samples: int, slots: int, processes: int
) -> tuple[tuple[int, int, int], int]:
    """(`Estimate.rows`, latents kept) for `samples` samples of `slots` prompts."""
    passes = resolved.method.passes
    fitted = passes * resolved.run.optim.updates_per_iteration * anchor_rows(resolved, plan, processes)
    if plan.tree is not None:
        work = tree_work(resolved, plan)
        return (work.rollout_rows(samples), work.update_rows(samples), fitted), work.latents(samples)
    demand = resolved.training.demand(plan, resolved.setting)
    sampled, trained = forward_rows(resolved.run, plan, samples, slots, demand.share, passes * demand.rows)
    return (sampled * resolved.drawn // resolved.group_size, trained, fitted), samples * demand.latents


def _phases(resolved: Resolved) -> tuple[str, ...]:
    """Phases of an iteration and of evaluations on the device."""
    drawn = ("rollout",) if resolved.drawn else ()
    climbed = ("gradient",) if climbed_at_once(resolved) else ()
    read = ("images",) if resolved.members or resolved.anchor else ()
    decoded = () if resolved.members else ("decode",)
    return (*drawn, *read, *decoded, "evaluation", *climbed, "update")


def climbed_at_once(resolved: Resolved) -> int:
    """Images through which a gradient is taken at once; 0: none, as of rewards that all judge latents."""
    gates = {plan.entry.gate.output for plan in resolved.rewards if plan.entry.gate is not None}
    seen = any(not p.on_latents for p in resolved.rewards if p.entry.weight or gates & {*p.outputs})
    return vars(resolved.algorithm.config).get("decoded_at_once", 0) if seen else 0


def climbed_cards(resolved: Resolved) -> list[Card]:
    """The cards, where there are some, of the rewards of images whose gradient is taken."""
    climbed = [plan for plan in resolved.rewards if plan.entry.weight != 0 and not plan.on_latents]
    return [plan.card for plan in climbed if plan.card is not None]


def _images(resolved: Resolved, adapter: Any, samples: int) -> int:
    """Host memory of an iteration's images: 8 bits a value; given ones are floats, opened a batch at a time."""
    held = _FLOAT * min(samples, resolved.run.rollout.batch_size) if resolved.members else samples
    return held * 3 * adapter.num_frames * adapter.height * adapter.width


def _weights(adapter: Any, resolved: Resolved, prompts: int) -> Weights:
    """The trained weights, with the frozen ones stored as the memory options say."""
    config, networks = resolved.model.config, component_names(adapter.network).values()
    few_bits.quantise(networks, config)
    # Fake tensors are not compiled.
    unread, texts = dataclasses.replace(config, init_lora=None, compile=None), [(str(k), ()) for k in range(prompts)]
    with torch.device("meta"):
        weights = resolved.training.weights(adapter, unread, texts, 0, "meta")
    few_bits.imitate_casting(networks, config)
    return weights


def _times(one: float | None, count: float) -> float | None:
    return None if one is None else one * count


def _measure(
    adapter: Any, encoders: dict[str, nn.Module], resolved: Resolved, *, reference: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """(transient bytes of every phase with operations per sample of a forward and per edge of an update; the reasons
    for those that cannot be measured)."""
    run, config, vae = resolved.run, resolved.model.config, adapter.pipeline.vae
    guidance, reads = run.rollout.guidance_scale, "images" in _phases(resolved)
    eval_guidance = guidance if run.eval.guidance_scale is None else run.eval.guidance_scale
    batch, edges, shown = run.rollout.batch_size, run.optim.batch_size, run.eval.batch_size
    in_training = resolved.training.guidance(adapter, guidance)
    visiting, unknown = offloaded(adapter.pipeline, config), {}
    leaf = {name: largest_leaf(part) if name in visiting else 0 for name, part in ({"vae": vae} | encoders).items()}

    # Autocast keeps casts of weights until its end, in no graph; every n-th block is unlike the others.
    alike = adapter.own_network and not adapter.autocasts and config.gradient_checkpointing in (True, False, "auto")
    repeating = [adapter.network] if alike else []

    def attempt(what: str, work: Callable[[], Any], *, grad: bool = False) -> tuple[int | None, float | None]:
        try:
            return folded(work, repeating if what in ("rollout", "update") else [], grad=grad)
        except Unmeasurable as error:
            unknown[what] = str(error)
            return None, None

    count = min(edges, climbed_at_once(resolved))
    seeing = [*forwards.image_networks(climbed_cards(resolved) if count else []).values()]
    with faked(adapter.network, vae, *encoders.values(), *seeing), cuda_rules():
        forward = attempt("rollout", lambda: forwards.predict(adapter, batch, guidance))
        same = eval_guidance == guidance
        held_out = forward if same else attempt("rollout", lambda: forwards.predict(adapter, batch, eval_guidance))
        decode = attempt("decode", lambda: forwards.decode(adapter, batch))
        given = attempt("images", lambda: forwards.latents(adapter, batch)) if reads else (0, 0.0)
        # One by one, a batch takes hardly more than an image; otherwise bytes are proportional to it.
        images = attempt("decode", lambda: forwards.decode(adapter, shown)) if config.memory.vae_slicing else decode
        slope = attempt("gradient", lambda: forwards.slope(adapter, count, seeing), grad=True) if count else (0, 0.0)
        trained = [p for p in adapter.network.parameters() if p.requires_grad]
        fit, frozen = partial(forwards.microbatch, adapter, trained, edges), resolved.training.frozen  # not evaluated
        update = (0, 0.0) if frozen else attempt("update", lambda: fit(in_training, reference), grad=True)
        alone = resolved.fitting and resolved.fitting.guidance(adapter, guidance)
        fitted = (0, 0.0) if alone is None else attempt("update", lambda: fit(alone, reference=False), grad=True)
        texts = [
            folded(lambda n=n, e=e: forwards.encode(n, e, adapter), [e], grad=False)[0] + leaf[n]
            for n, e in encoders.items()
        ]
    share, evaluation = shown / batch, None
    if held_out[0] is not None and images[0] is not None:
        largest = images[0] * (1 if config.memory.vae_slicing else share) + leaf["vae"]
        evaluation = max(round(share * held_out[0]), round(largest))
    return {
        "encode": max(texts, default=0),
        "rollout": forward[0],
        "decode": None if decode[0] is None else decode[0] + leaf["vae"],
        "images": None if given[0] is None else given[0] + leaf["vae"],
        "evaluation": evaluation,
        "gradient": None if slope[0] is None else slope[0] + leaf["vae"] + _FLOAT * sum(map(torch.numel, trained)),
        "update": update[0],
        "forward_flop": _times(forward[1], 1 / batch),
        "edge_flop": _times(update[1], 1 / edges),
        "fitted": (fitted[1] or 0.0) / (update[1] or 1.0),
    }, unknown


def largest_leaf(part: nn.Module) -> int:
    """Bytes of the largest module of a part that visits the device leaf by leaf."""
    return max(sum(t.numel() * t.element_size() for t in module.parameters(False)) for module in part.modules())
