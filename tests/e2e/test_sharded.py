"""FSDP2: two processes that share a network train what one process trains, save it, and go on from it."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError
from flowrl.data.prompt_sources import load_prompts
from flowrl.data.prompts import PromptSource
from flowrl.run import checkpoint
from tests import ranks
from tests.e2e.conftest import BASE, finish, inside, start, train
from tests.e2e.test_reproducible import _wait_for, _workers

SHARD = "model.shard=true"
LORA = "model.lora={rank: 4, alpha: 8}"
# An eps of the gradients' size: with its default AdamW turns the last digits of a tiny gradient into its sign.
SMOOTH = ("optim.eps=1e-3", "eval.num_inference_steps=2")
ONE_UPDATE = ("iterations=1", "optim.updates_per_iteration=1", *SMOOTH)
# Two samples here and four there, in batches of two, and one held-out prompt beside two.
UNEVEN = (
    *("rollout.prompts_per_iteration=3", "rollout.group_size=2", "rollout.batch_size=2", "optim.batch_size=2"),
    *("data.max_eval_prompts=3", "eval.batch_size=1"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(autouse=True)
def _here(folder: Path) -> Iterator[None]:
    with inside(folder):
        yield


def tensors(run: str, iteration: int = 1) -> dict[str, torch.Tensor]:
    """Of a checkpoint, whole, whatever number of processes wrote it."""
    return checkpoint.load(Path("runs") / run / "checkpoints", iteration).tensors


def row(run: str, iteration: int = 1) -> dict:
    return json.loads(Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()[iteration - 1])


COUNTS = ("nfe/rollout", "nfe/train")


def assert_same_update(one: str, two: str, tolerance: float = 1e-5, counts: tuple[str, ...] = COUNTS) -> None:
    """Gradients within `tolerance` of the largest, the rewards and counts of the rows, and the evaluations."""
    expected, found = tensors(one), tensors(two)
    assert found.keys() == expected.keys()
    moments = [name for name in expected if name.endswith("/exp_avg")]
    largest = max(float(expected[name].abs().max()) for name in moments)
    assert largest > 0
    for name in moments:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=tolerance * largest)
    for name in ("reward/total_mean", "reward/group_std", *counts, "advantage/dead_group_share"):
        assert row(two)[name] == pytest.approx(row(one)[name], abs=1e-5), name
    assert row(two)["grad/norm"] == pytest.approx(row(one)["grad/norm"], rel=max(1e-3, tolerance))
    for tag in ("base", "tuned"):
        scores = [json.loads(Path(f"runs/{name}/eval/{tag}.json").read_text())["scores"] for name in (one, two)]
        for metric, table in scores[0].items():
            np.testing.assert_allclose(scores[1][metric], table, rtol=max(1e-4, tolerance))


def assert_same_weights(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert two.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-4 * BASE["optim"]["learning_rate"])


# ---- what two processes train


@pytest.mark.slow
def test_two_processes_that_share_the_network_take_the_update_of_one(folder: Path):
    """Full weights and LoRA, with uneven work: metrics, gradients, memory, files, what a plain pipeline loads."""
    ranks.run(
        [
            ["run.yaml", "name=full-2", *ONE_UPDATE, *UNEVEN, SHARD],
            ["run.yaml", "name=lora-2", *ONE_UPDATE, *UNEVEN, SHARD, LORA],
        ]
    )
    train("name=full-1", *ONE_UPDATE, *UNEVEN)
    train("name=lora-1", *ONE_UPDATE, *UNEVEN, LORA)
    assert_same_update("full-1", "full-2")
    assert_same_update("lora-1", "lora-2")
    for run in ("full-2", "lora-2"):
        for own in json.loads(Path(f"runs/{run}/{ranks.SIZES}").read_text()):
            assert 0.45 < own["own"] / own["all"] < 0.55
            assert own["moments"] == (own["own"] if run == "full-2" else 39_936)
    saved = {
        name: sorted(f.name for f in Path(f"runs/{name}/checkpoints/iteration-000001").iterdir())
        for name in ("full-2", "lora-2")
    }
    assert saved["full-2"] == ["manifest.json", "state-00000.safetensors", "state-00001.safetensors", "state.json"]
    assert saved["lora-2"] == ["manifest.json", "state.json", "state.safetensors"]
    _assert_plain_pipelines_read_them()


def _assert_plain_pipelines_read_them() -> None:
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

    one, two = (SD3Transformer2DModel.from_pretrained(f"runs/full-{n}/adapter/transformer") for n in (1, 2))
    assert_same_weights(one.state_dict(), two.state_dict())
    assert dict(two.config) == dict(one.config) | {"_name_or_path": two.config["_name_or_path"]}
    files = [load_file(f"runs/lora-{n}/adapter/pytorch_lora_weights.safetensors") for n in (1, 2)]
    assert_same_weights(*files)


def test_the_generic_adapter_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"model: shard=true.*sd, sdxl, sd3, flux, qwen_image, wan"):
        resolve(load_config("run.yaml", ["model={name: generic, path: nowhere/to-be-found, shard: true}"]))


def test_one_process_keeps_the_network_whole_and_bitwise_the_same():
    train("name=whole-a", "iterations=1", "eval.num_inference_steps=1")
    train("name=whole-b", "iterations=1", "eval.num_inference_steps=1", SHARD)
    assert _digests("whole-a", 1) == _digests("whole-b", 1)


def _digests(run: str, iteration: int) -> dict[str, str]:
    """SHA-256 of the files with tensors, as the manifest has them."""
    manifest = json.loads(Path(f"runs/{run}/checkpoints/iteration-{iteration:06d}/manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest.items() if name.endswith(".safetensors")}


# ---- the other families, and what makes processes unequal

TINY = (
    *("model.max_sequence_length=8", "model.height=16", "model.width=16", "rollout.guidance_scale=3.0"),
    "rewards=[{path: mean.py}]",
)
CLIP = ("model.num_frames=1",)
UNET = (
    *("model.height=16", "model.width=16", "rollout.guidance_scale=3.0", "rollout.sampler={name: ddim}"),
    "rewards=[{path: mean.py}]",
)
DEEP = "model.gradient_checkpointing=true"
FULL, ADAPTER, BOTH = ("full",), ("lora",), ("full", "lora")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "flux": (BOTH, ("model={name: flux, path: 'tiny:flux'}", *TINY, *UNEVEN)),
    "qwen_image": (BOTH, ("model={name: qwen_image, path: 'tiny:qwen_image'}", *TINY, *UNEVEN)),
    "wan": (BOTH, ("model={name: wan, path: 'tiny:wan'}", *TINY, *CLIP, *UNEVEN, DEEP)),
    # Blocks inside blocks.
    "sd": (BOTH, ("model={name: sd, path: 'tiny:sd'}", *UNET, *UNEVEN, DEEP)),
    "sdxl": (BOTH, ("model={name: sdxl, path: 'tiny:sdxl'}", *UNET, *UNEVEN)),
    # Two experts, trained in microbatches of their own.
    "wan_2_2": (BOTH, ("model={name: wan, path: 'tiny:wan_2_2'}", *TINY, *CLIP, *UNEVEN)),
    # Two experts in one batch, not the same ones here and there.
    "wan_2_2_samples": (
        BOTH,
        (
            *("model={name: wan, path: 'tiny:wan_2_2'}", *TINY, *CLIP, *UNEVEN, "rollout.sampler=null"),
            "algorithm={name: diffusion_nft, times: {name: permutation, count: 2, fraction: 1.0}}",
        ),
    ),
    "half": (
        BOTH,
        ("model={name: flux, path: 'tiny:flux', dtype: bfloat16}", *TINY, *UNEVEN, DEEP, "algorithm.clip_range=0.1"),
    ),
    # All groups of the first process are dead.
    "dead": (FULL, ("rewards=[{path: half.py}]",)),
    # A group split by sample, and no held-out prompt for the first process.
    "split": (
        ADAPTER,
        (
            *("rollout.prompts_per_iteration=1", "rollout.group_size=3", "optim.batch_size=1"),
            *("data.max_eval_prompts=1", "eval.samples_per_prompt=3", "eval.batch_size=2"),
        ),
    ),
    # A second update, with a KL to what was before the first.
    "roles": (BOTH, ("algorithm.kl.coef=1.0", "optim.updates_per_iteration=2")),
    # Edges left out sample by sample, and old log-probs evaluated once more.
    "recompute": (FULL, ("algorithm={name: dance_grpo, clip_range: 1e-3, old_log_prob: recompute}", *UNEVEN)),
}
RUNS = [(name, mode) for name, (modes, _) in CASES.items() for mode in modes]


def _words(run: tuple[str, str], processes: int) -> list[str]:
    name, mode = run
    lora = [LORA] if mode == "lora" else []
    options = [*ONE_UPDATE, *CASES[name][1], *lora, *([SHARD] if processes > 1 else [])]
    return [f"name={name}-{mode}-{processes}", *options]


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[None]:
    """The runs of two processes, in one group."""
    (folder / "mean.py").write_text("def score(images, prompts, metadata):\n    return images.flatten(1).mean(dim=1)\n")
    train_prompts = load_prompts("shapes:train", "data.prompts")
    text = train_prompts[PromptSource(train_prompts, 2, 0).draw(1)[0]].text
    (folder / "half.py").write_text(
        f"def score(images, prompts, metadata):\n    own = images.mean(dim=(1, 2, 3))\n"
        f"    return own.masked_fill(own.new_tensor([p == {text!r} for p in prompts]).bool(), 0.5)\n"
    )
    with inside(folder), pytest.MonkeyPatch.context() as patch:
        ranks.use_tiny_pipelines(patch.setattr)
        ranks.run([["run.yaml", *_words(run, 2)] for run in RUNS], timeout_s=1800)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids="-".join)
@pytest.mark.usefixtures("two")
def test_two_processes_agree_with_one(run: tuple[str, str]):
    train(*_words(run, 1))
    name, mode = run
    # In half precision a gradient depends on its batches and on where its sum was rounded.
    # Calls of an expert without a sample count.
    counts = COUNTS[:1] if name == "wan_2_2_samples" else COUNTS
    assert_same_update(f"{name}-{mode}-1", f"{name}-{mode}-2", {"half": 0.1, "roles": 1e-3}.get(name, 1e-5), counts)
    if name == "dead":
        assert row(f"dead-{mode}-2")["advantage/dead_group_share"] == 0.5
    if name == "roles":
        kl = [row(f"roles-{mode}-{n}")["policy/kl_reference"] for n in (1, 2)]
        assert kl[0] > 0
        assert kl[1] == pytest.approx(kl[0], rel=1e-3)
    for own in json.loads(Path(f"runs/{name}-{mode}-2/{ranks.SIZES}").read_text()):
        assert own["own"] < 0.6 * own["all"]


# ---- resuming


@pytest.fixture(scope="module")
def saved(folder: Path) -> None:
    """Runs of two processes, some of them resumed, one of them from a checkpoint of one process."""
    with inside(folder):
        for name in ("from-1", "to-2"):
            train(f"name={name}", "iterations=1", *SMOOTH)
        ranks.run(
            [
                ["run.yaml", "name=whole", "iterations=3", *SMOOTH, SHARD],
                ["run.yaml", "name=parts", "iterations=1", *SMOOTH, SHARD],
                ["run.yaml", "name=parts", "iterations=3", *SMOOTH, SHARD, "--resume"],
                ["run.yaml", "name=to-2", "iterations=2", *SMOOTH, SHARD, "--resume"],
                ["run.yaml", "name=from-2", "iterations=1", *SMOOTH, SHARD],
            ]
        )


@pytest.mark.slow
@pytest.mark.usefixtures("saved")
def test_a_resumed_run_of_two_processes_ends_bitwise_where_the_whole_one_ends():
    assert len(_digests("whole", 3)) == 2
    assert _digests("parts", 3) == _digests("whole", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("saved")
def test_a_checkpoint_of_two_processes_goes_on_in_one_and_the_other_way_round():
    train("name=from-1", "iterations=2", *SMOOTH, resume=True)
    train("name=from-2", "iterations=2", *SMOOTH, resume=True)
    runs = {name: tensors(name, 2) for name in ("from-1", "from-2", "to-2")}
    before = tensors("from-1", 1)
    for one, other in (("from-1", "to-2"), ("from-1", "from-2")):
        assert runs[one].keys() == runs[other].keys()
        for name, value in runs[one].items():
            # Far less than the second iteration moves them; rows in the wrong place would differ by far more.
            moved = float((value - before[name]).abs().max())
            assert float((runs[other][name] - value).abs().max()) <= 0.05 * moved + 1e-9, (other, name)


@pytest.mark.slow
@pytest.mark.usefixtures("saved")
def test_a_damaged_shard_stops_every_process_before_it_trains():
    checkpoints = Path("runs/parts/checkpoints")
    file = checkpoint.path_of(checkpoints, 3) / "state-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    words = ("train", "run.yaml", "name=parts", "iterations=4", *SMOOTH, SHARD, "--resume", "--processes", "2")
    code, output = finish(start(*words))
    file.write_bytes(content)
    assert code == 2, output
    assert "state-00001.safetensors is truncated or was changed" in output
    assert checkpoint.available(checkpoints)[-1] == 3


@pytest.mark.slow
@pytest.mark.parametrize("everyone", [True, False])
def test_a_signal_in_the_middle_of_a_rollout_saves_and_ends_all_processes(everyone: bool):
    """Sent to the launcher, or to one worker alone: the others must not wait for it in a forward."""
    name = f"signal-{everyone}"
    words = (f"name={name}", "iterations=50", "rollout.num_inference_steps=12", "rollout.batch_size=1", *UNEVEN[:2])
    words += ("eval.num_inference_steps=2", "checkpoint.every=100", "algorithm.sde_steps=[0]", SHARD)
    process = start("train", "run.yaml", *words, "--processes", "2")
    _wait_for(Path(f"runs/{name}/metrics.jsonl"), '"iteration": 1', process, timeout_s=200)
    os.kill(process.pid if everyone else _workers(process.pid)[1], signal.SIGTERM)
    code, output = finish(process)
    assert code == 143, output
    (kept,) = checkpoint.available(Path(f"runs/{name}/checkpoints"))
    assert kept < 50
    train(*words, f"iterations={kept + 1}", resume=True)
    assert row(name, kept + 1)["iteration"] == kept + 1
