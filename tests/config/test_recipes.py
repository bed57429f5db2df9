"""Recipes of real models, on the meta device: published values, geometry, targets, trained steps, a plan offline."""

import math
import re
import shlex
import socket
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flowrl.rewards.video_align import frame_indices
from torch.testing import assert_close

from flowrl.commands.plan import PROCESSES, command, geometry, step_plan, transition_std
from flowrl.config.load import load_config, resolve
from flowrl.core.types import SampleId
from flowrl.diffusion.schedules import shift_sigmas
from flowrl.diffusion.windows import step_subsets
from flowrl.models.pipelines.classes import choose
from flowrl.planning import memory
from flowrl.planning.checkpointing import with_checkpointing
from flowrl.planning.tree_work import tree_work
from flowrl.samplers.ode import Ode
from tests.recipes import EVERY, FOLDER, PAIRED, PROVENANCE, RECIPES, adapter, at, published, recipe, words

# What the paper calls the two ways of a reward.
REWARDS = {"compressibility": "jpeg", "incompressibility": "jpeg"}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a plan must not open a connection")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def plan_and_stds(name: str, *overrides: str) -> tuple[Any, list[float]]:
    run = recipe(name, *overrides)
    model = adapter(run)
    plan = step_plan(run, model)
    return plan, transition_std(run, model, plan)


# ---- values


def test_every_recipe_has_its_provenance():
    assert sorted(PROVENANCE["recipes"]) == EVERY
    assert all(entry["source"] and entry["values"] for entry in PROVENANCE["sets"].values())
    assert set(PROVENANCE["sets"]) == {taken for entry in PROVENANCE["recipes"].values() for taken in entry["takes"]}


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_has_the_published_values_and_says_whose(name):
    tree, expected, entry, text = recipe(name).tree(), published(name), PROVENANCE["recipes"][name], words(name)
    assert {key: at(tree, key) for key in expected} == expected
    assert entry["named"] in text
    for phrase in ("No values were published for this model", "arried over from"):
        assert not entry.get("carried") or phrase in text
    assert entry.get("carried") or "No values were published for this model" not in text


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_says_how_it_is_run_and_what_departs(name):
    text = (FOLDER / f"{name}.yaml").read_text(encoding="ascii")
    assert max(map(len, text.splitlines())) <= 120
    # Each mark says what; "what departs from them is marked" alone is none.
    said = words(name)
    assert re.search(r"departs(?: as there)?: \w", said, re.IGNORECASE)
    if 'marked "departs"' in said:
        assert re.search(r"depart", text[text.index("\nname: ") :], re.IGNORECASE), "none at a value"
    assert "not run here" in said.lower()
    keys = re.findall(r"([A-Za-z_]+):", yaml.safe_dump(yaml.safe_load(text)))
    assert not {key for key in keys if re.search("gpu|(?<!pre)process|world|device|nproc", key)}
    assert f"torchrun --nproc-per-node gpu -m flowrl train configs/{name}.yaml" in text
    assert f"flowrl plan configs/{name}.yaml" in text


def departed(name: str) -> dict[str, Any]:
    """Key -> published value that a recipe leaves, by provenance.yaml; what is no key has a test of its own."""
    entry = PROVENANCE["recipes"][name]
    taken = [*(PROVENANCE["sets"][one] for one in entry["takes"]), entry]
    return {key: value for one in taken for key, value in one.get("departs", {}).items() if "." in key}


def comment(file: Path, key: str) -> str:
    """What stands next to the key `a.b` and in the lines right above it, in the file that sets it."""
    text = file.read_text(encoding="ascii")
    node, line = yaml.compose(text), 0
    for part in key.split("."):
        found = [(k.start_mark.line, value) for k, value in node.value if k.value == part]
        if not found:
            return comment(file.parent / yaml.safe_load(text)["extends"], key)
        ((line, node),) = found
    lines = [each.strip() for each in text.splitlines()]
    above = list(takewhile(lambda each: each.startswith("#"), reversed(lines[:line])))
    return " ".join([*reversed(above), lines[line].partition("#")[2]]).replace("#", " ")


