"""Claims as a user asks for them: measured by `claims`, judged again by `report --claims`."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

TINY = ("--set", "model.d_model=32", "--set", "train.seq_len=32")
ROOT = Path(__file__).parents[2]
PUBLISHED = "results/published/claims_cpu"


def test_a_study_is_measured_and_its_claim_is_judged(ckbench: Run) -> None:
    measured = ckbench(
        "claims", "--only", "micro_batches", "--device", "cpu", "--out", "made", *TINY, "--format", "json"
    )
    assert measured.code == 0, measured.err
    (device,) = json.loads(measured.out)
    outcomes = {item["name"]: item["outcome"] for item in device["claims"]}
    assert outcomes.pop("accumulation-changes-nothing") in ("holds", "holds only if")
    assert set(outcomes.values()) == {"not measured here"}
    again = ckbench("report", "made", "--claims", "--format", "json")
    assert again.out == measured.out


def test_a_page_goes_to_a_file(ckbench: Run) -> None:
    made = ckbench("report", str(ROOT / PUBLISHED), "--claims", "--format", "md", "--out", "page.md")
    assert made.code == 0 and made.out == ""
    assert Path("page.md").read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("report", "made", "--claims", "--group-by", "strategy"), "leave --group-by out"),
        (("report", "made", "--claims"), "no such results folder"),
        (("report", ".", "--claims", "--format", "html"), "have: console, md, json"),
        (("claims", "--only", "big_heads"), "did you mean 'big_head'"),
        (("claims", "--format", "csv"), "have: console, md, json"),
    ],
)
def test_what_cannot_be_answered_is_said(ckbench: Run, arguments: tuple[str, ...], said: str) -> None:
    outcome = ckbench(*arguments)
    assert outcome.code == 2 and said in outcome.err


def test_the_committed_page_is_what_the_committed_records_give(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The page names the command that makes it; run it again after a change of records or claims."""
    from ckbench import cli_claims

    monkeypatch.chdir(ROOT)
    page = ROOT / "docs" / "claims.md"
    made = cli_claims.verdicts(Path(PUBLISHED), format_="md", width=None)
    if request.config.getoption("--update-golden"):
        page.write_text(made, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == made, "run pytest with --update-golden and read the diff"
    assert f"`ckbench report {PUBLISHED} --claims --format md`" in made
