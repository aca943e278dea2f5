"""Claims on what recomputation costs and on segments say what the figures say."""

import pytest

from ckbench.claims.base import Undecided
from tests.claims.made import MIB, encoder, judged, recompute_cost, row


@pytest.mark.parametrize(
    ("dropped", "stopped", "outcome"),
    [(1.33, 1.33, "holds"), (1.33, 1.22, "holds only if"), (1.5, 1.22, "does not hold")],
)
def test_a_third_more_is_judged_by_counted_flops(dropped: float, stopped: float, outcome: str) -> None:
    verdict = judged("third-more", recompute_cost(dropped, stopped))
    assert verdict.outcome == outcome
    if outcome == "holds only if":
        assert "no early stop, no dropout" in verdict.condition and "early stop, dropout 0.1" in verdict.condition
        assert "(early stop, no dropout" not in verdict.condition


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({"per_block": (125, 20, 1.33)}, "holds"),
        ({"per_block": (200, 20, 1.33)}, "holds only if"),  # 500 / 200, and of activations 400 / 100
        ({"per_block": (400, 20, 1.33)}, "does not hold"),
        ({"none": (2000, 300, 1.0)}, "does not hold"),  # ten times lower is another claim
    ],
)
def test_peak_three_to_five_is_judged_by_the_peak_then_by_activations(
    changed: dict[str, tuple[float, float, float]], outcome: str
) -> None:
    assert judged("peak-three-to-five", encoder(**changed)).outcome == outcome


@pytest.mark.parametrize(
    ("times", "outcome"),
    [
        ((1.3, 1.25, 1.35), "holds"),
        ((1.3, 1.1, 1.5), "undecided"),
        ((1.3, 1.25, 1.5), "undecided"),
        ((1.6, 1.5, 1.7), "does not hold"),
        ((1.1, 1.0, 1.15), "does not hold"),
    ],
)
def test_time_is_judged_by_its_whole_interval(times: tuple[float, float, float], outcome: str) -> None:
    assert judged("at-1.2-to-1.4-times-the-time", encoder(times)).outcome == outcome


def test_time_without_an_interval_decides_nothing() -> None:
    with pytest.raises(Undecided, match="--rounds"):
        judged("at-1.2-to-1.4-times-the-time", encoder())


@pytest.mark.parametrize(
    ("ffn", "outcome", "said"),
    [
        ((350, 150, 1.165), "holds", ""),
        ((350, 150, 1.22), "holds only if", "savings"),
        ((450, 150, 1.165), "holds only if", "overhead"),
        ((450, 150, 1.30), "does not hold", ""),
    ],
)
def test_ffn_only_is_half_in_both_or_in_one(ffn: tuple[float, float, float], outcome: str, said: str) -> None:
    verdict = judged("ffn-only-half", encoder(ffn_only=ffn))
    assert verdict.outcome == outcome and said in verdict.condition


def test_ffn_only_is_judged_by_bytes_and_flops_where_no_time_was_taken() -> None:
    untimed = [item for item in encoder() if item["study"] == "encoder_8x512"]
    assert judged("ffn-only-half", untimed).outcome == "holds"


def test_half_of_nothing_decides_nothing() -> None:
    with pytest.raises(Undecided):
        judged("ffn-only-half", encoder(per_block=(500, 20, 1.33)))


def test_fewer_segments_save_less_where_the_peak_falls_with_each_cut() -> None:
    verdict = judged("fewer-segments-save-less", encoder())
    assert verdict.outcome == "holds" and "the other way" in verdict.reason


def test_fewer_segments_do_not_save_less_where_one_cut_raises_the_peak() -> None:
    assert judged("fewer-segments-save-less", encoder(segments_4=(360, 15, 1.33))).outcome == "does not hold"


def test_fewer_segments_cost_less_where_flops_rise() -> None:
    rising = encoder(segments_1=(1, 1, 1.0), segments_2=(1, 1, 1.1), segments_4=(1, 1, 1.2), segments_8=(1, 1, 1.3))
    assert judged("fewer-segments-cost-less", rising).outcome == "holds"


def test_fewer_segments_cost_less_only_where_the_last_one_is_spared() -> None:
    verdict = judged("fewer-segments-cost-less", encoder())
    assert verdict.outcome == "holds only if" and "checkpoint_sequential" in verdict.condition


def test_fewer_segments_do_not_cost_less_where_nothing_rises() -> None:
    flat = encoder(sequential_2=(1, 1, 1.33), sequential_4=(1, 1, 1.33))
    assert judged("fewer-segments-cost-less", flat).outcome == "does not hold"


def head(saving: float) -> list[dict[str, object]]:
    return [
        row("big_head", "none", peak_allocated_bytes=100 * MIB),
        row("big_head", "segments:1", peak_allocated_bytes=round(100 * MIB * (1 - saving))),
    ]


def test_one_segment_saves_nothing_or_only_under_a_head() -> None:
    assert judged("one-segment-saves-nothing", encoder() + head(0.0)).outcome == "holds"
    assert judged("one-segment-saves-nothing", encoder() + head(0.2)).outcome == "holds only if"
    lower = encoder(segments_1=(300, 10, 1.33))
    assert judged("one-segment-saves-nothing", lower + head(0.2)).outcome == "does not hold"
