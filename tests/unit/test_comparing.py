"""Two sets of results: what is paired, intervals that hold, and gates that alarm when they should and else do not."""

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckbench.comparing import Paired, Threshold, compare_sets, differences, parse_thresholds, welch_ratio
from ckbench.comparing_text import notes, outcome, summary
from ckbench.errors import ConfigError
from ckbench.statistics import paired_ratio
from tests.sample_records import MIB, record

Records = list[dict[str, Any]]
TIMES = st.floats(1e-3, 1e3)
STEP = parse_thresholds(["step:3%"])
ANY_STEP = parse_thresholds(["step:0%"])
PEAK = parse_thresholds(["peak:1%"])


def rounds(times: list[float], strategy: str = "none", side: str = "a", **changes: Any) -> Records:
    """Give one row's records, of a session of its own for each side."""
    return [
        record(
            strategy,
            round_number=i,
            **{"step_s_median": time, "session_id": side, "record_id": f"{side}{strategy}{i}{changes}", **changes},
        )
        for i, time in enumerate(times)
    ]


A = rounds([0.1, 0.101, 0.099])
B = rounds([0.1, 0.101, 0.099], side="b")


def scaled(records: Records, factor: float) -> Records:
    return [{**each, "step_s_median": each["step_s_median"] * factor} for each in records]


def scipy_interval(b: list[float], a: list[float], confidence: float) -> tuple[float, float]:
    import numpy as np
    from scipy import stats

    result = stats.ttest_ind(np.log(b), np.log(a), equal_var=False).confidence_interval(confidence)
    return float(np.exp(result.low)), float(np.exp(result.high))


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
@pytest.mark.parametrize(("n_b", "n_a"), [(2, 2), (3, 5), (5, 3), (10, 40)])
def test_the_interval_is_welch_s(n_b: int, n_a: int, confidence: float) -> None:
    draw = random.Random(n_b * n_a)
    b = [draw.lognormvariate(0.1, 0.02) for _ in range(n_b)]
    a = [draw.lognormvariate(0.0, 0.07) for _ in range(n_a)]
    ratio, low, high = welch_ratio(b, a, confidence)
    assert (low, high) == pytest.approx(scipy_interval(b, a, confidence), rel=1e-9)
    assert low is not None and high is not None and low < ratio < high


@given(st.lists(TIMES, min_size=2, max_size=8), st.lists(TIMES, min_size=2, max_size=8))
def test_the_interval_turns_over_with_the_ratio(b: list[float], a: list[float]) -> None:
    ratio, low, high = welch_ratio(b, a)
    back, back_low, back_high = welch_ratio(a, b)
    assert low is not None and high is not None and back_low is not None and back_high is not None
    assert low <= ratio <= high
    assert ratio * back == pytest.approx(1)
    if high < 1e100:
        assert (low * back_high, high * back_low) == pytest.approx((1, 1))


def test_a_single_round_has_a_ratio_but_no_interval() -> None:
    assert welch_ratio([2.0], [1.0, 1.0]) == (pytest.approx(2.0), None, None)
    assert welch_ratio([2.0, 2.0], [1.0]) == (pytest.approx(2.0), None, None)
    assert welch_ratio([2.0, 2.0], [1.0, 1.0], n_first=(0, None))[1:] == (None, None)


def test_rounds_without_scatter_are_exact() -> None:
    assert welch_ratio([3.0, 3.0], [2.0, 2.0]) == pytest.approx((1.5, 1.5, 1.5))


def test_only_the_rounds_that_decided_tell_the_scatter() -> None:
    """As in one set's interval: more rounds that happen to agree do not narrow it beyond their number."""
    apart, agreeing = [1.0, 1.1], [1.05] * 6
    _, low, high = welch_ratio([*apart, *agreeing], [1.0, 1.01], n_first=(2, None))
    _, naive_low, naive_high = welch_ratio([*apart, *agreeing], [1.0, 1.01])
    assert low is not None and high is not None and naive_low is not None and naive_high is not None
    assert low < naive_low < naive_high < high


