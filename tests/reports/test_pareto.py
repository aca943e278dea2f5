"""The memory-time front: what is dominated is so beyond doubt, and rows are judged inside their own group only."""

import pytest

from ckbench.compare import Row, compare
from ckbench.reports._pareto import by_group, front, is_measured, name_of_group, standings
from tests.sample_records import MIB, record

Rounds = tuple[float, ...]


def rows(**named: tuple[int, Rounds]) -> list[Row]:
    """Give rows of one group from a peak in MiB and the step times of the rounds in ms."""
    records = [
        record(
            name,
            round_number=i,
            order=order,
            peak_allocated_bytes=peak * MIB if i == 0 else None,
            **times(ms),
        )
        for order, (name, (peak, rounds_ms)) in enumerate(named.items())
        for i, ms in enumerate(rounds_ms)
    ]
    return compare(records).rows


def times(ms: float) -> dict[str, float]:
    """Give a step time that is known exactly."""
    return dict.fromkeys(("step_s_median", "step_s_low", "step_s_high"), ms / 1e3)


def judged(members: list[Row]) -> dict[str, str | None]:
    return {row.label: standing for row, standing in zip(members, standings(members), strict=True)}


def test_more_memory_and_more_time_is_dominated() -> None:
    members = rows(none=(80, (100, 101, 102)), full=(79, (130, 131, 132)), block=(50, (120, 121, 122)))
    assert judged(members) == {"none": "front", "full": "dominated", "block": "front"}
    assert [row.label for row in front(members)] == ["block", "none"]


def test_what_scatters_is_undecided() -> None:
    """By the medians ``wide`` is worse in both, but one of its rounds was the fastest of all."""
    members = rows(good=(50, (100, 101, 102)), wide=(60, (80, 120, 140)))
    assert judged(members) == {"good": "front", "wide": "undecided"}


def test_rounds_are_paired() -> None:
    """Both follow the machine's mood from 100 to 200 ms; round by round one is a tenth slower."""
    members = rows(one=(50, (100, 150, 200)), other=(60, (110, 165.1, 220)))
    assert members[0].values["step_s_high"] > members[1].values["step_s_low"], "intervals of time meet"
    assert judged(members) == {"one": "front", "other": "dominated"}


def test_rounds_of_different_sessions_are_not_paired() -> None:
    records = [
        record(name, round_number=i, session_id=name, peak_allocated_bytes=peak * MIB, step_s_median=ms / 1e3)
        for name, peak, rounds_ms in (("one", 50, (100, 150, 200)), ("other", 60, (110, 165.1, 220)))
        for i, ms in enumerate(rounds_ms)
    ]
    assert judged(compare(records).rows) == {"one": "front", "other": "undecided"}


def test_without_any_interval_nothing_is_beyond_doubt() -> None:
    unknown = {"step_s_low": None, "step_s_high": None}
    records = [
        record("fast", peak_allocated_bytes=50 * MIB, step_s_median=0.1, **unknown),
        record("slow", peak_allocated_bytes=60 * MIB, step_s_median=0.9, **unknown),
    ]
    assert judged(compare(records).rows) == {"fast": "front", "slow": "undecided"}


def test_one_round_has_the_interval_of_its_own_median() -> None:
    records = [
        record("fast", peak_allocated_bytes=50 * MIB, step_s_median=0.10, step_s_low=0.09, step_s_high=0.11),
        record("slow", peak_allocated_bytes=60 * MIB, step_s_median=0.20, step_s_low=0.12, step_s_high=0.30),
        record("near", peak_allocated_bytes=60 * MIB, step_s_median=0.12, step_s_low=0.10, step_s_high=0.13),
    ]
    assert judged(compare(records).rows) == {"fast": "front", "slow": "dominated", "near": "undecided"}


def test_the_same_place_twice_is_no_reason_to_dominate() -> None:
    members = rows(one=(50, (100, 101)), two=(50, (100, 101)))
    assert judged(members) == {"one": "front", "two": "front"}


def test_equal_memory_and_less_time_dominates() -> None:
    members = rows(one=(50, (100, 101, 102)), two=(50, (150, 151, 152)))
    assert judged(members) == {"one": "front", "two": "dominated"}


@pytest.mark.parametrize(
    "missing", [{"peak_allocated_bytes": None}, {"step_s_median": None}, {"status": "oom"}], ids=lambda m: next(iter(m))
)
def test_a_row_that_was_not_measured_has_no_place(missing: dict[str, str | None]) -> None:
    members = compare([record("none"), record("full", **missing)]).rows
    assert judged(members) == {"none": "front", "full": None}
    assert [row.label for row in members if is_measured(row)] == ["none"]


def test_groups_are_judged_by_themselves() -> None:
    records = [
        record(name, model__n_layers=depth, peak_allocated_bytes=depth * peak * MIB, **times(depth * ms))
        for depth in (4, 8)
        for name, peak, ms in (("none", 3, 10), ("full", 2, 11))
    ]
    comparison = compare(records)
    assert set(judged(comparison.rows).values()) == {"front"}, "a deeper model is not a worse strategy"
    names = [name_of_group(members[0].values, comparison.varied) for _, members in by_group(comparison.rows)]
    assert names == ["n_layers 4", "n_layers 8"]
