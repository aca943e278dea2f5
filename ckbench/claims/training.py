"""Claims about precision, accumulation and offload."""

from ckbench.claims.base import Figure, Undecided, Verdict
from ckbench.claims.evidence import Evidence

HALF = (0.48, 0.52)
SAME = 0.01
MASSES = {"weights": "static_bytes", "gradients": "gradient_bytes", "activations": "saved_bytes"}


def mixed_halves(evidence: Evidence) -> Verdict:
    """Mixed precision halves activations, weights and gradients."""
    study = "mixed_precision"
    whole = {what: evidence.number(study, "none", key, precision="fp32") for what, key in MASSES.items()}
    shares: dict[str, dict[str, float]] = {}
    figures = []
    for precision in ("bf16", "bf16-pure"):
        shares[precision] = {
            what: evidence.number(study, "none", key, precision=precision) / whole[what] for what, key in MASSES.items()
        }
        figures += [
            Figure(what=f"{precision}: {what} of fp32's", value=share, unit="share")
            for what, share in shares[precision].items()
        ]
    halved = {p: [what for what, share in parts.items() if HALF[0] <= share <= HALF[1]] for p, parts in shares.items()}
    if len(halved["bf16"]) == len(MASSES):
        return Verdict(outcome="holds", reason="Autocast halves all three.", figures=tuple(figures))
    if len(halved["bf16-pure"]) < len(MASSES):
        reason = "Not even pure bf16 halves all three."
        return Verdict(outcome="does not hold", reason=reason, figures=tuple(figures))
    left = ", ".join(what for what in MASSES if what not in halved["bf16"])
    return Verdict(
        outcome="holds only if",
        condition="weights themselves are kept in 2 bytes (bf16-pure)",
        reason=f"Autocast does not halve {left}: weights and gradients stay fp32 and are cast where they are used, and"
        " the residual stream, norms and loss keep fp32 activations.",
        figures=tuple(figures),
    )


def accumulation_changes_nothing(evidence: Evidence) -> Verdict:
    """Gradient accumulation leaves the activation peak of a micro-batch unchanged."""
    study = "micro_batches"
    counts = evidence.settings(study, "grad_accumulation")
    if len(counts) < 2:
        raise Undecided(f"{study} has one number of micro-batches, and a change needs two")
    figures, kept_same, peak_same = [], True, True
    for strategy in ("none", "per-block"):
        for key, what in (("saved_bytes", "kept after forward"), ("activation_peak_bytes", "live at the peak")):
            first, last = (evidence.number(study, strategy, key, grad_accumulation=n) for n in (counts[0], counts[-1]))
            same = abs(last / first - 1) <= SAME
            kept_same, peak_same = (
                (kept_same and same, peak_same) if key == "saved_bytes" else (kept_same, peak_same and same)
            )
            told = f"{strategy}: activations {what}, {counts[-1]} micro-batches over {counts[0]}"
            figures.append(Figure(what=told, value=last / first, unit="x"))
        first, last = (
            evidence.number(study, strategy, "peak_allocated_bytes", grad_accumulation=n)
            for n in (counts[0], counts[-1])
        )
        figures.append(Figure(what=f"{strategy}: peak of all tensors", value=last / first, unit="x"))
    if not kept_same:
        reason = "What blocks keep changes with the number of micro-batches."
        return Verdict(outcome="does not hold", reason=reason, figures=tuple(figures))
    if peak_same:
        reason = "Neither what blocks keep nor what is live at the peak changes; the peak of all tensors may."
        return Verdict(outcome="holds", reason=reason, figures=tuple(figures))
    return Verdict(
        outcome="holds only if",
        condition="it is said of what blocks keep",
        reason="That stays the same. Gradients of earlier micro-batches stay allocated, so the peak of the step is"
        " reached at another instant, where other activations are live.",
        figures=tuple(figures),
    )


def offload_beats_recompute(evidence: Evidence) -> Verdict:
    """Offload instead of recompute wins when the link is fast."""
    study = "offload_or_recompute"
    offload, blockwise, none = (evidence.row(study, s) for s in ("offload", "per-block", "none"))
    moved = evidence.number(study, "offload", "host_store_peak_bytes")
    recomputed = evidence.number(study, "per-block", "flops_backward") - evidence.number(
        study, "none", "flops_backward"
    )
    if recomputed <= 0:
        raise Undecided("per-block recomputes nothing there")
    intensity = moved / recomputed
    figures = [
        Figure(what="moved to the host and back", value=moved, unit="bytes"),
        Figure(what="recomputed by per-block", value=recomputed, unit="FLOPs"),
        Figure(what="moved per recomputed FLOP", value=intensity, unit="bytes/FLOP"),
        Figure(what="peak, offload over none", value=_ratio(offload, none), unit="x"),
        Figure(what="per-block over none", value=_ratio(blockwise, none), unit="x"),
    ]
    width = none["model"]["d_model"]
    condition = (
        f"the link moves more than {intensity:.3g} bytes for every FLOP that the device makes meanwhile (at d {width};"
        " it falls as 1/d)"
    )
    if not str(none["device"]).startswith("cuda"):
        reason = (
            "It needs a device with a link: on this machine host and device share one memory, so speed is not decided."
            f" Offload wins if bytes / link rate < FLOPs / compute rate, that is only if {condition}."
        )
        return Verdict(outcome="not measured here", reason=reason, figures=tuple(figures))
    ratios = [(row["slowdown_low"], row["slowdown_high"]) for row in (offload, blockwise)]
    if any(bound is None for pair in ratios for bound in pair):
        raise Undecided("one round has no interval; `--rounds 5` gives one")
    figures += [
        Figure(what=f"time over none, {row['strategy']}", value=row["slowdown_ratio"], low=low, high=high, unit="x")
        for row, (low, high) in zip((offload, blockwise), ratios, strict=True)
    ]
    (offload_low, offload_high), (block_low, block_high) = ratios
    if offload_high < block_low:
        return Verdict(
            outcome="holds only if", condition=condition, reason="Offload is faster here.", figures=tuple(figures)
        )
    if offload_low > block_high:
        reason = f"Recomputation is faster here: it would take a link with which {condition}."
        return Verdict(outcome="does not hold", reason=reason, figures=tuple(figures))
    return Verdict(outcome="undecided", reason="The intervals overlap.", figures=tuple(figures))


def _ratio(row: dict[str, object], base: dict[str, object]) -> float | None:
    peak, other = row["peak_allocated_bytes"], base["peak_allocated_bytes"]
    return peak / other if isinstance(peak, int) and isinstance(other, int) and other else None
