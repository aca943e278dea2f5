"""The page in a real headless Chromium: no error, no request, and hovering, sorting, filtering, choosing do work."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckbench import reporting
from ckbench.reports import html
from tests.reports.page_records import hostile, sweep

pytest.importorskip("plotly.offline", reason="plotly draws the page")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

DESKTOP: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
CHARTS = ("pareto", "phases", "categories", "times", "timeline")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page")
    asked = [reporting.budget("45MiB")]
    for name, records in (("sweep", sweep()), ("hostile", hostile())):
        found = reporting.findings(records, budgets=asked)
        (made / f"{name}.html").write_bytes(html.files(found)["report.html"])
    return made


class Opened:
    """One page in a window of its own, and what it complained about."""

    def __init__(self, browser: Any, path: Path, **settings: Any) -> None:
        self.window = browser.new_context(**(settings or DESKTOP))
        self.page = self.window.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("[data-chart=pareto] .main-svg")

    def chart(self, name: str) -> Any:
        return self.page.locator(f"[data-chart={name}]")

    def column(self, head: str) -> list[str]:
        """Give the cells of the rows that are shown, top to bottom."""
        heads = self.page.locator("#results thead th").all_inner_texts()
        index = [text.strip() for text in heads].index(head)
        rows = self.page.locator("#results tbody tr:not([hidden])")
        return [row.locator("> *").nth(index).inner_text() for row in rows.all()]

    def sort(self, head: str) -> None:
        self.page.locator("#results thead button", has_text=re.compile(f"^{re.escape(head)}$")).click()


@pytest.fixture
def opened(browser: Any, folder: Path) -> Iterator[Opened]:
    window = Opened(browser, folder / "sweep.html")
    yield window
    assert window.complaints == []
    assert {url for url in window.requests if not url.startswith(("file:", "data:", "blob:"))} == set()
    assert sum(url.startswith("file:") for url in window.requests) == 1
    window.window.close()


def test_every_chart_is_drawn(opened: Opened) -> None:
    for name in CHARTS:
        assert opened.chart(name).locator(".main-svg").count() > 0, name
        assert opened.chart(name).bounding_box()["height"] > 200
    assert opened.page.locator("[data-depth='0'] .scatterlayer .trace").count() == 8, "points and a law each"
    opened.page.locator("summary", has_text="whole peak").click()
    opened.page.wait_for_selector("[data-depth='2'] .main-svg")
    assert opened.page.locator("nav a:visible").all_inner_texts() == [
        "verdict", "trade-off", "depth", "peaks", "times", "timeline", "table", "environment", "doubts",
    ]  # fmt: skip


def test_a_point_under_the_pointer_shows_its_row(opened: Opened) -> None:
    opened.chart("pareto").scroll_into_view_if_needed()
    point = opened.chart("pareto").locator("g.trace.scatter").nth(1).locator("path.point").bounding_box()
    opened.page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    opened.page.wait_for_selector("[data-chart=pareto] .hovertext")
    told = opened.chart("pareto").locator(".hovertext").text_content()
    for piece in ("per-block", "peak MiB: 18.0", "saved MiB: 5.0", "trade-off: front"):
        assert piece in told


def test_budgets_and_dimmed_points_are_to_be_seen(opened: Opened) -> None:
    assert "45MiB" in opened.chart("pareto").locator(".annotation-text").all_text_contents()
    looks = opened.page.evaluate(
        "[...document.querySelectorAll('[data-chart=pareto] g.trace.scatter')].map(t => Number(getComputedStyle(t).opacity))"
    )
    assert sorted(set(looks)) == [0.4, 1]
    assert opened.chart("pareto").locator(".yerror").count() > 0


def test_heads_sort_by_number_both_ways(opened: Opened) -> None:
    opened.sort("peak MiB")
    peaks = [float(text) for text in opened.column("peak MiB")]
    assert peaks == sorted(peaks) and len(set(peaks)) > 5 and peaks[-1] >= 100 > peaks[0]
    assert opened.page.locator("th[aria-sort=ascending]").inner_text().strip() == "peak MiB"
    opened.sort("peak MiB")
    assert [float(text) for text in opened.column("peak MiB")] == peaks[::-1]
    opened.sort("strategy")
    names = opened.column("strategy")
    assert names == sorted(names) and names[0] == "every-k:2"


def test_filters(opened: Opened) -> None:
    opened.page.fill("#filter", "SQRT dominated")
    assert set(opened.column("strategy")) == {"sqrt"} and set(opened.column("trade-off")) == {"dominated"}
    n_shown = len(opened.column("strategy"))
    assert opened.page.inner_text("#count") == f"{n_shown} of 16 rows"
    opened.page.fill("#filter", "")
    opened.page.check("#front")
    assert set(opened.column("trade-off")) == {"on the front"}
    opened.page.check("#chosen")
    assert set(opened.column("n_layers")) == {"2"}


def test_choosing_a_configuration_redraws_its_charts(opened: Opened) -> None:
    before = opened.chart("times").locator(".xaxislayer-above").text_content()
    assert opened.page.locator("h3:visible").all_inner_texts() == ["n_layers 2"]
    opened.page.select_option("#group", label="n_layers 8")
    opened.page.wait_for_function(
        "old => document.querySelector('[data-chart=times] .xaxislayer-above').textContent !== old", arg=before
    )
    assert opened.page.locator("h3:visible").all_inner_texts() == ["n_layers 8"]


def test_the_page_follows_the_readers_theme(opened: Opened) -> None:
    script = """() => [getComputedStyle(document.body).backgroundColor,
        document.querySelector('[data-chart=phases] .xtick text').style.fill,
        document.querySelector('[data-chart=pareto]').data[1].marker.color]"""
    light = opened.page.evaluate(script)
    opened.page.emulate_media(color_scheme="dark")
    changed = "old => old.every((value, i) => value !== SCRIPT[i])".replace("SCRIPT", f"({script})()")
    opened.page.wait_for_function(changed, arg=light)
    assert light[0] == "rgb(255, 255, 255)" and opened.page.evaluate(script)[0] == "rgb(20, 24, 29)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(browser: Any, folder: Path, scheme: str) -> None:
    window = Opened(browser, folder / "sweep.html", **PHONE, color_scheme=scheme)
    width = window.page.evaluate("document.documentElement.scrollWidth")
    wide = window.page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, nav div, svg') "
        "&& e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert (width, wide) == (390, [])
    small = window.page.evaluate(
        "Math.min(...[...document.querySelectorAll('svg text')].filter(t => t.textContent.trim())"
        ".map(t => parseFloat(getComputedStyle(t).fontSize)))"
    )
    assert small >= 9 and window.complaints == []
    window.window.close()


def test_a_strangers_records_run_nothing(browser: Any, folder: Path) -> None:
    window = Opened(browser, folder / "hostile.html")
    for point in window.chart("pareto").locator("path.point").all():
        box = point.bounding_box()
        window.page.mouse.move(box["x"] + 3, box["y"] + 3)
    window.page.wait_for_timeout(200)
    assert window.page.evaluate("window.hacked") is None
    assert window.page.locator("img, a:not([href^='#'])").count() == 0
    assert "</script><script>" in window.page.inner_text("h1")
    assert window.complaints == []
    window.window.close()


def test_a_script_that_were_to_slip_in_is_not_run(browser: Any, folder: Path) -> None:
    """The policy of the page is the second wall: only its own two scripts run."""
    text = (folder / "sweep.html").read_text()
    (folder / "slipped.html").write_text(text.replace("<header>", "<script>window.hacked=1</script><header>"))
    window = Opened(browser, folder / "slipped.html")
    assert window.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in text for text in window.complaints)
    window.window.close()
