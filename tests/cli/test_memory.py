"""ckbench estimate and explain, and what run makes of estimates: as a user types them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

STUDY = """\
model: {n_layers: 3, d_model: 32, n_heads: 4, vocab_size: 64}
train: {batch_size: 2, seq_len: 32, precision: bf16}
strategies: [none, per-block, full]
run: {rounds: 1, threads: 1, min_steps: 1, max_steps: 1, parity: false}
on_cpu: {train: {precision: fp32}}
"""


@pytest.fixture
def study(ckbench: Run) -> Run:
    """Have a study in the current folder."""
    Path("study.yaml").write_text(STUDY)
    return ckbench


def test_estimate_for_cuda_with_a_card(study: Run) -> None:
    outcome = study("estimate", "study.yaml", "--gpu", "a100 40gb", "--format", "json")
    assert outcome.code == 0
    rows = json.loads(outcome.out)
    assert [row["strategy"] for row in rows] == ["none", "per-block", "full"]
    for row in rows:
        assert row["method"] == "replay" and row["fits"] == "yes"
        assert row["static_bytes"] < row["peak_allocated_bytes"] <= row["peak_reserved_bytes"]
        assert row["saved_bytes"] > 0 and row["peak_phase"] in ("forward", "loss", "backward", "optimizer")
        assert row["margin_bytes"] == 40960 * 2**20 - 500 * 2**20 - max(
            row["peak_allocated_bytes"], row["first_step_peak_bytes"]
        )
    assert rows[1]["saved_bytes"] < rows[0]["saved_bytes"]


def test_a_card_too_small(study: Run) -> None:
    outcome = study("estimate", "study.yaml", "--gpu", "505MiB")
    assert outcome.code == 0
    assert outcome.out.count("  no  ") == 3
    assert "card: 505MiB, 5.00 MiB for tensors" in outcome.out


def test_estimate_over_a_range(study: Run) -> None:
    outcome = study("estimate", "study.yaml", "--layers", "1..3", "-s", "none", "--device", "cpu", "--format", "json")
    rows = json.loads(outcome.out)
    assert sorted(row["model.n_layers"] for row in rows) == [1, 2, 3]
    by_depth = {row["model.n_layers"]: row["saved_bytes"] for row in rows}
    assert by_depth[3] - by_depth[2] == by_depth[2] - by_depth[1] > 0


def test_run_puts_the_estimate_beside_the_measurement(study: Run) -> None:
    outcome = study("run", "study.yaml", "--device", "cpu", "--format", "json")
    assert outcome.code == 0
    for row in json.loads(outcome.out):
        assert abs(row["estimate_peak_bytes"] - row["peak_allocated_bytes"]) <= 64
    assert "est. error" in study("report", "results").out
    bare = study("run", "study.yaml", "--device", "cpu", "--format", "json", "--no-estimates", "--out", "other")
    assert [row["estimate_peak_bytes"] for row in json.loads(bare.out)] == [None] * 3


def test_what_cannot_fit_is_warned_of_or_not_started(study: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckbench import forecast

    def small(n_bytes: int) -> int:
        return 400_000

    real_init = forecast.Forecast.__init__

    def with_total(self: forecast.Forecast, device: dict[str, Any], launcher: Any, planner: Any = None) -> None:
        real_init(self, device, launcher, planner)
        self.total_bytes = 1

    monkeypatch.setattr(forecast.Forecast, "__init__", with_total)
    monkeypatch.setattr(forecast, "usable_bytes", small)
    warned = study("run", "study.yaml", "--device", "cpu", "-s", "none", "--format", "json")
    assert warned.code == 0 and json.loads(warned.out)[0]["status"] == "ok"
    assert "none: needs about" in warned.err
    skipped = study("run", "study.yaml", "--device", "cpu", "-s", "none", "--skip-oom", "--out", "other")
    assert skipped.code == 0
    assert "skipped: not started: needs about" in skipped.out


def test_explain_names_what_autograd_keeps(study: Run) -> None:
    outcome = study("explain", "study.yaml", "--device", "cpu", "-s", "per-block", "--top", "3")
    assert outcome.code == 0
    assert "per-block: what autograd keeps after forward, on the CPU, estimated" in outcome.out
    assert "block, every block" in outcome.out
    assert "made again in backward" in outcome.out
    assert "live bytes over the step" in outcome.out


def test_explain_real_and_replayed_agree(study: Run) -> None:
    explained = {}
    for option in ("--device=cpu", "--real"):
        outcome = study("explain", "study.yaml", option, "-s", "none", "-s", "per-block", "--format", "json")
        assert outcome.code == 0, outcome.err
        explained[option] = json.loads(outcome.out)
    assert explained["--device=cpu"] == explained["--real"]


def test_explain_the_difference_of_two_strategies(study: Run) -> None:
    outcome = study("explain", "study.yaml", "--diff", "none", "per-block", "--device", "cpu")
    assert outcome.code == 0
    assert "per-block against none" in outcome.out
    assert "kept after forward -" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("estimate",), "give a study file, or a range such as --layers 2..48"),
        (("estimate", "study.yaml", "--gpu", "A101"), "unknown card 'A101'"),
        (("estimate", "study.yaml", "--device", "tpu"), "--device 'tpu': cuda or cpu"),
        (("estimate", "study.yaml", "--format", "csv"), "--format 'csv'; have: console, md, json"),
        (("explain", "study.yaml", "--format", "md"), "--format 'md'; have: console, json"),
        (("explain", "study.yaml", "-s", "per-bloc"), "unknown strategy 'per-bloc'; did you mean 'per-block'?"),
    ],
)
def test_what_cannot_be_asked_is_said(study: Run, arguments: tuple[str, ...], told: str) -> None:
    outcome = study(*arguments)
    assert outcome.code == 2 and told in outcome.err


def test_a_scripted_device_has_no_estimate(ckbench: Run, replay: Callable[..., str]) -> None:
    outcome = ckbench("run", "study.yaml", "--device", replay(), "--format", "json")
    assert [row["estimate_peak_bytes"] for row in json.loads(outcome.out)] == [None] * 3
