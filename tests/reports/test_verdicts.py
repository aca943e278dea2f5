"""Verdicts: the fastest that fits, in every budget, and what the intervals do not decide."""

from typing import Any

from ckbench.compare import compare
from ckbench.reports._verdicts import Verdict, choose, needed_bytes, verdicts
from ckbench.reports.base import Budget
from tests.sample_records import MIB, record, study

GIB = 2**30


def answers(records: list[dict[str, Any]], *asked: Budget) -> dict[str, str]:
    return {verdict.budget: verdict.sentence for verdict in verdicts(compare(records).rows, asked)}


def sizes(**gib: float) -> list[dict[str, Any]]:
    """Give three rounds of strategies with their peaks; each later one is slower."""
    return [
        record(name.replace("_", "-"), round_number=i, peak_allocated_bytes=int(peak * GIB), step_s_median=0.1 + 0.1 * j + i / 1e4, order=j)
        for j, (name, peak) in enumerate(gib.items())
        for i in range(3)
    ]  # fmt: skip


def test_small_models_fit_every_card_and_tighter_budgets_are_named() -> None:
    got = answers(study())
    assert list(got) == ["no limit", "T4 to B200", "from 50.00 MiB on", "below 50.00 MiB"]
    assert got["no limit"] == "`none` is fastest: 80.00 MiB, 101 ms per step."
    assert got["from 50.00 MiB on"].startswith(
        "`per-block` is the fastest that fits: 50.00 MiB, 126 ms per step (-37.5 % peak and 1.25 [1.25..1.25] times"
    )


def test_every_card_gets_its_own_fastest() -> None:
    got = answers(sizes(none=60, per_block=20, full=10))
    assert (
        got["T4 to V100 16GB"].startswith("use `full`: 10.00 GiB")
        and "needs 20.00 GiB or more" in got["T4 to V100 16GB"]
    )
    assert got["L4 to RTX A6000"].startswith("use `per-block`: 20.00 GiB")
    assert got["H100 80GB to B200"].startswith("use `none`: 60.00 GiB")


def test_a_card_that_nothing_fits_says_what_least_needs() -> None:
    got = answers(sizes(none=60, per_block=50))
    assert got["T4 to RTX A6000"] == "nothing measured fits; `per-block` needs least, 50.00 GiB."


def test_an_asked_budget_is_answered_first_after_no_limit() -> None:
    asked = Budget(name="mine", usable_bytes=55 * MIB)
    found = verdicts(compare(study()).rows, [asked])
    assert found[1].is_asked and found[1].budget == "mine"
    card = Budget(name="T4", usable_bytes=14 * GIB)
    assert verdicts(compare(study()).rows, [card])[1].budget == "T4 (14.00 GiB usable)"
    assert found[1].sentence.startswith("use `per-block`: 50.00 MiB")
    assert "what is faster needs 80.00 MiB or more" in found[1].sentence


def test_what_is_not_measurably_slower_and_needs_less_is_named() -> None:
    noisy = [
        record(name, round_number=i, step_s_median=base * (1 + sign * 0.3 * (i - 1)), order=j)
        for j, (name, base, sign) in enumerate([("none", 0.1, 1), ("per-block", 0.11, -1)])
        for i in range(3)
    ]
    got = answers(noisy)["no limit"]
    assert "`per-block` needs 37.5 % less and its intervals do not say that it is slower" in got
    assert "intervals" not in answers(study())["no limit"]


def test_what_a_device_must_hold_is_what_its_allocator_held() -> None:
    (row,) = compare([record("none", peak_reserved_bytes=99 * MIB, first_step_peak_bytes=85 * MIB)]).rows
    assert needed_bytes(row) == 99 * MIB
    assert choose([row], 98 * MIB) is None and choose([row], 99 * MIB) is row


def test_rows_that_did_not_end_ok_have_no_part() -> None:
    failed = [record("none", status="oom"), record("per-block", status="invalid")]
    assert verdicts(compare(failed).rows) == [
        Verdict(budget="any budget", sentence="no strategy ended ok with a peak and a step time.")
    ]
    assert answers([*failed, record("full")])["no limit"].startswith("`full` is fastest")


def test_a_name_with_backticks_cannot_leave_its_code() -> None:
    assert "`a?b?`" in answers([record("a`b`")])["no limit"]
