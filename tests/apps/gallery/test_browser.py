"""The report in a real browser: slider, keys, links, copies, paper, a phone, and a page without its script."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from flowrl.apps.gallery import build, links
from flowrl.apps.gallery.runs import load_run
from scripts.bench.gallery import write_run
from tests.apps.folders import EVIL, make_run
from tests.apps.gallery.browser import LEVEL_AA, LOOKS, PHONE, WIDE, fits, opened, violations
from tests.apps.gallery.test_previews import add_previews

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CLIP = "e => getComputedStyle(e.querySelectorAll('.two img')[1]).clipPath"
FOCUSED = "() => document.activeElement.closest('.card')?.id"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", num_prompts=40, size=64)


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return build([folder])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every part and few cards: axe-core takes 0.1 s for each."""
    return build(
        [
            make_run(
                tmp_path_factory.mktemp("small") / "run", prompts=[EVIL, "a red circle", 150 * "long"], iterations=40
            )
        ]
    )


@LOOKS
def test_the_page_is_silent_fits_the_window_and_everyone_can_use_it(browser, small, size, scheme):
    with opened(browser, small, viewport=size, color_scheme=scheme) as page:
        assert fits(page)
        page.locator(".numbers summary").click()
        page.locator(".seeds summary").first.click()
        assert fits(page)
        assert violations(page, LEVEL_AA) == []
        page.locator(".card .enlarge").first.click()
        assert page.locator("dialog.viewer").is_visible()
        assert fits(page)
        assert violations(page, LEVEL_AA) == []


def test_a_comparison_is_silent_fits_the_window_and_everyone_can_use_it(browser, tmp_path):
    prompts = ["a red circle", "two squares", 60 * "long"]
    runs = [make_run(tmp_path / name, name=name, prompts=prompts, iterations=40) for name in ("one", "two")]
    compared = build(runs, tmp_path / "both")
    for size, scheme in ((WIDE, "dark"), (PHONE, "light")):
        with opened(browser, compared, viewport=size, color_scheme=scheme) as page:
            assert fits(page)
            assert violations(page) == []


def test_the_strip_of_your_prompts_fits_is_reached_by_keys_and_everyone_can_use_it(browser, tmp_path):
    folder = make_run(tmp_path / "run", num_prompts=2, iterations=40)
    long = 40 * "a long prompt "
    add_previews(folder, {"base": ["my dog", long], "iteration-000020": ["my dog"], "tuned": ["my dog", long]}, 64)
    file = build([folder])
    for size, scheme in ((WIDE, "light"), (PHONE, "dark")):
        with opened(browser, file, "#run-0-previews", viewport=size, color_scheme=scheme) as page:
            assert fits(page)
            strip = page.get_by_role("group", name="Filmstrip of your prompts")
            strip.focus()
            page.keyboard.press("ArrowRight")
            narrow = "e => e.scrollWidth > e.clientWidth"
            if strip.evaluate(narrow):
                page.wait_for_function("e => e.scrollLeft > 0", arg=strip.element_handle())
            assert all(image.get_attribute("alt") for image in strip.locator("img").all())
            assert strip.get_by_text("not drawn").count() == 1
            assert violations(page, LEVEL_AA) == []


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("shape", [(64, 64), (48, 96), (96, 48)], ids=["square", "high", "wide"])
def test_an_enlarged_pair_opens_whole(browser, tmp_path, size, shape):
    folder = make_run(tmp_path / "run", num_prompts=2, iterations=20)
    for image in folder.glob("eval/*/*.png"):
        Image.open(image).resize(shape).save(image)
    with opened(browser, build([folder]), viewport=size) as page:
        page.locator("#run-0-pairs .enlarge").first.click()
        stage, viewer = page.locator(".stage"), page.locator("dialog.viewer").bounding_box()
        boxes = [image.bounding_box() for image in stage.locator("img").all()]
        assert stage.evaluate(CLIP) == "none"
        for box in boxes:
            assert viewer["y"] <= box["y"] < box["y"] + box["height"] <= size["height"], "in the window"
            assert viewer["x"] <= box["x"] < box["x"] + box["width"] <= viewer["x"] + viewer["width"]
        first, second = boxes
        assert first["x"] + first["width"] <= second["x"] or first["y"] + first["height"] <= second["y"]
        card = page.locator("#run-0-pairs .card img").first.bounding_box()
        # The image as it is fitted into its box.
        scale = [min(box["width"] / shape[0], box["height"] / shape[1]) for box in (first, card)]
        assert scale[0] > 1.15 * scale[1]
        page.get_by_role("button", name="Slider", exact=True).click()
        assert stage.evaluate(CLIP) == "inset(0px 0px 0px 50%)"


