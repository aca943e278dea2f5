"""Each reason for doubt appears when it should, and a clean table has none."""

from typing import Any

import pytest

from ckbench.compare import compare
from ckbench.doubts import doubts
from tests.sample_records import record, study


def said(records: list[dict[str, Any]]) -> list[str]:
    return [str(doubt) for doubt in doubts(compare(records))]


def changed(strategy: str, **changes: Any) -> list[dict[str, Any]]:
    """Give a session in which one strategy's rounds differ."""
    return [
        record(r["strategy"], round_number=r["round"], **changes) if r["strategy"] == strategy else r for r in study()
    ]


def test_a_clean_table_has_no_doubts() -> None:
    assert said(study()) == []


@pytest.mark.parametrize(
    ("strategy", "changes", "expected"),
    [
        ("per-block", {"status": "invalid", "parity_detail": "3 gradients differ"}, "does not compute what none computes: 3 gradients differ"),
        ("per-block", {"block_calls_backward": 3}, "blocks ran 3 times in backward, the plan says 4"),
        ("per-block", {"region_calls_backward": 0, "n_regions": 4}, "the strategy had no effect"),
        ("per-block", {"saved_bytes": 2**30}, "keeps more than none (1.00 GiB)"),
        ("per-block", {"peak_phase": "loss", "saved_bytes": 1}, "the peak belongs to the head and loss"),
        ("per-block", {"peak_phase": "optimizer"}, "the peak belongs to the optimizer"),
        ("per-block", {"outliers": 2}, "6 outlying steps (kept in the figures)"),
        ("per-block", {"run": {"seed": 0, "warmup_steps": 0}}, "only 0 warm-up steps were asked for"),
        ("per-block", {"parity": "none"}, "gradients were not compared with those of none"),
        ("per-block", {"allocator_retries": 1}, "the allocator ran short and retried"),
        ("per-block", {"skipped_optimizer_steps": 2}, "gradient scaling skipped up to 2 updates"),
        ("per-block", {"estimate_peak_bytes": 10 * 2**20}, "estimated and measured peak differ by more than 5 %"),
        ("per-block", {"notes": ["ffn without its norm"]}, "ffn without its norm"),
        ("none", {"status": "oom"}, "none has no ok row in 1 of 1 groups, so ratios are to every-k:2"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_reason_is_given(strategy: str, changes: dict[str, Any], expected: str) -> None:
    assert any(expected in text for text in said(changed(strategy, **changes))), said(changed(strategy, **changes))


def test_recomputing_faster_than_none_is_doubted() -> None:
    records = [r for r in study() if r["strategy"] != "per-block"]
    records += [record("per-block", round_number=i, step_s_median=0.05 * (1 + i / 1000)) for i in range(3)]
    assert any("recomputes and yet is faster than none (0.5" in text for text in said(records))


def test_time_far_above_counted_work_is_doubted() -> None:
    records = [r for r in study() if r["strategy"] != "per-block"]
    records += [record("per-block", round_number=i, step_s_median=0.3 * (1 + i / 1000)) for i in range(3)]
    assert any("where counted work says 1.23" in text for text in said(records))


def test_a_wide_interval_is_doubted_with_its_width() -> None:
    wide = [0.1, 0.2, 0.4]
    records = [
        record("none", round_number=i, step_s_median=s, run={"precision_target": 0.01}) for i, s in enumerate(wide)
    ]
    assert any("at worst, 1.0 % was asked" in text for text in said(records))


def test_one_round_is_doubted() -> None:
    assert any("measured in one round" in text for text in said(study(1)))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("environment__torch", "2.11.0", "rows of different PyTorch versions (2.11.0, 2.13.0)"),
        ("environment__allocator", {"a": "b"}, "rows of different allocator settings"),
        ("environment__load_1min", 9.0, "busy during 1 trial (load up to 9.0 on 2 threads)"),
        ("environment__other_processes", 2, "other processes were on the device"),
    ],
)
def test_conditions_that_differ_are_doubted(key: str, value: Any, expected: str) -> None:
    records = [*study(), record("ffn-only", **{key: value})]
    assert any(expected in text for text in said(records)), said(records)


def test_a_clock_below_its_highest_is_doubted() -> None:
    facts = {
        "torch": "2.13.0",
        "code": "abc",
        "threads": 2,
        "allocator": {},
        "clock_after_mhz": 1200,
        "max_clock_mhz": 1980,
    }
    assert any("throttled" in text for text in said([record("none", environment=facts)]))


def test_a_peak_in_the_loss_phase_that_kept_bytes_make_is_not_blamed_on_the_head() -> None:
    kept = {"peak_phase": "loss", "saved_bytes": 40, "activation_peak_bytes": 50}
    assert not any("head and loss" in text for text in said(changed("per-block", **kept)))
