"""Claims about what recomputation costs and saves: the third, the eight layers of tutorials, segments."""

from ckbench.claims.base import Figure, Undecided, Verdict
from ckbench.claims.evidence import Evidence, NotMeasured

ENCODER = "encoder_8x512"
ENCODER_TIME = "encoder_time"
"""The same model, in rounds for the clock."""
ABOUT_A_THIRD = (1.30, 1.37)
ABOUT_HALF = (0.40, 0.60)
STORED_SCORES = (
    " On a CPU this model's attention dropout makes PyTorch store the scores, which a fused kernel on a GPU does not."
)
NOTICEABLE = 0.05
"""Share of the peak below which a saving is said to be none."""


def slowdown(evidence: Evidence, study: str, strategy: str, what: str, **where: object) -> Figure:
    """Give the time ratio of a strategy with its interval; unknown where it was not timed."""
    row = evidence.row(study, strategy, **where)
    return Figure(what=what, value=row["slowdown_ratio"], low=row["slowdown_low"], high=row["slowdown_high"], unit="x")


def time_beside(evidence: Evidence, study: str, strategy: str, what: str, **where: object) -> Figure:
    """Give the time ratio for a verdict that does not need it; unknown where the study was not run."""
    try:
        return slowdown(evidence, study, strategy, what, **where)
    except NotMeasured:
        return Figure(what=what, value=None, unit="x")


def third_more(evidence: Evidence) -> Verdict:
    """About 33 % extra compute for full recomputation."""
    study = "recompute_cost"
    counted: dict[str, float] = {}
    for strategy, stop in (("per-block,early_stop=false", "no early stop"), ("per-block", "early stop")):
        for dropout in evidence.settings(study, "dropout"):
            behind = f"dropout {dropout:g}" if dropout else "no dropout"
            counted[f"{stop}, {behind}"] = evidence.number(study, strategy, "flops_ratio", dropout=dropout)
    first = evidence.settings(study, "dropout")[0]
    figures = (
        *(Figure(what=f"FLOPs over none, {case}", value=ratio, unit="x") for case, ratio in counted.items()),
        slowdown(evidence, study, "per-block,early_stop=false", "time, no early stop", dropout=first),
        slowdown(evidence, study, "per-block", "time, early stop", dropout=first),
    )
    inside = [case for case, ratio in counted.items() if ABOUT_A_THIRD[0] <= ratio <= ABOUT_A_THIRD[1]]
    reason = (
        "Counted, not timed: (forward + backward + recomputation) / (forward + backward), blocks alone. PyTorch ends a"
        " recomputation once every dropped tensor is back, which leaves the FFN's last product out unless something"
        " behind it, such as dropout, has to be rebuilt."
    )
    if len(inside) == len(counted):
        return Verdict(outcome="holds", reason=reason, figures=figures)
    if not inside:
        return Verdict(outcome="does not hold", reason=reason, figures=figures)
    return Verdict(
        outcome="holds only if",
        condition=f"regions are run to their end ({'; '.join(inside)})",
        reason=reason,
        figures=figures,
    )


def peak_three_to_five(evidence: Evidence) -> Verdict:
    """Peak 3-5 times lower for eight layers, d 512, batch 4, seq 256."""
    peak, activations, kept = (
        evidence.number(ENCODER, "none", key) / evidence.number(ENCODER, "per-block", key)
        for key in ("peak_allocated_bytes", "activation_peak_bytes", "saved_bytes")
    )
    static = evidence.number(ENCODER, "none", "static_bytes") + evidence.number(ENCODER, "none", "gradient_bytes")
    figures = (
        Figure(what="peak, none over per-block", value=peak, unit="x"),
        Figure(what="activations at the peak", value=activations, unit="x"),
        Figure(what="kept after forward", value=kept, unit="x"),
        Figure(what="weights, optimizer state and gradients", value=static, unit="bytes"),
        Figure(what="peak of none", value=evidence.number(ENCODER, "none", "peak_allocated_bytes"), unit="bytes"),
    )
    if 3 <= peak <= 5:
        return Verdict(outcome="holds", reason="The whole peak falls that far.", figures=figures)
    if 3 <= activations <= 5:
        return Verdict(
            outcome="holds only if",
            condition="activations alone are counted, without weights, optimizer state and gradients",
            reason="Those do not shrink with checkpointing, and in this model they are a large part of the peak.",
            figures=figures,
        )
    reason = (
        f"The peak is {peak:.2f} times lower, since weights, optimizer state and gradients in it do not shrink; the"
        f" activations in it are {activations:.2f} times lower, and what waits between forward and backward {kept:.1f}"
        " times."
    ) + _scores_note(evidence)
    return Verdict(outcome="does not hold", reason=reason, figures=figures)