@pytest.mark.parametrize("name", [name for name in EVERY if departed(name)])
def test_a_published_value_that_a_recipe_leaves_is_named_as_a_departure_next_to_its_key(name):
    for key, value in departed(name).items():
        assert at(recipe(name).tree(), key) != value, f"{key} departs no more"
        said = comment(FOLDER / f"{name}.yaml", key)
        assert "departs: " in said.lower(), key
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert value in map(float, re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", said)), key


def test_rewards_are_scaled_and_read_as_in_the_official_code():
    assert recipe("sd3/flow_grpo-pickscore").rewards[0].entry.scale == pytest.approx(1 / 26, rel=1e-6)
    assert recipe("sd3/flow_grpo-jpeg").rewards[0].entry.scale == 1 / 500
    assert recipe("sd3/flow_grpo-geneval").rewards[0].config.mode == "partial"
    assert recipe("sd/ddpo-aesthetic").rewards[0].config.version == "v2"
    for mode in REWARDS:
        reward = recipe(f"sd/ddpo-{mode}").rewards[0]
        assert (reward.config.quality, reward.config.mode) == (95, mode)
        assert (reward.entry.scale, reward.entry.offset, reward.entry.clip) == (None, None, None)
    for name in RECIPES:
        if name.endswith("-ocr"):
            # flow_grpo/ocr.py: PaddleOCR drops lines below 0.5 before the scorer; videos have no substring rule.
            config = recipe(name).rewards[0].config
            assert (config.min_confidence, config.allow_extra_text) == (0.5, not name.startswith("wan/"))


@pytest.mark.parametrize("name", [name for name in EVERY if "dance_video" in PROVENANCE["recipes"][name]["takes"]])
def test_the_frame_rate_of_dance_grpos_videos_is_named_as_a_departure(name):
    """VideoAlign samples by time, so the rate decides how many frames it sees."""
    run, published = recipe(name), PROVENANCE["sets"]["dance_video"]["departs"]["fps"]
    config = run.model.config
    assert {reward.config.fps for reward in run.rewards} == {config.fps}, "the model's own"
    seen, theirs = (len(frame_indices(config.num_frames, fps)) for fps in (config.fps, published))
    said = rf"Departs[^.:]*: fps is the model's own {config.fps:g}\b.*? sees {seen} of the {config.num_frames} frames, "
    assert re.search(rf"{said}at the script's {published} a second {theirs}\.", words(name))


def test_the_recipe_of_the_large_model_is_the_mediums_but_for_what_it_says():
    medium, large = recipe("sd3/flow_grpo-pickscore").tree(), recipe("sd35_large/flow_grpo-pickscore").tree()
    own = PROVENANCE["recipes"]["sd35_large/flow_grpo-pickscore"]["values"]
    for key in ("name", *own):
        *sections, last = key.split(".")
        at(medium, ".".join(sections))[last] = at(large, key)
    assert large == medium


@pytest.mark.parametrize(("variant", "edges"), [("prune", 130), ("mix", 34)])
def test_the_other_variants_that_branch_grpos_recipe_names_are_those_that_it_says(variant, edges):
    """Its overrides as they stand in the comment: with the depth window still set, others would be left out too."""
    file = FOLDER / "flux" / "branch_grpo-hpsv2.yaml"
    lines = file.read_text(encoding="ascii").splitlines()
    (own,) = (shlex.split(line.lstrip("# ")) for line in lines if line.startswith("#") and f"{variant}=" in line)
    run = resolve(load_config(file, own))
    assert sum(tree_work(run, step_plan(run, None)).edges) == edges


def test_finer_steps_at_the_same_cost_are_a_valid_geometry():
    """What the header of every DDPO recipe offers: as many samples in all."""
    for name in (name for name in RECIPES if name.startswith("sd/ddpo")):
        own = [word.rstrip(".") for word in words(name).split() if "=" in word][:3]
        run, finer = recipe(name).run, recipe(name, *own).run
        assert finer.iterations * finer.samples_per_iteration == run.iterations * run.samples_per_iteration


# ---- geometry, targets, steps


@pytest.mark.parametrize("name", EVERY)
def test_its_geometry_is_valid_and_its_names_are_those_of_the_file(name):
    run, paired = recipe(name), name in PAIRED
    tree, (model, method, data) = run.tree(), re.split("[/-]", name)
    assert run.algorithm.name == method
    assert choose(run.model.config.path).name == run.model.name  # its name could be left out
    plan = step_plan(run, None)
    if paired:
        assert (run.model.name, data) == (model, "pickapic")
    else:
        assert run.run.name.endswith(data)
        assert {entry.name for entry in run.rewards} == {REWARDS.get(data, data)}
        # The same forwards in rollout and training: half precision depends on the batch.
        assert at(tree, "rollout.batch_size") == at(tree, "optim.batch_size")
    for processes in PROCESSES:
        terms = {"extra": 1, "terms": 1} if paired else {"terms": PROVENANCE["recipes"][name].get("terms")}
        counts = geometry(run, plan, processes, **terms)
        assert counts.update_forwards > 0
        if paired:
            assert (counts.rollout_forwards, counts.frozen_forwards) == (0, counts.update_forwards)
        else:
            assert counts.samples * processes >= run.run.samples_per_iteration


@pytest.mark.parametrize("name", RECIPES)
def test_its_lora_targets_exist_and_its_trained_steps_are_the_noisy_ones(name):
    run = recipe(name)
    model = adapter(run)
    modules = [module for module, _ in model.network.named_modules()]
    lora = run.model.config.lora
    for target in (lora and lora.targets) or model.lora_targets:
        assert any(module.endswith(f".{target}") for module in modules), target
    assert set(model.dead_lora_modules()) <= set(modules)
    plan, stds = plan_and_stds(name)
    assert len(plan.train) == PROVENANCE["recipes"][name]["trained"]
    assert all((std > 0) == (k in plan.train) for k, std in enumerate(stds))
    assert step_plan(run, None).train == plan.train
    # MixGRPO-Flash: 11 forwards while the window is at the first place (arXiv 2507.21802).
    assert len(plan) == (11 if run.algorithm.name == "mix_grpo_flash" else run.run.rollout.num_inference_steps)


def test_the_grids_and_stds_are_the_published_ones():
    for name in (name for name in RECIPES if name.startswith("flux/")):
        run = recipe(name)
        count = run.run.rollout.num_inference_steps
        if run.model.config.shift is None:  # the pipeline's own shift, 1024 tokens at 512 pixels
            start = torch.linspace(1, 1 / count, count, dtype=torch.float64)
            tokens = adapter(run).height * adapter(run).width / 256
            shift = math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))
            sigmas = torch.cat([shift / (shift + 1 / start - 1), torch.zeros(1)]).float()
        else:
            sigmas = shift_sigmas(torch.linspace(1, 0, count + 1), 3.0)
        assert_close(adapter(run).schedule(count).sigmas, sigmas, atol=1e-5, rtol=0)
    # yifan123/flow_grpo on SD3.5 at noise 0.7
    expected = [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.0]
    assert plan_and_stds("sd3/flow_grpo-geneval")[1] == pytest.approx(expected, abs=6e-4)
    plan, _ = plan_and_stds("qwen_image/flow_grpo_fast-pickscore")
    assert float(plan.schedule.sigmas[-2]) == pytest.approx(0.02, abs=1e-6)  # the scheduler's shift_terminal
    # SAGE: w / eta^2 at shift 5 and 20 steps, derived from arXiv 2603.21872; at most 2 keeps the first step in bounds.
    _, stds = plan_and_stds("wan/sage_grpo-ocr")
    assert [std**2 / 0.25 for std in stds[:3]] == pytest.approx([1.234, 0.724, 0.438], rel=0.1)
    assert max(plan_and_stds("sd3/sage_grpo-pickscore")[1]) ** 2 < 0.5
    ten = plan_and_stds("sd3/sage_grpo-pickscore", "rollout.num_inference_steps=10")[1]
    assert ten[0] == pytest.approx(0.8, abs=0.01)
    # DanceGRPO: int((S - 1) * fraction) of the trained steps for each sample.
    config, (plan, _) = recipe("flux/dance_grpo-pickscore").algorithm.config, plan_and_stds("flux/dance_grpo-pickscore")
    assert step_subsets([SampleId(0, 0)], plan.train, config.timestep_fraction, 0, 1).sum() == int(11 * 0.6)
    # DDIM on the table of Stable Diffusion, by timestep: kvablack/ddpo-pytorch, and DanceGRPO without the last.
    for name, last in (*((name, 0.0206) for name in RECIPES if name.startswith("sd/ddpo")), ("sd/dance_grpo-hpsv2", 0)):
        plan, stds = plan_and_stds(name)
        by_time = dict(zip(plan.schedule.timesteps.int().tolist(), stds, strict=True))
        for timestep, std in {981: 0.4545, 481: 0.2877, 181: 0.1771, 41: 0.0999, 21: 0.0395, 1: last}.items():
            assert by_time[timestep] == pytest.approx(std, abs=5e-5)


