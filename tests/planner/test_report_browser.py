"""The report in a real browser: what a person sees, points at and types.

One test, as a browser takes longer to start than all of this; which of ``CHECKS`` failed is in
the traceback. Each begins with the whole iteration in view, no search and nothing chosen.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tensorpager.planner.plan import Move, Plan, plan_to_json
from tensorpager.planner.trace import make_trace
from tensorpager.planner.trace_file import write_trace

from .browser import WAIT_S, artefacts, chromium
from .command_line import HARDWARE, PAGE, run

NASTY = '<img src=x onerror="ran=1"></script><script>ran=1</script>\u2028'
ESCAPE, HOME, RIGHT, DOWN, TAB = (
    "\ue00c",
    "\ue011",
    "\ue014",
    "\ue015",
    "\ue004",
)  # WebDriver's codes
TENSORS = ("layers.0.weight", NASTY, "layers.1.weight", "moments")


@dataclass
class Page:
    driver: Any

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, what: Callable[[], Any]) -> Any:
        """The first true answer; a loaded machine may take its time."""
        give_up = time.monotonic() + WAIT_S
        while not (answer := what()):
            assert time.monotonic() < give_up, "the page did not get there"
            time.sleep(0.02)
        return answer

    def begin_again(self) -> None:
        self.mouse("mouseMoved", 1, 1)
        self.js("document.activeElement.blur()")
        self.keys(ESCAPE, ESCAPE, ESCAPE, HOME)

    def text(self, element: str) -> str:
        found: str = self.js("return document.getElementById(arguments[0]).textContent", element)
        return found

    def keys(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def shift(self, key: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(self.driver).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    def plot(self, chart: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of what the pointer can be over, in the window."""
        left, top, width, height = self.js(
            "const over = document.querySelector(`#${arguments[0]} .u-over`);"
            "over.scrollIntoView({block: 'center'}); const box = over.getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height]",
            chart,
        )
        return left, top, width, height

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        event = {"type": kind, "x": x, "y": y, **more}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def hover(self, chart: str, x: float, y: float) -> str:
        """The tip at these shares of the plot."""
        left, top, width, height = self.plot(chart)
        self.mouse("mouseMoved", left + x * width, top + y * height)
        self.until(lambda: self.js("return !document.getElementById('tip').hidden"))
        return self.text("tip")

    def window(self) -> tuple[float, float]:
        """The range in view as shares of the iteration, from the strip that shows it."""
        left, width = self.js(
            "const style = document.getElementById('window-part').style;"
            "return [parseFloat(style.left), parseFloat(style.width)]"
        )
        return left / 100, (left + width) / 100

    def ranges(self) -> Any:
        """The least and the most time on the axis of every chart."""
        return self.js(
            "return Array.from(document.querySelectorAll('.chart[role]'), (c) => c.dataset.range)"
        )

    def rows(self) -> list[str]:
        found: list[str] = self.js(
            "return Array.from(document.querySelectorAll('#tensor-table td.name'),"
            " (cell) => cell.textContent)"
        )
        return found


def report(folder: Path) -> Path:
    """Two weights, one of which leaves and comes back; the op that needs it has to wait."""
    trace = make_trace(
        [(0, 2 * PAGE, True), (1, 4 * PAGE, False), (2, PAGE, True), (3, PAGE // 2, True)],
        [
            ("embed", 20.0, [0, 2], []),
            ("matmul <b>", 30.0, [2], [1]),
            ("loss", 20.0, [1, 2], []),
            ("update", 10.0, [0, 3], [3]),
        ],
        page_size=PAGE,
        names=dict(enumerate(TENSORS)),
        kinds={3: "optimizer"},
        source="by hand",
    )
    written = write_trace(folder / "t.parquet", trace)
    moves = [Move(0, 0, 2, "host", "out", 1), Move(0, 0, 2, "host", "in", 3)]
    plan = Plan("by hand", PAGE, 6 * PAGE, 10**6, 0, moves, trace_sha256=written.sha256)
    (folder / "plan.json").write_text(json.dumps(plan_to_json(plan)))
    (folder / "hw.toml").write_text(HARDWARE.replace("4000", "6000"))
    machine = ("--hardware", folder / "hw.toml")
    out = folder / "report with spaces & ünïcode.html"
    result = run("html", folder / "t.parquet", folder / "plan.json", *machine, "-o", out)
    assert result.exit_code == 0, result.stderr
    return out


def it_loads_without_a_word_from_the_console(page: Page, folder: Path) -> None:
    assert page.driver.get_log("browser") == []
    assert page.js("return document.getElementById('trouble').hidden")
    assert page.text("title") == "t.parquet"
    assert "Ops wait" in page.text("limit")
    drawn = page.js(
        "return Array.from(document.querySelectorAll('.u-wrap canvas'), (canvas) => {"
        " const d = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        " return new Set(new Uint32Array(d.buffer)).size })"
    )
    assert len(drawn) == 4
    assert min(drawn) > 10  # colours


