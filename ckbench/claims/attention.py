"""Claims about attention scores: whether they dominate, and what recomputing the core saves and costs."""

from ckbench.claims.base import Figure, Undecided, Verdict
from ckbench.claims.cost import slowdown
from ckbench.claims.depth import SAME
from ckbench.claims.evidence import Evidence
from ckbench.claims.size import per_layer
from ckbench.statistics import fit_line

STUDY = "attention_scores"
SEVENTY = (0.65, 0.75)
PAPERS_COST = (0.022, 0.032)
GPT3 = "gpt3_layer"


def _kept(evidence: Evidence, strategy: str, attention: str) -> dict[int, float]:
    lengths = evidence.settings(STUDY, "seq_len")
    if len(lengths) < 3:
        raise Undecided(f"{STUDY} has {len(lengths)} sequence lengths; the law needs two and its proof a third")
    return {s: evidence.number(STUDY, strategy, "saved_bytes", attention=attention, seq_len=s) for s in lengths}


def scores_dominate(evidence: Evidence) -> Verdict:
    """Attention scores dominate activations with eager attention."""
    kept, without = _kept(evidence, "none", "eager"), _kept(evidence, "core-attn", "eager")
    shares = {s: 1 - without[s] / kept[s] for s in kept}
    lengths = list(kept)
    per_token = [kept[s] / s for s in lengths]
    line = fit_line(lengths[:2], per_token[:2])
    off = (line.start + line.slope * lengths[2]) / per_token[2] - 1
    figures = [
        *(Figure(what=f"share of the core at seq {s}", value=share, unit="share") for s, share in shares.items()),
        Figure(what=f"error of the law at seq {lengths[2]}", value=off, unit="share"),
    ]
    if all(share > 0.5 for share in shares.values()):
        return Verdict(outcome="holds", reason="They are more than half at every length.", figures=tuple(figures))
    if line.slope <= 0:
        reason = "What a token keeps does not grow with the sequence."
        return Verdict(outcome="does not hold", reason=reason, figures=tuple(figures))
    if abs(off) > SAME:
        raise Undecided("kept bytes per token are no straight line over the sequence")
    crossing = line.start / line.slope
    figures.append(Figure(what="length from which they are half", value=crossing, unit="count"))
    return Verdict(
        outcome="holds only if",
        condition=f"the sequence is long: from {crossing:.0f} tokens on in this model",
        reason="A token keeps c₀ + c₁·s bytes, the second term being scores; both are taken from two lengths and"
        " proven at a third. In the formula of Korthikanti et al. they are half at 5as/h = 34, s = 6.8 h/a.",
        figures=tuple(figures),
    )


def scores_gone_with_flash(evidence: Evidence) -> Verdict:
    """Attention scores no longer dominate with flash attention."""
    kept, without = _kept(evidence, "none", "flash"), _kept(evidence, "core-attn", "flash")
    lengths = list(kept)
    grown = (kept[lengths[-1]] / lengths[-1]) / (kept[lengths[0]] / lengths[0])
    share = max(1 - without[s] / kept[s] for s in kept)
    figures = (
        Figure(what=f"kept per token, seq {lengths[-1]} over {lengths[0]}", value=grown, unit="x"),
        Figure(what="largest share that core-attn drops", value=share, unit="share"),
    )
    if grown - 1 > SAME:
        return Verdict(outcome="does not hold", reason="A token keeps more in longer sequences.", figures=figures)
    reason = "A token keeps the same bytes at any length: the fused kernel stores a sum per row and makes scores again."
    return Verdict(outcome="holds", reason=reason, figures=figures)


def selective_saves_seventy(evidence: Evidence) -> Verdict:
    """Selective recomputation removes 70 % of GPT-3's activations; retold as leaving 5 %."""
    whole = per_layer(evidence, GPT3, "none", "eager", 1)
    left = per_layer(evidence, GPT3, "core-attn", "eager", 1)
    fused = 1 - per_layer(evidence, GPT3, "core-attn", "flash", 1) / per_layer(evidence, GPT3, "none", "flash", 1)
    full = per_layer(evidence, GPT3, "per-block", "eager", 1)
    removed = 1 - left / whole
    figures = (
        Figure(what="removed", value=removed, unit="share"),
        Figure(what="left", value=left / whole, unit="share"),
        Figure(what="left by per-block", value=full / whole, unit="share"),
        Figure(what="removed where attention is fused", value=fused, unit="share"),
    )
    if not SEVENTY[0] <= removed <= SEVENTY[1]:
        return Verdict(outcome="does not hold", reason="Another share is removed.", figures=figures)
    reason = f"{left / whole:.0%} of a layer is left; per-block leaves {full / whole:.1%}.".replace("%", " %")
    if fused > SAME:
        return Verdict(outcome="holds", reason=reason, figures=figures)
    reason += " With fused attention there are no scores to remove."
    condition = "attention stores its scores (unfused)"
    return Verdict(outcome="holds only if", condition=condition, reason=reason, figures=figures)


def selective_costs_little(evidence: Evidence) -> Verdict:
    """Selective recomputation costs 2.7 % more compute at the proportions of GPT-3."""
    study = "selective_recompute"
    row = evidence.row(study, "none")
    s, h = row["train"]["seq_len"], row["model"]["d_model"]
    said = (s / (6 * h)) / (1 + s / (6 * h))
    counted = evidence.number(study, "core-attn,early_stop=false", "flops_ratio") - 1
    stopped = evidence.number(study, "core-attn", "flops_ratio") - 1
    figures = (
        Figure(what="extra FLOPs, no early stop", value=counted, unit="share"),
        Figure(what="early stop", value=stopped, unit="share"),
        Figure(what="s/6h / (1 + s/6h)", value=said, unit="share"),
        Figure(what="per-block", value=evidence.number(study, "per-block", "flops_ratio") - 1, unit="share"),
        slowdown(evidence, study, "core-attn", "time over none"),
    )
    if PAPERS_COST[0] <= counted <= PAPERS_COST[1]:
        return Verdict(outcome="holds", reason="As many FLOPs are counted.", figures=figures)
    reason = "Another number is counted."
    if counted < PAPERS_COST[0]:
        reason = (
            "Less is counted. 2.7 % equals (s/6h) / (1 + s/6h), the core's forward and backward, 12·b·s²·h FLOPs, over"
            " those of the layer. A recomputation is its forward alone, 4·b·s²·h, and early stop leaves out the last"
            " product of it."
        )
    return Verdict(outcome="does not hold", reason=reason, figures=figures)