@pytest.mark.parametrize("name", [name for name in RECIPES if PROVENANCE["recipes"][name].get("noisy_end")])
def test_the_noise_that_the_official_rollout_keeps_in_its_last_step_is_named_as_a_departure(name):
    """The std of the sampler's transition on the model's own grid, spelled out here.

    DanceGRPO's SD script samples by ddpo-pytorch's pipeline, noise to the end, and trains num_steps - 1 of the steps.
    """
    run = recipe(name)
    grid = adapter(run).schedule(run.run.rollout.num_inference_steps)
    first, last = float(grid.sigmas[1]), float(grid.sigmas[-2])
    sampler = run.tree()["rollout"]["sampler"]

    def ddim() -> float:
        before, after = grid.alphas[-2:].double().square().tolist()
        return sampler["eta"] * ((1 - after) / (1 - before) * (1 - before / after)) ** 0.5

    std = {
        "ddim": ddim,
        "flow_sde": lambda: sampler["noise_level"] * last / (1 - last) ** 0.5,
        "wan_sde": lambda: first * last * last**0.5,
        "sage": lambda: sampler["eta"] * (-last - math.log(1 - last)) ** 0.5,
    }[sampler["name"]]()
    (said,) = re.findall(r"Departs: [^.]*? is an ODE step[^()]*\(std ([0-9.]+)\)", words(name))
    assert said == f"{std:.{len(said) - 2}f}"
    assert plan_and_stds(name)[1][-1] == 0


