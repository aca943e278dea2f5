"""Claims on attention scores say what the figures say."""

import pytest

from ckbench.claims.base import Undecided
from tests.claims.made import attention_scores, by_formula, judged, layers, row


def test_scores_dominate_from_the_length_on_where_they_are_half() -> None:
    verdict = judged("scores-dominate", attention_scores(eager_growth=0.004))
    assert verdict.outcome == "holds only if" and "from 250 tokens" in verdict.condition


def test_scores_dominate_where_they_are_more_than_half_at_every_length() -> None:
    assert judged("scores-dominate", attention_scores(eager_growth=0.1)).outcome == "holds"


def test_scores_do_not_dominate_where_a_token_keeps_the_same_at_any_length() -> None:
    assert judged("scores-dominate", attention_scores(eager_growth=0.0)).outcome == "does not hold"


def test_a_law_that_the_third_length_disproves_decides_nothing() -> None:
    bent = attention_scores()
    for item in bent:
        if item["train"]["seq_len"] == 512:
            item["saved_bytes"] *= 1.2 if item["strategy"] == "none" else 1.0
    with pytest.raises(Undecided, match="straight line"):
        judged("scores-dominate", bent)


@pytest.mark.parametrize(("growth", "outcome"), [(0.0, "holds"), (0.004, "does not hold")])
def test_flash_is_judged_by_what_a_token_keeps(growth: float, outcome: str) -> None:
    assert judged("scores-gone-with-flash", attention_scores(fused_growth=growth)).outcome == outcome


def test_selective_removes_seventy_percent_by_the_formula_and_only_of_stored_scores() -> None:
    verdict = judged("selective-saves-seventy", estimates=layers("gpt3_layer", by_formula(12288, 96)))
    assert verdict.outcome == "holds only if" and "unfused" in verdict.condition
    removed = next(figure.value for figure in verdict.figures if figure.what == "removed")
    assert removed == pytest.approx(80 / 114)


def test_selective_does_not_hold_where_it_removes_another_share() -> None:
    few_heads = layers("gpt3_layer", by_formula(12288, 12))
    assert judged("selective-saves-seventy", estimates=few_heads).outcome == "does not hold"


def test_selective_holds_without_condition_where_fused_attention_keeps_scores_too() -> None:
    unfused = by_formula(12288, 96)

    def size(strategy: str, attention: str, batch: int) -> float:
        return unfused(strategy, "eager", batch)

    assert judged("selective-saves-seventy", estimates=layers("gpt3_layer", size)).outcome == "holds"


def selective(extra: float) -> list[dict[str, object]]:
    shape = {"train_seq_len": 64, "model_d_model": 384}
    ratios = {"none": 1.0, "core-attn": 1 + extra / 2, "core-attn,early_stop=false": 1 + extra, "per-block": 1.33}
    return [row("selective_recompute", name, flops_ratio=ratio, **shape) for name, ratio in ratios.items()]


def test_selective_costs_what_is_counted() -> None:
    assert judged("selective-costs-little", selective(0.027)).outcome == "holds"
    cheaper = judged("selective-costs-little", selective(0.009))
    assert cheaper.outcome == "does not hold" and "Less is counted" in cheaper.reason
    dearer = judged("selective-costs-little", selective(0.1))
    assert dearer.outcome == "does not hold" and "Less" not in dearer.reason


def test_the_papers_cost_follows_from_its_two_formulas() -> None:
    figures = {figure.what: figure.value for figure in judged("selective-costs-little", selective(0.009)).figures}
    assert figures["s/6h / (1 + s/6h)"] == pytest.approx(0.0270, abs=0.0001)
