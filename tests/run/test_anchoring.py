"""`data.anchor`: the loss on given images beside the prompts, its gradient, its order, its state in a checkpoint."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import flowrl
from flowrl.commands._plan_data import data_here
from flowrl.commands.plan import command
from flowrl.core.errors import ConfigError, ModelError
from flowrl.data.given_samples import TooManyLost
from flowrl.losses.batches import LossOutput
from flowrl.models.sd3 import Sd3
from flowrl.run.session import Session, resolved
from flowrl.shapes import draw, parse, prompts
from flowrl.training.metrics import Sums, Timer
from tests import ranks
from tests.e2e.conftest import assert_same_gradient, inside, train
from tests.toys import ToyAdapter, learner_of, roll_out, rollout_of

COEF, COUNT, IMAGES = 0.7, 4, 10
METHODS = {
    "draft": ("rollout.prompts_per_iteration=4", "optim.updates_per_iteration=2"),
    "flow_grpo": ("rollout.group_size=4", "rollout.prompts_per_iteration=2", "rewards=[{name: jpeg}]"),
    "awm": ("rollout.group_size=4", "rollout.prompts_per_iteration=2", "rewards=[{name: jpeg}]"),
}
SLOW = [name if name == "draft" else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of the shapes world: winners alone."""
    folder = tmp_path_factory.mktemp("images")
    lines = []
    for k, caption in enumerate(prompts("train")[:IMAGES]):
        pixels = (255 * draw(parse(caption), np.random.default_rng(k))).round().astype(np.uint8)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(folder / f"{k}.png")
        lines.append(json.dumps({"prompt": caption, "chosen": f"{k}.png"}) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def opened(images: Path) -> Callable[..., Session]:
    """A session of a method on tiny-sd3, with the images or without."""

    def session(method: str, *words: str, anchored: bool = True) -> Session:
        anchor = f"data.anchor={{path: {images}, per_update: {COUNT}, coef: {COEF}, posterior: mean}}"
        sizes = ("rollout.num_inference_steps=4", "optim.batch_size=3", "optim.max_grad_norm=null", *METHODS[method])
        few = ("data.max_prompts=8", "data.max_eval_prompts=1", "eval.rewards=[]", "guard.mode=off")
        beside = (anchor,) if anchored else ()
        return flowrl.Session(f"configs/lab/{method}.yaml", *few, *sizes, *beside, *words)

    return session


Flat = list[Tensor]


def gradients(session: Session, monkeypatch: pytest.MonkeyPatch, *, credited: bool = True) -> tuple[list[Flat], Any]:
    """(gradient of each optimizer step of the first iteration, its row); `credited`: False sets all credit to 0."""
    found: list[Flat] = []
    step = session.optimizer.step

    def kept(gradients: Flat, divisor: Tensor) -> Any:
        found.append([gradient.detach().clone() / divisor for gradient in gradients])
        return step(gradients, divisor)

    monkeypatch.setattr(session.optimizer, "step", kept)
    rollout = session.roll_out(1)
    credit = session.credit(rollout)
    credit = credit if credited else replace(credit, values=torch.zeros_like(credit.values))
    return found, session.update(rollout, credit)


def by_hand(session: Session) -> tuple[Flat, float]:
    """(gradient of COEF times the mean squared error on the first update's images, the error), by autograd alone."""
    assert session.anchor is not None
    errors = []
    for batch, counts in session.anchor.work.batches(0):
        assert counts
        sigma = batch.sigma[:, None, None, None]
        x, target = (1 - sigma) * batch.clean + sigma * batch.eps, batch.eps - batch.clean
        output = session.model.predict(x, batch.timestep, batch.cond, 1.0)
        errors.append((output - target).square().mean(dim=(1, 2, 3)))
    mean = torch.cat(errors).mean()
    return [*torch.autograd.grad(COEF * mean, [*session.weights.parameters.values()])], float(mean.detach())


def norm(gradient: Flat) -> float:
    return float(torch.cat([each.flatten().double() for each in gradient]).norm())


def assert_near(found: Flat, expected: Flat) -> None:
    a, b = (torch.cat([each.flatten() for each in values]) for values in (found, expected))
    assert float(b.norm()) > 0
    assert float((a - b).norm() / b.norm()) < 1e-4


@pytest.mark.parametrize("method", SLOW)
def test_the_gradient_is_the_methods_own_and_that_of_the_images(opened, monkeypatch, method):
    with opened(method, anchored=False) as plain, opened(method) as anchored:
        (own, _), row = gradients(plain, monkeypatch)
        assert "anchor/loss" not in row
        anchored.roll_out(1)
        images, error = by_hand(anchored)
        (both, second), row = gradients(anchored, monkeypatch)
        assert_near([a - b for a, b in zip(both, own, strict=True)], images)
        assert row["anchor/gradient_share"] > 0
        assert row["grad/norm"] == pytest.approx((norm(both) + norm(second)) / 2, rel=1e-5)
        assert row["anchor/loss"] == pytest.approx(error, rel=0.7), "a mean over both updates"
        assert row["anchor/unreadable"] == 0


@pytest.mark.slow
def test_without_credit_the_gradient_is_that_of_sft_alone(opened, monkeypatch):
    with opened("flow_grpo") as session:
        session.roll_out(1)
        images, _ = by_hand(session)
        (first, _), row = gradients(session, monkeypatch, credited=False)
        assert_near(first, images)
        assert row["anchor/gradient_share"] == pytest.approx(1, rel=1e-5)


def test_the_share_is_the_norm_of_the_images_gradient_over_that_of_the_whole(opened, monkeypatch):
    with opened("draft", "optim.updates_per_iteration=1") as session:
        session.roll_out(1)
        images, _ = by_hand(session)
        (whole,), row = gradients(session, monkeypatch)
        assert row["anchor/gradient_share"] == pytest.approx(norm(images) / norm(whole), rel=1e-4)


@pytest.mark.parametrize(
    ("own", "share"),
    [((0.0, 0.0), 1.0), ((12.0, 16.0), 10 / 30), ((-6.0, 0.0), 10 / 8)],
    ids=["alone", "beside", "against"],
)
def test_the_share_by_hand(own, share):
    """Images' gradient (6, 8), of norm 10, beside a method's own, both sums over two rows."""
    session = roll_out(ToyAdapter())
    learner, (p, *_) = learner_of(session), session.weights.parameters.values()
    batch = MagicMock(steps=None)
    batch.__len__.return_value = 2

    def grows(by: tuple[float, float]) -> Tensor:
        return (p.flatten()[:2] * torch.tensor(by)).sum()

    learner.method = MagicMock(passes=1, feedback=(), loss=lambda *given: LossOutput(grows(own), {}))
    work = MagicMock(shares=[0], sizes=[2], batches=lambda number: [(batch, True)])
    learner.training = MagicMock(work=lambda *given: work)
    learner.add_gradient = lambda update, rows: grows((6.0, 8.0)).backward()
    sums = Sums()
    learner.update(1, rollout_of(session, torch.zeros(1, 2, 3)), MagicMock(), sums)
    row = sums.means()
    assert row["anchor/gradient_share"] == pytest.approx(share)
    assert row["grad/norm"] == pytest.approx(10 / share / 2)


def test_without_a_coefficient_a_run_is_bitwise_the_one_without_images(opened):
    with opened("draft", anchored=False) as plain, opened("draft") as off:
        assert plain.anchor is None
        assert off.anchor is not None
        off.anchor.coef = 0.0
        for session in (plain, off):
            session.step(1)
        assert all(torch.equal(v, off.weights.parameters[name]) for name, v in plain.weights.parameters.items())


def test_each_update_has_images_of_its_own_in_an_order_that_goes_through_the_set(opened):
    with opened("flow_grpo") as session:
        anchor = session.anchor
        assert anchor is not None
        session.roll_out(1)
        parts = [torch.cat([batch.sample for batch, _ in anchor.work.batches(update)]).tolist() for update in (0, 1)]
        assert sorted(parts[0] + parts[1]) == list(range(2 * COUNT))
        assert [len(part) for part in parts] == [COUNT, COUNT]
        assert max(len(batch) for batch, _ in anchor.work.batches(0)) <= 3  # optim.batch_size
        source = anchor.collector.given.source
        epoch = [number for iteration in range(1, 6) for number in source.draw(iteration)]  # 40 draws of 10
        assert sorted(epoch) == sorted([*range(IMAGES)] * 4)


@pytest.mark.slow
def test_a_resumed_session_is_bitwise_the_undisturbed_one_and_another_set_is_refused(opened):
    with opened("flow_grpo") as whole, opened("flow_grpo") as resumed:
        whole.step(1)
        tensors, plain = whole.state()
        tensors, plain = {name: value.clone() for name, value in tensors.items()}, json.loads(json.dumps(plain))
        resumed.load_state(1, tensors, plain)
        rows = [session.step(2) for session in (whole, resumed)]
        assert rows[0]["anchor/loss"] == rows[1]["anchor/loss"]
        assert all(torch.equal(v, resumed.weights.parameters[name]) for name, v in whole.weights.parameters.items())
        plain["anchor"]["count"] += 1
        with pytest.raises(ConfigError, match=r"data\.anchor\.path=.* has changed since the checkpoint"):
            resumed.load_state(1, tensors, plain)
        resumed.load_state(1, tensors, plain, other_data=True)


def test_the_rollouts_noise_levels_can_be_the_times(opened):
    with opened("flow_grpo", "data.anchor.times={name: subset, count: 2, fraction: 1}") as session:
        assert session.anchor is not None
        session.roll_out(1)
        assert session.anchor.work.sizes == [2 * COUNT] * 2
        grid = session.parts.sampling.schedule.sigmas[:-1]
        for batch, _ in session.anchor.work.batches(0):
            assert bool(torch.isin(batch.sigma, grid).all())


def test_unreadable_images_are_left_out_and_too_many_stop_the_run_with_the_key(opened, images, tmp_path):
    for file in images.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "0.png").write_bytes(b"broken")
    with opened("flow_grpo", f"data.anchor.path={tmp_path}") as session:
        sums, anchor = Sums(), session.anchor
        assert anchor is not None
        rows = 0
        for iteration in range(1, 6):
            anchor.collect(iteration, Timer(), sums)
            rows += sum(anchor.work.sizes)
        assert rows == 36, "of 40 draws every image four times"
        assert sums.values["anchor/unreadable"] == 4
        for k in range(1, IMAGES):
            (tmp_path / f"{k}.png").write_bytes(b"broken")
        anchor.collect(6, Timer(), sums)  # 12 of 48: up to 14.1 may be lost
        assert anchor.work.sizes == [0, 0]
        with pytest.raises(TooManyLost, match=r"data\.anchor\.records\.max_broken=0\.1"):
            anchor.collect(7, Timer(), sums)


