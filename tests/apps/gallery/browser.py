"""A headless browser for tests of pages: Chromium through playwright; a test is skipped where either is missing."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 360, "height": 780}
LEVEL_A = ("wcag2a", "wcag21a")
LEVEL_AA = (*LEVEL_A, "wcag2aa")
LOOKS = pytest.mark.parametrize(
    ("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide light", "phone dark"]
)


@contextmanager
def launched() -> Generator[Any]:
    """A playwright browser; skips the test with the reason where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'flowrl[browser]'")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, place: Path | str, anchor: str = "", **context: Any) -> Generator[Any]:
    """The page of a file or address. Fails at the end if it logged an error, threw, or asked for more than itself."""
    problems: list[str] = []
    address = place if isinstance(place, str) else place.resolve().as_uri()
    known = (address,) if isinstance(place, str) else (address, "data:", "blob:")
    with browser.new_context(**context) as session:
        page = session.new_page()
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(known) else problems.append(r.url))
        page.goto(address + anchor)
        yield page
    assert not problems, problems


def fits(page: Any) -> bool:
    """Whether nothing makes the page scroll sideways."""
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def violations(page: Any, tags: tuple[str, ...] = LEVEL_A) -> list[str]:
    """What axe-core finds against rules of these tags: rule, and the first element."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe: pip install 'flowrl[browser]'")
    found = axe.Axe().run(page, options={"runOnly": list(tags)}).response["violations"]
    return [f"{v['id']} ({v['impact']}): {v['nodes'][0]['html'][:200]}" for v in found]
