"""The steps of a GPU day by stage: a command, its time limit, and its small form for a rehearsal on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

SD3 = "configs/sd3/flow_grpo-pickscore.yaml"
FLUX = "configs/flux/flow_grpo-pickscore.yaml"
QWEN = "configs/qwen_image/flow_grpo_fast-pickscore.yaml"
WAN = "configs/wan/flow_grpo-ocr.yaml"
SDXL = (
    "configs/sd/ddpo-aesthetic.yaml",
    "model={name: sdxl, path: stabilityai/stable-diffusion-xl-base-1.0, dtype: bfloat16, lora: {rank: 16, alpha: 16}}",
)
TINY = (
    "configs/lab/flow_grpo-lora.yaml",
    "model={name: sd3, path: tiny-sd3, lora: {rank: 4, alpha: 8}, max_sequence_length: 9}",
    "rollout={sampler: {name: flow_sde, noise_level: 0.7}, num_inference_steps: 4, guidance_scale: 4.5, "
    "prompts_per_iteration: 2, group_size: 4, batch_size: 2}",
    "algorithm.sde_steps=null",
)
"""Stands in for every model in a rehearsal."""
LARGE_VAES = "vae-float32,now,vae-bfloat16"
VAES = f"{LARGE_VAES},vae-channels-last"
"""The first is what the others are compared with."""
REHEARSED = "now,checkpointing"
"""Variants of a rehearsal; compiling takes too long."""
LARGE_1024 = ("model.height=1024", "model.width=1024")
STAGES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Step:
    """One command of a stage."""

    stage: int
    name: str
    limit_s: int
    words: tuple[str, ...]
    """After `python3 -m`; RESULTS and FOLDER stand for the file of results and its folder."""
    small: tuple[str, ...] | None = None
    """The words of a rehearsal; None: it is left out there."""


def bench(
    stage: int, name: str, limit_s: int, what: str, config: tuple[str, ...], *options: str, small: str = ""
) -> Step:
    """`scripts.bench gpu` on random weights; in a rehearsal the measurements `small` on tiny-sd3, if it names some."""
    fixed, kept = ("scripts.bench", "gpu"), ("--random", "--json", "RESULTS")
    rehearsed = (*fixed, *TINY, *kept, "--what", small, "--repeats", "1")
    if "--variants" in options:
        rehearsed = (*rehearsed, "--variants", REHEARSED)
    words = (*fixed, *config, *kept, "--what", what, *options)
    return Step(stage, name, limit_s, words, rehearsed if small else None)


def other(stage: int, name: str, limit_s: int, words: tuple[str, ...], small: tuple[str, ...] | None = None) -> Step:
    """Another bench."""
    return Step(stage, name, limit_s, ("scripts.bench", *words), None if small is None else ("scripts.bench", *small))


def attention(backend: str) -> Step:
    """FLUX with one backend of diffusers."""
    config = (FLUX, f"model.attention={backend}")
    return bench(3, f"flux-attention-{backend.strip('_')}", 40, "gate,rollout", config)


QUIET = ("-q", "-p", "no:cacheprovider")
CPU_TESTS = (
    "tests/contracts",
    "tests/e2e/test_quickstart.py",
    "tests/e2e/test_samples.py",
    "tests/e2e/test_trees.py",
)
"""Tests that take a GPU where there is one."""
RESULTS = ("--json", "RESULTS")
TRACE = ("--random", "--out", "FOLDER/trace.json.gz")
STEPS = (
    Step(1, "doctor", 60, ("flowrl", "doctor"), ("flowrl", "doctor")),
    other(
        1,
        "ceilings",
        60,
        ("ceilings", *RESULTS),
        ("ceilings", *RESULTS, "--size", "64", "--copied-mib", "1", "--repeats", "1"),
    ),
    other(
        1,
        "attention",
        90,
        ("attention", *RESULTS),
        ("attention", *RESULTS, "--divisor", "256", "--repeats", "1"),
    ),
    Step(1, "tests-gpu", 240, ("pytest", "tests/gpu", "-m", "gpu", "-rs", *QUIET)),
    Step(
        1, "tests-cpu-on-gpu", 150, ("pytest", *CPU_TESTS, "-m", "not slow", "-k", "not two and not processes", *QUIET)
    ),
    bench(
        2, "sd3", 120, "gate,rollout,update,memory,noise", (SD3,), "--batches", "8", small="gate,rollout,memory,noise"
    ),
    Step(
        2,
        "flow_grpo",
        60,
        ("scripts.gpu_day.flow_grpo_loop", SD3, *RESULTS, "--batch", "8"),
        ("scripts.gpu_day.flow_grpo_loop", *TINY, *RESULTS, "--batch", "2", "--repeats", "1"),
    ),
    bench(
        2,
        "sd3-variants",
        200,
        "gate,rollout,update",
        (SD3,),
        "--batches",
        "8",
        "--variants",
        "autocast,native,compile",
        small="update",
    ),
    bench(2, "sd3-batches", 90, "rollout,update", (SD3,), "--batches", "4,16"),
    bench(2, "sd3-bfloat16", 40, "gate", (SD3, "model.dtype=bfloat16"), "--batches", "8"),
    bench(2, "sd3-checkpointing", 40, "update", (SD3,), "--batches", "8", "--variants", "checkpointing,positive"),
    other(
        2,
        "sd3-profile",
        60,
        ("profile", SD3, *TRACE),
        ("profile", *TINY, *TRACE),
    ),
    bench(3, "flux-512", 130, "rollout,update,memory", (FLUX,), "--variants", "checkpointing,stored"),
    bench(
        3, "flux-1024", 150, "rollout,update", (FLUX, *LARGE_1024), "--batches", "4", "--variants", "native,autocast"
    ),
    bench(3, "qwen", 140, "gate,rollout,update,memory", (QWEN,), small="rollout"),
    other(3, "qwen-profile", 140, ("profile", QWEN, "--random", "--out", "FOLDER/qwen.json.gz")),
    attention("_native_cudnn"),
    attention("_native_flash"),
    attention("flash"),
    bench(4, "wan-240p", 140, "rollout,update,decode,memory", (WAN,), small="decode"),
    bench(
        4,
        "wan-480p",
        120,
        "rollout,update",
        (WAN, "model.height=480", "model.width=832", "model.num_frames=81"),
        *("--batches", "1", "--repeats", "1"),
    ),
    bench(4, "checkpoint", 40, "checkpoint", (SD3,), small="checkpoint"),
    bench(4, "decode-sd3", 60, "decode", (SD3,), "--batches", "8", "--variants", VAES),
    bench(4, "decode-flux", 80, "decode", (FLUX, *LARGE_1024), "--batches", "2", "--variants", LARGE_VAES),
    bench(4, "sdxl", 60, "rollout,update", SDXL, "--batches", "4"),
    bench(
        4, "sd3-float8", 40, "rollout,memory", (SD3, "model.memory.layerwise_casting=float8_e4m3fn"), "--batches", "8"
    ),
    bench(4, "sd3-full", 60, "update,checkpoint", (SD3, "model.lora=null", "model.dtype=bfloat16"), "--batches", "4"),
    other(4, "reentry", 40, ("reentry",), None),
    other(4, "overhead", 40, ("overhead", "configs/lab/flow_grpo.yaml"), None),
)