def a_hover_names_the_tensor_and_says_where_it_is(page: Page, folder: Path) -> None:
    tip = page.hover("map", 0.4, 0.1)  # rows by first use: the weight that leaves is on top
    assert "layers.0.weight" in tip
    assert "parameter, 1.95 KiB in 2 pages" in tip
    assert "all 2 pages: in host memory" in tip
    assert "since 20.0 µs (op 1 matmul <b>)" in tip
    assert "next used by op 3 update" in tip


def a_hover_says_what_waits_for_what(page: Page, folder: Path) -> None:
    lanes_height = page.plot("lanes")[3]
    tip = page.hover("lanes", 0.8, 20 / lanes_height)  # 72 of 90 µs or more: 'update' waits
    assert "op 3 update" in tip
    assert "for layers.0.weight from host" in tip
    tip = page.hover("lanes", 0.8, (lanes_height - 12) / lanes_height)
    assert "layers.0.weight" in tip
    assert "waited for by op 3 update" in tip


def a_hover_gives_the_memory_by_kind(page: Page, folder: Path) -> None:
    tip = page.hover("memory", 0.05, 0.5)
    assert "3.91 KiB at" in tip
    assert "parameter2.93 KiB" in tip
    assert "of 5.86 KiB free" in tip


def a_drag_zooms_all_charts_and_a_double_click_ends_it(page: Page, folder: Path) -> None:
    left, top, width, height = page.plot("memory")
    y = top + height / 2
    page.mouse("mouseMoved", left + 0.25 * width, y)
    page.mouse("mousePressed", left + 0.25 * width, y, button="left", clickCount=1)
    page.mouse("mouseMoved", left + 0.5 * width, y, button="left", buttons=1)
    page.mouse("mouseReleased", left + 0.5 * width, y, button="left", clickCount=1)
    assert page.until(lambda: page.window() != (0.0, 1.0))
    assert page.window() == pytest.approx((0.25, 0.5), abs=0.01)
    ranges = page.ranges()
    assert len(set(ranges)) == 1
    assert "layers" in page.hover("map", 0.5, 0.1)
    left, top, width, height = page.plot("memory")  # which has scrolled
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.mouse(kind, left + 0.5 * width, top + height / 2, button="left", clickCount=count)
    page.until(lambda: page.window() == (0.0, 1.0))


def the_wheel_zooms_with_ctrl_only(page: Page, folder: Path) -> None:
    left, top, width, height = page.plot("memory")
    x, y = left + width / 2, top + height / 2
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-60, modifiers=2)
    page.until(lambda: page.window()[1] - page.window()[0] < 0.9)
    assert sum(page.window()) == pytest.approx(1.0, abs=0.01)  # what is under it stays there


def the_search_filters_table_and_map(page: Page, folder: Path) -> None:
    assert len(page.rows()) == 4
    page.keys("/", "WEIGHT")
    page.until(lambda: len(page.rows()) == 2)
    assert page.rows() == ["layers.0.weight", "layers.1.weight"]
    assert page.text("found") == "2 of 4 tensors"
    assert page.text("map-note") == "2 of 4 tensors"
    page.keys(ESCAPE)
    page.until(lambda: len(page.rows()) == 4)
    page.keys("/", "no such tensor")
    page.until(lambda: page.rows() == [])
    assert "No tensor's name or kind" in page.text("tensor-table")


def the_table_sorts_and_a_row_is_highlighted_in_the_map(page: Page, folder: Path) -> None:
    head = "return document.querySelectorAll('#tensor-table th')[arguments[0]]"
    button = head + ".querySelector('button').click()"
    sorted_by = head + ".getAttribute('aria-sort')"
    page.js(button, 0)
    assert page.js(sorted_by, 0) == "ascending"
    assert page.rows()[-1] == "moments"
    page.js(button, 2)
    assert page.js(sorted_by, 2) == "descending"
    assert page.rows()[-1] == "moments"
    picture = "return document.querySelector('#map canvas').toDataURL()"
    before = page.js(picture)
    page.js("document.querySelector('#tensor-table tbody tr').click()")
    page.until(lambda: page.js(picture) != before)
    chosen = page.js("return document.querySelectorAll('[aria-selected=true]').length")
    assert chosen == 1


def the_keyboard_does_what_the_pointer_does(page: Page, folder: Path) -> None:
    page.keys("+", "+")
    assert page.window() == pytest.approx((0.375, 0.625))
    page.keys(RIGHT)
    assert page.window() == pytest.approx((0.425, 0.675))
    page.keys("-")
    assert page.window() == pytest.approx((0.3, 0.8))
    page.keys(HOME)
    assert page.window() == (0.0, 1.0)
    page.js("document.getElementById('map').focus()")
    page.shift(RIGHT)
    page.shift(RIGHT)
    said = page.text("live")
    assert "layers" in said
    page.keys(DOWN)  # to another row
    assert page.text("live") != said
    assert page.js("return !document.getElementById('tip').hidden")
    page.keys("?")
    assert page.js("return document.getElementById('keys').open")
    page.keys(ESCAPE)
    page.until(lambda: not page.js("return document.getElementById('keys').open"))


