"""Peaks by phase from hand-written events: who owns the peak, what is saved, which gradients exist at it."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckbench.devices._timeline import MOST_POINTS, Allocation, Mark, figures, live_bytes_timeline, phase_marks

STEP: list[Mark] = [(10, "forward"), (20, "head"), (30, "turn"), (40, "blocks"), (50, "optimizer"), (60, "end")]


def weighed(events: list[Allocation], marks: list[Mark] = STEP, **known: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "live_at_start_bytes": 0,
        "static_bytes": 0,
        "gradients": {},
        "gradients_at_start": {},
    }
    return figures(events, marks, **{**settings, **known})


def test_phases_by_hand() -> None:
    events = [
        (11, 1, 100),  # kept in forward
        (12, 2, 50),
        (13, 2, -50),  # a temporary of forward
        (21, 3, 10),  # head, kept
        (31, 4, 70),  # gradient of the logits: still head and loss
        (32, 4, -70),
        (41, 5, 30),
        (42, 1, -100),
        (51, 6, 20),
        (52, 6, -20),
    ]
    got = weighed(events, live_at_start_bytes=1000, static_bytes=900)
    assert got["peak_forward_bytes"] == 1150
    assert got["saved_bytes"] == 110
    assert got["peak_loss_bytes"] == 1180
    assert got["peak_backward_bytes"] == 1140
    assert got["peak_optimizer_bytes"] == 1060
    assert (got["peak_allocated_bytes"], got["peak_phase"]) == (1180, "loss")
    assert got["activation_peak_bytes"] == 1180 - 900


def test_a_phase_starts_with_what_the_one_before_left() -> None:
    got = weighed([(11, 1, 100)])
    assert [got[f"peak_{phase}_bytes"] for phase in ("forward", "loss", "backward", "optimizer")] == [100] * 4
    assert got["peak_phase"] == "forward", "the first phase that reaches the peak owns it"


def test_a_step_without_blocks_enters_backward_at_the_turn() -> None:
    marks = [mark for mark in STEP if mark[1] not in ("head", "blocks")]
    got = weighed([(11, 1, 10), (31, 2, 90)], marks)
    assert phase_marks(marks) == [(10, "forward"), (30, "backward"), (50, "optimizer"), (60, "")]
    assert (got["peak_phase"], got["peak_backward_bytes"], got["peak_loss_bytes"]) == ("backward", 100, None)


def test_marks_of_a_full_step() -> None:
    assert phase_marks(STEP) == [(10, "forward"), (20, "loss"), (40, "backward"), (50, "optimizer"), (60, "")]


def test_what_comes_after_the_end_or_before_the_start_is_no_phase() -> None:
    got = weighed([(5, 1, 500), (6, 1, -500), (61, 2, 900)])
    assert got["peak_allocated_bytes"] == 0
    assert got["peak_optimizer_bytes"] == 0


def test_micro_batches_take_the_saved_bytes_of_the_first() -> None:
    marks = [*STEP[:4], (70, "forward"), (80, "head"), (90, "turn"), (100, "blocks"), (110, "optimizer"), (120, "end")]
    events = [(11, 1, 100), (41, 1, -100), (42, 9, 30), (71, 1, 100), (101, 1, -100)]
    got = weighed(events, marks, gradients={9: 30})
    assert got["saved_bytes"] == 100
    assert (got["peak_allocated_bytes"], got["peak_phase"]) == (130, "forward")
    assert got["activation_peak_bytes"] == 100, "the gradient of the first micro-batch is no activation"


def test_a_gradient_counts_from_its_birth() -> None:
    events = [(11, 1, 100), (41, 7, 40), (42, 1, -100), (43, 8, 50)]
    got = weighed(events, gradients={7: 40, 8: 50})
    assert got["peak_allocated_bytes"] == 140
    assert got["gradient_bytes"] == 90
    assert got["activation_peak_bytes"] == 100, "gradient 8 does not exist yet at the peak"


def test_a_gradient_on_an_address_used_before() -> None:
    """The address first held an activation; the gradient that lies there at the end was born later."""
    events = [(11, 7, 40), (12, 1, 100), (41, 7, -40), (42, 1, -100), (43, 7, 40)]
    got = weighed(events, gradients={7: 40})
    assert got["peak_allocated_bytes"] == 140
    assert got["activation_peak_bytes"] == 140


def test_gradients_kept_from_the_step_before() -> None:
    got = weighed([(11, 1, 100)], live_at_start_bytes=40, gradients={7: 40}, gradients_at_start={7: 40}, static_bytes=0)
    assert got["peak_allocated_bytes"] == 140
    assert got["activation_peak_bytes"] == 100


def test_an_allocation_of_the_optimizer_is_no_gradient() -> None:
    got = weighed([(41, 7, 40), (51, 7, -40), (52, 7, 40), (53, 8, 5)], gradients={7: 40})
    assert got["peak_allocated_bytes"] == 45
    assert got["activation_peak_bytes"] == 5


def test_a_gradients_address_used_again_by_the_optimizer() -> None:
    """Its birth is the last one before backward ended."""
    events = [(41, 7, 40), (42, 1, 100), (43, 1, -100), (51, 7, -40), (52, 7, 40)]
    got = weighed(events, gradients={7: 40})
    assert got["peak_allocated_bytes"] == 140
    assert got["activation_peak_bytes"] == 100


def test_no_events_at_all() -> None:
    got = weighed([], live_at_start_bytes=7, static_bytes=5)
    assert got["peak_allocated_bytes"] == 7
    assert got["saved_bytes"] == 0
    assert got["peak_phase"] == "forward"
    empty = weighed([], [], live_at_start_bytes=7)
    assert (empty["peak_allocated_bytes"], empty["saved_bytes"], empty["peak_forward_bytes"]) == (7, None, None)


def test_order_of_the_list_does_not_matter() -> None:
    events = [(11, 1, 100), (12, 2, 50), (13, 2, -50), (41, 1, -100)]
    assert weighed(events) == weighed(events[::-1])


@given(st.lists(st.tuples(st.integers(10, 59), st.integers(1, 1000)), max_size=30), st.integers(0, 10_000))
def test_the_peak_is_the_largest_running_sum(sizes: list[tuple[int, int]], start: int) -> None:
    """Blocks that live three ticks each: compare with a sum over all moments."""
    events = [(at, i, size) for i, (at, size) in enumerate(sizes)]
    events += [(at + 3, i, -size) for i, (at, size) in enumerate(sizes)]
    events.sort(key=lambda event: (event[0], event[2] > 0))
    got = weighed(events, live_at_start_bytes=start)
    moments = [start + sum(size for at, size in sizes if at <= t < at + 3) for t in range(10, 60)]
    assert got["peak_allocated_bytes"] == max([start, *moments])
    per_phase = {
        "forward": moments[0:10],
        "loss": moments[10:30],
        "backward": moments[30:40],
        "optimizer": moments[40:50],
    }
    for phase, values in per_phase.items():
        assert got[f"peak_{phase}_bytes"] >= max(values)
    assert got[f"peak_{got['peak_phase']}_bytes"] == got["peak_allocated_bytes"]
    assert max(got[f"peak_{phase}_bytes"] for phase in per_phase) == got["peak_allocated_bytes"]


@pytest.mark.parametrize("event", ["forward", "head", "turn", "blocks", "optimizer", "end"])
def test_every_event_of_the_protocol_is_understood(event: str) -> None:
    assert len(phase_marks([(1, event)])) == 1


def test_a_short_step_keeps_every_moment() -> None:
    events = [(5, 9, 999), (11, 1, 100), (21, 2, 10), (41, 1, -100), (51, 3, 5), (61, 4, 7)]
    events.insert(1, (6, 9, -999))
    assert live_bytes_timeline(events, STEP, live_at_start_bytes=1000) == [
        [0.0, 1000, 0],
        [0.1429, 1100, 0],
        [0.2857, 1100, 1],
        [0.4286, 1110, 1],
        [0.5714, 1110, 2],
        [0.7143, 1010, 2],
        [0.8571, 1010, 3],
        [1.0, 1015, 3],
    ], "what happens before the step and after it is no part of it"
    assert live_bytes_timeline([(11, 1, 5)], [], live_at_start_bytes=7) == []


@given(
    st.lists(st.tuples(st.integers(10, 59), st.integers(1, 1000)), min_size=200, max_size=900),
    st.integers(0, 10_000),
    st.randoms(use_true_random=False),
)
def test_a_long_step_is_thinned_and_keeps_its_peak(sizes: list[tuple[int, int]], start: int, random: Random) -> None:
    events = [(at, i, size) for i, (at, size) in enumerate(sizes)]
    events += [(min(59, at + random.randint(0, 20)), i, -size) for i, (at, size) in enumerate(sizes)]
    timeline = live_bytes_timeline(events, STEP, live_at_start_bytes=start)
    got = weighed(events, live_at_start_bytes=start)
    assert len(timeline) <= MOST_POINTS
    assert max(n_bytes for _, n_bytes, _ in timeline) == got["peak_allocated_bytes"]
    shares = [share for share, _, _ in timeline]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    assert timeline[-1][1] == start, "everything was given back"
    assert [phase for _, _, phase in timeline] == sorted(phase for _, _, phase in timeline)


def test_an_optimizer_of_many_small_pieces_leaves_room_for_the_other_phases() -> None:
    events = [(11 + i // 20, i, 10) for i in range(150)] + [
        (51 + i // 4000, 1000 + i, (-1) ** i) for i in range(30_000)
    ]
    timeline = live_bytes_timeline(events, STEP, live_at_start_bytes=0)
    phases = [phase for _, _, phase in timeline]
    assert len(timeline) <= MOST_POINTS and phases.count(0) >= 90
    assert [max(live for _, live, at in timeline if at == phase) for phase in range(4)] == [1500, 1500, 1500, 1501]


def test_many_micro_batches_stay_within_the_points() -> None:
    marks: list[Mark] = []
    events: list[Allocation] = []
    for i in range(60):
        start = 100 * i
        marks += [(start, "forward"), (start + 20, "head"), (start + 30, "turn"), (start + 40, "blocks")]
        events += [(start + 5, i, 50 + i), (start + 45, i, -50 - i)]
    marks += [(6000, "optimizer"), (6010, "end")]
    timeline = live_bytes_timeline(events, marks, live_at_start_bytes=0)
    assert len(timeline) <= MOST_POINTS
    assert max(live for _, live, _ in timeline) == 109
