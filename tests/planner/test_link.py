"""How long a step waits for the link: by hand, by what must hold, and against a clock that ticks."""

import random
from collections.abc import Iterator, Sequence

import pytest

from ckbench.planner.link import exposed_s

TICK_S = 1 / 64


def ticked(moved: Sequence[int], forward: Sequence[int], backward: Sequence[int], link: int) -> float:
    """Let time pass tick by tick: bytes are made evenly over a block, or are there when they have come."""
    n, waited = len(moved), 0.0
    sent = [0.0] * n
    for at in range(n):  # forward, and what is made can be sent
        gone = 0.0
        while gone < forward[at] or (at > 0 and sent[at - 1] < moved[at - 1]) or (at == n - 1 and sent[at] < moved[at]):
            gone += TICK_S
            waited += gone > forward[at]
            room = link * TICK_S
            for block in range(at + 1):
                made = moved[block] if block < at else moved[block] * min(1.0, gone / max(forward[at], TICK_S))
                step = max(0.0, min(room, made - sent[block]))
                sent[block], room = sent[block] + step, room - step
    come = [0.0] * n
    for at in range(n - 1, -1, -1):
        gone = 0.0
        while gone < backward[at] or come[at] < moved[at]:
            gone += TICK_S
            waited += gone > backward[at]
            room = link * TICK_S
            for block in (at, at - 1):
                if block >= 0:
                    step = min(room, moved[block] - come[block])
                    come[block], room = come[block] + step, room - step
    return waited * TICK_S


@pytest.mark.parametrize(
    ("moved", "forward", "backward", "waits"),
    [
        ([8], [1], [2], 0.0),  # carried within the block's own time, both ways
        ([32], [1], [2], 3.0 + 2.0),
        ([32, 0], [1, 9], [2, 9], 0.0),  # hidden behind the other block
        ([0, 32], [9, 1], [9, 2], 3.0 + 2.0),  # the last block's is not
        ([32, 32], [4, 4], [4, 4], 0.0),
        ([32, 32], [1, 1], [1, 1], (8 - 2) + (8 - 2)),  # the link is busy all the while
    ],
)
def test_by_hand(moved: list[int], forward: list[float], backward: list[float], waits: float) -> None:
    assert exposed_s(moved, forward, backward, 8.0) == pytest.approx(waits)


def spans(seed: int) -> Iterator[tuple[list[int], list[int], list[int], int]]:
    """Draw spans: bytes to move, seconds forward and backward by block, and a link's bytes per second."""
    draw = random.Random(seed)
    for _ in range(300):
        n = draw.randint(1, 4)
        moved = [draw.randint(0, 60) for _ in range(n)]
        forward, backward = ([draw.randint(1, 6) for _ in range(n)] for _ in range(2))
        yield moved, forward, backward, draw.randint(1, 20)


def test_against_a_clock() -> None:
    for span in spans(11):
        assert exposed_s(*span) == pytest.approx(ticked(*span), abs=6 * len(span[0]) * TICK_S), span


def test_a_faster_link_or_fewer_bytes_never_wait_longer() -> None:
    for moved, forward, backward, link in spans(3):
        waits = exposed_s(moved, forward, backward, link)
        assert waits >= -1e-9
        assert exposed_s(moved, forward, backward, 2 * link) <= waits + 1e-9
        assert exposed_s([n_bytes // 2 for n_bytes in moved], forward, backward, link) <= waits + 1e-9
        assert exposed_s(moved, forward, backward, 1e12) == pytest.approx(0.0, abs=1e-6)
