"""Counts and peaks from the meta device and fake tensors, against the real things at tiny size."""

import dataclasses
import json
import math
from typing import Any

import open_clip
import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch import nn

from flowrl.commands.plan import geometry
from flowrl.config.load import resolve
from flowrl.config.resolved import Resolved
from flowrl.config.schema import RunConfig
from flowrl.core.errors import ModelError
from flowrl.core.strict import validate
from flowrl.core.types import SampleId
from flowrl.diffusion.plan import StepPlan, window
from flowrl.models import sd3
from flowrl.models.memory import meter
from flowrl.models.memory.meter import Meter
from flowrl.models.pipelines.skeletons import UnknownModel, locate
from flowrl.planning import forwards
from flowrl.planning.cuda_rules import cuda_rules
from flowrl.planning.memory import estimate, forward_rows, skeleton
from flowrl.reward import Card
from flowrl.rewards import hpsv2
from flowrl.rollout.loop import run
from flowrl.rollout.noise import Noise
from flowrl.rollout.policy import Policy
from flowrl.rollout.trajectories import Asked
from flowrl.samplers import flow_sde
from flowrl.training.base import Demand
from flowrl.training.edge_batches import nodes_per_sample
from flowrl.training.optim import Optimizer
from flowrl.training.options import OptimConfig
from tests import tiny_sd3 as tiny

SD35 = "stabilityai/stable-diffusion-3.5-medium"
GIB = 2**30


def resolved(path: str, model: dict | None = None, **changes: dict | list) -> Resolved:
    """A run with 2 x 3 samples, of SD3 unless `model` says otherwise; changes replace whole sections."""
    model = {"name": "sd3", "path": path} | (model or {})
    if model["name"] == "sd3":
        model = {"max_sequence_length": tiny.TOKENS} | model
    tree = {
        "name": "estimate",
        "iterations": 1,
        "model": model,
        "data": {"prompts": "shapes:train"},
        "rewards": [{"name": "shapes"}],
        "rollout": {"prompts_per_iteration": 2, "group_size": 3, "batch_size": 2, "num_inference_steps": 4},
        "optim": {"updates_per_iteration": 1, "batch_size": 2},
    }
    return resolve(validate(RunConfig, tree | changes, ""))


def measured(run: Resolved, *, prompts: int = 1, processes: int = 1) -> Any:
    """An `Estimate`, of which the tests know what is None."""
    adapter = skeleton(run)
    return estimate(run, adapter, plan_of(run, adapter), prompts=prompts, processes=processes)


def plan_of(run: Resolved, adapter: sd3.Sd3) -> StepPlan:
    grid = adapter.schedule(run.run.rollout.num_inference_steps)
    return run.algorithm.build().plan(grid, run.sampler.build(), 1, 0)


# ---- where the configuration comes from


def test_embedded_configurations_assets_and_folders_are_found(folder, monkeypatch):
    assert locate(SD35) == tiny.ROOT / "assets" / "model_configs" / "sd35-medium"
    assert locate(str(folder)) == folder
    monkeypatch.setenv("FLOWRL_ASSETS", str(folder.parent))
    assert locate(folder.name) == folder


@pytest.mark.parametrize("path", ["owner/unheard-of", "/nothing/here", "model.safetensors"])
def test_what_is_not_here_is_said_to_be_unknown(path):
    with pytest.raises(UnknownModel, match="not known before the model is downloaded"):
        skeleton(resolved(path))


def test_a_folder_that_lacks_a_part_is_named(folder, tmp_path):
    (tmp_path / "model_index.json").write_text((folder / "model_index.json").read_text())
    with pytest.raises(ModelError, match=r"model\.path=.* could not be loaded"):
        skeleton(resolved(str(tmp_path)))


def test_a_family_without_a_skeleton_is_said_to_be_unknown(folder, monkeypatch):
    run = resolved(str(folder))
    monkeypatch.delattr(sd3, "skeleton")
    with pytest.raises(UnknownModel, match="cannot be measured without its weights"):
        skeleton(run)


# ---- the meter