def test_rows_are_paired_by_model_train_and_strategy() -> None:
    b = [*B, *rounds([0.1] * 3, side="b", model__n_layers=8), *rounds([0.1] * 3, "sqrt", side="b")]
    a = [*A, *rounds([0.2] * 3, model__n_layers=8), *rounds([0.2] * 3, train__batch_size=4)]
    paired = compare_sets(a, b)
    assert [(p.before.values["model"]["n_layers"], p.step_ratio) for p in paired.pairs] == [
        (4, pytest.approx(1.0)),
        (8, pytest.approx(0.5)),
    ]
    assert list(map(paired.name, paired.only_a)) == ["none (n_layers 4, batch_size 4)"]
    assert list(map(paired.name, paired.only_b)) == ["sqrt (n_layers 4, batch_size 2)"]


def test_a_key_that_is_newer_than_a_record_had_its_default() -> None:
    newer = {"model__norm_position": None, "model__dropout": 0.0, "train__loss": "cross_entropy"}
    assert len(compare_sets(A, rounds([0.1] * 3, side="b", **newer)).pairs) == 1
    with pytest.raises(ConfigError, match="no configuration"):
        compare_sets(A, rounds([0.1] * 3, side="b", model__dropout=0.1))


def test_other_versions_are_paired_and_noted() -> None:
    paired = compare_sets(A, rounds([0.1] * 3, side="b", environment__torch="2.14.0", environment__threads=4))
    assert differences(paired) == ["torch: 2.13.0 in A, 2.14.0 in B", "threads: 2 in A, 4 in B"]


def test_the_newest_of_several_versions_counts() -> None:
    late = [{**each, "started_at": "2027-01-01"} for each in rounds([0.2] * 3, environment__torch="2.14.0")]
    paired = compare_sets([*A, *late], B)
    assert paired.pairs[0].step_ratio == pytest.approx(0.5, rel=1e-3)
    assert any("A holds 1 older row" in line for line in notes(paired))


def test_devices_are_not_mixed() -> None:
    other = rounds([0.05] * 3, side="b", device_name="Another card")
    with pytest.raises(ConfigError, match=r"A was measured on A processor \(2 cores\) and B on Another card.*--allow"):
        compare_sets(A, other)
    paired = compare_sets(A, other, allow_different_device=True)
    assert paired.pairs[0].step_ratio == pytest.approx(0.5, rel=1e-3)
    assert differences(paired) == ["device: A processor (2 cores) in A, Another card in B"]
    assert paired.name(paired.pairs[0].before) == "none", "no two rows of one set are told apart by it"


def test_a_row_goes_to_its_own_device_first() -> None:
    """With the permission to mix devices too, and what is left over is listed without it."""
    other = rounds([0.05] * 3, device_name="Another card")
    for allowed in (False, True):
        paired = compare_sets([*other, *A], B, allow_different_device=allowed)
        assert [p.before.values["device_name"] for p in paired.pairs] == ["A processor (2 cores)"]
        assert list(map(paired.name, paired.only_a)) == ["none (on Another card)"]


def test_the_same_records_are_no_comparison() -> None:
    with pytest.raises(ConfigError, match="the same records"):
        compare_sets(A, A)
    late = [{**each, "started_at": "2027-01-01"} for each in B]
    with pytest.raises(ConfigError, match="the same records"):
        compare_sets([*A, *late], late)
    assert compare_sets(A, [*A, *late]).pairs, "an older session beside it is not compared"


@pytest.mark.parametrize(
    ("status_a", "status_b", "verdict"),
    [
        ("ok", "oom", "lost"),
        ("ok", "error", "lost"),
        ("ok", "skipped", "lost"),
        ("ok", "invalid", "lost"),
        ("oom", "ok", "fixed"),
        ("oom", "error", "not ok"),
        ("oom", "oom", "not ok"),
    ],
)
def test_what_no_longer_ends_ok_is_a_regression(status_a: str, status_b: str, verdict: str) -> None:
    a, b = ([*rounds([0.1] * 3, "sqrt", side, status=status)] for side, status in (("a", status_a), ("b", status_b)))
    asked, bare = (compare_sets([*A, *a], [*B, *b], thresholds) for thresholds in (STEP, ()))
    assert [pair.verdict for pair in asked.pairs] == ["within", verdict]
    assert asked.is_failed == (verdict == "lost")
    assert not bare.is_failed, "nothing was asked for"
    assert (f"no longer ok: sqrt ({status_b})" in summary(bare)) == (verdict == "lost")


def told(b: Records, thresholds: tuple[Threshold, ...], a: Records = A) -> Paired:
    return compare_sets(a, b, thresholds)