@pytest.mark.slow  # whole networks on fake tensors
@pytest.mark.parametrize(("name", "gigabytes"), zip(PAIRED, (12, 24, 24), strict=True))
def test_times_of_pairs_are_those_of_training_and_the_run_fits_its_device(name, gigabytes):
    run = recipe(name)
    if run.model.config.gradient_checkpointing == "auto":  # on, on a device of this size
        run = with_checkpointing(run, on=True)
    model = memory.skeleton(run)
    grid = model.schedule(run.run.rollout.num_inference_steps)
    algorithm = run.algorithm.build()
    ids = [SampleId(slot, sample) for slot in range(400) for sample in (0, 1)]
    times = algorithm.times(grid, ids, 1, 0).timestep
    assert torch.equal(times[::2], times[1::2]), "both of a pair"
    if run.model.name == "sd3":
        assert 300 < float(times.mean()) < 900
    else:
        assert algorithm.config.times.name == "timesteps"
        # Uniform over 0..999: the mean of 400 has a std of 288 / 20.
        assert abs(float(times.mean()) - 499.5) < 4 * 14.4
    result: Any = memory.estimate(run, model, algorithm.plan(grid, Ode(), 1, 0), prompts=100)  # all is known of it
    assert [phase.name for phase in result.phases] == ["encode", "images", "evaluation", "update"]
    assert not result.unknown
    assert result.rollout_flop == 0
    assert result.embeddings == 0, "captions are embedded when drawn"
    # What is not in the estimate takes 10 to 20 %, and the CUDA context half a GB.
    assert 1.15 * result.peak.peak + 5e8 < gigabytes * 1e9


