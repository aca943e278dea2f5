"""Claims about how activations grow with depth and tokens."""

import math

from ckbench.claims.base import Figure, Undecided, Verdict
from ckbench.claims.evidence import Evidence
from ckbench.statistics import Line, fit_line

STUDY = "memory_laws"
GOOD_FIT = 0.999
"""R² from which a law is said to be followed."""
SAME = 0.02
"""Relative difference below which two sizes are said to be equal."""


def _activations(evidence: Evidence, strategy: str, batch_size: int) -> dict[int, float]:
    """Give activation bytes at the peak by depth."""
    depths = evidence.settings(STUDY, "n_layers")
    if len(depths) < 3:
        raise Undecided(f"{STUDY} has {len(depths)} depths, and a law needs three")
    key = "activation_peak_bytes"
    return {n: evidence.number(STUDY, strategy, key, n_layers=n, batch_size=batch_size) for n in depths}


def _fewest(evidence: Evidence) -> int:
    return int(evidence.settings(STUDY, "batch_size")[0])


def _by_depth(sizes: dict[int, float]) -> Line:
    return fit_line(list(sizes), list(sizes.values()))


def _by_root(sizes: dict[int, float]) -> Line:
    return fit_line([math.sqrt(n) for n in sizes], list(sizes.values()))


def linear_without(evidence: Evidence) -> Verdict:
    """Memory O(N·L) without checkpointing, N tokens."""
    few, *_, many = evidence.settings(STUDY, "batch_size")
    sizes = _activations(evidence, "none", few)
    line = _by_depth(sizes)
    deepest = max(sizes)
    grown = _activations(evidence, "none", many)[deepest] / sizes[deepest]
    asked = many / few
    short, *_, long = evidence.settings("attention_scores", "seq_len")

    def growth(attention: str) -> float:
        """Kept bytes of a token at the longest sequence over those at the shortest."""
        kept = [
            evidence.number("attention_scores", "none", "saved_bytes", attention=attention, seq_len=n) / n
            for n in (short, long)
        ]
        return float(kept[1] / kept[0])

    fused, eager = growth("flash"), growth("eager")
    figures = (
        Figure(what="R² of a + b·L", value=line.r2, unit="count"),
        Figure(what="slope per block", value=line.slope, unit="bytes"),
        Figure(what=f"{asked:g} times the sequences", value=grown, unit="x"),
        Figure(what=f"kept per token, seq {long} over {short}: flash", value=fused, unit="x"),
        Figure(what="eager", value=eager, unit="x"),
    )
    is_linear = line.r2 >= GOOD_FIT and line.slope > 0 and abs(grown / asked - 1) <= 5 * SAME
    if not is_linear or abs(fused - 1) > SAME:
        reason = "Activations at the peak do not grow in proportion to depth and tokens."
        return Verdict(outcome="does not hold", reason=reason, figures=figures)
    reason = "Activations at the peak lie on a straight line over the depth and grow in proportion to the sequences."
    if abs(eager - 1) <= SAME:
        return Verdict(outcome="holds", reason=reason, figures=figures)
    reason += " With longer sequences a token costs more where scores are stored: O(N·L) becomes O(N·L·s)."
    return Verdict(
        outcome="holds only if", condition="attention stores no scores (fused)", reason=reason, figures=figures
    )


def root_with_segments(evidence: Evidence) -> Verdict:
    """Memory O(N·sqrt(L)) with sqrt(L) segments."""
    few = _fewest(evidence)
    sizes = _activations(evidence, "sqrt", few)
    blockwise = _activations(evidence, "per-block", few)
    root, line = _by_root(sizes), _by_depth(sizes)
    inside = _by_depth(_activations(evidence, "none", few)).slope
    boundary = _by_depth(blockwise).slope
    deepest = max(sizes)
    figures = [
        Figure(what="R² of a + b·√L", value=root.r2, unit="count"),
        Figure(what="R² of a + b·L", value=line.r2, unit="count"),
        Figure(what=f"sqrt at {deepest} layers over per-block", value=sizes[deepest] / blockwise[deepest], unit="x"),
    ]
    if root.r2 < GOOD_FIT or root.r2 <= line.r2 or root.slope <= 0:
        reason = "Activations at the peak do not follow the root of the depth."
        return Verdict(outcome="does not hold", reason=reason, figures=tuple(figures))
    reason = "Activations at the peak follow the root of the depth."
    if boundary > 0 and sizes[deepest] > blockwise[deepest]:
        figures.append(Figure(what="a/b", value=inside / boundary, unit="count"))
        figures.append(
            Figure(what="layers where sqrt meets per-block, (a/b)²", value=(inside / boundary) ** 2, unit="count")
        )
        reason += (
            " It is not the lowest for that: a segment of √L whole blocks is rebuilt at once, while one region per"
            " block, which is O(N·L), adds a boundary per block only and stays below up to (a/b)² layers."
        )
    return Verdict(outcome="holds", reason=reason, figures=tuple(figures))


