"""Claims on precision, accumulation and offload say what the figures say."""

import pytest

from ckbench.claims.base import Undecided
from tests.claims.made import MIB, judged, row

Rows = list[dict[str, object]]


def precision(bf16: tuple[float, float, float], pure: tuple[float, float, float]) -> Rows:
    shares = {"fp32": (1.0, 1.0, 1.0), "bf16": bf16, "bf16-pure": pure}
    return [
        row(
            "mixed_precision",
            "none",
            train_precision=name,
            static_bytes=round(weights * MIB),
            gradient_bytes=round(gradients * MIB),
            saved_bytes=round(kept * 10 * MIB),
        )
        for name, (weights, gradients, kept) in shares.items()
    ]


HALF = (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("bf16", "pure", "outcome"),
    [
        (HALF, HALF, "holds"),
        ((1.0, 1.0, 0.6), HALF, "holds only if"),
        ((1.0, 1.0, 0.6), (0.5, 0.5, 0.7), "does not hold"),
    ],
)
def test_halving_is_judged_mass_by_mass(
    bf16: tuple[float, float, float], pure: tuple[float, float, float], outcome: str
) -> None:
    verdict = judged("mixed-precision-halves", precision(bf16, pure))
    assert verdict.outcome == outcome
    if outcome == "holds only if":
        assert "does not halve weights, gradients, activations" in verdict.reason


def test_what_autocast_does_halve_is_not_named() -> None:
    verdict = judged("mixed-precision-halves", precision((1.0, 0.5, 0.6), HALF))
    assert "does not halve weights, activations" in verdict.reason


def accumulation(kept: float, live: float) -> Rows:
    return [
        row(
            "micro_batches",
            strategy,
            train_grad_accumulation=n,
            saved_bytes=round(100 * MIB * (kept if n == 4 else 1)),
            activation_peak_bytes=round(100 * MIB * (live if n == 4 and strategy == "per-block" else 1)),
            peak_allocated_bytes=(200 + n) * MIB,
        )
        for strategy in ("none", "per-block")
        for n in (1, 2, 4)
    ]


@pytest.mark.parametrize(
    ("kept", "live", "outcome"),
    [(1.0, 1.0, "holds"), (1.0, 1.4, "holds only if"), (1.5, 1.0, "does not hold"), (4.0, 4.0, "does not hold")],
)
def test_accumulation_is_judged_by_what_is_kept_then_by_the_peak(kept: float, live: float, outcome: str) -> None:
    assert judged("accumulation-changes-nothing", accumulation(kept, live)).outcome == outcome


def offload(
    device: str, offloaded: tuple[float, float] | None = None, blockwise: tuple[float, float] | None = None
) -> Rows:
    rows = []
    for name, bounds, peak in (("none", (1.0, 1.0), 100), ("offload", offloaded, 40), ("per-block", blockwise, 30)):
        low, high = bounds or (None, None)
        rows.append(
            row(
                "offload_or_recompute",
                name,
                device=device,
                model_d_model=128,
                peak_allocated_bytes=peak * MIB,
                host_store_peak_bytes=3_000_000,
                flops_backward=2_000_000_000 + (1_000_000_000 if name == "per-block" else 0),
                slowdown_ratio=low,
                slowdown_low=low,
                slowdown_high=high,
            )
        )
    return rows


def test_offload_is_not_decided_without_a_link_and_the_condition_is_stated() -> None:
    verdict = judged("offload-beats-recompute", offload("cpu", (0.5, 0.6), (1.2, 1.3)))
    assert verdict.outcome == "not measured here"
    assert "device with a link" in verdict.reason and "0.003 bytes for every FLOP" in verdict.reason


@pytest.mark.parametrize(
    ("offloaded", "blockwise", "outcome"),
    [
        ((1.05, 1.10), (1.25, 1.30), "holds only if"),
        ((1.50, 1.60), (1.25, 1.30), "does not hold"),
        ((1.20, 1.40), (1.25, 1.30), "undecided"),
    ],
)
def test_offload_is_judged_by_time_on_a_device_with_a_link(
    offloaded: tuple[float, float], blockwise: tuple[float, float], outcome: str
) -> None:
    assert judged("offload-beats-recompute", offload("cuda:0", offloaded, blockwise)).outcome == outcome


def test_offload_of_one_round_decides_nothing() -> None:
    with pytest.raises(Undecided, match="--rounds"):
        judged("offload-beats-recompute", offload("cuda:0"))