def time_of_that(evidence: Evidence) -> Verdict:
    """At 1.2-1.4 times the time, for the same model."""
    timed = slowdown(evidence, ENCODER_TIME, "per-block", "step time over none")
    counted = Figure(what="FLOPs over none", value=evidence.row(ENCODER_TIME, "per-block")["flops_ratio"], unit="x")
    figures = (timed, counted)
    if timed.value is None or timed.low is None or timed.high is None:
        raise Undecided("one round has no interval; `--rounds 5` gives one")
    if 1.2 <= timed.low and timed.high <= 1.4:
        return Verdict(outcome="holds", reason="The whole interval lies there.", figures=figures)
    if timed.high < 1.2 or timed.low > 1.4:
        return Verdict(outcome="does not hold", reason="The whole interval lies outside.", figures=figures)
    reason = (
        "The interval reaches beyond 1.2 to 1.4 or is wider, so these rounds do not decide it; more of them on a quiet"
        " machine do. The counted FLOPs say what to expect where matrix products dominate."
    )
    return Verdict(outcome="undecided", reason=reason, figures=figures)


def half_with_ffn(evidence: Evidence) -> Verdict:
    """FFN-only gives about half of the savings and half of the overhead of per-block."""
    peaks = {s: evidence.number(ENCODER, s, "peak_allocated_bytes") for s in ("none", "ffn-only", "per-block")}
    flops = {s: evidence.number(ENCODER, s, "flops_ratio") - 1 for s in ("ffn-only", "per-block")}
    if peaks["none"] <= peaks["per-block"] or flops["per-block"] <= 0:
        raise Undecided("per-block saves nothing or costs nothing there, so half of it means nothing")
    saved = (peaks["none"] - peaks["ffn-only"]) / (peaks["none"] - peaks["per-block"])
    paid = flops["ffn-only"] / flops["per-block"]
    figures = (
        Figure(what="saving of the peak, of per-block's", value=saved, unit="share"),
        Figure(what="saving of what is kept after forward, of per-block's", value=_kept_share(evidence), unit="share"),
        Figure(what="extra FLOPs, of per-block's", value=paid, unit="share"),
        time_beside(evidence, ENCODER_TIME, "ffn-only", "time over none: ffn-only"),
        time_beside(evidence, ENCODER_TIME, "per-block", "per-block"),
    )
    are_half = {
        "savings": ABOUT_HALF[0] <= saved <= ABOUT_HALF[1],
        "overhead": ABOUT_HALF[0] <= paid <= ABOUT_HALF[1],
    }
    reason = "About half is taken as 40 to 60 %; the FFN has two thirds of a block's matrix products."
    reason += _scores_note(evidence)
    if all(are_half.values()):
        return Verdict(outcome="holds", reason=reason, figures=figures)
    if not any(are_half.values()):
        return Verdict(outcome="does not hold", reason=reason, figures=figures)
    (half,) = (name for name, is_half in are_half.items() if is_half)
    return Verdict(outcome="holds only if", condition=f"it is said of the {half} alone", reason=reason, figures=figures)


def _scores_note(evidence: Evidence) -> str:
    """Say what makes the figures of this model differ between a CPU and a GPU; nothing on a GPU."""
    return STORED_SCORES if evidence.row(ENCODER, "none")["device"] == "cpu" else ""