def test_the_meter_counts_what_is_alive_and_the_most_that_was():
    x = torch.zeros(1000)  # made outside: not counted
    with Meter() as meter:
        y = x + 1
        assert (meter.now, meter.peak) == (4000, 4000)
        assert x[:5].numel() == 5  # a view of what was there before
        assert meter.now == 4000
        view = y[:10]
        y += 1
        assert meter.now == 4000  # a view and a write in place are no new memory
        z = y * 2
        assert (meter.now, meter.peak) == (8000, 8000)
        del y, z
        assert meter.now == 4000  # the view keeps y's storage
        del view
        assert (meter.now, meter.peak) == (0, 8000)


def test_the_meter_counts_multiply_adds_twice():
    with Meter() as meter:
        torch.mm(torch.zeros(3, 5), torch.zeros(5, 7))
        q = torch.zeros(2, 4, 10, 16)
        nn.functional.scaled_dot_product_attention(q, q, q)
    assert meter.flop == 2 * 3 * 5 * 7 + 2 * (2 * 2 * 4 * 10 * 10 * 16)


def test_a_forward_without_gradients_frees_what_it_no_longer_needs():
    layers = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
    x = torch.zeros(50, 100)
    with torch.no_grad(), Meter() as without:
        layers(x)
    with Meter() as kept:
        result = layers(x)
    assert without.peak == 2 * 50 * 100 * 4
    assert kept.peak == 8 * 50 * 100 * 4
    del result


@pytest.mark.parametrize("grad", [False, True])
def test_fake_tensors_need_what_real_ones_need(grad):
    def work(model: sd3.Sd3) -> None:
        if grad:
            forwards.loss(model, 3, 4.0, reference=True).backward()
        else:
            forwards.predict(model, 3, 4.0)

    real, faked = tiny.adapter(), tiny.adapter()
    for model in (real, faked):
        tiny.lora(model)
    measured = meter.measured(lambda: work(real), grad=grad)
    with meter.faked(faked.network):
        assert meter.measured(lambda: work(faked), grad=grad) == measured


# ---- the estimate against the real thing


def test_the_sizes_are_those_of_the_run_itself(folder, tmp_path):
    settings = {"rank": 4, "alpha": 10}
    optim = {"updates_per_iteration": 1, "batch_size": 2, "ema": {"decay": 0.5}}
    run_ = resolved(str(folder), {"lora": settings}, optim=optim)
    result = measured(run_, prompts=7)
    model = tiny.adapter()
    weights = tiny.lora(model)
    assert result.parameters["denoiser"] == sum(
        p.numel() for name, p in model.network.named_parameters() if "lora_" not in name
    )
    assert (result.trained, 2 * result.lora_modules) == (weights.count, len(weights.parameters))
    weights.save(tmp_path, StableDiffusion3Pipeline)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    assert result.saved == pytest.approx(file.stat().st_size, rel=0.05)
    cond = model.encode(["a red circle"])
    stored: list[Any] = [*cond.tensors.values()]  # SD3 has one tensor by name
    assert result.prompt == sum(value.numel() * value.element_size() for value in stored)
    assert result.embeddings == 7 * result.prompt
    optimizer = Optimizer(weights, OptimConfig(ema=None), 1)
    optimizer.step(optimizer.pieces(torch.ones(weights.count)))
    moments, _ = optimizer.state()
    assert result.moments == sum(v.numel() * 4 for name, v in moments.items() if not name.endswith("/step"))
    assert (result.ema, result.snapshots) == (4 * weights.count, 0)
    ids = [SampleId(slot, sample) for slot in range(2) for sample in range(3)]
    policy = Policy(model, flow_sde.build(flow_sde.Config()), 1.0)
    noise = Noise(0, "x", 1, model.latent_shape())
    plan = plan_of(run_, model)
    rows = torch.zeros(6, dtype=torch.int64)
    samples, edges = run(policy, plan, noise, Asked(ids, cond, rows), batch_size=2)
    assert result.latents == 4 * (samples.x0.numel() + edges.nodes.numel())
    assert result.images == model.decode(samples.x0).numel(), "8 bits a value"


def test_full_weights_and_a_reference_cost_what_they_hold(folder):
    run_ = resolved(str(folder), {"dtype": "bfloat16"}, algorithm={"name": "flow_grpo", "kl": {"coef": 0.1}})
    result = measured(run_)
    assert result.trained == result.parameters["denoiser"]
    assert result.lora_modules == 0
    assert result.snapshots == 4 * result.trained
    update = next(phase for phase in result.phases if phase.name == "update")
    assert update.transient >= 4 * result.trained  # the gradient


