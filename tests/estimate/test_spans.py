"""A step cut at the boundaries of its blocks: nothing is lost, and every stretch is whose it is."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ckbench.config import RunConfig
from ckbench.estimate.chain import figures, step_spans
from ckbench.estimate.replay import Replayed, replay
from ckbench.estimate.spans import CALL, ENTER, GRADIENT, Span, spans, watch_blocks
from ckbench.estimate.tracker import RELEASE, Timeline
from ckbench.records import PHASES

MakeRun = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("kind", "spec", "train"),
    [
        ("cuda", "none", {"precision": "bf16"}),
        ("cuda", "nested:2", {"grad_accumulation": 2, "set_to_none": False}),
        ("cpu", "per-block", {"optimizer_in_backward": True}),
    ],
)
def test_added_up_a_cut_step_is_the_replayed_one(
    tiny_run: MakeRun, kind: str, spec: str, train: dict[str, Any]
) -> None:
    replayed = replay(tiny_run(spec, model={"n_layers": 3, "d_model": 16}, train=train), kind, watch=watch_blocks)
    cut = spans(replayed)
    assert sum(span.added_bytes for span in cut) == replayed.tracker.live_bytes
    for step, whole in zip(step_spans(cut), (replayed.first, replayed.steady), strict=True):
        made = figures(step)
        assert made.peak_bytes == whole["peak_allocated_bytes"] and made.peak_phase == whole["peak_phase"]
        assert made.saved_bytes == whole["saved_bytes"]
        assert made.peaks == {phase: whole[f"peak_{phase}_bytes"] for phase in PHASES}
        for mark in (CALL, GRADIENT):
            assert {span.block for span in step.spans if span.mark.startswith(f"{mark} ")} >= {0, 1, 2}
        backward = [span for span in step.spans if span.phase == "backward" and span.mark.startswith(ENTER)]
        assert bool(backward) is (spec != "none"), "recomputation is seen"


def test_watching_changes_nothing(tiny_run: MakeRun) -> None:
    config = tiny_run("per-block", model={"n_layers": 3, "d_model": 16, "dropout": 0.1}, train={"precision": "bf16"})
    watched, plain = replay(config, "cuda", watch=watch_blocks), replay(config, "cuda")
    assert (watched.first, watched.steady) == (plain.first, plain.steady)
    assert watched.tracker.timeline.events == plain.tracker.timeline.events


def made_up(events: list[tuple[int, int]], marks: list[tuple[int, str]], block_of: dict[int, int | None]) -> Replayed:
    """Make a replay of a timeline alone: storages' numbers and bytes, marks by the event that comes next."""
    timeline = Timeline(events=[(i, number, n) for i, (number, n) in enumerate(events)], marks=marks)
    return SimpleNamespace(tracker=SimpleNamespace(timeline=timeline, block_of=block_of))  # type: ignore[return-value]


def test_a_loop_outside_of_blocks_is_cut_by_whose_storages_it_takes() -> None:
    """As an optimizer goes over the parameters: state of block 0, of block 1, then a temporary of neither."""
    events = [(1, 10), (2, 20), (3, 30), (1, -10), (4, 5)]
    cut = spans(made_up(events, [(0, "optimizer")], {1: 0, 2: 1, 3: 1, 4: None}))
    assert [(span.block, span.added_bytes, span.rise_bytes) for span in cut[1:]] == [
        (None, 0, 0), (0, 10, 10), (1, 40, 50), (None, 5, 5),
    ], "what the loop lets go of block 0 while it works on block 1 is part of that work"  # fmt: skip


def test_what_autocast_lets_go_of_is_each_block_s_own_in_whatever_order() -> None:
    """On a CPU its cache has no order; the work goes on in the block that it was in."""
    events = [(1, 8), (2, 8), (3, 8), (3, -8), (1, -8), (2, -8), (4, 100)]
    marks = [(0, f"{ENTER} 0"), (1, f"{ENTER} 1"), (2, f"{ENTER} 2"), (3, RELEASE)]
    for order in (events, [*events[:3], events[5], events[3], events[4], events[6]]):
        cut = spans(made_up(order, marks, {1: 0, 2: 1, 3: 2, 4: 2}))
        assert cut[-4:] == [
            Span(f"{ENTER} 2", 0, "", -8, 0),
            Span(f"{ENTER} 2", 1, "", -8, 0),
            Span(f"{ENTER} 2", 2, "", -8, 0),
            Span(f"{ENTER} 2", 2, "", 100, 100),
        ]


def test_sizes_may_be_another_s() -> None:
    cut = spans(made_up([(1, 10), (1, -10)], [(0, f"{CALL} 0")], {1: 0}), lambda number, n_bytes: 512)
    assert (cut[-1].added_bytes, cut[-1].rise_bytes) == (0, 512)
