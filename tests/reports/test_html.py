"""The page as text: whole, deterministic, harmless, and each figure one that plotly accepts."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ckbench import reporting
from ckbench.errors import CkbenchError, ConfigError
from ckbench.reports import html
from ckbench.reports._page_text import ascii_script, in_script, label, marked
from tests.prove import entry
from tests.reports.page_records import ATTACK, hostile, sweep
from tests.sample_records import MIB, record, study

GIB = 2**30
CSS = (html.ASSETS / "page.css").read_text(encoding="ascii")


class Reader(HTMLParser):
    """Reads a page as a browser does: tags, attributes, and text by the tag it stands in."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.tags[-1] if self.tags else "", []).append(data)


def page(records: list[dict[str, Any]], *budgets: str) -> str:
    asked = [reporting.budget(text) for text in budgets]
    return html.page(reporting.findings(records, budgets=asked), "/* library */")


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert match is not None
    data: dict[str, Any] = json.loads(match.group(1))
    return data


def figures_of(text: str) -> list[dict[str, Any]]:
    data = data_of(text)
    return [figure for group in data["groups"] for figure in group.values()] + data["depths"]


def traces(text: str, chart: str, group: int = 0) -> dict[str, dict[str, Any]]:
    return {trace.get("name", ""): trace for trace in data_of(text)["groups"][group][chart]["data"]}


def test_one_file_that_asks_nobody_for_anything() -> None:
    (name, content), *more = html.files(reporting.findings(sweep())).items()
    assert (name, more) == ("report.html", [])
    text = content.decode("ascii")
    read = Reader(text)
    assert {"link", "img", "iframe", "object", "embed", "base", "form"}.isdisjoint(read.tags)
    assert [value for _, name, value in read.attributes if name in ("src", "href", "action") and value[:1] != "#"] == []
    policy = next(
        value for tag, name, value in read.attributes if (tag, name) == ("meta", "content") and "src" in value
    )
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "http" not in policy
    assert "plotly.js v" in text and text.endswith("</html>\n")
    assert not re.search(r"@import|url\(", CSS)


def test_the_same_records_give_the_same_page() -> None:
    assert page(sweep()) == page(sweep())


def test_every_figure_is_one_that_plotly_accepts() -> None:
    go = pytest.importorskip("plotly.graph_objects")
    figures = figures_of(page(sweep(), "70MiB"))
    assert len(figures) == 4 * 5 + 3
    for figure in figures:
        go.Figure(json.loads(re.sub(r'"theme:\w+"', '"#123456"', json.dumps(figure))))
    with pytest.raises(ValueError):
        go.Figure({"data": [{"type": "scatter", "colour": "red"}]})


def test_every_colour_of_a_figure_is_in_the_theme_twice() -> None:
    used = set(re.findall(r'"theme:(\w+)"', json.dumps(figures_of(page(sweep(), "70MiB")))))
    light, dark = CSS.split("prefers-color-scheme: dark")
    assert used
    for name in used:
        assert f"--{name}:" in light and f"--{name}:" in dark.partition("* {")[0], name


def test_rows_hover_whole_and_dominated_ones_are_dim() -> None:
    slow = [
        record("full", round_number=i, peak_allocated_bytes=90 * MIB, step_s_median=0.9 + i / 100) for i in range(3)
    ]
    points = traces(page(study() + slow), "pareto")
    assert [points[name]["opacity"] for name in ("none", "per-block", "full")] == [1.0, 1.0, 0.4]
    told = points["per-block"]["hovertext"][0]
    for piece in ("<b>per-block</b>", "peak MiB: 50.0", "slower: 1.25", "parity: exact", "trade-off: front"):
        assert piece in told
    assert points["none"]["x"] == [80.0] and points["none"]["y"] == [pytest.approx(101, abs=0.5)]


def test_whiskers_are_the_interval_and_long_ones_leave_the_chart() -> None:
    records = [
        record("none", step_s_median=0.1, step_s_low=0.09, step_s_high=0.12),
        record("per-block", step_s_median=0.2, step_s_low=0.01, step_s_high=90.0),
    ]
    text = page(records)
    bars = traces(text, "pareto")["none"]["error_y"]
    assert (bars["array"], bars["arrayminus"]) == ([pytest.approx(20)], [pytest.approx(10)])
    low, high = data_of(text)["groups"][0]["pareto"]["layout"]["yaxis"]["range"]
    assert 0 <= low < 100 and 200 < high < 400


def test_budget_lines_are_cards_near_by_and_what_was_asked() -> None:
    records = [record("none", peak_allocated_bytes=45 * GIB), record("per-block", peak_allocated_bytes=20 * GIB)]
    layout = data_of(page(records, "24GiB"))["groups"][0]["pareto"]["layout"]
    names = [note["text"] for note in layout["annotations"]]
    assert names[0] == "24GiB" and "A40 / L40S" in names and "L4" in names and "A100 40GB" in names
    assert not any("T4" in name or "B200" in name for name in names)
    assert [shape["x0"] for shape in layout["shapes"]][0] == 24
    assert data_of(page(study()))["groups"][0]["pareto"]["layout"]["shapes"] == []


