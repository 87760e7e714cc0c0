"""The page in a real browser: no fault of accessibility, and no part beyond the screen.

Needs Chromium of the distribution (`.ci/run` installs it); without it the tests are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from cache_server.node.status import CacheStatus, NodeStatus
from cache_server.web.service import WebService
from tests.made_up_jobs import ENDED, FAILED, LOADING, NODES, READY, job
from tests.node_statuses import STATUS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")

PHONE, LAPTOP, WIDE = 390, 1280, 1920
BY_NAME = {
    "sixteen": job(16, [3, 9], name="sixteen"),
    "big": job(1024, range(192, 208), name="big", view='{"where": "' + "x" * 300 + '"}'),
}


def seen(name: str) -> NodeStatus:
    """A coordinator with a job of this name and others; another node: without a cache."""
    if name == "other node":
        return STATUS
    asked = BY_NAME[name]
    others = job(8, name="a" * 128, num_ranks=7)
    cache = CacheStatus(NODES, (READY, LOADING, FAILED), (asked, others, *ENDED), (asked,))
    return replace(STATUS, cache=cache)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as running:
        # No sandbox: as root there is none, and it opens only the page of this test.
        launched = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextmanager
def opened(
    browser: Browser, name: str, query: str = "", *, width: int = LAPTOP, scheme: str = "light"
) -> Iterator[Page]:
    """The page as a node serves it, with its headers."""
    with ExitStack() as stack:
        service = WebService("127.0.0.1", 0)
        service.start(lambda viewer, asked: seen(name), lambda: True)
        stack.callback(service.stop)
        context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        stack.callback(context.close)
        shown = context.new_page()
        shown.goto(f"http://127.0.0.1:{service.port}/{query}")
        yield shown


@pytest.mark.parametrize(
    ("name", "query", "scheme"),
    [
        ("sixteen", "?pause=1&show=ended&show=errors", "light"),
        ("sixteen", "?pause=1&show=ended&show=errors", "dark"),
        ("big", "?pause=1&ranks=192-255", "light"),
        ("other node", "?pause=1", "dark"),
    ],
)
def test_axe_finds_no_violation(browser: Browser, name: str, query: str, scheme: str) -> None:
    with opened(browser, name, query, scheme=scheme) as shown:
        found = Axe().run(shown)

    assert found.violations_count == 0, found.generate_report()
    assert len(found.response["passes"]) > 15


@pytest.mark.parametrize("width", [PHONE, LAPTOP, WIDE])
@pytest.mark.parametrize("name", ["sixteen", "big", "other node"])
def test_nothing_but_tables_is_wider_than_the_screen(
    browser: Browser, name: str, width: int
) -> None:
    with opened(browser, name, "?pause=1&show=errors", width=width) as shown:
        assert shown.evaluate("document.documentElement.scrollWidth") == width
        cut = shown.evaluate(
            "[...document.querySelectorAll('figure span')].map(each => [each.textContent,"
            " each.getBoundingClientRect()]).filter(([_, at]) => at.left < 0 ||"
            " at.right > innerWidth).map(([text, _]) => text)"
        )
        assert cut == [], "a label of a chart is cut"


def test_a_phone_shows_the_verdict_on_its_first_screen(browser: Browser) -> None:
    with opened(browser, "sixteen", width=PHONE) as shown:
        place = shown.locator(".verdict").first.bounding_box()

        assert place is not None
        assert place["y"] + place["height"] < 800


def test_keys_reach_a_fold_and_open_it(browser: Browser) -> None:
    with opened(browser, "sixteen", "?pause=1") as shown:
        for _ in range(50):
            shown.keyboard.press("Tab")
            if "ended jobs" in shown.evaluate("document.activeElement.textContent"):
                break
        shown.keyboard.press("Enter")

        shown.wait_for_url("**show=ended**")
        assert shown.get_by_text("stopped at step 5 of 100").is_visible()


def test_an_open_fold_stays_open_when_the_page_updates(browser: Browser) -> None:
    with opened(browser, "sixteen", "?show=ended") as shown:
        shown.wait_for_event("load", timeout=30_000)

        assert shown.get_by_text("stopped at step 5 of 100").is_visible()
