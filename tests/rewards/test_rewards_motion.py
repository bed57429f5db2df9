"""Motion of clips: every measure against a straight-line computation, and no prize for standing still."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flowrl.rewards._vision import optical_flow
from flowrl.rewards.motion import Config, build, consistency, dynamics, spaced
from transformers import ViTModel

from flowrl.reward import RewardError
from flowrl.rewards import motion
from tests.tiny_rewards import raw_scores
from tests.tiny_rewards.diversity import save_clip, save_dino

FRAMES, SIZE = 9, 64


def scored(reward, videos) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in raw_scores(reward, videos).items()}


def ground(seed: int = 0) -> torch.Tensor:
    """Soft blotches, [3, SIZE, 4 * SIZE]."""
    coarse = torch.rand(1, 3, 8, 32, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, (SIZE, 4 * SIZE), mode="bicubic")[0].clamp(0, 1)


def still() -> torch.Tensor:
    return ground()[None, :, :, :SIZE].expand(FRAMES, -1, -1, -1)


def panned(step: int) -> torch.Tensor:
    return torch.stack([ground()[:, :, i * step : i * step + SIZE] for i in range(FRAMES)])


def moving_disc() -> torch.Tensor:
    """A white disc of a tenth of the width that crosses half of a grey picture."""
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    discs = [((rows - 32) ** 2 + (columns - 10 - 4 * i) ** 2 < 40).float() for i in range(FRAMES)]
    return 0.4 + 0.6 * torch.stack(discs)[:, None].expand(-1, 3, -1, -1)


def grainy() -> torch.Tensor:
    """A still clip with the noise of a camera."""
    noise = torch.randn(FRAMES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    return (still() + 0.02 * noise).clamp(0, 1)


def flashing() -> torch.Tensor:
    """A still clip whose light goes up and down."""
    light = torch.tensor([1.0, 0.6]).repeat(FRAMES)[:FRAMES]
    return 0.5 * still() + 0.4 * light.view(-1, 1, 1, 1)


def boiling() -> torch.Tensor:
    """Another picture in every frame."""
    return torch.stack([ground(seed)[:, :, :SIZE] for seed in range(FRAMES)])


@pytest.fixture(scope="module")
def reward():
    return build(Config())


def test_a_still_clip_has_the_best_smoothness_and_the_worst_score(reward):
    found = scored(reward, torch.stack([still()]))
    assert found == {
        "motion": [0.0], "motion_smoothness": [1.0], "motion_dynamics": [0.0], "motion_strength": [0.0],
        "motion_flickering": [1.0],
    }  # fmt: skip


def test_what_moves_smoothly_beats_what_stands_still_flashes_or_boils(reward):
    clips = torch.stack([panned(3), moving_disc(), still(), grainy(), flashing(), boiling()])
    pan, disc, stands, grain, flash, boil = scored(reward, clips)["motion"]
    assert min(pan, disc) > 0.9
    assert max(stands, grain, flash) < 0.2
    assert boil < min(pan, disc)


def test_the_score_does_not_grow_with_motion_beyond_what_is_enough(reward):
    slow, fast = scored(reward, torch.stack([panned(3), panned(12)]))["motion"]
    assert fast < slow


def test_values_are_those_of_the_definitions(reward):
    clips = torch.stack([panned(2), boiling()])
    found = scored(reward, clips)
    for row, clip in enumerate(clips):
        saved = (clip.double() * 255).round()
        change = (saved[1:] - saved[:-1]).abs().mean().item()
        assert found["motion_strength"][row] == pytest.approx(change / 255)
        assert found["motion_flickering"][row] == pytest.approx((255 - change) / 255)
        odd = torch.arange(1, FRAMES - 1, 2)
        apart = (saved[odd] - (saved[odd - 1] + saved[odd + 1]) / 2).abs().mean().item()
        assert found["motion_smoothness"][row] == pytest.approx((255 - apart) / 255)
        # A cell is 8 x 8 pixels here; 5 % of them are 3.
        cells = saved.view(FRAMES, 3, 8, 8, 8, 8).mean(dim=(3, 5)) / 255
        cells = cells - cells.mean(dim=(2, 3), keepdim=True)
        changes = (cells[1:] - cells[:-1]).abs().mean(dim=1).flatten(1).sort(dim=1, descending=True).values
        assert found["motion_dynamics"][row] == pytest.approx(changes[:, :3].mean().item(), rel=1e-5)


def test_a_clip_of_more_frames_a_second_is_looked_at_at_an_eighth_of_a_second():
    frames = [np.array(number) for number in range(33)]
    assert spaced(frames, 8.0) == frames
    assert spaced(frames, 24.0) == frames[::3]
    assert spaced(frames, 4.0) == frames
    assert spaced(frames[:3], 60.0) == [frames[0], frames[2]]


def test_a_large_picture_has_32_by_32_cells():
    frames = torch.rand(2, 3, 320, 640, generator=torch.Generator().manual_seed(0))
    cells = frames.view(2, 3, 32, 10, 32, 20).mean(dim=(3, 5))
    cells = cells - cells.mean(dim=(2, 3), keepdim=True)
    change = (cells[1] - cells[0]).abs().mean(dim=0).flatten().sort(descending=True).values[:51].mean()
    pixels = [(frame * 255).round().byte().permute(1, 2, 0).contiguous().numpy() for frame in frames]
    assert dynamics(pixels) == pytest.approx(change.item(), rel=1e-3)


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (1, 2, 3, 8, 8)])
def test_what_is_no_clip_of_three_frames_is_refused(reward, shape):
    with pytest.raises(RewardError, match=r"videos \[F, 3, H, W\] of 3 frames or more, got"):
        reward.score(torch.zeros(shape), [""], [{}])


# ---- with a network of embeddings


def test_consistency_is_vbenchs():
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    expected = 0.0
    for i in range(1, 5):
        to_before, to_first = (torch.cosine_similarity(rows[i], rows[j], dim=0).item() for j in (i - 1, 0))
        expected += (max(0.0, to_before) + max(0.0, to_first)) / 2 / 4
    assert consistency(rows) == pytest.approx(expected)
    assert consistency(rows[:1].expand(4, -1)) == pytest.approx(1.0)


def test_a_backbone_adds_its_consistency_to_the_quality(tmp_path):
    reward = build(Config(backbone=save_clip(tmp_path), device="cpu"))
    assert set(reward.card.outputs) == {*motion.CARD.outputs, "motion_consistency"}
    found = scored(reward, torch.stack([still(), boiling(), panned(3)]))
    assert found["motion"][0] == 0
    assert found["motion_consistency"][0] == pytest.approx(1.0)
    assert found["motion_consistency"][1] < 1
    quality = (found["motion_consistency"][2] + found["motion_smoothness"][2]) / 2
    assert found["motion"][2] == pytest.approx(quality * min(found["motion_dynamics"][2] / 0.05, 1))


def test_dino_sees_frames_in_their_own_aspect_as_vbench_shows_them(tmp_path):
    """Vchitect/VBench:vbench/utils.py:dino_transform: the shorter side to the network's, nothing cut or squashed."""
    folder = save_dino(tmp_path)
    wide = panned(3)[..., :32, :]
    model = ViTModel.from_pretrained(folder).eval()
    saved = F.interpolate((wide * 255).round(), size=(16, 32), mode="bilinear", antialias=True)
    with torch.no_grad():
        pixels = (saved / 255 - 0.5) / 0.5
        rows = model(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state[:, 0]
    found = scored(build(Config(backbone=folder, device="cpu")), wide[None])["motion_consistency"][0]
    assert found == pytest.approx(consistency(rows), abs=2e-4)  # the processor rounds the resized image to 8 bits
    squashed = F.interpolate(pixels, size=(16, 16))
    with torch.no_grad():
        assert abs(consistency(model(pixel_values=squashed).last_hidden_state[:, 0]) - found) > 2e-3


# ---- with optical flow


def test_the_dynamic_degree_counts_as_vbench_does():
    """Vchitect/VBench:vbench/dynamic_degree.py, line by line."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        frames, side, fps = int(rng.integers(4, 40)), int(rng.choice([128, 256, 480])), float(rng.choice([4, 8, 16]))
        magnitudes = rng.uniform(0, 20, frames - 1)
        threshold = max(1.0, 8.0 / fps) * 6.0 * (side / 256.0)
        needed, count, moves = round(4 * (frames / 16.0)), 0, False
        for value in magnitudes:
            count += value > threshold
            if count >= needed:
                moves = True
                break
        share = optical_flow.moving_share(magnitudes.tolist(), frames=frames, shorter_side=side, fps=fps)
        assert (share >= 1) == moves


@pytest.fixture(scope="module")
def raft(tmp_path_factory):
    """RAFT large at random, in a file."""
    from torchvision.models.optical_flow import raft_large

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = raft_large(weights=None).eval()
    file = tmp_path_factory.mktemp("raft") / "raft.pth"
    torch.save(model.state_dict(), file)
    return model, str(file)


def test_the_speed_is_the_mean_of_the_fastest_twentieth_of_the_padded_flow(raft, caplog):
    model, file = raft
    magnitude = optical_flow.load_raft(file, device="cpu", reward="motion")
    assert "not the checkpoint that VBench uses" in caplog.text
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 256, (2, 130, 136, 3), dtype=np.uint8)

    def prepared(pixels):
        # 130 rows to 136: three above, three below.
        padded = np.pad(pixels, ((3, 3), (0, 0), (0, 0)), mode="edge").astype(np.float32)
        return torch.from_numpy(padded / 255 * 2 - 1).permute(2, 0, 1)[None]

    with torch.no_grad():
        flow = model(prepared(first), prepared(second), num_flow_updates=20)[-1][0].numpy()
    speeds = np.sort(np.sqrt(flow[0] ** 2 + flow[1] ** 2).flatten())[::-1]
    assert magnitude(first, second) == pytest.approx(speeds[: int(136 * 136 * 0.05)].mean(), rel=1e-3)


@pytest.mark.parametrize(("fps", "degree"), [(4.0, 0.0), (6.0, 0.0), (8.0, 1.0), (12.0, 1.0), (24.0, 1.0)])
def test_the_bound_of_a_speed_follows_the_videos_own_rate(monkeypatch, fps, degree):
    """VBench divides 8 by the file's rate; at 12, of which every second frame is taken, the bound stays."""
    speed = 1.1 * 6 * SIZE / 256
    monkeypatch.setattr(motion, "load_raft", lambda *args, **options: lambda first, second: speed)
    found = scored(build(Config(flow_weights="anything", fps=fps)), panned(3)[None])
    assert found["motion_degree"] == [degree]


def test_flow_decides_the_gate(monkeypatch):
    speeds = {}
    monkeypatch.setattr(motion, "load_raft", lambda *args, **options: lambda first, second: speeds["now"])
    reward = build(Config(flow_weights="anything"))
    for speed, degree in ((0.0, 0.0), (100.0, 1.0)):
        speeds["now"] = speed
        found = scored(reward, panned(3)[None])
        assert found["motion_degree"] == [degree]
        assert found["motion"] == [pytest.approx(degree * found["motion_smoothness"][0])]


def test_frames_too_small_for_raft_and_other_files_are_refused(raft, tmp_path):
    with pytest.raises(RewardError, match=r"at least 128 x 128 pixels, got 64 x 64"):
        build(Config(flow_weights=raft[1], device="cpu")).score(panned(1)[None], [""], [{}])
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(RewardError, match=r"Error\(s\) in loading state_dict"):
        build(Config(flow_weights=str(tmp_path / "other.pth")))
