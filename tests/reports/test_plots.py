"""Figures for papers: nothing overlaps, nothing is cut off, text stays text, and the bytes are the same every time."""

import itertools
import math
import random
import re
import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ckbench import reporting
from ckbench.compare import Row, compare
from ckbench.errors import ConfigError
from ckbench.reports import _plot_depth, _plot_pareto, _plot_phases, _plot_style
from ckbench.reports._plot_style import COLUMN_INCHES, PNG_DPI, TEXT_POINTS
from ckbench.reports.plots import PLUGIN
from tests.sample_records import MIB, record, study

NAMES = ["none", "per-block", "every-k:2", "sqrt", "selective:every-2nd-matmul", "per-block,early_stop=false"]
DEPTHS = (4, 9, 16, 25)


def sweep() -> list[dict[str, Any]]:
    """Give a depth sweep: activations grow as a line under none and as a root under sqrt."""
    return [
        record(
            name,
            order=order,
            model__n_layers=depth,
            static_bytes=5 * MIB,
            peak_allocated_bytes=5 * MIB + n_bytes + MIB,
            activation_peak_bytes=n_bytes,
            peak_forward_bytes=5 * MIB + n_bytes,
        )
        for depth in DEPTHS
        for order, (name, n_bytes) in enumerate(
            {"none": depth * 2 * MIB, "sqrt": int(math.sqrt(depth) * 3 * MIB)}.items()
        )
    ]


def crowd(n_rows: int, seed: int, spread: float) -> list[Row]:
    """Give rows at random places; the smaller the spread, the closer together."""
    chance = random.Random(seed)
    records = []
    for i in range(n_rows):
        time_s = 0.1 + spread * chance.random()
        records.append(
            record(
                f"{NAMES[i % len(NAMES)]}-{i}",
                order=i,
                peak_allocated_bytes=int((500 + spread * chance.random() * 500) * MIB),
                step_s_median=time_s,
                step_s_low=time_s * (1 - 0.5 * chance.random()),
                step_s_high=time_s * (1 + 3 * chance.random()),
            )
        )
    return compare(records).rows


@pytest.fixture
def styled() -> Iterator[None]:
    with _plot_style.style():
        yield