def constant_with_full(evidence: Evidence) -> Verdict:
    """Full recomputation keeps O(1) memory at 100 % extra forward."""
    few = _fewest(evidence)
    depths = evidence.settings(STUDY, "n_layers")
    kept = [evidence.number(STUDY, "full", "saved_bytes", n_layers=n, batch_size=few) for n in (depths[0], depths[-1])]
    peak = _activations(evidence, "full", few)
    beside = peak[depths[-1]] / _activations(evidence, "none", few)[depths[-1]]
    extra = [_extra_forward(evidence, strategy) for strategy in ("full,early_stop=false", "full")]
    figures = (
        Figure(what=f"kept after forward, {depths[-1]} over {depths[0]} layers", value=kept[1] / kept[0], unit="x"),
        Figure(what="activations at the peak, the same", value=peak[depths[-1]] / peak[depths[0]], unit="x"),
        Figure(what=f"of those of none at {depths[-1]} layers", value=beside, unit="share"),
        Figure(what="extra forward FLOPs", value=extra[0], unit="share"),
        Figure(what="with early stop", value=extra[1], unit="share"),
    )
    if abs(kept[1] / kept[0] - 1) > SAME or abs(extra[0] - 1) > 5 * SAME:
        reason = "What is kept grows with the depth, or the extra forward is not one whole forward."
        return Verdict(outcome="does not hold", reason=reason, figures=figures)
    if peak[depths[-1]] / peak[depths[0]] - 1 <= SAME:
        return Verdict(outcome="holds", reason="Neither what is kept nor the peak grows.", figures=figures)
    return Verdict(
        outcome="holds only if",
        condition="memory means what waits between forward and backward, not the peak",
        reason="One region over the whole stack keeps its input alone, and backward begins by rebuilding everything"
        " at once, so the peak grows with the depth as under none.",
        figures=figures,
    )


def _extra_forward(evidence: Evidence, strategy: str) -> float:
    """FLOPs added to backward, as a share of forward's."""
    study = "recompute_cost"
    dropout = evidence.settings(study, "dropout")[0]
    with_it = evidence.number(study, strategy, "flops_backward", dropout=dropout)
    without = evidence.number(study, "none", "flops_backward", dropout=dropout)
    return (with_it - without) / evidence.number(study, "none", "flops_forward", dropout=dropout)


def nested_is_lower(evidence: Evidence) -> Verdict:
    """Nested checkpointing buys more memory."""
    few = _fewest(evidence)
    nested, blockwise = (_activations(evidence, strategy, few) for strategy in ("nested:4", "per-block"))
    deepest = max(nested)
    flops = evidence.number(STUDY, "nested:4", "flops_ratio", n_layers=deepest, batch_size=few)
    other = evidence.number(STUDY, "per-block", "flops_ratio", n_layers=deepest, batch_size=few)
    figures = (
        *(
            Figure(what=f"nested:4 over per-block at {n} layers", value=nested[n] / blockwise[n], unit="x")
            for n in nested
        ),
        Figure(what="FLOPs over none, nested:4", value=flops, unit="x"),
        Figure(what="per-block", value=other, unit="x"),
    )
    lower = [n for n in nested if nested[n] < blockwise[n] * (1 - SAME)]
    if not lower:
        reason = "Activations at the peak are no lower at any depth measured."
        return Verdict(outcome="does not hold", reason=reason, figures=figures)
    reason = "It keeps a boundary per region instead of one per block, and pays with another run of most blocks."
    if len(lower) == len(nested):
        return Verdict(outcome="holds", reason=reason, figures=figures)
    if lower != [n for n in nested if n >= lower[0]]:
        raise Undecided("nested is lower at some depths and not at deeper ones")
    return Verdict(
        outcome="holds only if",
        condition=f"the stack is deep (from {lower[0]} layers on here)",
        reason=reason,
        figures=figures,
    )


def constant_with_reversible(evidence: Evidence) -> Verdict:
    """Reversible layers keep O(1)."""
    study = "reversible_depth"
    depths = evidence.settings(study, "n_layers")
    if len(depths) < 2:
        raise Undecided(f"{study} has one depth, and growth needs two")

    def grown(strategy: str, key: str) -> float:
        first, last = (evidence.number(study, strategy, key, n_layers=n) for n in (depths[0], depths[-1]))
        return last / first

    kept, peak = grown("reversible", "saved_bytes"), grown("reversible", "activation_peak_bytes")
    over = f"{depths[-1]} over {depths[0]} layers"
    figures = (
        Figure(what=f"kept after forward, {over}", value=kept, unit="x"),
        Figure(what="activations at the peak, the same", value=peak, unit="x"),
        Figure(what="kept under per-block", value=grown("per-block", "saved_bytes"), unit="x"),
        Figure(
            what="FLOPs over none",
            value=evidence.number(study, "reversible", "flops_ratio", n_layers=depths[-1]),
            unit="x",
        ),
    )
    if kept - 1 > SAME:
        return Verdict(outcome="does not hold", reason="What is kept grows with the depth.", figures=figures)
    if peak - 1 > SAME:
        return Verdict(
            outcome="holds only if",
            condition="memory means what waits between forward and backward",
            reason="Activations at the peak grow with the depth.",
            figures=figures,
        )
    reason = "Neither what is kept nor activations at the peak grow with the depth; weights and gradients still do."
    return Verdict(outcome="holds", reason=reason, figures=figures)