def test_the_slider_follows_pointer_touch_and_arrow_keys_and_names_itself(browser, file):
    with opened(browser, file, viewport=WIDE, has_touch=True) as page:
        page.locator("#run-0-pairs .enlarge").first.click()
        stage = page.locator(".stage")
        page.get_by_role("button", name="Slider", exact=True).click()
        slider = page.get_by_role("slider", name="Line between base and tuned")
        assert stage.evaluate(CLIP) == "inset(0px 0px 0px 50%)"
        slider.press("ArrowRight")
        assert stage.evaluate(CLIP) == "inset(0px 0px 0px 51%)"
        assert slider.get_attribute("aria-valuetext") == "51 % base"
        box = slider.bounding_box()
        page.mouse.click(box["x"] + 0.25 * box["width"], box["y"] + 40)
        assert slider.input_value() in ("24", "25", "26")
        page.touchscreen.tap(box["x"] + 0.8 * box["width"], box["y"] + 40)
        assert slider.input_value() in ("79", "80", "81")
        page.get_by_role("button", name="Slider", exact=True).click()
        left, right = (image.bounding_box() for image in stage.locator("img").all())
        assert left["x"] + left["width"] <= right["x"]


def test_every_action_has_a_key_which_can_be_switched_off(browser, file):
    with opened(browser, file, viewport=WIDE) as page:
        cards = page.locator("#run-0-pairs .card")
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("k")
        assert page.evaluate(FOCUSED) == cards.nth(0).get_attribute("id")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        viewer = page.locator("dialog.viewer")
        assert viewer.locator(".prompt").text_content() == cards.nth(1).locator(".prompt").text_content()
        page.keyboard.press("j")
        assert viewer.locator(".prompt").text_content() == cards.nth(2).locator(".prompt").text_content()
        page.keyboard.press("s")
        assert "sliding" in (viewer.get_attribute("class") or "")
        page.keyboard.press("Escape")
        assert not viewer.is_visible()
        assert page.evaluate(FOCUSED) == cards.nth(2).get_attribute("id")
        page.keyboard.press("s")
        assert page.locator("main.sliding .slider").count() == page.locator(".card").count()
        page.keyboard.press("/")
        page.keyboard.type("jks")
        assert page.locator("input[type=search]").input_value() == "jks"
        page.locator("input[type=search]").fill("")
        page.locator(".keys-on").first.uncheck()
        page.keyboard.press("s")
        assert page.locator("main.sliding").count() == 1


def test_tab_goes_through_the_page_shows_where_it_is_and_is_held_nowhere(browser, file):
    with opened(browser, file, viewport=WIDE) as page:
        seen, hidden = [], []
        for _ in range(400):
            page.keyboard.press("Tab")
            place = page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)")
            if page.evaluate("document.activeElement === document.body"):
                break
            seen.append(place)
            shown = (
                "e => { const s = getComputedStyle(e); return s.outlineStyle !== 'none' && s.outlineWidth !== '0px' }"
            )
            if not page.evaluate(f"({shown})(document.activeElement)"):
                hidden.append(page.evaluate("document.activeElement.outerHTML.slice(0, 120)"))
        assert seen == sorted(set(seen))
        assert len(seen) > 100
        assert not hidden
        assert page.evaluate("document.activeElement === document.body")


def test_a_link_to_a_prompt_turns_to_it_unfolds_it_and_marks_it(browser, folder, file):
    run = load_run(folder)
    assert run.base is not None
    anchor = links.pair_anchor(links.prompt_anchors(run.base.prompts)[35], 1)
    with opened(browser, file, f"#{anchor}", viewport=PHONE) as page:
        card = page.locator(f"[id='{anchor}']")

        def assert_shown() -> None:
            assert card.is_visible()
            assert "marked" in (card.get_attribute("class") or "")
            box = card.bounding_box()
            assert box["y"] < PHONE["height"]
            assert box["y"] + box["height"] > 0

        assert_shown()
        page.get_by_role("searchbox").fill("no prompt has this")
        assert not card.is_visible()
        page.evaluate("location.hash = ''")
        page.evaluate(f"location.hash = '{anchor}'")
        page.wait_for_timeout(100)
        assert_shown()
        row = links.prompt_anchors(run.base.prompts)[3]
        page.evaluate(f"location.hash = '{row}'")
        page.wait_for_timeout(100)
        assert page.locator(f"tr[id='{row}']").is_visible()


def test_the_link_button_copies_the_permanent_link_or_shows_it(browser, file):
    with opened(browser, file, viewport=WIDE) as page:
        stub = (
            "Object.defineProperty(navigator, 'clipboard', { value: { writeText: async t => { window.copied = t } } })"
        )
        page.evaluate(stub)
        page.locator("#run-0-worst .enlarge").first.click()
        page.get_by_role("button", name="Copy link").click()
        page.get_by_text("Link copied.").wait_for()
        address, anchor = page.evaluate("window.copied").split("#")
        assert address == file.resolve().as_uri()
        assert page.locator(f"[id='{anchor}']").count() == 1
        assert re.fullmatch(r"p-[0-9a-f]{10}-s[01]", anchor)
    with opened(browser, file, viewport=WIDE) as page:
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page.keyboard.press("j")
        page.keyboard.press("l")
        page.get_by_text("The clipboard refused").wait_for()
        assert page.url.split("#")[1] == page.locator(".card").first.get_attribute("data-link")