def test_a_split_denoiser_leaves_each_process_its_share(folder):
    lora = measured(resolved(str(folder), {"lora": {"rank": 2}}))
    full = measured(resolved(str(folder), optim={"updates_per_iteration": 1, "batch_size": 2, "ema": {}}))
    whole = lora.stored["denoiser"]
    assert lora.spared(1, full=False) == 0
    assert lora.spared(4, full=False) == pytest.approx(whole * 3 / 4, abs=1)
    # Weights, two moments and the average; its buffers are a thousandth and stay whole.
    assert full.spared(2, full=True) == pytest.approx(4 * full.trained * 4 / 2, rel=1e-3)


def test_processes_share_the_samples(folder):
    run_ = resolved(str(folder))
    one, two = (measured(run_, processes=n) for n in (1, 2))
    assert two.latents == one.latents // 2
    assert two.rollout_flop == one.rollout_flop / 2
    assert two.phases[:-1] == one.phases[:-1]
    # Several processes reduce one flat copy of the gradient.
    assert two.phases[-1].peak == max(one.phases[-1].peak, one.phases[-1].resident + 8 * one.trained)


def test_samples_of_one_start_share_their_forwards_up_to_the_first_stochastic_step(folder):
    run_ = resolved(str(folder), algorithm={"name": "flow_grpo", "sde_steps": [1, 2]})
    rollout = dataclasses.replace(run_.run.rollout, shared_noise=True)
    shared = dataclasses.replace(run_.run, rollout=rollout)
    slots, steps = rollout.prompts_per_iteration, rollout.num_inference_steps
    samples, updates = run_.run.samples_per_iteration, run_.run.optim.updates_per_iteration
    plan = plan_of(run_, skeleton(run_))
    assert forward_rows(run_.run, plan, samples, slots) == (samples * steps, 2 * samples)
    at_start = updates * min(slots, -(-samples // updates))
    assert forward_rows(shared, plan, samples, slots) == (2 * slots + samples * (steps - 2), at_start + samples)


def test_steps_and_samples_that_a_method_leaves_out_are_not_counted(folder):
    """DanceGRPO keeps int(2 * 0.5) of two steps and here two samples of a group."""
    half = {"name": "dance_grpo", "sde_steps": [1, 2], "timestep_fraction": 0.5, "clip_range": 1e-4}
    fewer = half | {"advantages": {"name": "group", "select": {"name": "best_worst", "keep": 2}}}
    one, two = (resolved(str(folder), algorithm=algorithm) for algorithm in (half, fewer))
    plan = plan_of(one, skeleton(one))
    assert one.training.demand(plan, one.setting).share == 0.5
    assert two.training.demand(plan, two.setting).share == pytest.approx(0.5 * 2 / two.run.rollout.group_size)
    samples, slots = one.run.samples_per_iteration, one.run.rollout.prompts_per_iteration
    assert forward_rows(one.run, plan, samples, slots, 0.5)[1] == samples


def test_cached_embeddings_take_host_memory_and_not_the_device(folder):
    run_ = resolved(str(folder), {"lora": {"rank": 4}})
    few, many = (measured(run_, prompts=count) for count in (7, 1000))
    assert many.embeddings == 1000 * few.prompt
    assert many.phases == few.phases


def test_encoders_stay_where_texts_are_not_cached(folder):
    cached, not_cached = (
        measured(resolved(str(folder), data={"prompts": "shapes:train", "cache_text": cache}))
        for cache in (True, False)
    )
    assert not_cached.embeddings == 0
    encoders = sum(count for name, count in cached.parameters.items() if name.startswith("text_encoder"))
    before, after = (next(p for p in each.phases if p.name == "rollout").resident for each in (cached, not_cached))
    assert after - before == pytest.approx(4 * encoders, rel=0.01)


def test_neighbouring_steps_share_a_latent(folder):
    grid = skeleton(resolved(str(folder))).schedule(8)
    assert nodes_per_sample(window(grid, 0.7)) == 8
    assert nodes_per_sample(window(grid, 0.7, [0, 2, 3])) == 5


def test_checkpointing_trades_memory_for_a_forward(folder):
    options = {"rollout": {"guidance_scale": 4.0}, "optim": {"batch_size": 32}}
    plain, light = (
        measured(resolved(str(folder), {"lora": {"rank": 4}, "gradient_checkpointing": on}, **options))
        for on in (False, True)
    )
    assert light.phases[:4] == plain.phases[:4]
    assert light.phases[4].transient < 0.5 * plain.phases[4].transient
    edges = 1152 * 9
    forward = plain.rollout_flop / (1152 * 10)
    # All blocks once more; what comes before and after them is kept.
    assert 0.9 * forward < (light.update_flop - plain.update_flop) / edges <= forward


def test_a_rewards_gradient_needs_the_decoder_both_ways(folder):
    assert "gradient" not in {phase.name for phase in measured(resolved(str(folder))).phases}
    options = {
        "rewards": [{"name": "clip_score", "model": "tiny-clip", "preprocess": "fast"}],
        "optim": {"batch_size": 4, "updates_per_iteration": 1},
    }
    options["rollout"] = {"prompts_per_iteration": 4, "group_size": 1, "batch_size": 4, "num_inference_steps": 4}
    peaks = []
    for count in (1, 2, 4, 8):
        climbing = {"name": "draft", "low_variance": 0, "decoded_at_once": count}
        result = measured(resolved(str(folder), algorithm=climbing, **options))
        gradient = next(phase for phase in result.phases if phase.name == "gradient")
        peaks.append(gradient.transient - 4 * result.trained)  # beside the gradients of an earlier microbatch
    # Activations are proportional to the images; a batch has no more than its four.
    assert peaks[1] - peaks[0] == pytest.approx((peaks[2] - peaks[1]) / 2, rel=0.05)
    assert peaks[3] == peaks[2] > 3 * peaks[0]


def test_a_rewards_image_network_is_counted_where_its_card_names_one(folder, monkeypatch):
    """On fake tensors as on real ones: decoder, tiny-clip and the gradient at the latents, on a tiny SD3."""
    described = json.loads((tiny.ROOT / "assets" / "tiny-clip" / "open_clip_config.json").read_text())["model_cfg"]
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: described if name == "tiny" else None)
    (name, network), *others = forwards.image_networks(
        [Card(outputs=("a",), image_network="tiny"), Card(outputs=("b",))]
    ).items()
    assert (name, others) == ("a", [])
    run_ = resolved(str(folder))
    adapter = skeleton(run_)
    with meter.faked(adapter.network, adapter.pipeline.vae, network):
        without, fake = (
            meter.measured(lambda used=used: forwards.slope(adapter, 2, used), grad=True)[0] for used in ([], [network])
        )
    real = sd3.build(run_.model.config)
    score = open_clip.CLIP(**described).visual.eval().requires_grad_(False)
    assert fake == meter.measured(lambda: forwards.slope(real, 2, [score]), grad=True)[0] > without
    half = forwards.image_networks([Card(outputs=("a",), image_network="tiny", half_precision=True)])["a"]
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in half.parameters())


