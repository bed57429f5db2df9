"""Videos of the report in a real browser: both of a pair move together, and stand where no motion is wanted."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.apps.gallery import build
from flowrl.media import media
from tests.apps.folders import make_run
from tests.apps.gallery.browser import LEVEL_AA, LOOKS, PHONE, WIDE, fits, opened, violations
from tests.apps.gallery.test_live_page import watching
from tests.apps.gallery.test_previews import add_previews

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FRAMES, SIZE = 9, (48, 64)
# By a copy: reading a canvas twice makes Chromium warn about it.
PIXEL = (
    "(c, x, y) => { const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', { willReadFrequently: true });"
    " copy.drawImage(c, 0, 0); return Array.from(copy.getImageData(x, y, 1, 1).data.slice(0, 3)) }"
)
AT = "([s, p]) => getComputedStyle(document.querySelector(s))[p]"


def colour(frame: int, tag: str) -> list[int]:
    return [20 * frame, 90, 200 if tag == "base" else 40]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("videos") / "run", num_prompts=3, iterations=20)
    add_previews(folder, {"base": ["my dog"], "tuned": ["my dog"]}, 64)
    for image in [*folder.glob("eval/*/*.png"), *folder.glob("previews/*/*.png")]:
        levels = torch.tensor([colour(k, image.parent.name) for k in range(FRAMES)], dtype=torch.uint8)
        # 4 a second: a frame stays long enough to be looked at twice.
        media.write(levels[..., None, None].expand(-1, -1, *SIZE), image.with_suffix(""), fps=4)
        image.unlink()
    return build([folder])


def pixels(part: Any) -> list[list[int]]:
    """Colours of the frames that are seen, once the images are there."""
    drawn = "b => [...b.querySelectorAll('.reel img')].every(i => i.complete && i.naturalWidth)"
    part.page.wait_for_function(drawn, arg=part.element_handle())
    part.page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    return part.locator("canvas").evaluate_all(f"cs => cs.map(c => ({PIXEL})(c, 32, 24))")


@LOOKS
def test_the_page_is_silent_fits_and_everyone_can_use_it(browser, file, size, scheme):
    with opened(browser, file, viewport=size, color_scheme=scheme) as page:
        page.get_by_role("button", name="Pause every video").click()
        assert fits(page)
        assert violations(page, LEVEL_AA) == []
        page.get_by_role("button", name="Filmstrips", exact=True).click()
        assert fits(page)
        page.get_by_role("button", name="Filmstrips", exact=True).click()
        page.locator(".card .enlarge").first.click()
        assert fits(page)
        assert violations(page, LEVEL_AA) == []


def test_base_and_tuned_play_together_pause_and_are_scrubbed_by_keys(browser, file):
    with opened(browser, file, "#run-0-pairs", viewport=WIDE) as page:
        card = page.locator("#run-0-pairs .card").first
        scrub, play = card.get_by_role("slider", name="Frame:"), card.locator(".play")
        page.wait_for_function("s => s.value === '2'", arg=scrub.element_handle())
        assert play.get_attribute("aria-label").startswith("Pause: ")
        play.press("Space")
        here = int(scrub.input_value())
        assert pixels(card) == [colour(here, "base"), colour(here, "tuned")]
        page.wait_for_timeout(600)
        assert scrub.input_value() == str(here)
        scrub.press("Home")
        for _ in range(5):
            scrub.press("ArrowRight")
        assert pixels(card) == [colour(5, "base"), colour(5, "tuned")]
        assert scrub.get_attribute("aria-valuetext") == "frame 6 of 9, 1.25 s"
        others = page.locator("#run-0-pairs .card .play.on")
        assert others.count() == 2, "the other pairs go on"
        play.press("Enter")
        page.wait_for_function("s => s.value === '7'", arg=scrub.element_handle())
        scrub.press("ArrowLeft")
        assert play.get_attribute("aria-label").startswith("Play: "), "who scrubs wants it to stand"


def test_all_are_paused_and_played_by_one_button_and_one_key(browser, file):
    with opened(browser, file, "#run-0-pairs", viewport=WIDE) as page:
        number = page.locator(".play").count()
        assert page.locator(".play.on").count() == number > 6
        page.keyboard.press("p")
        assert page.locator(".play.on").count() == 0
        page.get_by_role("button", name="Play every video").click()
        assert page.locator(".play.on").count() == number
        # A row of a table is one player: every evaluation of a prompt at the same time.
        row = page.locator("#run-0-previews table tbody tr").first
        row.locator(".scrub").press("End")
        assert pixels(row) == [colour(8, "base"), colour(8, "tuned")]


def test_the_enlarged_pair_goes_on_where_the_card_is(browser, file):
    with opened(browser, file, "#run-0-pairs", viewport=WIDE) as page:
        card = page.locator("#run-0-pairs .card").first
        card.locator(".scrub").press("End")
        card.locator("canvas").first.click()
        viewer = page.locator("dialog.viewer")
        assert pixels(viewer) == [colour(8, "base"), colour(8, "tuned")]
        assert viewer.locator(".play.on").count() == 0
        page.keyboard.press("p")
        assert viewer.locator(".play.on").count() == 1
        page.keyboard.press("j")
        assert viewer.locator(".player").count() == 1
        page.wait_for_function("s => s.value === '3'", arg=viewer.locator(".scrub").element_handle())


def test_a_copied_pair_has_the_frame_that_is_seen(browser, file):
    with opened(browser, file, "#run-0-pairs", viewport=WIDE) as page:
        card = page.locator("#run-0-pairs .card").first
        card.locator(".scrub").press("End")
        drawn = page.evaluate(
            "() => { const c = drawPair(document.querySelector('#run-0-pairs .card'));"
            f" return [c.width, ...[184, 516].map(x => ({PIXEL})(c, x, 200))] }}"
        )
        assert drawn == [2 * 24 + 2 * 320 + 12, colour(8, "base"), colour(8, "tuned")]


def test_who_wants_no_motion_sees_filmstrips_and_may_play(browser, file):
    with opened(browser, file, "#run-0-pairs", viewport=WIDE, reduced_motion="reduce") as page:
        card = page.locator("#run-0-pairs .card").first
        assert card.locator("canvas:visible, .player:visible").count() == 0
        strips = card.locator("img").all()
        assert len(strips) == 2
        for strip in strips:
            # Nine frames in three rows, 2 pixels apart.
            assert strip.evaluate("i => i.decode().then(() => [i.naturalWidth, i.naturalHeight])") == [198, 150]
            assert strip.evaluate("i => getComputedStyle(i).opacity") == "1"
            assert strip.get_attribute("alt").endswith("(video, 9 frames in a row)")
        above, below = (strip.bounding_box() for strip in strips)
        assert above["y"] + above["height"] <= below["y"]
        page.keyboard.press("f")
        scrub = card.locator(".scrub")
        page.wait_for_timeout(400)
        assert (card.locator("canvas:visible").count(), scrub.input_value()) == (2, "0")
        card.locator(".play").press("Space")
        page.wait_for_function("s => s.value === '2'", arg=scrub.element_handle())


def test_on_paper_and_without_a_script_all_frames_are_there(browser, file):
    with opened(browser, file, viewport=WIDE) as page:
        page.emulate_media(media="print")
        assert page.locator("canvas:visible, .player:visible").count() == 0
        assert page.evaluate(AT, ["#run-0-pairs .reel img", "opacity"]) == "1"
        assert page.evaluate(AT, ["#run-0-pairs .reel img", "position"]) == "static"
    with opened(browser, file, viewport=WIDE, java_script_enabled=False) as page:
        assert page.locator("#run-0-pairs .reel img:visible").count() == 2 * 3
        assert page.evaluate(AT, ["#run-0-pairs .reel img", "opacity"]) == "1"


def test_a_live_page_and_a_comparison_play_them_too(browser, file, tmp_path):
    folder = file.parents[1]
    with watching(browser, folder, viewport=WIDE) as page:
        card = page.locator("#run-0-pairs .card").first
        card.scroll_into_view_if_needed()
        image = card.locator("img").first
        assert image.evaluate("i => i.decode().then(() => [i.naturalWidth, i.naturalHeight])") == [198, 150]
        card.locator(".scrub").press("End")
        assert pixels(card) == [colour(8, "base"), colour(8, "tuned")]
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    with opened(browser, build([folder, other], tmp_path / "both"), "#compare-images", viewport=PHONE) as page:
        row = page.locator(".wall tbody tr").first
        row.locator(".scrub").press("End")
        assert pixels(row) == [colour(8, "base"), colour(8, "tuned"), colour(8, "tuned")]
        assert fits(page)
        page.get_by_role("button", name="Pause every video").first.click()
        assert violations(page) == []
