"""Diagrams of plans: what is told and drawn of each block follows from the regions, for any plan."""

import re
from xml.etree import ElementTree

import pytest

from ckbench import diagrams
from ckbench.diagrams import BlockPicture, describe, draw, pictures, shape
from ckbench.plan import Plan, Region
from ckbench.specs import parse, resolve

SVG = "{http://www.w3.org/2000/svg}"


def drawn(plan: Plan, look: str) -> list[tuple[float, float]]:
    """Give left edge and width of every rectangle of a kind, without those of the legend."""
    found = [rect for rect in ElementTree.fromstring(draw(plan)).iter(f"{SVG}rect") if rect.get("class") == look]
    edges = [(float(rect.get("x", 0)), float(rect.get("width", 0))) for rect in found]
    return [edge for edge in edges if edge[0] >= diagrams.LABEL]


def of(spec: str, n_layers: int = 8) -> Plan:
    return resolve(parse(spec), shape(n_layers))


def test_a_region_over_blocks_keeps_its_input_and_no_more() -> None:
    plan = Plan(n_layers=4, regions=(Region(start=1, stop=3),))
    assert [block.kept for block in pictures(plan)] == ["everything", "input", "nothing", "everything"]
    assert [block.runs_again for block in pictures(plan)] == [0, 1, 1, 0]
    assert [block.depth for block in pictures(plan)] == [0, 1, 1, 0]
    assert len(drawn(plan, "kept")) == 3 and len(drawn(plan, "again")) == 2 and len(drawn(plan, "region")) == 1


def test_numbers_are_the_plan_s_own() -> None:
    for spec in ("recursive", "nested:3", "per-block,skip_last", "nested:4,early_stop=false", "hf-native"):
        plan = of(spec)
        assert tuple(block.runs_again for block in pictures(plan)) == plan.block_calls_backward()
        texts = [text.text or "" for text in ElementTree.fromstring(draw(plan)).iter(f"{SVG}text")]
        numbers = [int(text) for text in texts if text.isdigit()]
        assert numbers == [*range(8), *plan.block_calls_backward()]


def test_nested_regions_lie_in_lanes() -> None:
    plan = Plan(n_layers=2, regions=(Region(start=0, stop=2, children=(Region(start=1, stop=2),)),))
    assert [block.depth for block in pictures(plan)] == [1, 2]
    (outer, inner) = drawn(plan, "region")
    assert outer[1] > inner[1] and inner[0] > outer[0]


def test_parts_leave_a_gap_in_what_is_kept() -> None:
    picture = pictures(of("ffn-only", 1))[0]
    assert picture == BlockPicture(kept="everything", runs_again=0, parts_again=("ffn",), depth=1)
    kept, again = drawn(of("ffn-only", 1), "kept"), drawn(of("ffn-only", 1), "again")
    assert kept[0][0] + kept[0][1] == pytest.approx(again[0][0])
    assert "all but the FFN" in describe(of("ffn-only"))
    both = Plan(n_layers=1, regions=(Region(start=0, stop=1, part="ffn"), Region(start=0, stop=1, part="attention")))
    assert sum(width for _, width in drawn(both, "kept")) < 4


def test_kept_results_are_drawn_in_every_block_of_a_region() -> None:
    plan = Plan(n_layers=3, regions=(Region(start=0, stop=2, save_ops=("aten.mm",)),))
    assert [block.has_results for block in pictures(plan)] == [True, True, False]
    assert describe(plan).startswith("3 blocks; kept on the device: input and some results, some results, everything")
    bars = len(diagrams.RESULTS_AT)
    assert len(drawn(plan, "kept")) == 1 + bars + bars + 1
    part = Plan(n_layers=1, regions=(Region(start=0, stop=1, part="ffn", save_ops=("aten.mm",)),))
    assert len(drawn(part, "kept")) == 1 + bars


def test_what_waits_on_the_host_is_not_drawn_on_the_device() -> None:
    assert len(drawn(of("offload"), "host")) == 8 and drawn(of("offload"), "kept") == []
    plan = of("every-k:4+offload")
    assert len(drawn(plan, "host")) == 2 and drawn(plan, "kept") == []
    assert "on the host" in describe(plan)


def test_an_inverting_region_keeps_the_output() -> None:
    assert [block.kept for block in pictures(of("reversible", 3))] == ["nothing", "nothing", "output"]


def test_the_compiler_s_share_is_no_prediction() -> None:
    plan = of("compile-budget:0.25")
    assert {block.runs_again for block in pictures(plan)} == {None}
    widths = {width for _, width in drawn(plan, "kept")}
    assert widths == {(diagrams.CELL - 2) * 0.25}
    assert drawn(of("compile-budget:0"), "kept")[0][1] == 1.5


@pytest.mark.parametrize("n_layers", [1, 2, 8, 40, 200])
def test_pictures_of_any_depth_hold_all_they_draw(n_layers: int) -> None:
    for spec in ("recursive", "per-block", "none"):
        root = ElementTree.fromstring(draw(of(spec, n_layers)))
        width, height = (float(part) for part in root.get("viewBox", "").split()[2:])
        for rect in root.iter(f"{SVG}rect"):
            assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width
            assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height


def test_text_from_outside_is_no_markup() -> None:
    root = ElementTree.fromstring(draw(of("none"), title="<script>&"))
    assert root.findtext(f"{SVG}title") == "<script>&"


def test_the_command_draws_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert diagrams.main(["nested:4", "--layers", "12"]) == 0
    assert re.match(r"<svg .*\n<title>nested:4 over 12 blocks</title>", capsys.readouterr().out)
    assert diagrams.main(["nestd:4"]) == 2
    assert "did you mean 'nested'" in capsys.readouterr().err
    assert diagrams.main(["none", "--layers", "0"]) == 2
