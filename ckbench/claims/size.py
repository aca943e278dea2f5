"""Claims about models too large to run, decided by estimates of one layer and by arithmetic."""

import math

from ckbench.claims.base import Figure, Undecided, Verdict
from ckbench.claims.evidence import Evidence

GPT3 = "gpt3_layer"
GPT3_LAYERS = 96
TERABYTE = 10**12
USUAL_MICRO_BATCH = 64
"""Sequences of 2048 tokens; beyond it no replica of such a model is trained by one micro-batch."""
HALF_PRECISION_BYTES = 2


def per_layer(evidence: Evidence, study: str, strategy: str, attention: str, batch_size: int) -> float:
    """Give the bytes that one more layer keeps for backward: the difference of two depths. Raises NotMeasured."""
    depths = evidence.estimated_settings(study, "n_layers")
    if len(depths) < 2:
        raise Undecided(f"{study} has one depth, and a layer is the difference of two")
    where = {"attention": attention, "batch_size": batch_size}
    less, more = (
        evidence.estimate(study, strategy, "saved_bytes", n_layers=n, **where) for n in (depths[0], depths[-1])
    )
    return float((more - less) / (depths[-1] - depths[0]))


def stack_of_150_gb(evidence: Evidence) -> Verdict:
    """A 96-layer d 12288 batch 32 seq 2048 stack holds about 150 GB of activations."""
    batch = 32
    boundaries = GPT3_LAYERS * batch * 2048 * 12288 * HALF_PRECISION_BYTES
    flash, eager = (GPT3_LAYERS * per_layer(evidence, GPT3, "none", kind, batch) for kind in ("flash", "eager"))
    blockwise = GPT3_LAYERS * per_layer(evidence, GPT3, "per-block", "flash", batch)
    figures = (
        Figure(what="fp16 block boundaries, 96·32·2048·12288·2", value=boundaries, unit="bytes"),
        Figure(what="kept under per-block", value=blockwise, unit="bytes"),
        Figure(what="kept under none, flash", value=flash, unit="bytes"),
        Figure(what="eager", value=eager, unit="bytes"),
    )
    if abs(flash / 150e9 - 1) <= 0.1:
        return Verdict(outcome="holds", reason="So much is kept without checkpointing.", figures=figures)
    if abs(blockwise / 150e9 - 1) <= 0.1:
        return Verdict(
            outcome="holds only if",
            condition="every block is checkpointed (per-block)",
            reason=f"Boundaries are then all that is kept. Without checkpointing it is {flash / blockwise:.0f} times"
            " as much with flash attention, and more where scores are stored.",
            figures=figures,
        )
    reason = "Neither with nor without checkpointing is about so much kept."
    return Verdict(outcome="does not hold", reason=reason, figures=figures)


def more_than_a_terabyte(evidence: Evidence) -> Verdict:
    """175B parameters need more than a terabyte of activations per replica."""
    one = {kind: GPT3_LAYERS * per_layer(evidence, GPT3, "none", kind, 1) for kind in ("eager", "flash")}
    blockwise = GPT3_LAYERS * per_layer(evidence, GPT3, "per-block", "flash", 1)
    enough = {kind: math.ceil(TERABYTE / size) for kind, size in one.items()}
    figures = (
        *(Figure(what=f"one sequence of 2048, {kind}", value=size, unit="bytes") for kind, size in one.items()),
        Figure(what="under per-block", value=blockwise, unit="bytes"),
        *(Figure(what=f"sequences to a terabyte, {kind}", value=n, unit="count") for kind, n in enough.items()),
    )
    if all(size > TERABYTE for size in one.values()):
        return Verdict(outcome="holds", reason="One sequence needs as much.", figures=figures)
    if all(n > USUAL_MICRO_BATCH for n in enough.values()):
        reason = f"{USUAL_MICRO_BATCH} sequences need less."
        return Verdict(outcome="does not hold", reason=reason, figures=figures)
    return Verdict(
        outcome="holds only if",
        condition=f"a micro-batch has {enough['eager']} sequences of 2048 tokens or more with eager attention,"
        f" {enough['flash']} or more with flash, and nothing is recomputed",
        reason="Activations grow with the micro-batch, which the sentence leaves out.",
        figures=figures,
    )


def korthikanti(evidence: Evidence) -> Verdict:
    """A layer keeps sbh(34 + 5as/h) bytes."""
    errors, figures, fused = {}, [], []
    for study in (GPT3, "gpt22b_layer"):
        d_model, n_heads, seq_len, batch = (
            evidence.estimated_settings(study, key)[0] for key in ("d_model", "n_heads", "seq_len", "batch_size")
        )
        sbh = seq_len * batch * d_model
        formula = sbh * (34 + 5 * n_heads * seq_len / d_model)
        made = per_layer(evidence, study, "none", "eager", batch)
        flash = per_layer(evidence, study, "none", "flash", batch)
        errors[study] = made / formula - 1
        fused.append(f"{flash / sbh:.1f}")
        figures += [
            Figure(what=f"d {d_model}, {n_heads} heads: estimated", value=made, unit="bytes"),
            Figure(what="formula", value=formula, unit="bytes"),
            Figure(what="difference", value=errors[study], unit="share"),
            Figure(what="flash, in sbh", value=flash / sbh, unit="count"),
        ]
    if all(abs(error) <= 0.03 for error in errors.values()):
        reason = f"With eager attention, dropout and 2-byte types, within 3 %; with flash {' and '.join(fused)} sbh."
        return Verdict(outcome="holds", reason=reason, figures=tuple(figures))
    reason = "An estimated layer differs by more than 3 %."
    return Verdict(outcome="does not hold", reason=reason, figures=tuple(figures))


def larger_models(evidence: Evidence) -> Verdict:
    """Checkpointing lets 3-10 times larger models fit."""
    study = "larger_models"
    gains: dict[int, float] = {}
    figures = []
    for batch in evidence.estimated_settings(study, "batch_size"):
        n, m = (evidence.estimate(study, strategy, "largest", batch_size=batch) for strategy in ("none", "per-block"))
        gains[batch] = m / n
        figures.append(Figure(what=f"batch {batch}: {n:g} to {m:g} layers", value=m / n, unit="x"))
    inside = [batch for batch, gain in gains.items() if 3 <= gain <= 10]
    reason = (
        "A layer takes 16 bytes per parameter whatever the strategy (12·d² of them: weights, gradients, Adam's two) and"
        " about 34·T·d without, 2·T·d with checkpointing, T tokens in a micro-batch (2-byte types, fused attention)."
        " Three times as many layers need 28·T·d ≥ 2·16·12·d², T ≥ 13.7·d."
    )
    if len(inside) == len(gains):
        return Verdict(outcome="holds", reason=reason, figures=tuple(figures))
    if not inside:
        return Verdict(outcome="does not hold", reason=reason, figures=tuple(figures))
    told = ", ".join(map(str, inside))
    return Verdict(
        outcome="holds only if",
        condition=f"a micro-batch has many tokens (here at batch {told} of 1024)",
        reason=reason,
        figures=tuple(figures),
    )
