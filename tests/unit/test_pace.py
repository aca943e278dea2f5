"""The time that is left: what ran before runs as long again, and longer where a step has more work to do."""

from collections.abc import Callable

import pytest

from ckbench.config import RunConfig
from ckbench.estimates import Estimate
from ckbench.pace import Pace, work_of


def test_what_ran_before_takes_as_long_again() -> None:
    pace = Pace()
    assert pace.left_s([("a", 1.0)]) == 0.0, "nobody knows yet"
    pace.note("a", 2.0, 1e9)
    pace.note("a", 4.0, 1e9)
    pace.note("b", 9.0, 1e9)
    assert pace.left_s([("a", 1e9), ("b", 1e9)]) == 12.0
    assert pace.left_s([("new", 1e9), ("unknown", None)]) == 2 * 6.0, "without a line: the average of configurations"


def test_others_take_what_their_work_says() -> None:
    pace = Pace()
    pace.note("small", 3.0, 1e9)
    pace.note("large", 5.0, 3e9)
    assert pace.left_s([("larger", 10e9)]) == pytest.approx(12.0)
    assert pace.left_s([("smaller", 0.1e9)]) == pytest.approx(3.0), "no less than the shortest"
    assert pace.left_s([("unknown", None)]) == pytest.approx(4.0)


def test_a_line_that_falls_is_no_line() -> None:
    pace = Pace()
    pace.note("small", 5.0, 1e9)
    pace.note("large", 3.0, 3e9)
    assert pace.left_s([("larger", 100e9)]) == pytest.approx(4.0)


def test_work_is_parameters_times_tokens(tiny_run: Callable[..., RunConfig]) -> None:
    config = tiny_run("none", train={"grad_accumulation": 2})
    made = Estimate(strategy="none", n_parameters=1000)
    assert work_of(config, made) == 1000 * config.train.batch_size * (config.train.seq_len or 0) * 2
    assert work_of(config, None) is None and work_of(config, Estimate(strategy="none", reason="no")) is None