def test_a_model_without_an_encoder_is_refused(opened, monkeypatch):
    def encode(*given: Any) -> Tensor:
        raise ModelError("makes no latents of images")

    monkeypatch.setattr(Sd3, "encode_images", encode)
    with pytest.raises(ModelError, match="makes no latents"):
        opened("flow_grpo")


def test_a_plan_tells_of_the_images_and_counts_their_captions_and_forwards(images, capsys):
    words = ("data.max_prompts=1", "data.max_eval_prompts=1")
    plain = data_here(resolved("configs/lab/flow_grpo.yaml", *words))
    found = data_here(resolved("configs/lab/flow_grpo.yaml", *words, f"data.anchor={{path: {images}, per_update: 4}}"))
    assert any("data.anchor: 8 images an iteration" in line for line in found.lines)
    assert found.texts > plain.texts
    anchor = f"data.anchor={{path: {images}, per_update: 9}}"
    command("configs/lab/flow_grpo.yaml", [*words, anchor, "optim.updates_per_iteration=2", "optim.batch_size=4"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "images of data.anchor" in line]
    assert line.split()[-3:] == ["6", "4", "2"]  # 9, 5 and 2 images in forwards of 4, twice


@pytest.mark.slow
def test_two_processes_take_the_same_update_and_facts_are_written(images, tmp_path):
    anchor = f"data.anchor={{path: {images}, per_update: 4, coef: 0.5, posterior: mean}}"
    words = (anchor, "iterations=1", "optim.updates_per_iteration=1", "data.max_eval_prompts=1")
    with inside(tmp_path):
        train("name=one", *words)
        ranks.run([["run.yaml", *words, "name=two"]])
        one, two = (json.loads(Path(f"runs/{name}/metrics.jsonl").read_text()) for name in ("one", "two"))
        assert one["anchor/loss"] == pytest.approx(two["anchor/loss"], rel=1e-4)
        shares = [row["anchor/gradient_share"] for row in (one, two)]
        assert 0 < shares[0] == pytest.approx(shares[1], rel=1e-3)
        assert_same_gradient("one", "two")
        facts = json.loads(Path("runs/one/provenance.json").read_text())["data"]["anchor"]
        assert facts["usable"] == IMAGES
