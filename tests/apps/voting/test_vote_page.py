"""The page of `flowrl vote` in a real browser: voting by keys alone, and that everyone can use it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.apps.folders import EVIL, SEEDS, make_run
from tests.apps.gallery.browser import LEVEL_AA, LOOKS, PHONE, WIDE, fits, opened, violations
from tests.apps.voting.test_vote import voting
from tests.apps.voting.test_vote_waiting import ask, close

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", prompts=[EVIL, 40 * "a long prompt "], iterations=20)


def waits(page: Any, progress: str) -> None:
    """Wait until the next pair, or the end, is on the screen."""
    page.wait_for_function(
        "p => document.getElementById('progress').textContent === p && document.body.dataset.state !== 'busy'",
        arg=progress,
    )


def test_votes_by_keys_alone(browser, folder):
    total = 2 * len(SEEDS)
    with voting(folder) as server, opened(browser, server.address, viewport=WIDE) as page:
        waits(page, f"0 of {total} answered")
        shown = server.ballot.shown("ann")
        assert shown is not None
        assert page.locator("#prompt").text_content() == shown.prompt
        assert page.title() == page.locator("h1").text_content() == "Which image is better?"
        assert page.locator(".side img").evaluate_all("l => l.every(i => i.naturalWidth === 32)")
        wanted = []
        for done, key in enumerate(("ArrowLeft", "2", "ArrowDown")):
            shown = server.ballot.shown("ann")
            assert shown is not None
            left, right = ("second", "first") if shown.second_left else ("first", "second")
            wanted.append({"ArrowLeft": left, "2": right, "ArrowDown": "tie"}[key])
            page.keyboard.press(key)
            waits(page, f"{done + 1} of {total} answered")
        page.keyboard.press("u")
        waits(page, f"2 of {total} answered")
        page.keyboard.press("s")
        waits(page, f"3 of {total} answered")
        assert [vote.choice for vote in server.ballot.book.votes.values()] == [*wanted[:2], "skip"]
        # A second person types their name, with letters that are keys.
        page.locator("#voter").fill("")
        page.locator("#voter").press_sequentially("sus1")
        page.keyboard.press("Enter")
        waits(page, f"0 of {total} answered")
        page.keyboard.press("1")
        waits(page, f"1 of {total} answered")
        assert [vote.voter for vote in server.ballot.book.votes.values()] == ["ann", "ann", "ann", "sus1"]
        page.reload()
        waits(page, f"1 of {total} answered")
        for done in range(1, total):
            # Without a pointer and without the keys of the page, buttons are reached by Tab.
            page.locator("[data-choice=tie]").focus()
            page.keyboard.press("Enter")
            waits(page, f"{done + 1} of {total} answered")
        assert page.locator("#done").is_visible()
        assert page.locator("#undo").is_enabled()
    assert len((folder / "votes" / "pairs.jsonl").read_text().splitlines()) == 3
    assert json.loads((folder / "votes" / "votes.jsonl").read_text().splitlines()[-1])["voter"] == "sus1"


@LOOKS
def test_the_page_fits_the_window_and_everyone_can_use_it(browser, folder, size, scheme):
    with voting(folder) as server, opened(browser, server.address, viewport=size, color_scheme=scheme) as page:
        page.locator("body[data-state=pair], body[data-state=idle]").wait_for()
        assert fits(page)
        assert violations(page, LEVEL_AA) == []
        page.get_by_role("button", name="Enlarge left").click()
        assert fits(page)
        assert violations(page, LEVEL_AA) == []


def test_an_image_is_enlarged_on_a_phone_and_no_vote_is_given_meanwhile(browser, folder):
    with (
        voting(folder) as server,
        opened(browser, server.address, viewport=PHONE, has_touch=True, is_mobile=True) as page,
    ):
        page.locator("body[data-state=pair]").wait_for()
        before = dict(server.ballot.book.votes)
        sources = [page.locator(f"#{side}").evaluate("e => e.src") for side in ("left", "right")]
        small = page.locator("#left").bounding_box()
        page.get_by_role("button", name="Enlarge right").tap()
        dialog, image = page.locator("dialog#large"), page.locator("#large-image")
        box = image.bounding_box()
        assert box["width"] > 0.9 * PHONE["width"] > 2 * small["width"]
        assert box["height"] > 0.9 * box["width"]
        assert (image.get_attribute("src"), image.get_attribute("alt")) == (sources[1], "Right image")
        image.tap()
        assert (image.get_attribute("src"), image.get_attribute("alt")) == (sources[0], "Left image")
        for key, shown in (("2", 1), ("ArrowLeft", 0), ("ArrowDown", 0), ("s", 0)):
            page.keyboard.press(key)
            assert image.get_attribute("src") == sources[shown]
        page.get_by_role("button", name="Close").tap()
        assert not dialog.is_visible()
        assert server.ballot.book.votes == before


def test_of_two_names_in_quick_succession_the_second_counts(browser, folder):
    with voting(folder) as server, opened(browser, server.address, viewport=WIDE) as page:
        page.locator("body:not([data-state=busy])").wait_for()
        held: list[Any] = []
        page.route("**/ask", lambda route: route.continue_() if held else held.append(route))
        for name in ("dora", "emil"):
            page.locator("#voter").fill(name)
            page.keyboard.press("Enter")
            page.locator("#voter").blur()
        held[0].continue_()
        page.wait_for_function(
            "() => document.body.dataset.state !== 'busy' && sessionStorage.getItem('voter') === 'emil'"
        )
        assert page.locator("#voter").input_value() == "emil"


def test_an_answer_that_does_not_count_is_said(browser, folder):
    with browser.new_context(viewport=WIDE) as session:
        page = session.new_page()
        with voting(folder) as server:
            page.goto(server.address)
            page.locator("#voter").fill("carl")
            page.keyboard.press("Enter")
            page.locator("body[data-state=pair]").wait_for()
            page.route("**/vote", lambda route: route.abort())
            page.keyboard.press("1")
            page.get_by_text("No answer from flowrl vote").wait_for(timeout=5000)
            page.unroute("**/vote")
            before = len(server.ballot.book.votes)
        # The connection is still there.
        page.keyboard.press("1")
        page.get_by_text("this answer does not count").wait_for(timeout=5000)
        assert len(server.ballot.book.votes) == before


def test_the_page_of_a_run_that_waits_follows_its_questions(browser, waiting_run):
    """Pairs come and go by themselves, a name that is being typed stays, and a late vote is refused by name."""
    with voting(waiting_run) as server, browser.new_context(viewport=WIDE) as session:
        page = session.new_page()
        page.goto(server.address)
        page.locator("#waits").wait_for()
        waits(page, "The run draws its next samples")
        assert violations(page, LEVEL_AA) == []
        page.locator("#voter").fill("carla")
        first = ask(waiting_run, 0.1, 0.5, 0.9)
        page.locator("body[data-state=pair]").wait_for(timeout=5000)
        assert page.locator("#voter").input_value() == "carla"
        page.keyboard.press("Enter")
        waits(page, "Iteration 1: 3 votes missing, on 1 prompt")
        page.keyboard.press("1")
        waits(page, "Iteration 1: 2 votes missing, on 1 prompt")
        page.keyboard.press("u")
        waits(page, "Iteration 1: 3 votes missing, on 1 prompt")
        page.keyboard.press("2")
        waits(page, "Iteration 1: 2 votes missing, on 1 prompt")
        close(waiting_run, first)
        page.keyboard.press("2")
        page.get_by_text("Iteration 1 has counted the votes on its prompt 1").wait_for(timeout=5000)
        assert page.locator("#undo").is_disabled()
        assert page.locator("#waits").is_visible()
        assert not page.locator("#done").is_visible()
        ask(waiting_run, 0.2, 0.6, iteration=2)
        page.locator("body[data-state=pair]").wait_for(timeout=5000)
        assert not page.locator("#problem").is_visible()
        (waiting_run / "summary.json").write_text('{"status": "finished"}')
        page.keyboard.press("1")
        page.get_by_text("this one does not count: it has finished").wait_for(timeout=5000)
        assert [(vote.voter, vote.group) for vote in server.ballot.book.votes.values()] == [("carla", first.group)]
