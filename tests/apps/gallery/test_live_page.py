"""The live page in a real browser: it follows the run, and the reader keeps what they had."""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrl.apps.gallery import live
from tests.apps.folders import make_run
from tests.apps.gallery.browser import LEVEL_AA, PHONE, WIDE, fits, opened, violations
from tests.apps.gallery.test_server import add_row, locked, running, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", num_prompts=30, iterations=40)


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return running(Path(shutil.copytree(finished, tmp_path / "run")))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SHARE", 0)
    monkeypatch.setattr(live, "EVERY_S", 0.1)


@contextmanager
def watching(browser: Any, *folders: Path, **context: Any) -> Generator[Any]:
    """The live page, as `opened` watches it."""
    with serving(*folders) as server, opened(browser, server.address, **context) as page:
        page.locator(".live[data-state]").wait_for()
        yield page


def says(page: Any, text: str) -> None:
    page.locator(".live .state", has_text=text).wait_for(timeout=20_000)


def shows(page: Any, iteration: int) -> None:
    """Waits until the curves have been drawn up to an iteration."""
    page.wait_for_function(
        "n => Array.from(document.querySelectorAll('#run-0-curves svg.chart'))"
        ".some(chart => chart.dataset.readout.includes('iteration ' + n + ':'))",
        arg=iteration,
        timeout=20_000,
    )


def test_a_row_is_drawn_and_the_place_fold_filter_order_and_focus_stay(browser, folder):
    with locked(folder), watching(browser, folder, viewport=WIDE) as page:
        says(page, "Live: iteration 40")
        page.locator("#run-0-curves details summary").click()
        page.locator("#run-0-prompts input[type=search]").fill("red")
        page.locator("#run-0-prompts select").select_option("text")
        page.locator(".numbers summary").click()
        page.locator("button[data-column='2']").click()
        card = page.locator("#run-0-worst .card").first
        card.locator(".enlarge").focus()
        card.scroll_into_view_if_needed()
        page.mouse.wheel(0, 57)
        page.wait_for_timeout(200)
        top, shown = card.bounding_box()["y"], page.locator("#run-0-prompts .count").text_content()
        add_row(folder, 41)
        says(page, "Live: iteration 41")
        shows(page, 41)
        assert abs(card.bounding_box()["y"] - top) <= 1
        assert page.evaluate("document.activeElement.closest('.card')?.id") == card.get_attribute("id")
        assert page.locator("#run-0-curves details").get_attribute("open") is not None
        # A new evaluation replaces the images and the table too.
        later = json.loads((folder / "eval" / "base.json").read_text()) | {"iteration": 41}
        shutil.copytree(folder / "eval" / "base", folder / "eval" / "iteration-000041")
        (folder / "eval" / "iteration-000041.json").write_text(json.dumps(later))
        page.locator("#run-0-film th", has_text="41").wait_for()
        page.wait_for_timeout(300)
        assert page.locator("#run-0-prompts input[type=search]").input_value() == "red"
        assert page.locator("#run-0-prompts select").input_value() == "text"
        assert page.locator("#run-0-prompts .count").text_content() == shown
        assert page.locator(".numbers").get_attribute("open") is not None
        assert page.locator("th[aria-sort=ascending] button").get_attribute("data-column") == "2"


def test_an_enlarged_pair_and_its_slider_stay(browser, folder):
    with locked(folder), watching(browser, folder, viewport=WIDE) as page:
        page.locator("#run-0-pairs .enlarge").first.click()
        page.get_by_role("button", name="Slider", exact=True).click()
        page.locator(".stage .slider").press("ArrowRight")
        text = page.locator("dialog.viewer .prompt").text_content()
        later = json.loads((folder / "eval" / "base.json").read_text()) | {"iteration": 41}
        shutil.copytree(folder / "eval" / "base", folder / "eval" / "iteration-000041")
        (folder / "eval" / "iteration-000041.json").write_text(json.dumps(later))
        add_row(folder, 41)
        shows(page, 41)
        page.wait_for_timeout(300)
        assert page.locator("dialog.viewer").is_visible()
        assert page.locator(".stage .slider").input_value() == "51"
        assert page.locator("dialog.viewer .prompt").text_content() == text
        labels = page.locator("#run-0-pairs .card").first.locator(".two small")
        assert labels.all_text_contents() == ["base", "iteration 40"]
        page.keyboard.press("Escape")
        page.locator("#run-0-pairs .two small", has_text="iteration 41").first.wait_for()
        page.locator("#run-0-pairs .enlarge").first.click()
        assert page.locator("dialog.viewer").is_visible()


