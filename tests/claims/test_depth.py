"""Claims on growth with depth say what the figures say: made-up laws in, verdicts out."""

import pytest

from ckbench.claims.base import Undecided
from ckbench.claims.evidence import NotMeasured
from tests.claims.made import BOUNDARY, DEPTHS, INSIDE, MIB, attention_scores, judged, memory_laws, recompute_cost, row


def test_linear_without_checkpointing_holds_for_a_straight_line() -> None:
    verdict = judged("linear-without", memory_laws() + attention_scores(eager_growth=0.0))
    assert verdict.outcome == "holds"


def test_linear_holds_only_with_fused_attention_where_eager_tokens_grow() -> None:
    verdict = judged("linear-without", memory_laws() + attention_scores())
    assert verdict.outcome == "holds only if" and "no scores" in verdict.condition


def test_linear_does_not_hold_for_a_square_or_for_growing_tokens() -> None:
    square = memory_laws(none=lambda n: n * n * MIB)
    assert judged("linear-without", square + attention_scores()).outcome == "does not hold"
    growing = attention_scores(fused_growth=0.004)
    assert judged("linear-without", memory_laws() + growing).outcome == "does not hold"


def test_root_with_segments_holds_for_a_root_and_names_the_crossing() -> None:
    verdict = judged("root-with-segments", memory_laws())
    assert verdict.outcome == "holds" and "(a/b)²" in verdict.reason
    (crossing,) = (figure.value for figure in verdict.figures if "meets" in figure.what)
    assert crossing == pytest.approx((INSIDE / BOUNDARY) ** 2)


def test_root_with_segments_does_not_hold_for_a_line() -> None:
    assert judged("root-with-segments", memory_laws(sqrt=lambda n: n * INSIDE)).outcome == "does not hold"


def test_full_is_constant_only_between_forward_and_backward() -> None:
    verdict = judged("full-keeps-constant", memory_laws() + recompute_cost())
    assert verdict.outcome == "holds only if" and "peak" in verdict.condition


def test_full_holds_where_the_peak_does_not_grow_either() -> None:
    flat = memory_laws(full=lambda n: INSIDE)
    assert judged("full-keeps-constant", flat + recompute_cost()).outcome == "holds"


def test_full_does_not_hold_where_it_keeps_more_with_depth_or_runs_half_a_forward() -> None:
    growing = memory_laws(kept_full=lambda n: n * BOUNDARY)
    assert judged("full-keeps-constant", growing + recompute_cost()).outcome == "does not hold"
    assert judged("full-keeps-constant", memory_laws() + recompute_cost(extra=0.5)).outcome == "does not hold"


def test_nested_holds_where_it_is_lower_at_every_depth() -> None:
    low = memory_laws(nested_4=lambda n: INSIDE)
    assert judged("nested-is-lower", low).outcome == "holds"


def test_nested_holds_only_from_the_depth_on_at_which_it_is_lower() -> None:
    verdict = judged("nested-is-lower", memory_laws())
    assert verdict.outcome == "holds only if" and "9 layers" in verdict.condition


def test_nested_does_not_hold_where_it_is_never_lower() -> None:
    high = memory_laws(nested_4=lambda n: n * INSIDE)
    assert judged("nested-is-lower", high).outcome == "does not hold"


def test_nested_that_is_lower_at_shallow_depths_alone_decides_nothing() -> None:
    odd = memory_laws(nested_4=lambda n: INSIDE if n == DEPTHS[1] else n * INSIDE)
    with pytest.raises(Undecided):
        judged("nested-is-lower", odd)


def reversible(kept_growth: float = 0.0, peak_growth: float = 0.0) -> list[dict[str, object]]:
    return [
        row(
            "reversible_depth",
            strategy,
            model_n_layers=n,
            saved_bytes=MIB * (1 + growth * n),
            activation_peak_bytes=MIB * (5 + (peak_growth if strategy == "reversible" else 1) * n),
            flops_ratio=1.32,
        )
        for strategy, growth in (("none", 1.0), ("per-block", 0.1), ("reversible", kept_growth))
        for n in (4, 8, 16)
    ]


@pytest.mark.parametrize(
    ("kept", "peak", "outcome"),
    [(0.0, 0.0, "holds"), (0.0, 0.1, "holds only if"), (0.1, 0.0, "does not hold")],
)
def test_reversible_is_judged_by_growth(kept: float, peak: float, outcome: str) -> None:
    assert judged("reversible-keeps-constant", reversible(kept, peak)).outcome == outcome


def test_laws_need_three_depths_and_say_what_is_missing() -> None:
    two = [item for item in memory_laws() if item["model"]["n_layers"] < 10]
    with pytest.raises(Undecided, match="2 depths"):
        judged("root-with-segments", two)
    gap = [item for item in memory_laws() if (item["strategy"], item["model"]["n_layers"]) != ("sqrt", 16)]
    with pytest.raises(NotMeasured, match="sqrt, n_layers 16"):
        judged("root-with-segments", gap)
