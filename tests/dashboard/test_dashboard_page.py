"""The dashboard as people meet it: in Debian's Chromium, against a real daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

REQUESTS = "return performance.getEntriesByType('resource').map((e) => e.name)"
FOREIGN = "return performance.getEntriesByType('resource').map((e) => e.name).filter((n) => !n.startsWith(origin))"


@pytest.fixture
def used(daemon: Any, waiting: Callable[..., Any]) -> Any:
    """A daemon that has answered something."""
    with daemon.generating():
        waiting(lambda: daemon.get("/expertd/cache")["evictions"] > 0, "evictions")
    return daemon


def test_it_draws(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    page.open(used.url)
    waiting(lambda: len(page.colours()) > 20, "the map")
    waiting(lambda: len(page.colours("#chart-disk canvas")) > 5, "a chart")
    assert page.text("state") == "ready"
    assert "8 layers × 64" in page.text("map-counts")
    assert page.text("sentence")
    assert page.text("model").startswith("tiny-moe")
    waiting(lambda: "dense, locked" in page.find("memory-kinds").text, "the memory")
    assert page.find("memory-bar").get_attribute("aria-label").startswith("Memory by kind: dense")
    assert page.complaints() == []


def test_nothing_is_fetched_from_elsewhere(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    page.open(used.url)
    waiting(lambda: any("heatmap" in name for name in page.run(REQUESTS)), "the map")
    assert page.run(FOREIGN) == []


def test_it_follows_a_running_generation(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    page.open(used.url)
    waiting(lambda: page.text("request-what") == "Idle", "the end of what ran")
    before = page.pixels()
    with used.generating():
        waiting(lambda: page.text("request-what").startswith("Writing:"), "the request")
        waiting(lambda: page.pixels() != before, "another map")
        waiting(lambda: "just missed" in page.text("map-counts"), "misses")
        waiting(lambda: page.run("return document.querySelector('#chart-tokens .now').textContent") != "–", "a speed")
        waiting(lambda: page.find("verdict").get_attribute("data-cause") != "idle", "a verdict")
    waiting(lambda: page.text("request-what") == "Idle", "the end")


def test_it_draws_only_when_something_changed(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    page.open(used.url)
    waiting(lambda: page.text("request-what") == "Idle", "the end of what ran")
    waiting(lambda: "missed" not in page.text("map-counts"), "the last miss to fade")
    page.run("""
      const real = CanvasRenderingContext2D.prototype.drawImage;
      CanvasRenderingContext2D.prototype.drawImage = function (...all) {
        performance.clearResourceTimings();
        return real.apply(this, all);
      };
      performance.clearResourceTimings();
    """)
    # What is being drawn now may end yet; a page that drew at every look would never have three in a row without.
    waiting(lambda: sum("heatmap" in name for name in page.run(REQUESTS)) >= 3, "three looks without a drawing")


def test_a_hidden_page_asks_for_nothing(page: Any, daemon: Any, waiting: Callable[..., Any]) -> None:
    page.open(daemon.url)
    hide = """
      Object.defineProperty(document, 'hidden', { configurable: true, value: arguments[0] });
      document.dispatchEvent(new Event('visibilitychange'));
    """
    page.run(hide, True)
    # What was under way when the page was hidden may still come in.
    waiting(lambda: page.driver.execute_async_script("""
      const done = arguments[0];
      setTimeout(() => {
        performance.clearResourceTimings();
        setTimeout(() => done(performance.getEntriesByType('resource').length === 0), 3000);
      }, 300);
    """), "silence", 20)  # fmt: skip
    page.run(hide, False)
    waiting(lambda: page.run(REQUESTS), "the next look")


def test_the_tables_say_the_same(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    page.open(used.url)
    page.find("as-tables").click()
    rows = "return [...document.querySelectorAll(arguments[0] + ' tbody tr')].map((r) => r.textContent)"
    layers = waiting(lambda: page.run(rows, "#layers"), "the layers")
    assert len(layers) == 8
    hottest = page.run(rows, "#hottest")
    assert hottest[0].startswith("1layer ")
    assert "KiB" in hottest[0]
    points = waiting(lambda: page.run(rows, "#points"), "points")
    assert "MiB/s" in points[0]
    assert not page.shown("map")
    assert page.find("as-tables").get_attribute("aria-pressed") == "true"
    page.find("as-charts").click()
    waiting(lambda: page.shown("map"), "the map")


def test_the_pointer_names_an_expert(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    from selenium.webdriver import ActionChains

    page.open(used.url)
    waiting(lambda: len(page.colours()) > 20, "the map")
    ActionChains(page.driver).move_to_element_with_offset(page.find("map"), 30, 10).perform()
    tip = waiting(lambda: page.shown("tip") and "KiB" in page.find("tip").text and page.find("tip").text, "the facts")
    assert tip.startswith("layer ")
    assert "rank" in tip or "never used" in tip


def test_the_keyboard_reaches_every_expert(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    from selenium.webdriver import Keys

    page.open(used.url)
    waiting(lambda: len(page.colours()) > 20, "the map")
    canvas = page.find("map")
    page.run("arguments[0].focus({ focusVisible: true })", canvas)
    canvas.send_keys(Keys.ARROW_RIGHT)
    canvas.send_keys(Keys.ARROW_DOWN)
    waiting(lambda: page.text("map-said").startswith("layer 1, expert 1,"), "what is said")
    assert "KiB" in page.text("map-said")
    canvas.send_keys(Keys.END)
    canvas.send_keys(Keys.PAGE_DOWN)
    waiting(lambda: page.text("map-said").startswith("layer 7, expert 63,"), "the last expert")
    canvas.send_keys(Keys.ESCAPE)
    assert not page.shown("tip")


def test_tab_goes_through_all_that_can_be_used(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    from selenium.webdriver import Keys

    page.open(used.url)
    reached = []
    for _ in range(12):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.run("return document.activeElement.id || document.activeElement.textContent.trim()"))
    for name in ("as-charts", "as-tables", "theme", "map", "metrics"):
        assert name in reached
    unnamed = """return [...document.querySelectorAll('button, canvas[tabindex], [role=img], [role=progressbar]')]
      .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim())).map((e) => e.outerHTML)"""
    assert page.run(unnamed) == []
    assert page.find("verdict-words").get_attribute("aria-live") == "polite"


def test_dark_and_light(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    page.open(used.url)
    waiting(lambda: len(page.colours()) > 20, "the map")
    dark, colours = page.run(background), page.colours()
    page.media("light")
    waiting(lambda: page.run(background) != dark, "the light page")
    waiting(lambda: page.colours().keys() != colours.keys(), "the light map")
    page.find("theme").click()
    assert page.find("theme").get_attribute("aria-label") == "Theme: dark"
    assert page.run(background) == dark
    page.open(used.url)
    assert page.run(background) == dark


def test_it_fits_a_phone(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    page.size(390, 844, phone=True)
    page.open(used.url)
    waiting(lambda: len(page.colours()) > 20, "the map")
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    page.find("as-tables").click()
    waiting(lambda: page.run("return document.querySelectorAll('#layers tbody tr').length") == 8, "the layers")
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_it_survives_a_restart(page: Any, used: Any, waiting: Callable[..., Any]) -> None:
    page.open(used.url)
    waiting(lambda: len(page.colours()) > 20, "the map")
    rows = "return document.querySelectorAll('#points tbody tr').length"
    page.find("as-tables").click()
    points = waiting(lambda: page.run(rows) > 1 and page.run(rows), "points")
    used.stop()
    waiting(lambda: "No answer from the daemon since" in page.text("connection"), "the notice")
    assert page.shown("connection")
    assert page.text("state") == "away"
    used.start()
    waiting(lambda: "was started again at" in page.text("connection"), "the restart")
    waiting(lambda: page.text("state") == "ready", "what is ready")
    waiting(lambda: page.run(rows) >= points, "the points from before")
    page.find("as-charts").click()
    with used.generating():
        waiting(lambda: page.text("request-what").startswith("Writing:"), "the next request")


def test_without_steering_it_says_why_there_is_no_map(
    page: Any, make_daemon: Callable[..., Any], waiting: Callable[..., Any]
) -> None:
    daemon = make_daemon(steering="off")
    daemon.start()
    try:
        page.open(daemon.url)
        waiting(lambda: "There is no map" in page.text("map-empty"), "the reason")
        assert page.shown("map-empty")
        assert not page.shown("map")
        page.find("as-tables").click()
        assert page.complaints() == []
    finally:
        daemon.stop()


def test_a_key_is_asked_for(
    page: Any, make_daemon: Callable[..., Any], tmp_path: Any, waiting: Callable[..., Any]
) -> None:
    from selenium.webdriver import Keys

    keys = tmp_path / "keys"
    keys.write_text("the-right-key-of-this-daemon\n")
    keys.chmod(0o600)
    daemon = make_daemon(f"server.api_keys_file={keys}")
    daemon.start()
    try:
        page.driver.get(f"{daemon.url}/")
        waiting(lambda: page.shown("key-dialog"), "the question")
        page.find("key").send_keys("a-wrong-key-of-some-length", Keys.ENTER)
        waiting(lambda: page.shown("key-wrong"), "the refusal")
        page.find("key").send_keys("the-right-key-of-this-daemon", Keys.ENTER)
        waiting(lambda: page.text("state") == "ready", "the answer")
        assert not page.shown("key-dialog")
        assert page.run("return Object.values(sessionStorage)") == ["the-right-key-of-this-daemon"]
        assert page.run("return Object.values(localStorage)") == []
    finally:
        daemon.stop()