def test_a_pair_is_copied_as_one_image_or_saved_where_the_clipboard_refuses(browser, folder, file):
    with opened(browser, file, viewport=WIDE) as page:
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page.keyboard.press("j")
        with page.expect_download() as download:
            page.keyboard.press("c")
        card = page.locator(".card").first
        name = download.value.suggested_filename
        assert name == f"{card.get_attribute('data-link')}.png"
        saved = Image.open(download.value.path()).convert("RGB")
        prompt, seed = re.findall(r"\d+", card.locator(".id").text_content())
        run = load_run(folder)
        side = 320
        assert saved.width == 2 * 24 + 2 * side + 12
        assert saved.getpixel((2, 2)) == (255, 255, 255)
        top = next(y for y in range(saved.height) if saved.getpixel((24 + 160, y)) != (255, 255, 255) and y > 70)
        for i, evaluation in enumerate(run.both):
            image = evaluation.image(int(prompt), int(seed))
            assert image is not None
            left = 24 + i * (side + 12)
            drawn = saved.crop((left, top, left + side, top + side)).resize((64, 64), Image.Resampling.NEAREST)
            assert drawn.tobytes() == Image.open(image).convert("RGB").tobytes()
    with opened(browser, file, viewport=WIDE) as page:
        keep = "async ([item]) => { window.blob = await item.getType('image/png') }"
        page.evaluate(f"Object.defineProperty(navigator, 'clipboard', {{ value: {{ write: {keep} }} }})")
        page.locator(".enlarge").first.click()
        page.get_by_role("button", name="Copy as image").click()
        page.get_by_text("Image copied.").wait_for()
        content = page.evaluate("window.blob.arrayBuffer().then(b => Array.from(new Uint8Array(b)))")
        assert Image.open(io.BytesIO(bytes(content))).size == saved.size


def test_without_a_script_pairs_stand_side_by_side_and_every_prompt_is_there(browser, file):
    with opened(browser, file, viewport=WIDE, java_script_enabled=False) as page:
        assert page.locator(".every > .card").count() == 40
        assert page.locator(".every > .card:visible").count() == 40
        assert page.locator(".tools:visible, .filter:visible, .pager:visible, .slider, dialog:visible").count() == 0
        left, right = (image.bounding_box() for image in page.locator("#run-0-pairs .card").first.locator("img").all())
        assert left["x"] + left["width"] <= right["x"]
        assert left["y"] == right["y"]


def test_paper_is_light_without_controls_and_cuts_no_image(browser, file):
    with opened(browser, file, viewport=WIDE, color_scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        style = "([s, p]) => getComputedStyle(document.querySelector(s))[p]"
        assert page.evaluate(style, ["body", "backgroundColor"]) == "rgb(255, 255, 255)"
        assert page.evaluate(style, ["h1", "color"]) == "rgb(31, 32, 35)"
        for part in (".card", ".film tr", ".chart-box"):
            assert page.evaluate(style, [part, "breakInside"]) == "avoid"
        assert (
            page.locator(".tools:visible, .filter:visible, .pager:visible, nav:visible, .enlarge:visible").count() == 0
        )
        assert page.locator("#run-0-pairs .card img:visible").count() == 48


def test_five_hundred_prompts_are_paged_and_found_on_a_phone(browser, tmp_path):
    big = build([write_run(tmp_path / "big", 500, 1, 16, distinct=4)])
    with opened(browser, big, viewport=PHONE, has_touch=True) as page:
        assert fits(page)
        visible = page.locator(".every > .card:visible")
        assert visible.count() == 24
        page.locator("[data-turn='1']").click()
        assert visible.first.locator(".prompt").text_content().endswith("number 24")
        assert "25 to 48 of 500" in page.locator(".pager").text_content()
        page.get_by_role("searchbox").fill("number 37")
        assert visible.count() == 11
        assert page.locator(".count").text_content() == "11 of 500 prompts"
        page.get_by_role("searchbox").fill("")
        page.get_by_label("Order of the images").select_option("worst")
        gains = [float(g) for g in visible.evaluate_all("cards => cards.map(c => c.dataset.gain)")]
        assert gains == sorted(gains)
        assert gains[0] < 0
        assert fits(page)


def test_two_hundred_prompts_of_four_seeds_keep_to_size_and_memory_and_show_their_images(browser, tmp_path):
    command = [sys.executable, "-m", "scripts.bench", "gallery", "--size", "256", "--keep", str(tmp_path)]
    cost = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert cost["megabytes"] <= 15
    assert cost["peak_mb"] < 1000
    page_file = tmp_path / "run" / "gallery" / "index.html"
    assert len(set(re.findall(r'id="(p-[0-9a-f]{10})-s0"', page_file.read_text()))) == 200
    with opened(browser, page_file, viewport=PHONE) as page:
        assert page.evaluate("performance.getEntriesByName('first-contentful-paint').length") == 1
        assert page.locator(".every > .card:visible").count() == 24
        page.locator(".seeds summary").first.click()
        image = page.locator(".seeds[open] img").first
        image.scroll_into_view_if_needed()
        assert image.evaluate("i => i.decode().then(() => i.naturalWidth)") > 90
