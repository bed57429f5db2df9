"""The strength dial: the formula, its ends bit for bit, mixes, a LoRA's factor, and an evaluation's identity."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.testing import assert_close

from flowrl.apps.gallery.results import metrics_of
from flowrl.apps.gallery.runs import load_run
from flowrl.apps.gallery.strength import view as strength_charts
from flowrl.commands.eval import command as evaluate
from flowrl.commands.sample import command as sample
from flowrl.core.errors import ConfigError
from flowrl.evaluation.results import Evaluation
from flowrl.media import media
from flowrl.run import judged
from flowrl.run.dial import Dial, dial_of, mixed
from tests import tiny_sd3 as tiny
from tests.apps.publish.test_export import write_run
from tests.e2e.conftest import inside, train
from tests.remedies import follows
from tests.remedies.following import numbered, provoked
from tests.run.test_judged import output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one base: `lora`, `other` with an update of twice the size, and two of full weights."""
    place = tmp_path_factory.mktemp("runs")
    base = tiny.save(place / "model", tiny.pipeline(sd35=True))
    made = {name: write_run(place / name, base, tiny.LORA) for name in ("lora", "other")}
    made |= {name: write_run(place / name, base, None) for name in ("full", "fuller")}
    for name, file in (("other", "pytorch_lora_weights"), ("fuller", "transformer/diffusion_pytorch_model")):
        _change(made[name] / "adapter" / f"{file}.safetensors")
    return made


