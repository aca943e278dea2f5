"""Peaks by phase, and live bytes over a step, from allocations and frees, each with time, address and size."""

from collections.abc import Iterator, Sequence
from typing import Any

from ckbench.records import PHASES

Allocation = tuple[int, int, int]
"""Time, address, bytes: positive for an allocation, negative for a free."""
Mark = tuple[int, str]
"""Time, event of a step (see devices.base.Observer)."""

MOST_POINTS = 200
"""Points of a stored timeline."""

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


def live_bytes_timeline(
    events: Sequence[Allocation], marks: Sequence[Mark], *, live_at_start_bytes: int
) -> list[list[float]]:
    """Give at most 200 points of [share of the step's allocations and frees, live bytes, number of the phase].

    Each stretch of one phase gets as many points as the others, since an optimizer may allocate more often than all
    else; a long one is cut into pieces of equally many events, of which the lowest and the highest moment stay, so that
    the peak is among the points. Empty where the step reported no phase.
    """
    moments = list(_moments(events, marks, live_at_start_bytes))
    last = max(1, len(moments) - 1)
    return [[round(i / last, 4), moments[i][1], PHASES.index(moments[i][0])] for i in _chosen(moments)]


def _chosen(moments: Sequence[tuple[str, int]]) -> list[int]:
    """Give the positions of the moments to keep, in order; first and last are among them."""
    turns = [i for i in range(1, len(moments)) if moments[i][0] != moments[i - 1][0]]
    ends = [*turns, len(moments)]
    stretches = [range(begin, end) for begin, end in zip([0, *turns], ends, strict=True)]
    if 4 * len(stretches) > MOST_POINTS:  # so many micro-batches that a phase is no more than a dot
        stretches = [range(len(moments))]
    kept = {0, len(moments) - 1} if moments else set()
    room = MOST_POINTS - 2
    for n_left, stretch in zip(range(len(stretches), 0, -1), sorted(stretches, key=len), strict=True):
        points = _extremes(moments, stretch, room // n_left)
        kept |= points
        room -= len(points)
    return sorted(kept)


def _extremes(moments: Sequence[tuple[str, int]], stretch: range, most: int) -> set[int]:
    """Keep a stretch whole, or the lowest and the highest moment of each of its pieces."""
    if len(stretch) <= most:
        return set(stretch)
    n_pieces = most // 2
    kept = set()
    for i in range(n_pieces):
        piece = stretch[i * len(stretch) // n_pieces : (i + 1) * len(stretch) // n_pieces]
        kept |= {min(piece, key=lambda n: moments[n][1]), max(piece, key=lambda n: moments[n][1])}
    return kept


def _moments(events: Sequence[Allocation], marks: Sequence[Mark], live: int) -> Iterator[tuple[str, int]]:
    """Yield phase and live bytes at the start of every phase and after every event inside one."""
    starts = phase_marks(marks)
    phase, next_mark = "", 0
    stream = sorted(events, key=lambda event: event[0])
    for time, _, size in [*stream, (_after_all(stream, marks), 0, 0)]:
        while next_mark < len(starts) and starts[next_mark][0] <= time:
            phase = starts[next_mark][1]
            next_mark += 1
            if phase:
                yield phase, live
        live += size
        if phase and size:
            yield phase, live


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