@pytest.mark.slow  # a whole network on fake tensors
def test_a_recipe_of_videos_is_measured_and_fits_its_card():
    """Wan2.1 1.3B on 24 GB: nothing of it stands in."""
    run = recipe("wan/flow_grpo-ocr-24gb")
    model, (config, rollout) = memory.skeleton(run), (run.model.config, run.run.rollout)
    samples = rollout.prompts_per_iteration * rollout.group_size
    result: Any = memory.estimate(run, model, step_plan(run, model), prompts=100)  # all is known of it
    assert not result.unknown
    assert [phase.name for phase in result.phases] == ["encode", "rollout", "decode", "evaluation", "update"]
    assert result.images == samples * config.num_frames * 3 * config.height * config.width, "in 8 bits"
    # Its VAE makes 8 x 8 pixels of a value, and of all but the first frame 4; float32, each node of a path is kept.
    latent = 16 * (1 + config.num_frames // 4) * (config.height // 8) * (config.width // 8)
    assert result.latents == 4 * samples * (rollout.num_inference_steps + 1) * latent
    # With CFG two forwards a sample and step; a token of 2 x 2 latent pixels meets each weight once. More: attention.
    forwards = 2 * samples * rollout.num_inference_steps
    products = 2 * forwards * latent // (16 * 4) * result.parameters["denoiser"]
    assert 1 < result.rollout_flop / products < 1.5
    assert result.update_flop > result.rollout_flop
    assert result.peak.peak > result.stored["text_encoder"]
    assert 1.15 * result.peak.peak + 5e8 < 24e9


# ---- the plan


@pytest.mark.parametrize("name", RECIPES)
def test_its_plan_prints_without_a_network(offline, capsys, monkeypatch, name):
    model = adapter(recipe(name))
    monkeypatch.setattr(memory, "skeleton", lambda resolved: model)
    # The measurement itself has its tests, and takes seconds.
    monkeypatch.setattr("flowrl.commands.plan.estimated", lambda *given: ({}, None))
    command(str(FOLDER / f"{name}.yaml"), [])
    text = capsys.readouterr().out
    branching = "edges trained" in text  # the steps of a tree say how many
    assert branching == (recipe(name).algorithm.name == "branch_grpo")
    on_samples = "terms" in PROVENANCE["recipes"][name]
    assert branching or ("sde, trained" in text) != on_samples
    doubled = model.branches(recipe(name).run.rollout.guidance_scale) > 1
    assert ("CFG: each sample twice" in text) == doubled


def test_the_plan_of_a_recipe_tells_it_all(offline, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    # The measurement itself has its tests, and takes seconds.
    bytes_ = {"encode": 1, "rollout": 2, "decode": 3, "evaluation": 4, "update": 34 * 2**30}
    operations = {"forward_flop": 4.5e12, "edge_flop": 1.4e13, "fitted": 1.0}
    monkeypatch.setattr(memory, "_measure", lambda *args, **options: (bytes_ | operations, {}))
    command(str(FOLDER / "sd3" / "flow_grpo-pickscore.yaml"), ["optim.learning_rate=1.0e-4"])
    text = capsys.readouterr().out
    for piece in (
        "learning_rate: 0.0001",
        "384 train and 96 held-out prompts",
        "1152 samples per iteration = 48 prompts x 24; 2 updates of 576 samples x 9 steps; 1000 iterations = 2000",
        "2,243,171,520",
        "LoRA rank 32, alpha 64, 191 modules",
        "18,776,064",
        "embeddings of 480 texts, 1.6 MiB each",
        "largest: update",
        "51.8 PFLOP in the rollout, 145 PFLOP in the updates",
    ):
        assert piece in text
    assert re.search(r"samples per process +1,152 +576 +144", text)
    assert re.search(r"1 +0\.96013 +0\.91335 +960\.13 +sde, trained +0\.74", text)
    assert re.search(r"9 +0\.00893 +0\.00000 +8\.93 +ode +0\.00000", text)


def test_a_plan_of_an_unknown_model_has_a_geometry(offline, capsys):
    command(str(FOLDER / "sd3" / "flow_grpo-jpeg.yaml"), ["model.path=owner/unheard-of"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("not known before the model is downloaded") == 2
    assert "samples per process" in text
    # A method that shortens the grid needs no model either.
    command(str(FOLDER / "sd3" / "mix_grpo_flash-pickscore.yaml"), ["model.path=owner/unheard-of"])
    assert "Steps: 11 in all, 4 trained" in capsys.readouterr().out


def test_forwards_are_counted_for_the_busiest_process():
    few = ("rollout.prompts_per_iteration=3", "rollout.group_size=10", "algorithm.sde_steps=[0, 1]")
    run = recipe("sd3/flow_grpo-jpeg", *few)
    plan = step_plan(run, None)
    one, two = geometry(run, plan, 1, extra=1), geometry(run, plan, 2, extra=1)
    assert (one.samples, one.rollout_forwards) == (30, 10 * 4)  # 30 in batches of 8
    assert (one.update_forwards, one.frozen_forwards) == (2 * 4, 2 * 4)  # 30 edges in each of 2 updates
    assert (two.samples, two.rollout_forwards) == (20, 10 * 3)  # two whole groups against one
    assert two.update_forwards == 2 * 3
