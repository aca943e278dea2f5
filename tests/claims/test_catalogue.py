"""The catalogue as a whole: every claim has its study, is judged alone, and is shown in every format."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ckbench import examples, study
from ckbench.claims import drawing, evidence, making
from ckbench.claims.base import OUTCOMES, Figure, Verdict, write
from ckbench.claims.catalogue import CLAIMS, ESTIMATED, SEARCHED, STUDIES, judge
from ckbench.errors import ConfigError, StoreError
from tests.claims.made import MIB, encoder
from tests.sample_records import record


def test_names_are_unique_and_every_study_is_there() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for name in STUDIES:
        assert study.load(examples.path(f"articles/{name}.yaml")).name == name
    assert set(ESTIMATED + SEARCHED) <= set(STUDIES)


def test_every_claim_is_told_apart_from_its_figures_missing() -> None:
    items = judge(evidence.Evidence(device="nothing"))
    assert [item.claim for item in items] == list(CLAIMS)
    assert {item.verdict.outcome for item in items} == {"not measured here"}
    assert all("records" in item.verdict.reason or "estimates" in item.verdict.reason for item in items)


def test_one_claim_without_figures_leaves_the_others_alone() -> None:
    items = judge(evidence.Evidence(device="a processor", rows=encoder()))
    outcomes = {item.claim.name: item.verdict.outcome for item in items}
    assert outcomes["fewer-segments-save-less"] == "holds"
    assert outcomes["scores-dominate"] == "not measured here"


def test_a_row_that_did_not_end_ok_is_no_figure_and_says_why() -> None:
    rows = encoder()
    rows[1]["status"] = "oom"
    items = {i.claim.name: i.verdict for i in judge(evidence.Evidence(device="a card", rows=rows))}
    assert "per-block ended oom" in items["peak-three-to-five"].reason


def stored(strategy: str, peak: int, session: str = "s1", **changes: Any) -> dict[str, Any]:
    made = record(strategy, session_id=session, study="encoder_8x512", **changes)
    return {**made, "record_id": f"{strategy}{session}{changes}", "peak_allocated_bytes": peak, "gradient_bytes": MIB}


def test_the_newest_session_of_a_study_counts() -> None:
    old = [stored("none", 9 * MIB, "old"), stored("per-block", 2 * MIB, "old")]
    new = [stored("none", 8 * MIB, "new", started_at="2026-12-01T10:00:00.000+00:00")]
    (found,) = evidence.gather([*new, *old], [])
    assert found.number("encoder_8x512", "none", "peak_allocated_bytes") == 8 * MIB
    with pytest.raises(evidence.NotMeasured, match="per-block is not in the records"):
        found.row("encoder_8x512", "per-block")


def test_devices_are_judged_apart() -> None:
    here, there = stored("none", MIB), stored("none", 2 * MIB, device_name="A card", device="cuda:0")
    found = evidence.gather([here, there], [])
    assert [each.device for each in found] == ["A processor (2 cores)", "A card"]
    assert [each.number("encoder_8x512", "none", "peak_allocated_bytes") for each in found] == [MIB, 2 * MIB]


def test_a_figure_that_is_there_twice_is_not_guessed_at() -> None:
    twice = evidence.Evidence(device="", rows=[*encoder(), *encoder()])
    with pytest.raises(evidence.NotMeasured, match="several times"):
        twice.row("encoder_8x512", "none")


@pytest.mark.parametrize("content", ["[]", "{}", '{"rows": [1]}', '{"rows": [{"study": 1}]}', "{", "\xff"])
def test_a_foreign_file_of_estimates_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / evidence.ESTIMATES_NAME).write_text(content, encoding="latin-1")
    with pytest.raises(StoreError, match="ckbench claims"):
        evidence.read(tmp_path)


def test_an_empty_folder_says_what_makes_records(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="ckbench claims"):
        evidence.read(tmp_path)


def test_a_condition_belongs_to_holds_only_if() -> None:
    with pytest.raises(AssertionError):
        Verdict(outcome="holds", reason="", condition="x")
    with pytest.raises(AssertionError):
        Verdict(outcome="holds only if", reason="")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (512, "bytes", "512 B"),
        (2_500, "bytes", "2.5 kB"),
        (2.6e12, "bytes", "2.6 TB"),
        (1.005e9, "FLOPs", "1.0 GFLOPs"),
    ],
)
def test_figures_carry_their_unit(value: float, unit: Any, text: str) -> None:
    assert write(value, unit) == text


def drawn(format_: str, **how: Any) -> str:
    found = evidence.Evidence(device="a processor", rows=encoder((1.3, 1.25, 1.35)))
    return drawing.draw([(found, judge(found))], format_=format_, source="results/claims", **how)


def test_json_holds_every_claim_with_raw_figures() -> None:
    (device,) = json.loads(drawn("json"))
    assert [item["name"] for item in device["claims"]] == [claim.name for claim in CLAIMS]
    by_name = {item["name"]: item for item in device["claims"]}
    (time, _) = by_name["at-1.2-to-1.4-times-the-time"]["figures"]
    assert (time["value"], time["low"], time["high"], time["unit"]) == (1.3, 1.25, 1.35, "x")
    assert {item["outcome"] for item in device["claims"]} <= set(OUTCOMES)


def test_page_links_study_and_names_formula_of_every_claim() -> None:
    page = drawn("md")
    for claim in CLAIMS:
        assert f'<a id="{claim.name}"></a>' in page and f"](#{claim.name})" in page
        for name in claim.studies:
            assert f"configs/articles/{name}.yaml" in page
    assert page.count("Formula: ") == len(CLAIMS)
    assert "`ckbench report results/claims --claims --format md`" in page


def test_anchors_of_two_devices_are_told_apart() -> None:
    both = [evidence.Evidence(device=name, rows=encoder()) for name in ("a processor", "a card")]
    page = drawing.draw([(each, judge(each)) for each in both], format_="md", source="results")
    anchors = re.findall(r'<a id="([^"]+)"></a>', page)
    assert len(anchors) == 2 * len(CLAIMS) == len(set(anchors))
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == set(anchors)


@pytest.mark.parametrize("width", [40, 80])
def test_console_fits_its_width(width: int) -> None:
    lines = drawn("console", width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("HOLDS ONLY IF" in line for line in lines)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="have: console, md, json"):
        drawn("html")


def test_unknown_studies_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="memory_laws"):
        making.chosen(["memory_law"])
    assert making.chosen(["big_head", "memory_laws"]) == ("memory_laws", "big_head")


def test_figures_without_an_interval_have_none() -> None:
    assert Figure(what="x", value=1.0, unit="x").text() == "x 1.00 x"
