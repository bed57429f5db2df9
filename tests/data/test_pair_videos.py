"""Preference sets of videos: mp4, WebP and folders of frames, what their headers refuse, and which frames are taken."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.algorithms import diffusion_dpo
from flowrl.commands._pair_check import look as looked
from flowrl.core.errors import ConfigError
from flowrl.core.types import SampleId
from flowrl.data.given_samples import Given, Look, latents_of, slot_of
from flowrl.data.options import PairsConfig, PreferenceOptions
from flowrl.data.preferences import PreferenceSet, load_preferences
from flowrl.data.stored_videos import Frames, frame_files
from flowrl.media import media
from tests.tables import table
from tests.toys import ToyAdapter

FRAMES = 5
ALL, VIDEOS = PreferenceOptions(max_broken=1.0), Frames(FRAMES)


def video(seed: int, frames: int = FRAMES, size: int = 16) -> Tensor:
    """Noise, [F, 3, H, W] uint8."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, 3, size, size), generator=generator).to(torch.uint8)


def put(folder: Path, name: str, frames: Tensor, fps: float = 16.0) -> str:
    """A video as `<name>.webp` or `.mp4`, or as a folder of PNGs where the name has no suffix; gives the name."""
    if Path(name).suffix:
        media.encode_video(folder / name, frames, fps)
    else:
        (folder / name).mkdir()
        for number, frame in enumerate(frames):  # 10 comes after 9, and before it by plain sorting
            Image.fromarray(frame.permute(1, 2, 0).numpy()).save(folder / name / f"frame-{number + 8}.png")
    return name


