"""Rows, ratios and their baseline: only what belongs together is compared."""

import math

import pytest

from ckbench.compare import compare, row_json
from ckbench.doubts import doubts
from ckbench.records import FIELDS
from tests.sample_records import MIB, record, study


def test_rounds_become_one_row_per_strategy_in_order_of_the_study() -> None:
    comparison = compare(study())
    assert [row.label for row in comparison.rows] == ["none", "per-block", "every-k:2"]
    assert all(row.values["rounds"] == 3 and row.values["samples"] == 21 for row in comparison.rows)


def test_ratios_are_paired_by_round() -> None:
    """Rounds that are all slower together leave the ratio, and its interval, where they were."""
    per_block = compare(study()).rows[1].values
    assert per_block["slowdown_ratio"] == pytest.approx(1.25)
    assert per_block["slowdown_low"] == pytest.approx(1.25)
    assert per_block["slowdown_high"] == pytest.approx(1.25)
    assert per_block["peak_change_ratio"] == pytest.approx(50 / 80 - 1)
    assert per_block["flops_ratio"] == pytest.approx(3700 / 3000)


def test_one_round_has_a_ratio_but_no_interval() -> None:
    per_block = compare(study(1)).rows[1].values
    assert per_block["slowdown_ratio"] == pytest.approx(1.25)
    assert per_block["slowdown_low"] is None and per_block["slowdown_high"] is None


def test_the_pooled_step_is_the_geometric_mean_of_rounds() -> None:
    rounds = [0.1, 0.11, 0.13]
    records = [record("none", round_number=i, step_s_median=s) for i, s in enumerate(rounds)]
    values = compare(records).rows[0].values
    assert values["step_s_median"] == pytest.approx(math.prod(rounds) ** (1 / 3))
    assert values["step_s_low"] < values["step_s_median"] < values["step_s_high"]
    assert values["tokens_per_s"] == pytest.approx(128 / values["step_s_median"])


def test_baseline_falls_back_to_what_keeps_most_when_none_does_not_fit() -> None:
    records = [record("none", status="oom"), record("per-block"), record("every-k:2")]
    comparison = compare(records)
    assert set(comparison.baselines.values()) == {"every-k:2"}
    assert comparison.fallback_groups
    none = next(row for row in comparison.rows if row.label == "none")
    assert none.values["slowdown_ratio"] is None and none.values["peak_change_ratio"] is None


@pytest.mark.parametrize("status", ["invalid", "killed", "timeout", "error", "recompute_mismatch", "oom"])
def test_a_row_that_is_not_ok_takes_no_part_in_ratios(status: str) -> None:
    records = [*study(), record("per-block", round_number=3, status=status, message="why")]
    row = compare(records).rows[1].values
    assert row["status"] == status and row["message"] == "why"
    assert row["slowdown_ratio"] is None and row["flops_ratio"] is None and row["peak_change_ratio"] is None


def test_a_trial_tried_again_replaces_its_failure() -> None:
    failed = record("none", status="killed", started_at="2026-11-29T09:00:00.000+00:00", record_id="old")
    values = compare([failed, record("none")]).rows[0].values
    assert values["status"] == "ok"


def test_another_baseline_can_be_asked_for() -> None:
    comparison = compare(study(), baseline="per-block")
    assert comparison.rows[0].values["slowdown_ratio"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    "change",
    [
        {"device_name": "Another card"},
        {"environment__torch": "2.11.0"},
        {"environment__allocator": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}},
        {"environment__threads": 1},
        {"train__precision": "bf16"},
        {"model__d_model": 128},
    ],
    ids=str,
)
def test_ratios_stay_inside_equal_conditions(change: dict[str, object]) -> None:
    comparison = compare([*study(), record("per-block", **{**change, "session_id": "s2"})])
    odd = [row for row in comparison.rows if row.values["session_id"] == "s2"]
    assert len(odd) == 1 and odd[0].values["slowdown_ratio"] in (None, 1.0)
    assert len(comparison.baselines) == 2


def test_the_same_card_at_another_index_is_one_group() -> None:
    records = [record("none", device="cuda:0", device_name="H"), record("per-block", device="cuda:4", device_name="H")]
    assert len(compare(records).baselines) == 1


def test_the_newest_session_wins_unless_all_are_wanted() -> None:
    later = "2026-11-30T10:00:00.000+00:00"
    records = [*study(), record("none", session_id="s2", step_s_median=0.5, started_at=later)]
    newest = compare(records).rows[0].values
    assert newest["session_id"] == "s2" and newest["step_s_median"] == 0.5
    every = compare(records, all_sessions=True)
    assert len(every.rows) == 4
    assert len(every.baselines) == 2


LATER = "2026-11-30T10:00:00.000+00:00"


def test_a_ratio_is_to_the_baseline_of_its_own_session() -> None:
    """A later and slower none is a row of its own, and no row of an earlier session is divided by it."""
    slow = [record("none", round_number=i, session_id="s2", started_at=LATER, step_s_median=9.0) for i in range(3)]
    none, per_block, _ = compare([*study(), *slow]).rows
    assert none.values["session_id"] == "s2" and none.values["slowdown_ratio"] == 1.0
    assert per_block.values["slowdown_ratio"] == pytest.approx(1.25) and per_block.values["slowdown_low"] is not None
    assert not per_block.is_across_sessions


def test_rounds_of_different_sessions_give_no_interval_and_a_doubt() -> None:
    alone = [record("full", round_number=i, session_id="s2", started_at=LATER) for i in range(3)]
    comparison = compare([*study(), *alone])
    full = next(row for row in comparison.rows if row.label == "full")
    assert full.values["slowdown_ratio"] is not None and full.values["slowdown_low"] is None
    assert full.is_across_sessions
    assert any("in another session only" in str(doubt) for doubt in doubts(comparison))


def test_depths_sort_as_numbers() -> None:
    records = [record("none", model__n_layers=n) for n in (2, 10, 4, 48)]
    comparison = compare(records)
    assert comparison.varied == ("model.n_layers",)
    assert [row.values["model"]["n_layers"] for row in comparison.rows] == [2, 4, 10, 48]


def test_row_json_promises_every_record_field() -> None:
    row = row_json(compare(study()).rows[0])
    promised = {
        "study", "strategy", "status", "device", "model", "train", "parity", "peak_allocated_bytes", "peak_phase",
        "peak_forward_bytes", "peak_loss_bytes", "peak_backward_bytes", "peak_optimizer_bytes", "static_bytes",
        "gradient_bytes", "activation_peak_bytes", "saved_bytes", "peak_reserved_bytes", "nvml_process_bytes",
        "step_s_median", "step_s_low", "step_s_high", "samples", "slowdown_ratio", "slowdown_low", "slowdown_high",
        "tokens_per_s", "flops_ratio", "block_calls_forward", "block_calls_backward", "estimate_peak_bytes",
    }  # fmt: skip
    assert promised <= set(FIELDS)
    assert set(FIELDS) <= set(row)
    assert row["peak_allocated_bytes"] == 80 * MIB


def test_parity_of_a_row_is_always_one_of_the_promised_words() -> None:
    rows = compare([record("none"), record("full", status="oom", parity=None)]).rows
    assert [row.values["parity"] for row in rows] == ["exact", "none"]
