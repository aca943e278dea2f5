"""Claims on models too large to run are decided by the difference of two estimated depths."""

import pytest

from ckbench.claims.base import Undecided
from ckbench.claims.evidence import NotMeasured
from tests.claims.made import by_formula, judged, layers, row

GPT3 = by_formula(12288, 96)


def test_stack_of_150_gb_is_what_per_block_keeps() -> None:
    verdict = judged("stack-of-150-gb", estimates=layers("gpt3_layer", GPT3))
    assert verdict.outcome == "holds only if" and "per-block" in verdict.condition
    assert "17 times" in verdict.reason
    boundaries = verdict.figures[0]
    assert boundaries.text() == "fp16 block boundaries, 96·32·2048·12288·2 154.6 GB"


def test_stack_of_150_gb_holds_where_a_layer_keeps_as_little() -> None:
    def small(strategy: str, attention: str, batch: int) -> float:
        return 150e9 / 96 / 32 * batch

    assert judged("stack-of-150-gb", estimates=layers("gpt3_layer", small)).outcome == "holds"


def test_stack_of_150_gb_does_not_hold_where_neither_is_near() -> None:
    def large(strategy: str, attention: str, batch: int) -> float:
        return 500e9 / 96 / 32 * batch

    assert judged("stack-of-150-gb", estimates=layers("gpt3_layer", large)).outcome == "does not hold"


def test_a_terabyte_depends_on_the_micro_batch() -> None:
    verdict = judged("more-than-a-terabyte", estimates=layers("gpt3_layer", GPT3))
    assert verdict.outcome == "holds only if"
    assert "has 4 sequences" in verdict.condition and "13 or more with flash" in verdict.condition


def test_a_terabyte_holds_where_one_sequence_needs_it() -> None:
    def huge(strategy: str, attention: str, batch: int) -> float:
        return 20e9 * batch

    assert judged("more-than-a-terabyte", estimates=layers("gpt3_layer", huge)).outcome == "holds"


def test_a_terabyte_does_not_hold_where_no_usual_micro_batch_needs_it() -> None:
    def tiny(strategy: str, attention: str, batch: int) -> float:
        return 1e6 * batch

    assert judged("more-than-a-terabyte", estimates=layers("gpt3_layer", tiny)).outcome == "does not hold"


def formula_of_korthikanti(scale: float) -> list[dict[str, object]]:
    other = layers("gpt22b_layer", by_formula(6144, 64, scale), d_model=6144, n_heads=64, batches=(4,))
    return layers("gpt3_layer", GPT3) + other


@pytest.mark.parametrize(("scale", "outcome"), [(1.0, "holds"), (1.02, "holds"), (1.1, "does not hold")])
def test_korthikantis_formula_must_fit_both_models(scale: float, outcome: str) -> None:
    assert judged("korthikanti-layer", estimates=formula_of_korthikanti(scale)).outcome == outcome


def largest(gains: dict[int, float]) -> list[dict[str, object]]:
    return [
        row("larger_models", strategy, train_batch_size=batch, largest=round(10 * factor))
        for batch, gain in gains.items()
        for strategy, factor in (("none", 1.0), ("per-block", gain))
    ]


@pytest.mark.parametrize(
    ("gains", "outcome"),
    [({1: 3.0, 64: 9.0}, "holds"), ({1: 0.9, 64: 3.5}, "holds only if"), ({1: 0.9, 64: 2.0}, "does not hold")],
)
def test_larger_models_are_judged_at_every_batch(gains: dict[int, float], outcome: str) -> None:
    verdict = judged("larger-models", estimates=largest(gains))
    assert verdict.outcome == outcome
    assert outcome != "holds only if" or "batch 64 of" in verdict.condition


def test_a_layer_is_the_difference_of_two_depths() -> None:
    one = [item for item in layers("gpt3_layer", GPT3) if item["model"]["n_layers"] == 1]
    with pytest.raises(Undecided, match="one depth"):
        judged("stack-of-150-gb", estimates=one)
    with pytest.raises(NotMeasured, match="gpt3_layer is not among the estimates"):
        judged("stack-of-150-gb")