def test_what_lies_in_memory_at_the_peak_adds_up_to_it() -> None:
    text = page(sweep((4,)))
    parts = traces(text, "categories")
    assert list(parts) == [
        "parameters, buffers, optimizer state",
        "gradients",
        "kept for backward (at most)",
        "recomputed and temporary",
    ]
    for i, peak in enumerate([57, 28, 31, 36]):
        assert sum(part["x"][i] for part in parts.values()) == pytest.approx(peak)
        last = parts["recomputed and temporary"]
        assert last["base"][i] + last["x"][i] == pytest.approx(peak)
    owners = traces(text, "phases")["owner of the peak"]
    assert owners["x"] == [pytest.approx(peak) for peak in (57, 28, 31, 36)]


def test_depths_have_their_laws() -> None:
    text = page(sweep())
    assert [figure["layout"]["yaxis"]["title"]["text"] for figure in data_of(text)["depths"]] == [
        "activations at the peak, MiB", "kept for backward, MiB", "whole peak, MiB",
    ]  # fmt: skip
    laws = re.search(r'<table class="laws">.*?</table>', text, re.S)
    assert laws is not None
    cells = re.findall(r"<td>(.*?)</td>", laws.group())
    rows = [cells[i : i + 4] for i in range(0, len(cells), 4)]
    assert [row[:3] for row in rows] == [
        ["none", "1.0000", "1.00 MiB + 10.00 MiB\u00b7L (expected)"],
        ["per-block", "1.0000", "8.00 MiB + 1.00 MiB\u00b7L (expected)"],
        ["sqrt", "1.0000", "3.00 MiB + 6.00 MiB\u00b7\u221aL (expected)"],
        ["every-k:2", "1.0000", "12.00 MiB + 2.00 MiB\u00b7L (better fit)"],
    ]
    assert all(float(row[3]) < 1 for row in rows)
    assert 'id="depth"' not in page(sweep((2, 4))), "two depths are no sweep"


def test_records_of_before_have_no_timeline() -> None:
    assert 'data-chart="timeline"' not in page(study())
    lines = traces(page(sweep((4,))), "timeline")
    assert lines["none"]["y"] == [57.0], "the peak is marked"


def test_phases_of_a_timeline_are_drawn_at_the_same_places() -> None:
    odd = [[0.0, MIB, 0], [0.9, 3 * MIB, 2], [0.95, 2 * MIB, 2], [1.0, MIB, 3]]
    even = [[0.0, MIB, 0], [0.2, MIB, 1], [0.5, 3 * MIB, 2], [0.8, 2 * MIB, 2], [1.0, MIB, 3]]
    figure = data_of(page([record("none", live_bytes_timeline=even), record("full", live_bytes_timeline=odd)]))
    drawn = [t for t in figure["groups"][0]["timeline"]["data"] if t["mode"] == "lines"]
    assert drawn[0]["x"] == [0, 3, 5, 9, 9]
    assert drawn[0]["text"] == ["forward", "head and loss", "backward", "backward", "optimizer"]


@pytest.mark.parametrize("text", [page(hostile())], ids=["page"])
def test_nothing_from_a_strangers_file_becomes_markup(text: str) -> None:
    read = Reader(text)
    assert read.tags.count("script") == 3 and "img" not in read.tags
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert any(ATTACK in heading for heading in read.texts["h1"])
    drawn = json.dumps(data_of(text))
    assert "<img" not in drawn and "<script" not in drawn and "&lt;/script&gt;" in drawn
    assert set(re.findall(r"<(/?\w+)", drawn)) <= {"b", "/b", "br", "extra", "/extra"}
    templates = re.findall(r'"(?:hover|text)template": "([^"]*)"', drawn)
    assert templates and not any("7*7" in template or "hacked" in template for template in templates)
    assert data_of(text)["groups"][0]["timeline"]["data"][0]["x"] == [0, 3], "points that are none are left out"


def test_texts_are_made_harmless_where_they_are_written() -> None:
    assert label("<b>x</b>" + "y" * 60) == "&lt;b&gt;x&lt;/b&gt;yyyyyyyy..yyyyyyyyyyyyyyyy"
    assert marked("use `a<b`: \x1b & 1") == "use <code>a&lt;b</code>: ? &amp; 1"
    assert in_script({"a": "</script>&"}) == '{"a":"\\u003c/script\\u003e\\u0026"}'
    assert ascii_script('"\u5341\U0001f600\x01"\r\n\t') == '"\\u5341\\ud83d\\ude00\\u0001"\n\t'


