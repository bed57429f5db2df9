"""Prompts and pairs of `flowrl plan`, as far as they are known without the network."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.config.resolved import Resolved


@dataclass(frozen=True, slots=True)
class Data:
    """Training and evaluation data of a run, as far as they are on this machine."""

    lines: tuple[str, ...]
    """Sentences for the user: what is known, and what is not."""
    texts: int
    """Number of distinct texts whose embeddings are cached, of the known ones."""
    unknown: bool
    """Whether some data are on the hub."""
    images: bool
    """Whether prompts have images."""
    evaluated: int | None
    """Number of prompts for evaluation; None: not known."""
    searched: int | None = None
    """Number of captions on which `eval.best_guidance` is compared; None: not known, or none are."""

    def counted(self, slots: int) -> int:
        """Texts whose embeddings are cached, at least those of an iteration of `slots` prompts."""
        return max(self.texts, slots if self.unknown else 0)


def data_here(resolved: "Resolved") -> Data:
    """The data of a run, without data sets on the hub."""
    from flowrl.data.given_samples import Given
    from flowrl.data.prompt_sources import hub_id
    from flowrl.evaluation.held_out import run_prompts
    from flowrl.run.best_guidance import captions

    run, data, own = resolved.run, resolved.run.data, resolved.training.own_prompts
    sources = {"prompts": data.prompts, "eval_prompts": data.eval_prompts}
    sources |= {"anchor.path": None if data.anchor is None else data.anchor.path}
    if data.pairs is not None:
        sources |= {"pairs.path": data.pairs.path, "pairs.eval": data.pairs.eval}
    remote = {key: value for key, value in sources.items() if hub_id(value) is not None}
    lines = [
        f"data.{key}={value!r}: a data set of the hub, and a plan asks the network for nothing; its number of "
        "records, and whether its columns fit, are not known: give a folder that holds it (hf:FOLDER)"
        for key, value in remote.items()
    ]
    texts: set[Any] = set()
    count: int | None = None
    evaluated: int | None = None
    prompts, given = None, None
    if "prompts" in remote:
        lines.append("number of training prompts: not known")
    elif "eval_prompts" in remote:
        whole = {} if data.prompts is None else {"eval_share": 0.0}  # nothing is split off where some are named
        prompts = run_prompts(replace(run, data=replace(data, eval_prompts=None, **whole)), own)
        texts |= {(p.text, p.images) for p in prompts.train}
        count = len(prompts.train)
        lines.append(f"{count} training prompts; number of prompts for evaluation: not known")
    else:
        prompts = run_prompts(run, own)
        texts |= {(p.text, p.images) for p in (*prompts.train, *prompts.evaluated)}
        count, evaluated = len(prompts.train), len(prompts.evaluated)
        if resolved.members:
            lines.append(f"{len(prompts.evaluated)} prompts for evaluation")
        else:
            lines.append(prompts.describe() + (f" ({prompts.source})" if prompts.share is not None else ""))
        lines += [prompts.remark] if prompts.remark else []
    if "pairs.path" in remote:
        count = None
        lines.append("number of pairs: not known")
    elif data.pairs is not None:
        here = replace(data.pairs, eval=None) if "pairs.eval" in remote else data.pairs
        given = Given(here, resolved.method, run.seed, resolved.model.config.frames)
        count = len(given.records)
        texts |= set(given.captions()) if data.caches_text else set()
        lines += [f"{given.pairs.report}", f"{len(given.held_out_numbers)} held-out pairs"]
    lines += [] if "anchor.path" in remote else _anchor(resolved, texts)
    if count is not None and count < resolved.slots:
        lines.append("fewer than are drawn in an iteration: some are drawn twice")
    searched = None
    if run.eval.best_guidance and prompts is not None and (data.pairs is None or given is not None):
        searched = len(captions(prompts, given))
    return Data(tuple(lines), len(texts), bool(remote), any(images for _, images in texts), evaluated, searched)


def _anchor(resolved: "Resolved", texts: set[Any]) -> list[str]:
    """Sentences about the images of `data.anchor`, whose captions are added to the `texts` that are cached."""
    from flowrl.run.assembly.data import anchor_images

    given = anchor_images(resolved)
    if given is None:
        return []
    texts |= set(given.captions()) if resolved.run.data.caches_text else set()
    line = f"data.anchor: {given.options.per_iteration} images an iteration"
    return [f"{given.pairs.report}", line]


def evaluations(resolved: "Resolved", data: Data) -> str:
    """A sentence: the evaluations of a run and the images they draw."""
    from flowrl.evaluation.diversity import SAMPLES

    run, options, prompts = resolved.run, resolved.run.eval, data.evaluated
    during = (run.iterations - 1) // options.every if options.every and run.iterations else 0
    own = run.rollout.guidance_scale if options.guidance_scale is None else options.guidance_scale
    scales = len({own, *options.best_guidance}) if options.best_guidance else 0
    text = f"evaluations: the base, {during} during training, the result"
    if scales:
        many = "" if data.searched is None else f"{data.searched} "
        text += f"; of base and result {scales} guidance scales on {many}training captions, and the best one"
    if prompts is None or (scales and data.searched is None):
        return f"{text}; the images that they draw are not known"
    if not prompts:
        return "evaluations: no prompts are evaluated"
    few = min(prompts, options.periodic_prompts or prompts)
    images = 2 * prompts + during * few
    images += 2 * (scales * (data.searched or 0) + prompts) if scales else 0
    images *= options.samples_per_prompt
    alike = ((4 if scales else 2, prompts), (during, few))
    missing = max(0, SAMPLES - options.samples_per_prompt)
    images += missing * sum(times * min(options.diversity or 0, count) for times, count in alike)
    shown = options.preview_prompts if isinstance(options.preview_prompts, list) else ()
    images += (2 + during) * len(shown)
    steps = options.num_inference_steps or run.rollout.num_inference_steps
    return f"{text}; {images} images of {steps} steps in all" + (", preview prompts among them" if shown else "")
