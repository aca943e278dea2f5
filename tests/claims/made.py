"""Evidence made by hand: rows and estimates with just the figures that a claim reads."""

from collections.abc import Callable
from typing import Any

from ckbench.claims.base import Verdict
from ckbench.claims.catalogue import CLAIMS
from ckbench.claims.evidence import Evidence

MIB = 2**20


def row(study: str, strategy: str, *, device: str = "cpu", status: str = "ok", **values: Any) -> dict[str, Any]:
    """Make a row; ``model_x`` and ``train_x`` are keys of the sections, all else are figures."""
    made: dict[str, Any] = {"study": study, "strategy": strategy, "device": device, "status": status}
    made |= {"command": "", "model": {}, "train": {}, "environment": {}, "started_at": ""}
    made |= {"slowdown_ratio": None, "slowdown_low": None, "slowdown_high": None}
    for key, value in values.items():
        section, _, name = key.partition("_")
        if section in ("model", "train"):
            made[section][name] = value
        else:
            made[key] = value
    return made


def judged(
    name: str, rows: list[dict[str, Any]] | None = None, estimates: list[dict[str, Any]] | None = None
) -> Verdict:
    """Let the claim of a name judge."""
    (claim,) = (claim for claim in CLAIMS if claim.name == name)
    return claim.judge(Evidence(device="a processor", rows=rows or [], estimates=estimates or []))


DEPTHS = (4, 9, 16, 25)
INSIDE, BOUNDARY = 16 * MIB, MIB

Size = Callable[[int], float]
PEAKS: dict[str, Size] = {
    "none": lambda n: n * INSIDE,
    "per-block": lambda n: n * BOUNDARY + INSIDE,
    "sqrt": lambda n: n**0.5 * (INSIDE + BOUNDARY),
    "full": lambda n: n * INSIDE + BOUNDARY,
    "nested:4": lambda n: (n / 4 + 3) * BOUNDARY + INSIDE,
}
KEPT: dict[str, Size] = {**PEAKS, "full": lambda n: BOUNDARY}


def memory_laws(**changes: Size) -> list[dict[str, Any]]:
    """Make the study of depths; a strategy's law of peaks may be replaced, ``kept_full`` what full keeps."""
    kept_full = changes.pop("kept_full", KEPT["full"])
    peaks = {**PEAKS, **{key.replace("_", ":") if key == "nested_4" else key: law for key, law in changes.items()}}
    return [
        row(
            "memory_laws",
            strategy,
            model_n_layers=n,
            train_batch_size=batch,
            activation_peak_bytes=law(n) * batch,
            saved_bytes=(kept_full if strategy == "full" else law)(n) * batch,
            flops_ratio=1.3,
        )
        for strategy, law in peaks.items()
        for n in DEPTHS
        for batch in (4, 8)
    ]


def attention_scores(fused_growth: float = 0.0, eager_growth: float = 0.004, base: float = 1.0) -> list[dict[str, Any]]:
    """Make the study of sequences: a token keeps ``base + growth·s``, and without its core ``base``."""
    return [
        row(
            "attention_scores",
            strategy,
            model_attention=attention,
            train_seq_len=s,
            saved_bytes=s * 1000 * (base + (growth * s if strategy == "none" else 0.0)),
        )
        for attention, growth in (("flash", fused_growth), ("eager", eager_growth))
        for s in (128, 256, 512)
        for strategy in ("none", "core-attn")
    ]


def recompute_cost(dropped: float = 1.33, stopped: float = 1.22, extra: float = 1.0) -> list[dict[str, Any]]:
    """Make the study of FLOPs: ratios with dropout or run to the end, and without dropout and with early stop."""
    rows = []
    for dropout in (0.0, 0.1):
        for strategy in ("none", "per-block", "per-block,early_stop=false", "full", "full,early_stop=false"):
            is_short = strategy == "per-block" and not dropout
            backward = 200 if strategy == "none" else 200 + 100 * extra
            rows.append(
                row(
                    "recompute_cost",
                    strategy,
                    model_dropout=dropout,
                    flops_forward=100,
                    flops_backward=backward,
                    flops_ratio=stopped if is_short else dropped,
                )
            )
    return rows


ENCODER: dict[str, tuple[float, float, float]] = {
    # strategy: peak MiB, kept MiB, FLOPs over none
    "none": (500, 300, 1.0),
    "per-block": (200, 20, 1.33),
    "segments:1": (500, 10, 1.33),
    "segments:2": (350, 12, 1.33),
    "segments:4": (270, 15, 1.33),
    "segments:8": (200, 20, 1.33),
    "sequential:2": (400, 160, 1.17),
    "sequential:4": (300, 90, 1.25),
    "ffn-only": (350, 150, 1.17),
}


def encoder(
    times: tuple[float, float, float] | None = None, **changes: tuple[float, float, float]
) -> list[dict[str, Any]]:
    """Make the study of eight layers; ``per_block=...`` replaces a strategy's figures, ``segments_1`` likewise."""
    spelled = {key.replace("per_block", "per-block").replace("ffn_only", "ffn-only"): v for key, v in changes.items()}
    spelled = {key.replace("s_", "s:").replace("l_", "l:"): value for key, value in spelled.items()}
    ratio, low, high = times or (None, None, None)
    figures = {**ENCODER, **spelled}
    return [
        row(
            study,
            strategy,
            peak_allocated_bytes=round(peak * MIB),
            activation_peak_bytes=round(peak * MIB) - 100 * MIB,
            saved_bytes=round(kept * MIB),
            static_bytes=75 * MIB,
            gradient_bytes=25 * MIB,
            flops_ratio=flops,
            slowdown_ratio=ratio,
            slowdown_low=low,
            slowdown_high=high,
        )
        for study in ("encoder_8x512", "encoder_time")
        for strategy, (peak, kept, flops) in figures.items()
    ]


def layers(
    study: str,
    per_layer: Callable[[str, str, int], float],
    *,
    d_model: int = 12288,
    n_heads: int = 96,
    batches: tuple[int, ...] = (1, 32),
) -> list[dict[str, Any]]:
    """Make estimates of one and two layers; ``per_layer`` tells bytes by strategy, attention and batch."""
    return [
        row(
            study,
            strategy,
            model_n_layers=n,
            model_attention=attention,
            model_d_model=d_model,
            model_n_heads=n_heads,
            train_batch_size=batch,
            train_seq_len=2048,
            saved_bytes=7 * MIB + n * per_layer(strategy, attention, batch),
        )
        for n in (1, 2)
        for attention in ("eager", "flash")
        for batch in batches
        for strategy in ("none", "per-block", "core-attn")
    ]


def by_formula(d_model: int, n_heads: int, scale: float = 1.0) -> Callable[[str, str, int], float]:
    """Give the bytes of a layer by sbh(34 + 5as/h), times ``scale``."""

    def size(strategy: str, attention: str, batch: int) -> float:
        if strategy == "per-block":
            return 2 * 2048 * batch * d_model
        scores = 5 * n_heads * 2048 / d_model if attention == "eager" and strategy == "none" else 0
        return scale * 2048 * batch * d_model * (34 + scores)

    return size
