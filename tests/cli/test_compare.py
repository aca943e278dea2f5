"""ckbench compare: exit codes that continuous integration can rely on, in every format, and misuse in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Outcome, Run

Replay = Callable[..., str]
QUIET = {"process": 0.002, "step": 0.005}
OOM = {"fail": {"raise": "CUDA out of memory.", "type": "OutOfMemoryError"}}


def scripted(step_s: float, salt: str, peak_bytes: int = 2**20) -> dict[str, Any]:
    return {"step_s": step_s, "salt": salt, "noise": QUIET, "fields": {"peak_allocated_bytes": peak_bytes}}


@pytest.fixture
def measure(ckbench: Run, replay: Replay) -> Callable[..., None]:
    """Measure the study into a folder; keywords replace what is scripted for a strategy, hyphens as underscores."""

    def run(folder: str, *options: str, device_name: str = "scripted", **strategies: Any) -> None:
        answers = {"*": scripted(0.01, folder)}
        answers |= {name.replace("_", "-"): answer for name, answer in strategies.items()}
        device = replay(answers, device_name=device_name)
        ckbench("run", "study.yaml", "--device", device, "--out", folder, "--set", "run.rounds=5", *options)

    return run


Measure = Callable[..., None]


def gate(ckbench: Run, *options: str) -> Outcome:
    return ckbench("compare", "a", "b", "--fail-above", "step:3%", "--fail-above", "peak:1%", *options)


def test_no_change_passes(ckbench: Run, measure: Measure) -> None:
    measure("a")
    measure("b")
    outcome = gate(ckbench)
    assert outcome.code == 0
    assert outcome.err == "passed: step within +3 % and peak within +1 % in 3 rows\n"
    assert outcome.out.startswith(outcome.err) and "within" in outcome.out and "same" in outcome.out


def test_a_slower_step_fails(ckbench: Run, measure: Measure) -> None:
    measure("a")
    measure("b", per_block=scripted(0.0106, "b"))
    outcome = gate(ckbench)
    assert outcome.code == 1
    assert outcome.err.startswith("failed: step time above +3 %: per-block +") and "none" not in outcome.err
    assert ckbench("compare", "a", "b", "--fail-above", "step:20%").code == 0
    assert ckbench("compare", "a", "b", "--fail-above", "peak:0%").code == 0
    back = ckbench("compare", "b", "a", "--fail-above", "step:3%")
    assert back.code == 0, "faster is no failure"


def test_a_higher_peak_fails_by_bytes(ckbench: Run, measure: Measure) -> None:
    measure("a", per_block=scripted(0.01, "a", 10_000))
    measure("b", per_block=scripted(0.01, "b", 10_101))
    outcome = gate(ckbench)
    assert (outcome.code, outcome.err) == (1, "failed: peak memory above +1 %: per-block +1.0 %\n")
    measure("c", per_block=scripted(0.01, "c", 10_100))
    assert ckbench("compare", "a", "c", "--fail-above", "peak:1%").code == 0


def test_the_undecided_passes_with_a_note(ckbench: Run, measure: Measure) -> None:
    measure("a", "--set", "run.rounds=2")
    measure("b", "--set", "run.rounds=2", per_block=scripted(0.0103, "b"))
    outcome = gate(ckbench)
    assert outcome.code == 0
    assert outcome.err.startswith("not failed, but undecided: step time perhaps above +3 %: ")
    assert "more --rounds make it narrower" in outcome.out
    measure("c", "--quick", "--set", "run.rounds=1")
    single = ckbench("compare", "a", "c", "--fail-above", "step:3%")
    assert single.code == 0 and "single round" in single.out and "(no interval)" in single.err


def test_what_no_longer_fits_is_a_regression(ckbench: Run, measure: Measure) -> None:
    measure("a")
    measure("b", per_block=OOM)
    outcome = gate(ckbench)
    assert (outcome.code, outcome.err) == (1, "failed: no longer ok: per-block (oom)\n")
    assert "per-block: ok in A, oom in forward in B (OutOfMemoryError: CUDA out of memory.)" in outcome.out
    assert "NO LONGER OK" in outcome.out
    bare = ckbench("compare", "a", "b")
    assert bare.code == 0 and "no longer ok: per-block (oom)" in bare.out
    back = ckbench("compare", "b", "a", "--fail-above", "step:3%")
    assert back.code == 0 and "ok again" in back.out


def test_without_thresholds_it_only_prints(ckbench: Run, measure: Measure) -> None:
    measure("a")
    measure("b", per_block=scripted(0.1, "b"))
    outcome = ckbench("compare", "a", "b")
    assert (outcome.code, outcome.err) == (0, "")
    assert "no threshold was asked for, so nothing is judged" in outcome.out
    assert "ABOVE" not in outcome.out and "verdict" not in outcome.out


def test_rows_of_one_side_are_named(ckbench: Run, measure: Measure) -> None:
    measure("a", "-s", "none", "-s", "sqrt")
    measure("b", "-s", "none", "-s", "full")
    outcome = gate(ckbench)
    assert outcome.code == 0
    assert "\nonly in A: sqrt\n" in outcome.out and "\nonly in B: full\n" in outcome.out


def test_every_format(ckbench: Run, measure: Measure) -> None:
    measure("a")
    measure("b", per_block=scripted(0.012, "b"))
    answer = gate(ckbench, "--format", "json")
    assert answer.code == 1
    told = json.loads(answer.out)
    assert told["outcome"] == "failed" and told["summary"] + "\n" == answer.err
    assert told["thresholds"][0] == {"quantity": "step", "above_ratio": 0.03}
    rows = {row["strategy"]: row for row in told["rows"]}
    assert rows["per-block"]["told"] == {"step": "above", "peak": "within"}
    assert 1.03 < rows["per-block"]["step_ratio_low"] < rows["per-block"]["step_ratio"] < 1.25
    assert rows["none"]["peak_ratio"] == 1 and rows["none"]["rounds_a"] == rows["none"]["rounds_b"] == 5
    assert told["only_in_a"] == told["only_in_b"] == told["not_used"] == []
    drawn = gate(ckbench, "--format", "md")
    table = [line for line in drawn.out.splitlines() if line.startswith("|")]
    assert drawn.code == 1 and len(table) == 5 and len({line.count("|") for line in table}) == 1


def test_devices_are_not_mixed_unasked(ckbench: Run, measure: Measure) -> None:
    measure("a")
    measure("b", device_name="another")
    outcome = gate(ckbench)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("A was measured on scripted and B on another") and outcome.err.count("\n") == 1
    allowed = gate(ckbench, "--allow-different-device")
    assert allowed.code == 0 and "device: scripted in A, another in B" in allowed.out


def test_other_versions_are_noted(ckbench: Run, measure: Measure) -> None:
    measure("a")
    measure("b")
    (file,) = Path("b").glob("*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        record["environment"]["torch"] = "9.9"
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + "not a record\n")
    outcome = gate(ckbench)
    assert outcome.code == 0
    assert "torch: " in outcome.out and "9.9 in B" in outcome.out
    assert "not used:" in outcome.out and ":16: not JSON" in outcome.out


def test_text_from_files_steers_nothing(ckbench: Run, measure: Measure) -> None:
    measure("a")
    measure("b", per_block=scripted(0.02, "b"))
    for folder in ("a", "b"):
        (file,) = Path(folder).glob("*.jsonl")
        file.write_text(file.read_text().replace('"per-block"', '"per\\u001b[2J|<b>"'))
    for format_ in ("console", "md", "json"):
        outcome = gate(ckbench, "--format", format_)
        assert outcome.code == 1
        assert (outcome.out + outcome.err).replace("\n", "").isprintable()
        assert "<b>" not in outcome.out or format_ != "md"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("a", "nowhere"), "nowhere: no such results folder; `ckbench run` makes one\n"),
        (("a", "empty"), "empty: no ckbench records; `ckbench run` makes some\n"),
        (("a", "a"), "A and B hold the same records; compare two measurements, each in a place of its own\n"),
        (("a", "wide"), "A and B have no configuration (model, train and strategy) in common; measure one study in both\n"),
        (("a", "b", "--format", "csv"), "--format 'csv'; have: console, md, json\n"),
        (("a", "b", "--fail-above", "time:3%"), "--fail-above 'time:3%': unknown quantity 'time'; have: step, peak\n"),
        (("a", "b", "--fail-above", "step=3%"), "--fail-above 'step=3%': write a quantity and percent, for example step:3% or peak:1%\n"),
        (("a", "b", "--fail-above", "step:3%", "--fail-above", "step:4%"), "--fail-above gives step twice; keep one of them\n"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_misuse_ends_in_one_line_and_exit_2(
    ckbench: Run, measure: Measure, arguments: tuple[str, ...], expected: str
) -> None:
    Path("empty").mkdir()
    measure("a", "--set", "run.rounds=1")
    measure("b", "--set", "run.rounds=1")
    measure("wide", "--set", "model.d_model=64", "--set", "run.rounds=1")
    outcome = ckbench("compare", *arguments)
    assert (outcome.code, outcome.err, outcome.out) == (2, expected, "")


@pytest.mark.parametrize("arguments", [(), ("a",), ("a", "b", "c"), ("a", "b", "--nope")])
def test_usage_errors_are_exit_2(ckbench: Run, arguments: tuple[str, ...]) -> None:
    assert ckbench("compare", *arguments).code == 2