def test_a_step_is_above_only_where_its_whole_interval_is() -> None:
    assert [told(scaled(B, f), STEP).pairs[0].verdict for f in (0.9, 1.0, 1.03, 1.1)] == [
        "within",
        "within",
        "undecided",
        "above",
    ]
    undecided = told(scaled(B, 1.04), STEP)
    assert not undecided.is_failed and outcome(undecided) == "undecided"
    assert "undecided: step time perhaps above +3 %: none +4.0 % (" in summary(undecided)
    assert any("more --rounds" in line for line in notes(undecided))


def test_a_speed_up_can_be_demanded() -> None:
    demand = parse_thresholds(["step:-10%"])
    assert [told(scaled(B, f), demand).is_failed for f in (0.8, 1.0)] == [False, True]


def test_a_single_round_is_undecided() -> None:
    paired = told(rounds([0.2], side="b"), STEP)
    assert paired.pairs[0].verdict == "undecided" and not paired.is_failed
    assert any("single round" in line for line in notes(paired))


@pytest.mark.parametrize(
    ("peak_bytes", "verdict"),
    [
        (80 * MIB, "within"),
        (80 * MIB * 101 // 100, "within"),
        (80 * MIB * 101 // 100 + 1, "above"),
        (None, "undecided"),
    ],
)
def test_a_peak_is_judged_to_the_byte(peak_bytes: int | None, verdict: str) -> None:
    paired = told(rounds([9.0] * 3, side="b", peak_allocated_bytes=peak_bytes), PEAK)
    assert paired.pairs[0].told == {"peak": verdict}
    assert paired.is_failed == (verdict == "above")


def test_peaks_of_any_size_are_exact() -> None:
    """Where the ratio of two floats would be 1."""
    big = 2**60
    a, b = (rounds([0.1] * 3, side=s, peak_allocated_bytes=big + (s == "b")) for s in "ab")
    paired = compare_sets(a, b, parse_thresholds(["peak:0%"]))
    assert paired.pairs[0].peak_ratio == Fraction(big + 1, big) and paired.is_failed


def test_several_thresholds_are_judged_apart() -> None:
    both = parse_thresholds(["step:3%", "peak:1%"])
    paired = told(rounds([0.1, 0.101, 0.099], side="b", peak_allocated_bytes=90 * MIB), both)
    assert paired.pairs[0].told == {"step": "within", "peak": "above"}
    assert summary(paired) == "failed: peak memory above +1 %: none +12.5 %"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("step", "write a quantity and percent"),
        ("step:3", "write a quantity and percent"),
        ("step:nan%", "write a quantity and percent"),
        ("step:1e9%", "write a quantity and percent"),
        ("steps:3%", "did you mean 'step'"),
        ("step:-100%", "more than -100%"),
        ("step:99999999%", "at most 1000000%"),
    ],
)
def test_what_is_no_threshold_is_said(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        parse_thresholds([text])
    with pytest.raises(ConfigError, match="step twice"):
        parse_thresholds(["step:1%", "step:2%"])


def test_percent_is_read_exactly() -> None:
    assert parse_thresholds([" peak : +0.1 % "])[0].above == Fraction(1, 1000)


def test_more_rows_make_wider_intervals() -> None:
    """All intervals hold together, so that many rows raise no more false alarms than one."""
    names = ["none", "per-block", "sqrt", "full"]

    def width(n_rows: int) -> float:
        a, b = ([r for n in names[:n_rows] for r in rounds([0.1, 0.101, 0.099], n, side)] for side in "ab")
        pair = compare_sets(a, b).pairs[0]
        assert pair.step_low is not None and pair.step_high is not None
        return pair.step_high - pair.step_low

    assert width(1) < width(2) < width(4)
    alone = welch_ratio([0.1, 0.101, 0.099], [0.1, 0.101, 0.099])
    assert alone[1] is not None and alone[2] is not None
    assert width(1) == pytest.approx(alone[2] - alone[1])


TEMPLATE = record(record_id="")
NOISE = 0.01
"""Standard deviation of the rounds' logarithms in the simulations: what a quiet machine has."""


def simulated(seed: int, n_rows: int, n_rounds: int, change: float, noise: float, max_rounds: int = 0) -> Paired:
    """Measure twice by chance, B slower in its last row; both by the rule to add rounds where there is one."""
    draw = random.Random(f"{seed}/{n_rows}/{n_rounds}/{max_rounds}")
    sides: list[tuple[dict[str, Any], str]] = []
    for side in "ab":
        run = {"rounds": n_rounds, "max_rounds": max_rounds or None, "seed": 0}
        times: list[list[float]] = [[] for _ in range(n_rows)]
        while True:
            shared = draw.gauss(0.0, noise)  # a disturbance of the whole machine: all rows of the round have it
            for i, row in enumerate(times):
                slower = 1 + change if side == "b" and i == n_rows - 1 else 1.0
                row.append(0.1 * slower * draw.lognormvariate(shared, noise))
            n = len(times[0])
            if n < n_rounds:
                continue
            ratios = [paired_ratio(row, times[0], n_rounds if max_rounds else None) for row in times[1:]]
            if n >= max_rounds or all(low and high and (high - low) / 2 / ratio <= 0.01 for ratio, low, high in ratios):
                break
        for i, row in enumerate(times):
            plain = {**TEMPLATE, "strategy": f"every-k:{i + 1}", "session_id": side, "run": run}
            sides += [({**plain, "round": number, "step_s_median": time}, side) for number, time in enumerate(row)]
    a, b = ([each for each, side in sides if side == wanted] for wanted in "ab")
    return compare_sets(a, b, ANY_STEP if change == 0 else STEP)


def alarms(n_studies: int, **how: Any) -> int:
    return sum(simulated(seed, **how).is_failed for seed in range(n_studies))


def test_few_false_alarms_and_a_real_change_found() -> None:
    """A small version of the proofs below."""
    assert alarms(60, n_rows=5, n_rounds=5, change=0.0, noise=NOISE) <= 6
    assert alarms(60, n_rows=5, n_rounds=5, change=0.05, noise=0.002) == 60


PROMISED = 0.025
N_STUDIES = 2000
MOST = 73
"""Of 2000 gates that each alarm with probability 0.025, more than 73 do so once in a thousand times."""


@pytest.mark.prove
@pytest.mark.parametrize("n_rows", [1, 4, 12])
@pytest.mark.parametrize("n_rounds", [2, 3, 5, 10])
def test_where_nothing_changed_gates_alarm_no_more_often_than_promised(n_rows: int, n_rounds: int) -> None:
    """At the hardest threshold, 0 %; each row's own noise is a draw of its own beside that of the machine."""
    from scipy import stats

    assert stats.binom.sf(MOST, N_STUDIES, PROMISED) < 0.001
    found = alarms(N_STUDIES, n_rows=n_rows, n_rounds=n_rounds, change=0.0, noise=NOISE)
    print(
        f"{n_rows} rows, {n_rounds} rounds: {found} of {N_STUDIES} gates at step:0% alarmed ({found / N_STUDIES:.2%})"
    )
    assert found <= MOST
    if n_rows == 1 and n_rounds > 3:
        assert found > PROMISED * N_STUDIES / 2, "the simulation does put the promise to the test"


@pytest.mark.prove
def test_added_rounds_raise_no_more_false_alarms() -> None:
    found = alarms(N_STUDIES, n_rows=4, n_rounds=5, max_rounds=12, change=0.0, noise=NOISE)
    print(f"4 rows, 5 to 12 rounds: {found} of {N_STUDIES} gates at step:0% alarmed ({found / N_STUDIES:.2%})")
    assert found <= MOST


@pytest.mark.prove
def test_a_threshold_above_the_noise_never_alarms_by_chance() -> None:
    found = 0
    for seed in range(N_STUDIES):
        paired = simulated(seed, n_rows=5, n_rounds=5, change=1e-12, noise=NOISE)
        assert paired.thresholds == STEP
        found += paired.is_failed
    print(f"5 rows, 5 rounds: {found} of {N_STUDIES} gates at step:3% alarmed")
    assert found <= 2


@pytest.mark.prove
@pytest.mark.parametrize(("noise", "least"), [(0.002, 1.0), (0.003, 0.95)])
def test_five_percent_are_found_at_a_threshold_of_three(noise: float, least: float) -> None:
    found = alarms(1000, n_rows=5, n_rounds=5, change=0.05, noise=noise)
    print(f"noise {noise:.1%}: a change of 5 % was found by {found} of 1000 gates at step:3%")
    assert found >= least * 1000
