"""Record fields from the caching allocator's statistics and history: by hand, without torch."""

from typing import Any

from ckbench.devices._allocator import (
    Moment,
    allocator_peaks,
    history_figures,
    moment,
    phase_figures,
    trace_events,
)


def at(event: str, allocated: int, peak: int, n_actions: int = 0) -> Moment:
    """Make a moment whose bytes are not rounded."""
    return Moment(
        event=event, allocated_bytes=allocated, requested_bytes=allocated, peak_bytes=peak, n_actions=n_actions
    )


def test_peaks_by_phase_come_from_the_stretches_between_resets() -> None:
    moments = [
        at("forward", 100, 999),  # what was before the step belongs to no phase
        at("head", 150, 160),
        at("turn", 180, 190),
        at("blocks", 170, 230),
        at("optimizer", 120, 210),
        at("end", 110, 140),
    ]
    assert phase_figures(at("start", 100, 999), moments) == {
        "saved_bytes": 80,
        "peak_allocated_bytes": 230,
        "peak_phase": "loss",
        "peak_forward_bytes": 160,
        "peak_loss_bytes": 230,
        "peak_backward_bytes": 210,
        "peak_optimizer_bytes": 140,
    }


def test_peaks_by_phase_over_micro_batches() -> None:
    batch = ["forward", "head", "turn", "blocks"]
    peaks = [0, 10, 20, 30, 41, 12, 22, 32, 40, 5]
    moments = [at(e, 1, p) for e, p in zip([*batch, *batch, "optimizer", "end"], peaks, strict=True)]
    fields = phase_figures(at("start", 0, 0), moments)
    # A stretch ends at its moment: the blocks' stretch of the first batch ends where the second batch begins.
    assert [fields[f"peak_{p}_bytes"] for p in ("forward", "loss", "backward", "optimizer")] == [12, 32, 41, 5]
    assert fields["peak_phase"] == "backward"


def test_a_step_that_never_reports_blocks_enters_backward_at_the_turn() -> None:
    moments = [at("forward", 0, 0), at("turn", 7, 9), at("optimizer", 3, 12), at("end", 0, 4)]
    fields = phase_figures(at("start", 0, 0), moments)
    assert (fields["peak_forward_bytes"], fields["peak_loss_bytes"], fields["peak_backward_bytes"]) == (9, None, 12)


def test_a_step_without_events_has_no_figures() -> None:
    assert set(phase_figures(at("start", 0, 0), []).values()) == {None}


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    """Make an entry of the history as torch.cuda.memory._snapshot gives it."""
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": []}


HISTORY = [
    entry("segment_alloc", 0x1000, 2**21),
    entry("alloc", 0x1000, 40),  # an activation
    entry("alloc", 0x2000, 30),  # the logits
    entry("snapshot", 0, 0),
    # the turn
    entry("alloc", 0x3000, 20),  # a gradient
    entry("alloc", 0x4000, 5),  # a temporary of backward: the peak
    entry("free_requested", 0x2000, 30),
    entry("free_completed", 0x2000, 30),
    entry("free_requested", 0x1000, 40),
    entry("free_completed", 0x1000, 40),
    entry("free_requested", 0x4000, 5),
    entry("free_completed", 0x4000, 5),
    # the optimizer
    entry("free_requested", 0x3000, 20),
    entry("free_completed", 0x3000, 20),
]
MOMENTS = [at("forward", 100, 0, 50), at("turn", 170, 0, 52), at("optimizer", 120, 0, 57), at("end", 100, 0, 58)]


def test_the_history_becomes_allocations_and_frees_in_order() -> None:
    assert trace_events(HISTORY) == [
        (1, 0x1000, 40),
        (3, 0x2000, 30),
        (5, 0x3000, 20),
        (7, 0x4000, 5),
        (9, 0x2000, -30),
        (11, 0x1000, -40),
        (13, 0x4000, -5),
        (15, 0x3000, -20),
    ]
    assert trace_events([]) == []


def weighed(history: list[dict[str, Any]] = HISTORY, n_end: int = 58, **changes: Any) -> Any:
    """Give the activation peak of a step on a model of 100 bytes, 10 of them batches."""
    return figures_of(history, n_end, **changes)["activation_peak_bytes"]


def figures_of(history: list[dict[str, Any]] = HISTORY, n_end: int = 58, **changes: Any) -> dict[str, Any]:
    """Give what the history of a step tells on a model of 100 bytes, 10 of them batches."""
    arguments: dict[str, Any] = {"static_bytes": 90, "gradients": {0x3000: 20}, "gradients_at_start": {}}
    start, end = at("start", 100, 0, 50), at("over", 100, 0, n_end)
    return history_figures(trace_events(history), start, MOMENTS, end, **arguments | changes)


def test_activations_are_what_is_live_at_the_peak_but_static_and_gradients() -> None:
    # Live at the peak: 100 held before + 40 + 30 + 20 + 5 = 195, of which 90 static and 20 a gradient.
    assert weighed() == 85


def test_a_gradient_that_does_not_exist_at_the_peak_is_not_taken_off() -> None:
    late = [*HISTORY[:5], entry("alloc", 0x4000, 50), entry("free_requested", 0x4000, 50), *HISTORY[6:10]]
    late += [entry("alloc", 0x5000, 20), entry("free_requested", 0x5000, 20)]
    assert weighed(late, n_end=50 + len(trace_events(late)), gradients={0x5000: 20}) == 40 + 30 + 20 + 50 + 10


def test_live_bytes_over_the_step_in_bytes_as_asked_for() -> None:
    timeline = figures_of()["live_bytes_timeline"]
    assert [n_bytes for _, n_bytes, _ in timeline] == [100, 140, 170, 170, 190, 195, 165, 125, 120, 120, 100]
    assert [phase for _, _, phase in timeline] == [0, 0, 0, 2, 2, 2, 2, 2, 2, 3, 3]
    assert figures_of(HISTORY[2:])["live_bytes_timeline"] == [], "not from a history with gaps"


def test_a_history_with_gaps_gives_no_activation_peak() -> None:
    assert weighed(HISTORY[2:]) is None  # the ring buffer has dropped the beginning
    assert weighed([]) is None  # this allocator records nothing


STATS = {
    "allocated_bytes.all.current": 512,
    "allocated_bytes.all.peak": 2048,
    "reserved_bytes.all.current": 4096,
    "reserved_bytes.all.peak": 8192,
    "active_bytes.all.peak": 2560,
    "requested_bytes.all.current": 500,
    "requested_bytes.all.peak": 2000,
    "num_alloc_retries": 0,
    "allocation.all.allocated": 7,
    "allocation.all.freed": 5,
}


def test_peaks_from_allocator_statistics() -> None:
    assert allocator_peaks(STATS) == {
        "peak_allocated_bytes": 2048,
        "peak_reserved_bytes": 8192,
        "peak_active_bytes": 2560,
        "peak_requested_bytes": 2000,
        "allocator_retries": 0,
    }
    assert allocator_peaks({**STATS, "requested_bytes.all.peak": 0})["peak_requested_bytes"] is None
    assert set(allocator_peaks({}).values()) == {None}
    assert moment("turn", STATS) == Moment(
        event="turn", allocated_bytes=512, requested_bytes=500, peak_bytes=2048, n_actions=12
    )