def tab_reaches_everything(page: Page, folder: Path) -> None:
    page.js("document.getElementById('search').focus()")
    reached = set()
    for _ in range(25):
        page.keys(TAB)
        reached.add(page.js("const a = document.activeElement; return a.id || a.tagName"))
    assert {"zoom-in", "reset", "help", "memory", "lanes", "map", "order", "TR"} <= reached


def a_nasty_name_is_text_and_runs_nothing(page: Page, folder: Path) -> None:
    shown = NASTY.replace("\u2028", "\ufffd")
    assert shown in page.rows()
    page.keys("/", "onerror")
    page.until(lambda: page.rows() == [shown])
    assert shown.split("</")[0] in page.hover("map", 0.45, 0.1)
    assert page.js("return typeof ran") == "undefined"
    assert page.js("return document.querySelectorAll('main img, #tip img').length") == 0
    assert page.driver.get_log("browser") == []


def dark_mode_and_a_narrow_window(page: Page, folder: Path) -> None:
    page.js("window.scrollTo(0, 0)")
    grounds = []
    for scheme in ("light", "dark"):
        page.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        # The page hears of it with its next frame.
        page.until(
            lambda now=scheme: page.js("return document.documentElement.dataset.theme") == now
        )
        grounds.append(page.js("return getComputedStyle(document.body).backgroundColor"))
        assert page.driver.save_screenshot(str(folder / f"report-{scheme}.png"))
    assert grounds[0] != grounds[1]
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 380, "height": 800, "deviceScaleFactor": 2, "mobile": False},
    )
    try:
        page.until(
            lambda: page.js("return document.querySelector('#map .uplot').offsetWidth < 380")
        )
        assert page.js("return document.documentElement.scrollWidth <= innerWidth")
        assert page.driver.save_screenshot(str(folder / "report-narrow.png"))
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert page.driver.get_log("browser") == []


def the_address_shows_the_same_view_again(page: Page, folder: Path) -> None:
    assert "What would help" in page.js("return document.getElementById('help-block').textContent")
    assert page.js("return document.querySelectorAll('#remedies li').length") >= 1
    assert page.js("return document.querySelectorAll('#tier-host canvas').length") == 1
    page.js("document.getElementById('theme').click()")
    page.js("const s = document.getElementById('search'); s.value = 'weight';"
            "s.dispatchEvent(new Event('input'))")  # fmt: skip
    page.js("document.getElementById('zoom-in').click()")
    page.until(lambda: "q=weight" in page.js("return location.hash"))
    address, rows = page.js("return location.href"), page.rows()
    ranges, theme = page.ranges(), page.js("return document.documentElement.dataset.theme")
    assert f"theme={theme}" in address
    page.driver.get("about:blank")
    page.driver.get(address)
    page.until(lambda: page.js("return document.documentElement.dataset.ready"))
    page.until(lambda: page.rows() == rows)
    for now, before in zip(page.ranges(), ranges, strict=True):  # the address has nanoseconds
        assert [float(end) for end in now.split()] == pytest.approx(
            [float(end) for end in before.split()], abs=2e-3
        )
    assert page.js("return document.documentElement.dataset.theme") == theme
    assert page.js("return document.getElementById('search').value") == "weight"
    # The old page may answer for a while after reload() and must not pass for the new one.
    page.js("delete document.documentElement.dataset.ready;"
            "history.replaceState(null, '', location.pathname); location.reload()")  # fmt: skip
    page.until(lambda: page.js("return document.documentElement.dataset.ready"))


CHECKS = (
    it_loads_without_a_word_from_the_console,
    a_hover_names_the_tensor_and_says_where_it_is,
    a_hover_says_what_waits_for_what,
    a_hover_gives_the_memory_by_kind,
    a_drag_zooms_all_charts_and_a_double_click_ends_it,
    the_wheel_zooms_with_ctrl_only,
    the_search_filters_table_and_map,
    the_table_sorts_and_a_row_is_highlighted_in_the_map,
    the_keyboard_does_what_the_pointer_does,
    tab_reaches_everything,
    a_nasty_name_is_text_and_runs_nothing,
    the_address_shows_the_same_view_again,
    dark_mode_and_a_narrow_window,
)


def test_the_report_in_a_browser(tmp_path: Path) -> None:
    with chromium(tmp_path / "profile") as driver:
        page = Page(driver)
        driver.get(report(tmp_path).as_uri())
        page.until(lambda: page.js("return document.documentElement.dataset.ready"))
        for check in CHECKS:
            page.begin_again()
            check(page, artefacts(tmp_path))
