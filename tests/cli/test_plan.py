"""ckbench plan --max: the answers hold when they are tried, and what cannot be asked is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

STUDY = """\
model: {n_layers: 3, d_model: 64, n_heads: 4, vocab_size: 32}
train: {batch_size: 2, seq_len: 64, optimizer: sgd}
strategies: [none, per-block]
run: {rounds: 1, threads: 1, min_steps: 1, max_steps: 1, warmup_steps: 0}
"""


def rows(text: str) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in json.loads(text)}


def test_the_largest_batch_fits_and_the_next_does_not(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    budget = 12 * 2**20
    options = ("--device", "cpu", "--budget", "12MiB", "--format", "json")
    outcome = ckbench("plan", "study.yaml", "--max", "batch", *options)
    assert outcome.code == 0
    found = rows(outcome.out)
    for row in found.values():
        assert row["needed_bytes"] <= budget < row["next_bytes"]
        assert row["next_size"] == row["largest"] + 1
        assert row["tokens_per_s"] > 0 and row["parity"] == "exact"
    assert found["per-block"]["largest"] > 1.5 * found["none"]["largest"], "what checkpointing is for"
    assert found["per-block"]["times_none"] == found["per-block"]["largest"] / found["none"]["largest"]
    # a plain run at both sizes tells the same
    for size, fits in ((found["none"]["largest"], True), (found["none"]["next_size"], False)):
        again = ckbench(
            "run",
            "study.yaml",
            "--device",
            "cpu",
            "-s",
            "none",
            "--set",
            f"train.batch_size={size}",
            "--format",
            "json",
        )
        (row,) = json.loads(again.out)
        assert (max(row["peak_allocated_bytes"], row["first_step_peak_bytes"]) <= budget) is fits


def test_layers_and_the_table(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    outcome = ckbench("plan", "study.yaml", "--max", "layers", "--device", "cpu", "--budget", "6MiB", "--step", "4")
    assert outcome.code == 0
    assert "largest layers within 6.00 MiB" in outcome.out
    assert "none: layers 4 needs" in outcome.err
    report = ckbench("report", "results")
    assert report.code == 0 and "per-block" in report.out, "the measured trials are ordinary records"


def test_nothing_fits_is_exit_3_with_the_least_budget(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    outcome = ckbench("plan", "study.yaml", "--max", "batch", "--device", "cpu", "--budget", "100KiB")
    assert outcome.code == 3
    assert "no strategy fits at any batch; the smallest size needs" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--max", "width", "--budget", "1GiB"), "--max 'width'; have: batch, seq-len, layers"),
        (("--max", "batch", "--budget", "16"), "--budget: '16' has no unit"),
        (("--max", "batch"), "without a GPU memory has no end of its own; give --budget"),
        (("--max", "batch", "--budget", "1GiB", "--format", "csv"), "--format 'csv': this command writes"),
    ],
)
def test_what_cannot_be_asked_is_said(
    ckbench: Run, replay: Callable[..., str], arguments: tuple[str, ...], told: str
) -> None:
    outcome = ckbench("plan", "study.yaml", "--device", replay(), *arguments)
    assert outcome.code == 2
    assert told in outcome.err


def test_a_grid_is_refused(ckbench: Run, replay: Callable[..., str]) -> None:
    device = replay()
    with Path("study.yaml").open("a") as file:
        file.write("vary: {train.batch_size: [1, 2]}\n")
    outcome = ckbench("plan", "study.yaml", "--device", device, "--max", "batch", "--budget", "1GiB")
    assert outcome.code == 2 and "take vary out of the study" in outcome.err


def test_a_failing_strategy_is_a_row_with_its_reason(ckbench: Run, replay: Callable[..., str]) -> None:
    device = replay({"none": {"fail": {"raise": "a bug"}}})
    asked = ("plan", "study.yaml", "--device", device, "--max", "batch", "--budget", "1GiB")
    outcome = ckbench(*asked)
    assert outcome.code == 0
    assert "none: batch 2 ended error: RuntimeError: a bug" in outcome.out
    found = rows(ckbench(*asked, "--format", "json").out)
    assert found["none"]["status"] == "failed"
    assert found["per-block"]["largest"] == 1_000_000, "the others are searched all the same"
    alone = ckbench(*asked, "-s", "none")
    assert alone.code == 2 and "none: batch 2 ended error: RuntimeError: a bug" in alone.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--max", "batch", "--step", "2000000"), "--step 2000000 is beyond the largest batch that is tried, 1000000"),
        (("--max", "layers", "--set", "model.d_ff=[32,64,96,32]"), "layers cannot vary in this study: with 1, "),
    ],
)
def test_what_cannot_vary_is_refused_before_the_first_trial(
    ckbench: Run, replay: Callable[..., str], arguments: tuple[str, ...], told: str
) -> None:
    outcome = ckbench("plan", "study.yaml", "--device", replay(), "--budget", "1GiB", *arguments)
    assert outcome.code == 2 and told in outcome.err
    assert "needs" not in outcome.err


def test_the_largest_size_by_estimate_is_that_by_trials(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    options = ("--max", "batch", "--budget", "12MiB", "--device", "cpu", "--format", "json")
    tried = rows(ckbench("plan", "study.yaml", *options).out)
    estimated = rows(ckbench("plan", "study.yaml", *options, "--estimate").out)
    for spec, row in estimated.items():
        assert (row["largest"], row["next_size"]) == (tried[spec]["largest"], tried[spec]["next_size"])
        assert abs(row["needed_bytes"] - tried[spec]["needed_bytes"]) <= 64
        assert row["status"] == "estimated" and row["tokens_per_s"] is None


def test_by_estimate_a_card_is_a_budget_without_a_gpu(ckbench: Run) -> None:
    Path("study.yaml").write_text(STUDY)
    outcome = ckbench(
        "plan",
        "study.yaml",
        "--max",
        "layers",
        "--estimate",
        "--budget",
        "T4",
        "--step",
        "64",
        "--set",
        "train.batch_size=4096",
    )
    assert outcome.code == 0 and "estimated: no step was run" in outcome.out
    refused = ckbench("plan", "study.yaml", "--max", "layers", "--estimate")
    assert refused.code == 2 and "--estimate needs --budget" in refused.err