def texts(figure: Any) -> list[Any]:
    """List every text that is drawn (ticks beyond an axis are not), with its rectangle in pixels."""
    from matplotlib.text import Text

    drawn: dict[Text, None] = {}
    draw = Text.draw

    def watched(text: Text, *arguments: Any, **named: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            drawn[text] = None
        draw(text, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", watched)
        figure.canvas.draw()
    return [(text, text.get_window_extent()) for text in drawn]


def check_figure(figure: Any) -> None:
    """Check that no text lies on another, none leaves the figure, and none is too small."""
    drawn = texts(figure)
    assert figure.get_figwidth() == COLUMN_INCHES
    for text, box in drawn:
        assert text.get_fontsize() >= TEXT_POINTS, text.get_text()
        assert -0.5 <= box.x0 and box.x1 <= figure.bbox.width + 0.5, text.get_text()
        assert -0.5 <= box.y0 and box.y1 <= figure.bbox.height + 0.5, text.get_text()
    for (one, a), (two, b) in itertools.combinations(drawn, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 0.5 or along <= 0.5, f"{one.get_text()!r} lies on {two.get_text()!r}"


@pytest.mark.parametrize(("n_rows", "seed", "spread"), [(2, 0, 1.0), (5, 1, 1.0), (12, 2, 1.0), (23, 3, 1.0), (23, 4, 0.05), (9, 5, 0.0)], ids=str)  # fmt: skip
def test_pareto_labels_keep_apart_and_every_row_is_named(styled: None, n_rows: int, seed: int, spread: float) -> None:
    rows = crowd(n_rows, seed, spread)
    figure = _plot_pareto.draw(rows, "n_layers 12")
    check_figure(figure)
    written = " ".join(text.get_text() for text, _ in texts(figure)).replace("\n", "")
    for row in rows:
        assert len(re.findall(rf"{re.escape(row.label)}(?!\d)", written)) == 1, row.label


def test_no_label_covers_a_mark(styled: None) -> None:
    figure = _plot_pareto.draw(crowd(12, 2, 1.0), "")
    axes = figure.axes[0]
    places = [line.get_xydata()[0] for line in axes.lines if line.get_marker() in ("o", "x")]
    assert len(places) == 12
    for _, box in [item for item in texts(figure) if item[0] in axes.texts]:
        for x, y in axes.transData.transform(places):
            assert not (box.x0 < x < box.x1 and box.y0 < y < box.y1)


def test_what_is_dominated_is_dimmed_and_has_another_shape(styled: None) -> None:
    figure = _plot_pareto.draw(compare(study()).rows, "")
    marks = {line.get_marker(): line.get_color() for line in figure.axes[0].lines if line.get_marker() in ("o", "x")}
    assert marks == {"o": _plot_style.BLUE, "x": _plot_style.DIM}
    colours = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    assert colours["every-k:2"] == _plot_style.DIM and colours["none"] == _plot_style.BLUE


def test_bars_are_the_intervals_and_those_that_go_on_end_in_arrows(styled: None) -> None:
    records = [
        record("none", step_s_median=0.100, step_s_low=0.095, step_s_high=0.104),
        record("full", step_s_median=0.120, step_s_low=0.110, step_s_high=9.0),
        record("sqrt", step_s_median=0.110, step_s_low=None, step_s_high=None, peak_allocated_bytes=60 * MIB),
    ]
    axes = _plot_pareto.draw(compare(records).rows, "").axes[0]
    bars = [line.get_xydata() for line in axes.lines if line.get_color() == "#888888" and len(line.get_xydata()) == 2]
    top = axes.get_ylim()[1]
    assert sorted((round(bar[0][1], 6), round(bar[1][1], 6)) for bar in bars) == [(95, 104), (110, round(top, 6))]
    assert [line.get_xydata()[0][1] for line in axes.lines if line.get_marker() == "^"] == [top]


def test_a_sweep_gives_a_figure_of_every_kind(styled: None) -> None:
    made = PLUGIN.files(reporting.findings(sweep()))
    names = [f"{kind}-sample-n_layers-{depth}" for depth in DEPTHS for kind in ("pareto", "peak")]
    assert sorted(made) == sorted(f"{n}.{end}" for n in [*names, "depth-sample"] for end in ("png", "svg"))


def test_files_are_one_column_wide_and_their_text_is_text() -> None:
    made = PLUGIN.files(reporting.findings(study()))
    assert sorted(made) == ["pareto-sample.png", "pareto-sample.svg"], "nothing says what their peaks are made of"
    png, svg = made["pareto-sample.png"], made["pareto-sample.svg"].decode()
    assert png.startswith(b"\x89PNG") and struct.unpack(">I", png[16:20])[0] == round(COLUMN_INCHES * PNG_DPI)
    assert 'width="237.6pt"' in svg
    for label in ("none", "per-block", "every-k:2", "peak memory, MiB", "step time, ms", "dominated"):
        assert re.search(rf"<text[^>]*>{label}</text>", svg), label
    assert "<dc:date>" not in svg and b"Software" not in png and b"matplotlib" not in png


def test_the_same_records_give_the_same_bytes_whatever_the_user_set() -> None:
    import matplotlib

    records = [r for r in sweep() if r["strategy"] == "none" or r["model"]["n_layers"] == 4]
    first = PLUGIN.files(reporting.findings(records))
    assert {name.partition("-")[0] for name in first} == {"pareto", "peak", "depth"}
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert PLUGIN.files(reporting.findings(records)) == first
        assert matplotlib.rcParams["font.size"] == 30, "and what the user set stays"


def test_names_are_shown_as_they_are(styled: None) -> None:
    records = [
        record(name, order=i, peak_allocated_bytes=(50 + 20 * i) * MIB)
        for i, name in enumerate(("$x^2$", "a_b", "日本"))
    ]
    made = PLUGIN.files(reporting.findings(records))
    svg = made["pareto-sample.svg"].decode()
    for label in ("$x^2$", "a_b", "日本"):
        assert f">{label}</text>" in svg


def test_depth_has_the_law_of_every_strategy(styled: None) -> None:
    ((_, lines),) = _plot_depth.sweeps(compare(sweep()).rows, ("model.n_layers",))
    assert {line.label: line.fitted.law.is_root for line in lines if line.fitted.law} == {"none": False, "sqrt": True}
    figure = _plot_depth.draw(lines, "")
    check_figure(figure)
    written = [text.get_text() for text in figure.legends[0].get_texts()]
    assert written[0] == "none: 0 B + 2.00 MiB·L, R² 1.0000"
    assert re.fullmatch(r"sqrt: -?\d+ B \+ 3\.00 MiB·√L, R² 1\.0000", written[1])


def test_other_axes_divide_sweeps_and_failures_are_no_points() -> None:
    records = [
        {**r, "train": {**r["train"], "batch_size": batch}, "status": "oom" if r["model"]["n_layers"] == 25 else "ok"}
        for batch in (2, 4)
        for r in sweep()
    ]
    swept = _plot_depth.sweeps(compare(records).rows, ("model.n_layers", "train.batch_size"))
    assert [values["train"]["batch_size"] for values, _ in swept] == [2, 4]
    assert all(line.depths == [4, 9, 16] and line.fitted.law is None for _, lines in swept for line in lines)


@pytest.mark.parametrize("n_rows", [1, 3, 30])
def test_peaks_are_stacked_whole(styled: None, n_rows: int) -> None:
    records = [
        record(
            f"{NAMES[i % len(NAMES)]}-{i}",
            order=i,
            peak_allocated_bytes=(50 + i) * MIB,
            static_bytes=10 * MIB,
            activation_peak_bytes=None if i == 1 else 30 * MIB,
            peak_forward_bytes=40 * MIB,
            peak_backward_bytes=(50 + i) * MIB,
        )
        for i in range(n_rows)
    ]
    rows = compare(records).rows
    figure = _plot_phases.draw(rows, "n_layers 12")
    check_figure(figure)
    ends: dict[int, float] = {}
    for bar in figure.axes[0].patches:
        place = round(bar.get_y() + bar.get_height() / 2)
        assert bar.get_x() == pytest.approx(ends.get(place, 0.0)), "parts follow each other without a gap"
        ends[place] = bar.get_x() + bar.get_width()
    assert ends == pytest.approx({i: 50.0 + i for i in range(n_rows)})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"static_bytes": 4, "activation_peak_bytes": 5}, {"static": 4, "gradients": 1, "activations": 5}),
        ({"static_bytes": 4, "activation_peak_bytes": None}, {"static": 4, "unknown": 6}),
        ({"static_bytes": 4, "activation_peak_bytes": 9}, {"static": 4, "unknown": 6}),
        ({"static_bytes": None, "activation_peak_bytes": 5}, None),
        ({"static_bytes": 11, "activation_peak_bytes": 0}, None),
    ],
)
def test_a_peak_is_divided_by_what_is_known(changes: dict[str, int | None], parts: dict[str, int] | None) -> None:
    assert _plot_phases.split({"peak_allocated_bytes": 10, **changes}) == parts


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'^--format plots needs matplotlib: pip install "ckbench\[report\]"$'):
        PLUGIN.files(reporting.findings(study()))


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ConfigError, match="nothing to draw: a figure needs two rows"):
        PLUGIN.files(reporting.findings([record("none")]))


def test_two_groups_of_one_name_are_two_files() -> None:
    records = [
        record(name, environment={"torch": version}) for version in ("2.12", "2.13") for name in ("none", "full")
    ]
    made = PLUGIN.files(reporting.findings(records))
    assert {"pareto-sample.png", "pareto-sample-2.png"} <= set(made)