def test_a_chart_that_is_read_stays_at_its_iteration(browser, folder):
    with locked(folder), watching(browser, folder, viewport=WIDE) as page:
        chart = page.locator("#run-0-curves svg.chart").first
        chart.focus()
        for _ in range(5):
            page.keyboard.press("ArrowLeft")
        read = page.locator("#run-0-curves .readout").first
        before = read.text_content()
        assert before.startswith("iteration 36")
        add_row(folder, 41)
        shows(page, 41)
        assert read.text_content() == before
        page.keyboard.press("ArrowRight")
        assert read.text_content().startswith("iteration 37")


def test_pause_a_death_and_an_ended_server_are_said(browser, folder):
    with watching(browser, folder, viewport=WIDE) as page:
        says(page, "Died at iteration 40")
        assert "flowrl train x.yaml --resume" in page.locator(".live .each").text_content()
        page.locator("[data-do=pause]").click()
        add_row(folder, 41)
        page.wait_for_timeout(500)
        says(page, "Died at iteration 40")
        page.locator("[data-do=pause]").click()
        says(page, "Live: iteration 41")
        # The browser itself would log a request that fails.
        page.evaluate("() => { window.fetch = () => Promise.reject(new Error('gone')); }")
        says(page, "No answer from flowrl watch")


def test_a_run_is_followed_from_its_first_second(browser, tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: new\niterations: 5\n")
    with locked(folder), watching(browser, folder, viewport=PHONE) as page:
        says(page, "waits for the first evaluation")
        made = make_run(tmp_path / "made", num_prompts=6, iterations=20)
        shutil.copytree(made, folder, dirs_exist_ok=True)
        running(folder)
        says(page, "Live: iteration 20")
        page.locator("#run-0-pairs .card").first.wait_for(state="attached")
        assert page.locator(".card .enlarge").count() == page.locator(".card").count()
        assert fits(page)


@pytest.mark.parametrize(
    ("size", "scheme"),
    [(WIDE, "light"), (PHONE, "dark"), (WIDE, "dark"), (PHONE, "light")],
    ids=["wide light", "phone dark", "wide dark", "phone light"],
)
def test_everyone_can_use_it(browser, folder, size, scheme):
    with watching(browser, folder, viewport=size, color_scheme=scheme) as page:
        says(page, "Died at iteration 40")
        assert fits(page)
        assert violations(page, LEVEL_AA) == []


def test_a_comparison_follows_its_runs_and_keeps_the_metric(browser, tmp_path):
    folders = [make_run(tmp_path / name, name=name, num_prompts=6, iterations=20) for name in ("one", "two")]
    running(folders[1])
    with locked(folders[1]), watching(browser, *folders, viewport=WIDE) as page:
        says(page, "2 runs: 1 live, 1 ended.")
        chosen = page.locator("#compare-metric option").nth(1).get_attribute("value")
        page.locator("#compare-metric").select_option(chosen)
        add_row(folders[1], 21)
        page.locator(".live .each", has_text="two: Live: iteration 21").wait_for()
        page.locator("#run-1-head", has_text="21").wait_for()
        assert page.locator("#compare-metric").input_value() == chosen
        assert not page.locator("#m0-leaders").is_visible()
        assert page.locator("#m1-leaders").is_visible()
        assert violations(page) == []