# ---- the real shape


@pytest.mark.slow
def test_a_rewards_gradient_leaves_the_update_its_memory():
    """DRaFT-1 of SD3.5-M at 512 pixels: HPSv2's gradient of an image through the decoder, and then an update of two."""
    model = {"dtype": "bfloat16", "lora": {"rank": 32, "alpha": 64}, "height": 512, "width": 512}
    model |= {"vae_precision": "bfloat16", "memory": {"vae_checkpointing": True}, "gradient_checkpointing": True}
    run_ = resolved(SD35, model | {"max_sequence_length": 256}, rollout={"guidance_scale": 4.5})
    adapter = skeleton(run_)
    run_.training.weights(adapter, run_.model.config, [("a", ())], 0, "meta")
    (network,) = forwards.image_networks([hpsv2.card_of(hpsv2.Config(preprocess="fast", dtype="bfloat16"))]).values()

    with meter.faked(adapter.network, adapter.pipeline.vae, network), cuda_rules():
        trained = [p for p in adapter.network.parameters() if p.requires_grad]

        def climb() -> None:
            forwards.slope(adapter, 1, [network])

        def update() -> None:
            forwards.microbatch(adapter, trained, 2, 4.5, reference=False)

        chunk = meter.measured(climb, grad=True)[0]
        with Meter() as both:
            update()
            without, left = both.peak, both.now
            climb()
            update()
    assert chunk <= 1.5 * GIB
    assert left <= 1.1 * sum(4 * p.numel() for p in trained)  # the gradients, and texts
    assert both.peak <= max(1.15 * without, chunk + left)


