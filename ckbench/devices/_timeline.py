"""Peaks by phase from a list of allocations and frees, each with time, address and size."""

from collections.abc import Sequence
from typing import Any

from ckbench.records import PHASES

Allocation = tuple[int, int, int]
"""Time, address, bytes: positive for an allocation, negative for a free."""
Mark = tuple[int, str]
"""Time, event of a step (see devices.base.Observer)."""

_PHASE_OF_EVENT = {"forward": "forward", "head": "loss", "blocks": "backward", "optimizer": "optimizer", "end": ""}


def phase_marks(marks: Sequence[Mark]) -> list[Mark]:
    """Turn events into starts of phases; a step that never reports ``blocks`` enters backward at the turn."""
    has_blocks = any(event == "blocks" for _, event in marks)
    names = dict(_PHASE_OF_EVENT)
    if not has_blocks:
        names["turn"] = "backward"
    return [(time, names[event]) for time, event in marks if event in names]


def figures(
    events: Sequence[Allocation],
    marks: Sequence[Mark],
    *,
    live_at_start_bytes: int,
    static_bytes: int,
    gradients: dict[int, int],
    gradients_at_start: dict[int, int],
) -> dict[str, Any]:
    """Give record fields of memory for one step.

    ``gradients`` maps addresses to bytes as held when backward has ended, ``gradients_at_start`` those
    that were there before the step. A gradient counts as such from the allocation of its storage on.
    """
    starts = phase_marks(marks)
    turn = next((time for time, event in marks if event == "turn"), None)
    backward_end = next((time for time, event in reversed(marks) if event == "optimizer"), None)
    peaks: dict[str, int] = {}
    live = live_at_start_bytes
    at_turn: int | None = None
    born: dict[int, int] = {}
    peak, peak_time, peak_phase = live, None, PHASES[0]
    phase, next_mark = "", 0
    stream = sorted(events, key=lambda event: event[0])
    for time, address, size in [*stream, (_after_all(stream, marks), 0, 0)]:
        while next_mark < len(starts) and starts[next_mark][0] <= time:
            phase = starts[next_mark][1]
            next_mark += 1
            if phase:
                peaks[phase] = max(peaks.get(phase, 0), live)
        if at_turn is None and turn is not None and time >= turn:
            at_turn = live
        live += size
        if size > 0 and (backward_end is None or time <= backward_end):
            born[address] = time
        if phase and live > peaks.get(phase, 0):
            peaks[phase] = live
        if phase and live > peak:
            peak, peak_time, peak_phase = live, time, phase
    held = _gradients_at(peak_time, gradients, gradients_at_start, born)
    return {
        "static_bytes": static_bytes,
        "gradient_bytes": sum(gradients.values()),
        "saved_bytes": None if at_turn is None else at_turn - live_at_start_bytes,
        "peak_allocated_bytes": peak,
        "peak_phase": peak_phase,
        **{f"peak_{name}_bytes": peaks.get(name) for name in PHASES},
        "activation_peak_bytes": peak - static_bytes - held,
    }


def _after_all(events: Sequence[Allocation], marks: Sequence[Mark]) -> int:
    return max([event[0] for event in events[-1:]] + [mark[0] for mark in marks[-1:]] + [0]) + 1


def _gradients_at(
    time: int | None, gradients: dict[int, int], gradients_at_start: dict[int, int], born: dict[int, int]
) -> int:
    """Add up the gradients whose storage existed at ``time`` (None: at the start of the step)."""
    held = 0
    for address, size in gradients.items():
        if address in gradients_at_start or (time is not None and born.get(address, time + 1) <= time):
            held += size
    return held