def _change(file: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(file, framework="pt") as source:
        header = source.metadata()
    torch.manual_seed(9)
    tensors = {name: value + 0.02 * torch.randn_like(value) for name, value in load_file(file).items()}
    save_file(tensors, file, metadata=header)


def at(run: Path, strength: float | None = None, scale: float | None = None, *mix: str) -> Tensor:
    """The guided output of a run under the dial."""
    return output(judged.load(str(run), dial=dial_of(str(run), strength, scale, mix)).pipeline)


# ---- the formula


def test_coefficients_sum_to_one_and_networks_without_one_are_not_asked():
    a, b = Path("a"), Path("b")
    assert Dial(a, "").parts == [(1.0, "run", a)]
    assert Dial(a, "", strength=0.0).parts == [(1.0, "base", None)]
    assert Dial(a, "", strength=1.6).parts == [(pytest.approx(-0.6), "base", None), (1.6, "run", a)]
    assert Dial(a, "", strength=0.7, mix=((b, 0.3),)).parts == [(0.7, "run", a), (0.3, "mix_0", b)]
    both = Dial(a, "", mix=((b, 0.5), (b, 0.25))).parts
    assert [name for _, name, _ in both] == ["base", "run", "mix_0", "mix_1"]
    assert sum(factor for factor, _, _ in both) == pytest.approx(1)


def test_a_sum_of_networks_is_linear_and_equal_networks_give_their_own_output_bit_for_bit():
    torch.manual_seed(0)
    a, b, c = torch.randn(3, 4, 5)
    found = mixed([(-0.6, lambda: (a, {"x": [a]}, "word")), (1.1, lambda: (b, {"x": [b]}, "word")),
                   (0.5, lambda: (c, {"x": [c]}, "word"))])()  # fmt: skip
    wanted = -0.6 * a + 1.1 * b + 0.5 * c
    assert_close(found[0], wanted)
    assert_close(found[1]["x"][0], wanted)
    assert found[2] == "word"
    assert torch.equal(mixed([(-0.6, lambda: a), (1.6, lambda: a)])(), a)
    half = a.bfloat16()
    assert torch.equal(mixed([(-3.0, lambda: half), (4.0, lambda: half)])(), half)
    assert mixed([(1.0, lambda: half)])() is half


# ---- pipelines


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_ends_are_the_base_and_the_run_and_between_them_the_output_is_a_line(runs, kind):
    run = runs[kind]
    base, tuned = output(judged.load(str(run), base=True).pipeline), output(judged.load(str(run)).pipeline)
    assert dial_of(str(run), 1.0, None, []) is None
    assert torch.equal(at(run, 0.0), base)
    for s in (0.5, 1.6, -1.0):
        assert_close(at(run, s), base + s * (tuned - base), atol=1e-5, rtol=0)
    assert not torch.allclose(base, tuned, atol=1e-2)


@pytest.mark.parametrize(("kind", "second"), [("lora", "other"), ("full", "fuller")])
def test_a_mix_is_the_weighted_sum_and_each_run_alone_is_itself(runs, kind, second):
    run, other = runs[kind], runs[second]
    base, own, others = (at(run, 0.0), at(run), at(other))
    assert torch.equal(at(run, 0.0, None, f"{other}:1"), others)
    assert torch.equal(at(run, 1.0, None, f"{other}:0"), own)
    assert_close(at(run, 0.7, None, f"{other}:0.3"), 0.7 * own + 0.3 * others, atol=1e-5, rtol=0)
    free = base + (own - base) + 0.5 * (others - base)
    assert_close(at(run, None, None, f"{other}:0.5"), free, atol=1e-5, rtol=0)
    assert torch.equal(at(run, 0.5, None, f"{run}:0.5"), own)  # equal networks
    words = [f"{other}:0.4", f"{run}:-0.2"]
    assert torch.equal(at(run, 1.0, None, *words), at(run, 1.0, None, *words[::-1]))


def test_the_lora_has_a_factor_of_its_own_in_one_network(runs):
    run, calls = runs["lora"], list[int]()
    base, own = at(run, 0.0), at(run)
    assert torch.equal(at(run, None, 0.0), base)
    near = 1e-3
    assert_close((at(run, None, near) - base) / near, (at(run, None, -near) - base) / -near, atol=0.1, rtol=0.05)
    assert not torch.allclose(at(run, None, 0.5), base + 0.5 * (own - base), atol=1e-3)  # a network is not linear
    for dial, count in ((dial_of(str(run), None, 0.5, []), 1), (dial_of(str(run), 0.5, None, []), 2), (None, 1)):
        network = judged.load(str(run), dial=dial).pipeline.transformer
        calls.clear()
        network.transformer_blocks[0].register_forward_hook(lambda *_: calls.append(1))
        x = torch.zeros(1, network.config.in_channels, 4, 4)
        text = torch.zeros(1, 3, network.config.joint_attention_dim)
        pooled = torch.zeros(1, network.config.pooled_projection_dim)
        network(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=torch.tensor([500.0]))
        assert len(calls) == count


def test_a_run_that_began_with_a_lora_has_it_in_its_base(runs, tmp_path):
    """`model.init_lora` is a part of the base, as in the run's own evaluation before its training."""
    run = tmp_path / "run"
    shutil.copytree(runs["lora"], run)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["init_lora"] = str(runs["other"] / "adapter")
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert_close(at(run, 0.0), at(runs["other"]), atol=1e-5, rtol=0)


def test_sampled_images_say_the_dial_and_another_strength_is_another_file(runs, tmp_path):
    from flowrl.run.origin import weights_hash

    run = str(runs["lora"])
    own: dict[str, Any] = {"out": tmp_path, "steps": 1, "quiet": True}
    words: dict[str, Any]
    for words in ({}, {"strength": 1.0}, {"strength": 0.5}, {"lora_scale": 0.5}, {"mix": [f"{runs['other']}:0.5"]}):
        sample(run, ["a red circle"], **own, **words)
    notes = [media.read_note(file) for file in sorted(tmp_path.glob("*.png"))]
    found = sorted(json.dumps({k: n[k] for k in ("strength", "lora_scale", "mix") if k in n}) for n in notes)
    mix = {"run": str(runs["other"]), "weight": 0.5, "adapter": weights_hash(runs["other"] / "adapter")}
    assert found == sorted(map(json.dumps, ({}, {"strength": 0.5}, {"lora_scale": 0.5}, {"mix": [mix]})))


# ---- evaluations of a run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, `run` and `second`, of seconds."""
    place = tmp_path_factory.mktemp("trained")
    with inside(place):
        short = ("iterations=1", "optim.learning_rate=3e-2", "eval.save_images=1", "checkpoint.keep=1")
        train(*short, "model.lora.rank=4")
        train(*short, "model.lora.rank=4", "name=second", "seed=1", "optim.ema=null")
        train(*short, "name=full", "optim.learning_rate=1e-3")
    return place


def scored(out: Path, tag: str) -> Evaluation:
    return Evaluation.load(out / "eval" / f"{tag}.json")


@pytest.mark.parametrize("name", ["run", "full"])
def test_an_evaluation_at_both_ends_is_that_of_the_run_bit_for_bit(trained, name):
    with inside(trained):
        run = Path("runs") / name
        for strength in (None, 1.0, 0.0, 1.5):
            evaluate(str(run), strength=strength, quiet=True)
        out = run / "eval-extra"
        assert sorted(file.stem for file in (out / "eval").glob("*.json")) == [
            "evaluation", "evaluation-strength-0.0", "evaluation-strength-1.5"]  # fmt: skip
        base, tuned = scored(run, "base"), scored(run, "tuned")
        assert (scored(out, "evaluation").digests == tuned.digests).all()
        assert (scored(out, "evaluation-strength-0.0").digests == base.digests).all()
        more = scored(out, "evaluation-strength-1.5")
        assert not (more.digests == tuned.digests).any()
        assert more.made_with["dial"] == '{"strength": 1.5}'
        assert more.unlike(tuned) == []
        assert more.unlike(scored(out, "evaluation-strength-0.0")) == ["the strength"]
        read = load_run(run)
        (chart,) = strength_charts(read, metrics_of(read))  # no diversity: one sample of a prompt
        means = [float(each.scores["brightness"].mean()) for each in (base, tuned, more)]
        assert all(f"{s}: {mean:.4g}" in chart["svg"] for s, mean in zip(("0", "1", "1.5"), means, strict=True))
        shutil.copy(out / "eval" / "evaluation-strength-1.5.json", out / "eval" / "evaluation-other.json")
        record = json.loads((out / "eval" / "evaluation-other.json").read_text())
        changes = ({"num_inference_steps": 9}, {"iteration": 9}, {"made_with": record["made_with"] | {"dial": "{}"}})
        for change in changes:  # other steps, other weights, no dial
            (out / "eval" / "evaluation-other.json").write_text(json.dumps(record | change))
            assert strength_charts(read, metrics_of(read)) == [chart]


def test_an_evaluation_takes_other_runs_and_the_factor_of_the_lora(trained):
    with inside(trained):
        run, out = "runs/run", Path("mixes")
        evaluate(run, strength=0.0, mix=["runs/second:1"], out=out, quiet=True)
        evaluate(run, lora_scale=0.0, out=out, quiet=True)
        evaluate(run, lora_scale=1.0, out=out, quiet=True)
        evaluate("runs/second", strength=0.0, mix=["runs/run:1"], out=out, quiet=True)
        found = {file.stem: scored(out, file.stem).digests for file in (out / "eval").glob("*.json")}
        one, two = (value for name, value in found.items() if "mix" in name)
        wanted = [scored(Path("runs") / name, "tuned").digests.tolist() for name in ("run", "second")]
        assert sorted([one.tolist(), two.tolist()]) == sorted(wanted)
        assert (found["evaluation-lora_scale-0.0"] == scored(Path(run), "base").digests).all()
        assert (found["evaluation"] == scored(Path(run), "tuned").digests).all()


def test_a_suite_keeps_each_strength_in_a_folder_of_its_own(trained):
    from flowrl.apps.suites.running.options import Judging, Making, Options

    with inside(trained):
        making, judging = Making(None, None, None, [], None, 0, 4, 1), Judging([], [], None, [], None, [], False, False)
        asked: dict[str, Any] = {"target": "runs/run", "suite": "geneval", "base": None, "loras": [], "prompts": None}
        asked |= {"making": making, "judging": judging, "out": None}
        dials = [dial_of("runs/run", s, None, []) for s in (None, 0.5, 2.0)]
        folders = [Options(**asked, dial=dial).folder.name for dial in dials]
        assert folders == ["geneval", "geneval-strength-0.5", "geneval-strength-2.0"]


# ---- what is refused


@follows(*numbered("run/dial.py:dial_of 1 2 3 4"), *numbered("run/dial.py:Dial.require"))
@follows(*numbered("run/judged.py:_require_alone"))
def test_what_no_dial_can_turn_is_refused_with_its_words(runs, trained):
    lora, full = str(runs["lora"]), str(runs["full"])

    def refused(place: str, message: str, *words: Any, without: str) -> None:
        fault = provoked(lambda: dial_of(*words), numbered(place))
        assert message in str(fault)
        assert [remedy.without for remedy in fault.remedies] == [without]

    place = "run/dial.py:dial_of"
    refused(place, "one network in place of several", lora, 0.5, 0.5, [], without="--lora-scale")
    refused(f"{place} 2", "is no run folder", "tiny-sd3", 0.5, None, [f"{lora}:1"], without="--strength --mix")
    refused(f"{place} 4", "trained full weights", full, None, 0.5, [], without="--lora-scale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowrl.run.dial.learned_noise", lambda run: run)
        refused(f"{place} 3", "learned its initial noise", lora, 0.5, None, [], without="--strength")
    few: Any = SimpleNamespace(distilled="nodes")
    Dial(Path(lora), "--strength", strength=0.0).require(few)
    fault = provoked(lambda: Dial(Path(lora), "--mix", strength=0.5).require(few), ["flowrl/run/dial.py:Dial.require"])
    assert [remedy.without for remedy in fault.remedies] == ["--mix"]
    for strength in (math.nan, math.inf):
        with pytest.raises(ConfigError, match="must be a finite number"):
            dial_of(lora, strength, None, [])
    for word, message in {
        "nowhere:1": "is no folder of a run",
        lora: "must be RUN:WEIGHT",
        f"{lora}:nan": "must be RUN:WEIGHT",
        f"{full}:1": "its model.lora is None",
        f"{trained / 'runs/run'}:1": "its model.path is tiny-sd3",
    }.items():
        with pytest.raises(ConfigError, match=message):
            dial_of(lora, None, None, [word])
    words: dict[str, Any]
    for words, other in (({"base": True}, "--base"), ({"loras": [f"{lora}/adapter"]}, "--lora")):
        load = partial(judged.load, lora, dial=dial_of(lora, 0.5, None, []), **words)
        assert [remedy.without for remedy in provoked(load, numbered("run/judged.py:_require_alone")).remedies] == [
            other
        ]
