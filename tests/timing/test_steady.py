"""Warm-up ends when steps are steady, drift is found where there is some, and rounds are added until precise."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from ckbench.statistics import drift, still_warming_up
from tests.cli.conftest import Run, ckbench, replay

__all__ = ["ckbench", "replay"]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], True),
        ([1.0] * 5, True),
        ([1.0] * 6, False),
        ([79, 5.6, 0.6, 0.1, 0.1, 0.1], True),
        ([5.6, 0.6, 0.1, 0.1, 0.1, 0.1], True),
        ([0.6, 0.1, 0.1, 0.1, 0.1, 0.1], False),
        ([1.0, 1.0, 1.0, 1.2, 1.2, 1.2], False),
        ([1.0, 1.02, 0.99, 0.97, 1.0, 0.98], False),
    ],
)
def test_warm_up_lasts_while_steps_get_faster(samples: list[float], expected: bool) -> None:
    assert still_warming_up(samples) is expected


def test_drift_is_found_and_its_size_told() -> None:
    noise = random.Random(0)
    steady = [1 + noise.gauss(0, 0.01) for _ in range(100)]
    change, chance = drift(steady) or (9.0, 0.0)
    assert abs(change) < 0.01 and chance > 0.01
    rising = [x * (1 + 0.2 * i / 99) for i, x in enumerate(steady)]
    change, chance = drift(rising) or (0.0, 1.0)
    assert change == pytest.approx(0.2 / 1.1, abs=0.03) and chance < 1e-6


def test_drift_ignores_outliers_and_says_nothing_of_few_samples() -> None:
    assert drift([1.0] * 7) is None
    assert drift([1.0] * 50) == (0.0, 1.0)
    change, chance = drift([1.0 if i % 9 else 50.0 for i in range(50)]) or (9.0, 0.0)
    assert abs(change) < 0.01 and chance > 0.01


def test_a_false_alarm_is_as_rare_as_promised() -> None:
    noise = random.Random(1)
    alarms = sum((drift([noise.lognormvariate(0, 0.1) for _ in range(40)]) or (0, 1))[1] < 0.01 for _ in range(500))
    assert alarms <= 15


def records(outcome: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(outcome.out)
    return rows


def test_warm_up_steps_never_enter_the_statistics(ckbench: Run, replay: Callable[..., str]) -> None:
    steps = [79, 5.6, 0.6, *[0.1] * 500]
    outcome = ckbench(
        "run", "study.yaml", "-s", "none", "--format", "json", "--device", replay({"none": {"step_s": steps}})
    )
    (row,) = records(outcome)
    assert set(row["step_samples_s"]) == {0.1}
    assert row["warmup_steps_done"] >= 6


def test_no_warm_up_is_allowed_but_doubted(ckbench: Run, replay: Callable[..., str]) -> None:
    outcome = ckbench("run", "study.yaml", "--set", "run.warmup_steps=0", "--device", replay())
    assert "only 0 warm-up steps were asked for" in outcome.out


def test_rounds_are_added_until_slowdowns_are_precise(ckbench: Run, replay: Callable[..., str]) -> None:
    noisy = {"*": {"step_s": 0.01, "noise": {"process": 0.05}}}
    options = (
        "run",
        "study.yaml",
        "-s",
        "none",
        "-s",
        "full",
        "--format",
        "json",
        "--set",
        "run.precision_target=0.03",
        "--rounds",
        "5",
    )
    fixed = records(ckbench(*options, "--device", replay(noisy)))
    assert {row["rounds"] for row in fixed} == {5}
    adaptive = records(ckbench(*options, "--max-rounds", "60", "--device", replay(noisy)))
    full = next(row for row in adaptive if row["strategy"] == "full")
    assert 5 < full["rounds"] < 60
    assert (full["slowdown_high"] - full["slowdown_low"]) / 2 / full["slowdown_ratio"] <= 0.03
    quiet = records(ckbench(*options, "--max-rounds", "60", "--device", replay({"*": {"step_s": 0.01}})))
    assert {row["rounds"] for row in quiet} == {5}


def test_drift_within_a_trial_is_doubted(ckbench: Run, replay: Callable[..., str]) -> None:
    drifting = replay({"*": {"noise": {"drift": 0.5, "step": 0.01}}})
    outcome = ckbench(
        "run", "study.yaml", "--set", "run.max_steps=100", "--set", "run.precision_target=0.001", "--device", drifting
    )
    assert "step time drifted by more than 10% within a trial" in outcome.out


def test_pinning_is_recorded(ckbench: Run, replay: Callable[..., str]) -> None:
    import os

    before = os.sched_getaffinity(0)
    try:
        outcome = ckbench(
            "run",
            "study.yaml",
            "-s",
            "none",
            "--pin",
            "--set",
            "run.threads=1",
            "--device",
            replay(),
            "--format",
            "json",
        )
        (row,) = records(outcome)
        assert row["run"]["pin"] is True and len(row["environment"]["affinity"]) == 1
    finally:
        os.sched_setaffinity(0, before)