def _kept_share(evidence: Evidence) -> float | None:
    """What FFN-only drops of the bytes kept after forward, as a share of what per-block drops."""
    none, ffn, blockwise = (evidence.number(ENCODER, s, "saved_bytes") for s in ("none", "ffn-only", "per-block"))
    return (none - ffn) / (none - blockwise) if none > blockwise else None


def _along_segments(evidence: Evidence, key: str) -> dict[int, float]:
    return {n: evidence.number(ENCODER, f"segments:{n}", key) for n in (1, 2, 4, 8)}


def _rises(values: list[float]) -> bool:
    return all(later > earlier for earlier, later in zip(values, values[1:], strict=False))


def fewer_save_less(evidence: Evidence) -> Verdict:
    """Fewer segments mean less saving."""
    peaks, kept = (_along_segments(evidence, key) for key in ("peak_allocated_bytes", "saved_bytes"))
    figures = (
        *(Figure(what=f"peak, segments:{n}", value=size, unit="bytes") for n, size in peaks.items()),
        Figure(what="kept after forward, segments:1", value=kept[1], unit="bytes"),
        Figure(what="segments:8", value=kept[8], unit="bytes"),
    )
    if not _rises([-size for size in peaks.values()]):
        return Verdict(outcome="does not hold", reason="The peak does not fall with every cut.", figures=figures)
    reason = "The peak falls with every cut, since less is rebuilt at once."
    if kept[1] < kept[8]:
        reason += " What is kept after forward goes the other way; whoever reads memory there sees the opposite."
    return Verdict(outcome="holds", reason=reason, figures=figures)


def fewer_cost_less(evidence: Evidence) -> Verdict:
    """Fewer segments mean less overhead."""
    ours = _along_segments(evidence, "flops_ratio")
    theirs = {n: evidence.number(ENCODER, f"sequential:{n}", "flops_ratio") for n in (2, 4)}
    figures = (
        *(Figure(what=f"FLOPs over none, segments:{n}", value=ratio, unit="x") for n, ratio in ours.items()),
        *(Figure(what=f"sequential:{n}", value=ratio, unit="x") for n, ratio in theirs.items()),
    )
    if _rises(list(ours.values())):
        return Verdict(outcome="holds", reason="Every cut adds FLOPs.", figures=figures)
    reason = "However they are cut, all blocks are run once more."
    if _rises(list(theirs.values())):
        return Verdict(
            outcome="holds only if",
            condition="the last segment is left without a checkpoint, as checkpoint_sequential leaves it",
            reason=f"{reason} There 1/N of the blocks is spared.",
            figures=figures,
        )
    return Verdict(outcome="does not hold", reason=reason, figures=figures)


def one_saves_nothing(evidence: Evidence) -> Verdict:
    """One segment means no saving."""
    small, large = (
        1 - evidence.number(study, "segments:1", key) / evidence.number(study, "none", key)
        for study, key in ((ENCODER, "peak_allocated_bytes"), ("big_head", "peak_allocated_bytes"))
    )
    kept = 1 - evidence.number(ENCODER, "segments:1", "saved_bytes") / evidence.number(ENCODER, "none", "saved_bytes")
    figures = (
        Figure(what="saving of the peak, no head", value=small, unit="share"),
        Figure(what="a head that owns the peak", value=large, unit="share"),
        Figure(what="kept after forward, no head", value=kept, unit="share"),
    )
    if small > NOTICEABLE:
        return Verdict(outcome="does not hold", reason="The peak falls.", figures=figures)
    reason = "Backward begins by rebuilding the whole stack, so the peak is that of none, though less waits for it."
    if large <= NOTICEABLE:
        return Verdict(outcome="holds", reason=reason, figures=figures)
    return Verdict(
        outcome="holds only if",
        condition="the blocks own the peak",
        reason=f"{reason} Where head and loss own it, they run while the blocks are dropped, and that saves.",
        figures=figures,
    )
