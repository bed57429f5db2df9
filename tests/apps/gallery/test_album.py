"""Images of every prompt in a page of limited size, and links that keep their aim."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from flowrl.apps.gallery import album, build, images, links
from scripts.bench.gallery import write_run
from tests.apps.folders import NUM_PROMPTS, SEEDS, Page, make_run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[album.Files]:
    """Twelve pairs of noisy images of 300 pixels."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    paths = [folder / f"{i}.png" for i in range(24)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (300, 300, 3), dtype=np.uint8)).save(path, compress_level=0)
    return list(zip(paths[::2], paths[1::2], strict=True))


def num_bytes(filled: album.Album) -> int:
    return sum(len(image["src"]) for image in filled.images.values())


@pytest.mark.parametrize("room", [40_000, 150_000, 400_000, 10_000_000])
def test_images_fill_the_room_and_never_more_the_first_seeds_before_the_others(files, tmp_path, room):
    filled = album.fill(files[:4], files[4:], room, "run-0", images.OnDisk(tmp_path))
    assert num_bytes(filled) <= room
    held = {path for pair in files[:4] for path in pair}
    assert held <= set(filled.images)
    assert filled.further + filled.further_left_out == 8
    place = album.SIZES.index(filled.size)
    if place:
        # The next better size does not fit.
        better = album.SIZES[place - 1]
        sizes = [*[(f, better.main_px) for f in files[:4]], *[(f, better.further_px) for f in files[4:]]]
        total = sum(
            len((images.OnDisk(tmp_path).image(path, px, quality=better.quality) or {})["src"])
            for pair, px in sizes
            for path in pair
            if px
        )
        assert total * 1.5 > room
    assert ("pairs of further seeds are in the run folder alone" in filled.described()) == bool(filled.further_left_out)


def test_with_less_room_than_the_smallest_images_need_whole_pairs_are_left_out_and_counted(files, tmp_path):
    filled = album.fill(files, [], 20_000, "run-0", images.OnDisk(tmp_path))
    assert 0 < num_bytes(filled) <= 20_000
    kept = len(filled.images) // 2
    assert set(filled.images) == {path for pair in files[:kept] for path in pair}
    assert filled.main_left_out == 12 - kept
    assert f"{12 - kept} more pairs have no room here" in filled.described()
    assert album.fill([], [], 0, "run-0", images.OnDisk(tmp_path)).images == {}


def test_an_image_is_embedded_once_and_every_later_place_refers_to_it(tmp_path):
    page = Page(build([make_run(tmp_path / "run", num_prompts=20)]))
    film = page.source.index('id="run-0-film"'), page.source.index('id="run-0-worst"')
    sources = re.findall(r"base64,([A-Za-z0-9+/=]+)", page.source[: film[0]] + page.source[film[1] :])
    assert len(sources) == 20 * len(SEEDS) * 2
    assert "shown further up" in page.text("a")


def test_every_prompt_with_images_has_a_card_with_its_other_seeds(tmp_path):
    folder = make_run(tmp_path / "run", num_pictured=30)
    page = Page(build([folder]))
    prompts = json.loads((folder / "eval" / "base.json").read_text())["prompts"]
    names = links.prompt_anchors(prompts)
    cards = [i for i in page.ids if re.fullmatch(r"p-[0-9a-f]{10}-s\d", i)]
    assert cards == [links.pair_anchor(name, seed) for name in names[:30] for seed in SEEDS]
    rows = [i for i in page.ids if re.fullmatch(r"p-[0-9a-f]{10}", i)]
    assert rows == names
    assert len(rows) == NUM_PROMPTS


def test_a_link_stays_when_prompts_are_sorted_and_added_and_equal_texts_have_one_each(tmp_path):
    first = make_run(tmp_path / "a", prompts=["a red circle", "two squares", "a red circle"])
    ids = Page(build([first])).ids
    names = links.prompt_anchors(["a red circle", "two squares", "a red circle"])
    assert len(set(names)) == 3
    assert {links.pair_anchor(name, seed) for name in names for seed in SEEDS} <= set(ids)
    other = make_run(tmp_path / "b", prompts=["three triangles", "two squares", "a red circle"])
    again = set(Page(build([other])).ids)
    assert {links.pair_anchor(name, 0) for name in names[:2]} <= again
    assert links.prompt_anchors(["two squares"]) == names[1:2]


def test_two_runs_on_one_page_have_links_of_their_own(tmp_path):
    runs = [make_run(tmp_path / name, name=name, num_prompts=3) for name in ("one", "two")]
    page = Page(build(runs, tmp_path / "both"))
    assert len(set(page.ids)) == len(page.ids)
    assert len([i for i in page.ids if i.startswith("p-")]) == 6


def test_a_page_of_many_long_prompts_keeps_to_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr("flowrl.apps.gallery.view.PAGE_BYTES", 2_000_000)
    page = build([write_run(tmp_path / "run", 20, 2, 400, words=250, distinct=2)])
    assert page.stat().st_size <= 2_000_000
    text = page.read_text()
    assert "Images on this page are WebP of at most" in text
    assert len(re.findall(r'id="p-[0-9a-f]{10}-s0"', text)) == 20


def test_curves_and_a_comparison_leave_less_room_for_images(tmp_path, monkeypatch):
    rng, rooms = np.random.default_rng(0), []

    def nothing(main, further, room, prefix, place):
        rooms.append(room)
        return album.Album(prefix, album.SIZES[-1], {}, 0)

    monkeypatch.setattr(album, "fill", nothing)
    runs = [make_run(tmp_path / name, name=name, num_prompts=8, iterations=20) for name in ("one", "two")]
    for file in (file for run in runs for file in run.glob("eval/*/*.png")):
        Image.fromarray(rng.integers(0, 256, (90, 90, 3), dtype=np.uint8)).save(file, compress_level=1)
    rows = [{"iteration": i} | {f"x/{k}": i % 7 for k in range(40)} for i in range(1, 401)]
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for shown in (runs[:1], runs):
        rooms.clear()
        size = build(shown, tmp_path / "page").stat().st_size
        assert 14_000_000 < size + sum(rooms) <= album.PAGE_BYTES