def write(folder: Path, *pairs: tuple[str, str]) -> str:
    lines = [{"prompt": f"prompt {k}", "chosen": a, "rejected": b} for k, (a, b) in enumerate(pairs)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def load(source: str, videos: Frames | None = VIDEOS) -> PreferenceSet:
    return load_preferences(source, "data.pairs.path", ALL, videos=videos)


class Videos(ToyAdapter):
    """Keeps what it is asked to encode."""

    num_frames, height, width = FRAMES, 16, 16

    def __init__(self) -> None:
        ToyAdapter.__init__(self)
        self.seen: list[Tensor] = []

    def latent_shape(self) -> tuple[int, ...]:
        return (FRAMES, 2, 16, 16)

    def encode_images(self, pictures: Tensor, noise: Tensor | None = None) -> Tensor:
        self.seen.append(pictures)
        return 2 * pictures[:, :, :2] - 1 + (0 if noise is None else 0.1 * noise)


def encoded(source: str, **options: Any) -> tuple[Videos, Tensor]:
    """(the adapter, latents) of the first pair."""
    config = PairsConfig(path=source, records=ALL, **options)
    found = Given(config, diffusion_dpo.build(diffusion_dpo.Config()), seed=3, num_frames=FRAMES)
    adapter, ids = Videos(), [SampleId(0, 0), SampleId(0, 1)]
    result = latents_of(lambda s: slot_of(found.records, s, found.members), ids, adapter, batch_size=4)
    assert result.rewards.tolist() == [1, 0]
    return adapter, result.x0


def test_webp_and_folders_hold_the_same_frames_to_the_last_bit(tmp_path):
    chosen, rejected = video(1), video(2)
    one = write(tmp_path, (put(tmp_path, "a.webp", chosen), put(tmp_path, "b", rejected)))
    Image.new("RGB", (16, 16)).save(tmp_path / "b" / "preview.gif")
    adapter, x0 = encoded(one)
    (given,) = adapter.seen
    assert torch.equal(given, torch.stack([chosen, rejected]) / 255)
    assert torch.equal(x0, 2 * given[:, :, :2] - 1)
    assert [file.name for file in frame_files(tmp_path / "b")] == [f"frame-{k}.png" for k in range(8, 13)]


def test_mp4_is_read_with_its_rate(tmp_path):
    pytest.importorskip("av", reason="needs the extra video")
    grey = torch.full((FRAMES, 3, 16, 16), 120, dtype=torch.uint8)
    pair = put(tmp_path, "a.mp4", grey, 24), put(tmp_path, "b.webp", grey // 2, 24)
    adapter, _ = encoded(write(tmp_path, pair))
    # Limited range: 219 levels for 256.
    assert float((adapter.seen[0] * 255 - torch.stack([grey, grey // 2])).abs().max()) <= 3


def test_a_frozen_video_is_a_video_and_a_missing_frame_of_a_folder_changes_the_contents(tmp_path):
    frozen = video(3)[:1].repeat(FRAMES, 1, 1, 1)
    source = write(tmp_path, (put(tmp_path, "a", video(1)), put(tmp_path, "b.webp", frozen)))
    adapter, _ = encoded(source)
    assert torch.equal(adapter.seen[0][1], frozen / 255)
    before = load(source).report.files()
    Image.new("RGB", (16, 17)).save(tmp_path / "a" / "frame-12.png")
    assert load(source).report.files() != before


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    table(__file__, "refused_pairs_of_videos"),
)
def test_a_pair_that_does_not_fit_is_named_with_the_remedy_before_training(tmp_path, first, second, reason):
    counts = Frames(None) if "counts" in reason else Frames(FRAMES)
    for name, frames, fps in (first, second):
        if frames > 1:
            put(tmp_path, name, video(1, frames), fps)
        elif frames == 1:
            Image.new("RGB", (16, 16)).save(tmp_path / name)
        elif frames == 0 and Path(name).suffix:
            (tmp_path / name).write_bytes(b"")
        elif frames == 0:
            (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"(?s)skipped 1, .*" + reason + ".*no record can be used"):
        load(write(tmp_path, (first[0], second[0])), counts)


def test_an_empty_mp4_and_one_that_lies_are_named(tmp_path):
    pytest.importorskip("av", reason="needs the extra video")
    put(tmp_path, "a.webp", video(1))
    (tmp_path / "b.mp4").write_bytes(b"")
    (tmp_path / "c.mp4").write_bytes(b"no video at all")
    source = write(tmp_path, ("a.webp", "b.mp4"), ("a.webp", "c.mp4"))
    with pytest.raises(ConfigError, match=r"(?s)skipped 2, unreadable video: .*b.mp4: it is empty.*c.mp4: it is not"):
        load(source)


def test_videos_of_other_layouts_and_kinds_are_refused_for_models_of_images(tmp_path):
    source = write(tmp_path, (put(tmp_path, "a", video(1)), put(tmp_path, "b", video(2))))
    with pytest.raises(ConfigError, match=r"a video, for a model of images: .*use a model of videos"):
        load(source, None)
    moving = put(tmp_path, "c.webp", video(1))
    for name in ("d.png", "e.webp"):
        Image.new("RGB", (16, 16)).save(tmp_path / name)
    found = load(write(tmp_path, (moving, "d.png"), ("e.webp", "d.png"), ("d.png", moving)), None)
    assert found.report.counts == {"a video, for a model of images": 2}
    assert "line 1 (c.webp; use a model of videos)" in str(found.report)
    assert len(found) == 1, "a WebP that does not move is an image"


def test_a_longer_video_is_cut_only_where_asked_and_both_of_a_pair_at_the_same_place(tmp_path):
    long = video(1, 12)
    source = write(tmp_path, (put(tmp_path, "a", long), put(tmp_path, "b.webp", long)))
    adapter, _ = encoded(source, frames="cut")
    assert torch.equal(adapter.seen[0], (long[4:9] / 255).expand(2, -1, -1, -1, -1)), "the middle"
    starts = set()
    for iteration in range(1, 9):
        config = PairsConfig(path=source, records=ALL, frames="cut", crop="random", flip=False, posterior="mean")
        found = Given(config, diffusion_dpo.build(diffusion_dpo.Config()), seed=3, num_frames=FRAMES)
        adapter, ids = Videos(), [SampleId(0, 0), SampleId(0, 1)]
        look = Look(config, 3, iteration)
        latents_of(lambda s: slot_of(found.records, s, found.members), ids, adapter, batch_size=4, look=look)  # noqa: B023
        (given,) = adapter.seen
        assert torch.equal(given[0], given[1])
        starts.add(next(k for k in range(8) if torch.equal(given[0], long[k : k + FRAMES] / 255)))
    assert len(starts) > 2
    with pytest.raises(ConfigError, match="frames=cut"):
        load(source)


def test_the_check_reads_every_video_and_names_what_differs(tmp_path, capsys):
    names = [put(tmp_path, name, video(k)) for k, name in enumerate(("a.webp", "b", "c.webp", "d.webp"))]
    put(tmp_path, "e.webp", video(9, 9))
    source = write(tmp_path, (names[0], names[1]), (names[2], names[3]), (names[0], "e.webp"), (names[1], names[1]))
    assert not looked(source, [])
    told = capsys.readouterr().out
    assert "2 of 2 records have readable videos of 5 frames, of 16x16" in told
    assert "methods on pairs: broken 25.00% of 4 records" in told
    assert looked(source, ["max_broken=0.3"])
    frame = tmp_path / "b" / "frame-9.png"
    frame.write_bytes(frame.read_bytes()[:50])
    looked(source, ["max_broken=0.3"])
    assert "1 records with an image that cannot be read" in capsys.readouterr().out


def test_a_broken_frame_masks_its_pair_and_frames_of_two_sizes_or_too_many_are_refused(tmp_path, monkeypatch):
    source = write(tmp_path, (put(tmp_path, "a", video(1)), put(tmp_path, "b", video(2))))
    found = load(source)
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "b" / "frame-9.png")
    rejected = found.read(0).rejected
    assert rejected is not None
    with pytest.raises(Exception, match=r"several sizes, such as \[\(9, 9\), \(16, 16\)\]; make them equal"):
        rejected.frames(FRAMES)
    monkeypatch.setattr("flowrl.media.mp4.MOST_BYTES", 3 * 16 * 16 * (FRAMES - 1))
    with pytest.raises(Exception, match=f"it has {FRAMES} frames of 16 x 16 pixels, more than"):
        found.read(0).chosen.frames(FRAMES)
