"""Records for the page: a sweep of depths with exact laws, and one whose every string is an attack."""

import math
from typing import Any

from tests.sample_records import MIB, record

ATTACK = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>{{7*7}}`'\"&lt;%{x}"
STRATEGIES = ("none", "per-block", "sqrt", "every-k:2")


def activations(strategy: str, depth: int) -> int:
    """Give what each strategy's activations take by its law: straight lines, and a root."""
    a, b = {"none": (1, 10), "per-block": (8, 1), "sqrt": (3, 6), "every-k:2": (12, 2)}[strategy]
    grown = math.sqrt(depth) if strategy == "sqrt" else depth
    return round((a + b * grown) * MIB)


def timeline(peak: int) -> list[list[float]]:
    """Give a small timeline with that peak, in backward."""
    return [[0.0, peak // 4, 0], [0.3, peak // 2, 1], [0.5, peak // 2, 2], [0.7, peak, 2], [1.0, peak // 4, 3]]


def sweep(depths: tuple[int, ...] = (2, 4, 6, 8), **changes: Any) -> list[dict[str, Any]]:
    """Give one session over depths and strategies, in three rounds."""
    records = []
    for depth in depths:
        for place, strategy in enumerate(STRATEGIES):
            kept = activations(strategy, depth)
            static, gradients = 3 * depth * MIB, depth * MIB
            peak = static + gradients + kept
            for number in range(3):
                step_s = depth * (0.1 + 0.02 * place) * (1 + 0.01 * number)
                values = dict(
                    round_number=number,
                    order=place,
                    model__n_layers=depth,
                    step_samples_s=[step_s * (1 + 0.001 * i) for i in range(7)],
                    step_s_median=step_s,
                    step_s_low=step_s * 0.99,
                    step_s_high=step_s * 1.01,
                    strategy_spec={"name": strategy.partition(":")[0]},
                )
                if number == 0:
                    values |= {
                        "peak_allocated_bytes": peak,
                        "activation_peak_bytes": kept,
                        "static_bytes": static,
                        "gradient_bytes": gradients,
                        "saved_bytes": kept // 2,
                        "peak_forward_bytes": peak // 2,
                        "peak_loss_bytes": peak // 2,
                        "peak_backward_bytes": peak,
                        "peak_optimizer_bytes": static + gradients,
                        "live_bytes_timeline": timeline(peak),
                    }
                records.append(record(strategy, **{**values, **changes}))
    return records


def hostile() -> list[dict[str, Any]]:
    """Give records of a stranger who wants a script to run in the reader's browser."""
    records = []
    for depth in (2, 4, 6, 8):
        for i, name in enumerate((f"none{ATTACK}", f"x{ATTACK}")):
            records.append(
                record(
                    name,
                    study=ATTACK,
                    study_notes=[ATTACK],
                    device=ATTACK,
                    device_name=ATTACK,
                    model={"family": ATTACK, ATTACK: ATTACK, "n_layers": depth},
                    environment={"torch": ATTACK, ATTACK: {ATTACK: ATTACK}, "threads": 1},
                    order=i,
                    alias_of=ATTACK,
                    peak_allocated_bytes=(50 + i + depth) * MIB,
                    activation_peak_bytes=depth * MIB,
                    static_bytes=MIB,
                    peak_forward_bytes=40 * MIB,
                    peak_phase=ATTACK,
                    live_bytes_timeline=[[0, 1, 0], [ATTACK, 2, 1], [0.5, ATTACK, 1], [0.5, 5, 9], ATTACK, [1, 9, 3]],
                )
            )
    records.append(record("full", study=ATTACK, status="oom", failed_phase=ATTACK, message=ATTACK))
    return records