def test_a_row_that_did_not_end_ok_is_in_the_table_and_not_in_a_chart() -> None:
    text = page([*study(), record("full", status="oom", failed_phase="forward", message="tried 9 bytes")])
    assert "full" not in traces(text, "pareto")
    assert "full: oom in forward: tried 9 bytes" in text and "<tr class=failed" in text


def test_results_without_one_ok_row_make_a_page_too() -> None:
    text = page([record("none", status="oom", step_s_median=None, step_samples_s=[], peak_allocated_bytes=None)])
    assert "no strategy ended ok" in text and data_of(text)["groups"] == [{}]


def test_without_plotly_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError) as error:
        html.files(reporting.findings(study()))
    assert str(error.value) == '--format html needs plotly: pip install "ckbench[report]"'


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    Path("results/s.jsonl").write_text("".join(json.dumps(values) + "\n" for values in study()))
    return tmp_path


def test_the_command_writes_where_it_is_told(stored: Path) -> None:
    into_file = entry.call("report", "results", "--format", "html", "--out", "new/page.html")
    assert (into_file.code, into_file.out, into_file.err) == (0, "", "html: new/page.html\n")
    into_folder = entry.call("report", "results", "--format", "html", "--out", "new", "--budget", "60MiB")
    assert into_folder.err == "html: new/report.html\n"
    piped = entry.call("report", "results", "--format", "html")
    assert piped.code == 0 and piped.out == Path("new/page.html").read_text()
    assert "<b>60MiB</b>" in Path("new/report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--format", "html"), "--format html makes no text for a terminal; say where: --out report.html"),
        (("--format", "html", "--out", "results/s.jsonl/x.html"), "results/s.jsonl/x.html: cannot be written"),
        (("--budget", "plenty"), "--budget: unknown card 'plenty'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(stored: Path, arguments: tuple[str, ...], told: str) -> None:
    answer = entry.call("report", "results", *arguments, width=80)
    entry.check_manners(answer)
    assert answer.code == CkbenchError.exit_code and answer.err.startswith(told) and answer.out == ""


def test_text_may_go_to_a_file_as_well(stored: Path) -> None:
    answer = entry.call("report", "results", "--format", "md", "--out", "table.md")
    assert answer.out == "" and Path("table.md").read_text() == reporting.report(Path("results"), format_="md")


def test_a_run_refuses_files_before_it_measures(stored: Path) -> None:
    Path("study.yaml").write_text(
        "model: {n_layers: 4, d_model: 32, n_heads: 4, vocab_size: 64}\ntrain: {batch_size: 2, seq_len: 16}\n"
    )
    answer = entry.call("run", "study.yaml", "--format", "html", "--device", "replay:none.json")
    assert answer.code == 2 and answer.err.startswith("--format html makes files; keep --format console here")


def test_assets_are_ascii() -> None:
    assert sorted(path.name for path in html.ASSETS.iterdir()) == ["page.css", "page.js"]
    for path in html.ASSETS.iterdir():
        assert path.read_bytes().isascii()


MACHADO = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
"""How linear RGB looks to people who lack one kind of cones (Machado, Oliveira and Fernandes 2009, severity 1)."""


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(rgb: list[float]) -> list[float]:
    """Give CIE L*a*b* of linear sRGB, white D65."""
    r, g, b = (min(1.0, max(0.0, part)) for part in rgb)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def palette(theme: str) -> dict[str, str]:
    part = CSS.partition("@media (prefers-color-scheme: dark)")[0 if theme == "light" else 2].partition("* {")[0]
    return dict(re.findall(r"--(\w+): (#\w{6})", part))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("sight", MACHADO)
def test_colours_are_told_apart_whatever_cones_an_eye_lacks(theme: str, sight: str) -> None:
    """Bars of phases have colour alone; lines and points have signs and dashes as well."""
    colours = palette(theme)
    for names, least in ((("p0", "p1", "p2", "p3", "static"), 10), ([f"c{i}" for i in range(8)], 6)):
        seen = {
            name: lab(
                [sum(m * part for m, part in zip(row, linear(colours[name]), strict=True)) for row in MACHADO[sight]]
            )
            for name in names
        }
        near = [
            (one, other, round(math.dist(seen[one], seen[other]), 1))
            for one in names
            for other in names
            if one < other and math.dist(seen[one], seen[other]) < least
        ]
        assert near == [], names


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_signs_stand_out_from_the_paper(theme: str) -> None:
    """Contrast of WCAG 2.2: 4.5 for text, 3 for graphics."""
    colours = palette(theme)

    def luminance(name: str) -> float:
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colours[name]), strict=True))

    for name, least in (*((f"c{i}", 3) for i in range(8)), ("ink", 4.5), ("muted", 4.5), ("accent", 4.5)):
        for paper in ("paper", "surface") if least > 3 else ("paper",):
            one, other = sorted((luminance(name), luminance(paper)))
            assert (other + 0.05) / (one + 0.05) >= least, (name, paper)