@pytest.mark.slow
def test_the_real_model_is_measured_without_weights():
    run_ = resolved(
        SD35,
        {"dtype": "float16", "lora": {"rank": 32, "alpha": 64}, "height": 512, "width": 512}
        | {"max_sequence_length": 128},
        rollout={"guidance_scale": 4.5},
        optim={"batch_size": 8},
    )
    result = measured(run_, prompts=100)
    assert (result.trained, result.lora_modules) == (18_776_064, 191)
    assert result.saved == pytest.approx(75.1e6, rel=0.002)
    assert result.prompt == 2 * (205 * 4096 + 2048)
    phases = {phase.name: phase for phase in result.phases}
    assert phases["encode"].resident / GIB == pytest.approx(15.38, abs=0.01)  # T5 alone is 8.87
    # 11 x 1152 latents of 64 x 64 x 16 in float32.
    assert result.latents == 11 * 1152 * 65_536 * 4
    assert result.peak.name == "update"
    # Measured on an H200 with 8 images, float32 convolutions in TF32: 13.68 GiB (docs/performance.md).
    assert phases["decode"].peak / GIB == pytest.approx(13.68, rel=0.1)
    # Per row 2.247e12: linear layers and attention over 1024 image and 205 text tokens.
    assert result.rollout_flop == pytest.approx(1152 * 10 * 2 * 2.247e12, rel=0.001)


def test_methods_on_finished_samples_count_their_times_and_passes_and_keep_no_chain(folder):
    """FPO: 8 times, 2 passes; its forwards are without CFG whatever the rollout's."""
    optim = {"updates_per_iteration": 2, "batch_size": 8}
    run_ = resolved(str(folder), algorithm={"name": "fpo"}, optim=optim)
    plan = plan_of(run_, skeleton(run_))
    assert run_.training.demand(plan, run_.setting) == Demand(rows=8, share=1.0, latents=0)
    samples, slots = run_.run.samples_per_iteration, run_.run.rollout.prompts_per_iteration
    assert forward_rows(run_.run, plan, samples, slots, 1.0, 16) == (samples * len(plan), 16 * samples)
    assert geometry(run_, plan, 1, 0, 1.0, 8, 2).update_forwards == 2 * 2 * samples * 8 // 2 // 8
    found = measured(run_)
    assert found.latents == samples * math.prod(skeleton(run_).latent_shape()) * 4
    guided_run = dataclasses.replace(run_.run, rollout=dataclasses.replace(run_.run.rollout, guidance_scale=4.0))
    guided = measured(dataclasses.replace(run_, run=guided_run))
    assert guided.rollout_flop == pytest.approx(2 * found.rollout_flop, rel=0.01)
    assert guided.update_flop == pytest.approx(found.update_flop, rel=0.01)


def test_given_images_beside_the_prompts_add_rows_without_guidance_or_reference(folder):
    """6 samples x 3 steps, guided and beside a reference of full weights; 5 images at 1 time are plain rows."""
    data = {"prompts": "shapes:train", "anchor": {"path": "none", "per_update": 5}}
    rollout = {"prompts_per_iteration": 2, "group_size": 3, "batch_size": 2, "num_inference_steps": 4}
    costly: dict[str, Any] = {"rollout": rollout | {"guidance_scale": 4.0}, "algorithm": {"kl": {"coef": 0.1}}}
    cheap = measured(resolved(str(folder), rollout=rollout))
    for options in ({}, costly):
        plain = measured(resolved(str(folder), **{"rollout": rollout} | options))
        anchored = measured(resolved(str(folder), **{"rollout": rollout, "data": data} | options))
        assert anchored.rows == (*plain.rows[:2], 5)
        added = anchored.update_flop - plain.update_flop
        assert added == pytest.approx(5 * cheap.update_flop / cheap.rows[1], rel=1e-6)
        assert {p.name for p in anchored.phases} == {p.name for p in plain.phases} | {"images"}
