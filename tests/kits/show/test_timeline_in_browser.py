"""The page of a timeline in a real browser: it is zoomed, moved and walked through, and names run nothing.

Skipped where there is no Chromium, as test_browser.py is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partway.propagation.program.timeline import COMMUNICATION, COMPUTE, Span
from partway.show.timeline import Timeline

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><img src=x onerror='window.harmed=1'>"

pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of ten operators of 1 ms, and of two collectives beside them."""
    about = {"kind": "all_reduce", "axes": "dp", "bytes": 1_500_000}
    timeline = Timeline(Span(f"linear_{i}", "forward", COMPUTE, i * 1e-3, 1e-3) for i in range(10))
    timeline.append(Span("convert", "backward", COMMUNICATION, 2e-3, 3e-3, about))
    timeline.append(Span(HOSTILE, "backward", COMMUNICATION, 6e-3, 3e-3, about))
    path = tmp_path_factory.mktemp("pages") / "timeline.html"
    timeline.save_html(path, predicted=list(timeline))
    return path


@pytest.fixture
def window(page: Path) -> Iterator[Any]:
    """A window that shows the page. At the end there was no error, and nothing was asked for but the page."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    problems: list[str] = []
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1300, "height": 900})
        opened.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("request", lambda each: problems.extend([] if each.url == page.as_uri() else [each.url]))
        opened.goto(page.as_uri())
        yield opened
        assert opened.evaluate("window.harmed") is None
        browser.close()
    assert problems == []


def width(window: Any, name: str) -> float:
    """How wide the first bar of this name is."""
    bar = window.locator(f'.span[aria-label^="{name} "] rect').first
    return float(bar.get_attribute("width"))


def said(window: Any) -> str:
    return str(window.inner_text(".said"))


def test_buttons_zoom_and_move_and_show_all_again(window: Any) -> None:
    assert width(window, "linear_5") == pytest.approx(100)
    window.click("text='+'")
    assert width(window, "linear_5") == pytest.approx(200)
    assert "aside" in window.locator('.span[aria-label^="linear_0 "]').first.get_attribute("class")
    window.click("text='←'")
    assert width(window, "linear_2") == pytest.approx(200)
    window.click("text='all'")
    assert width(window, "linear_5") == pytest.approx(100)
    assert window.locator(".axis text").all_text_contents() == [f"{i} ms" for i in range(0, 11, 2)]


def test_keys_walk_from_bar_to_bar_and_zoom(window: Any) -> None:
    window.locator(".tools button").last.focus()
    window.keyboard.press("Tab")
    assert said(window) == "linear_0 (forward): 1 ms, from 0 us on"
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown"):
        window.keyboard.press(key)
    assert said(window) == "convert (all_reduce): 3 ms, from 2 ms on; 1.5 MB"
    window.keyboard.press("+")
    window.keyboard.press("+")
    assert width(window, "linear_5") == pytest.approx(400)
    window.keyboard.press("ArrowUp")
    window.keyboard.press("Home")  # out of sight: it is brought back
    assert said(window) == "linear_0 (forward): 1 ms, from 0 us on"
    assert width(window, "linear_0") == pytest.approx(400)
    window.keyboard.press("0")
    assert width(window, "linear_0") == pytest.approx(100)


def test_pointing_says_what_a_bar_is_and_the_wheel_zooms_with_ctrl_only(window: Any) -> None:
    window.hover('.span[aria-label^="linear_4 "]')
    assert said(window) == "linear_4 (forward): 1 ms, from 4 ms on"
    window.mouse.wheel(0, -100)
    window.wait_for_timeout(100)
    assert width(window, "linear_4") == pytest.approx(100)
    window.keyboard.down("Control")
    window.mouse.wheel(0, -100)
    window.wait_for_timeout(100)
    window.keyboard.up("Control")
    assert width(window, "linear_4") == pytest.approx(125)


def test_dragging_moves_what_is_zoomed(window: Any) -> None:
    window.click("text='+'")
    box = window.locator('.span[aria-label^="linear_5 "]').first.bounding_box()
    x, y = box["x"] + 5, box["y"] + 5
    window.mouse.move(x, y)
    window.mouse.down()
    window.mouse.move(x + 100, y)
    window.mouse.up()
    moved = window.locator('.span[aria-label^="linear_5 "]').first.bounding_box()
    assert moved["x"] - box["x"] == pytest.approx(100, abs=2)


def test_a_name_with_markup_is_only_a_name(window: Any) -> None:
    window.hover('.span[aria-label^="</script>"]')
    assert said(window).startswith(f"{HOSTILE} (all_reduce): 3 ms")
    window.click("summary")
    assert window.locator("tbody th", has_text=HOSTILE).count() == 2
    assert window.locator("img").count() == 0


def test_it_is_dark_where_that_is_wanted_and_paper_has_no_buttons(window: Any) -> None:
    window.emulate_media(color_scheme="dark")
    assert window.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(27, 27, 31)"
    window.emulate_media(media="print", color_scheme="light")
    assert not window.locator(".tools").is_visible()
    assert window.locator("svg").is_visible()
