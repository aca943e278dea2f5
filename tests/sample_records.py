"""Records made by hand, for tests of storing, comparing and drawing."""

from typing import Any

from ckbench.records import Record

MIB = 2**20
STEPS = {"none": 0.100, "per-block": 0.125, "every-k:2": 0.130}
PEAKS = {"none": 80 * MIB, "per-block": 50 * MIB, "every-k:2": 60 * MIB}


def record(strategy: str = "none", *, round_number: int = 0, **changes: Any) -> dict[str, Any]:
    """Give one ok record as it is stored; ``changes`` replace fields, ``model.x`` and ``train.x`` their keys."""
    step_s = STEPS.get(strategy, 0.2) * (1 + 0.01 * round_number)
    values: dict[str, Any] = {
        "record_id": f"{strategy}-{round_number}-{sorted(changes.items())}",
        "session_id": "s1",
        "configuration_id": f"c-{strategy}",
        "study": "sample",
        "strategy": strategy,
        "round": round_number,
        "order": list(STEPS).index(strategy) if strategy in STEPS else 9,
        "started_at": f"2026-11-29T10:00:{round_number:02d}.000+00:00",
        "trial_s": 1.0,
        "device": "cpu",
        "device_name": "A processor (2 cores)",
        "model": {"family": "gpt", "n_layers": 4, "d_model": 64, "n_heads": 4, "vocab_size": 128},
        "train": {"batch_size": 2, "seq_len": 64, "precision": "fp32", "grad_accumulation": 1},
        "run": {"seed": 0, "warmup_steps": 3, "precision_target": 0.5},
        "environment": {"torch": "2.13.0", "code": "abc", "threads": 2, "allocator": {}, "load_1min": 0.1},
        "n_parameters": 236_900,
        "parity": "exact" if round_number == 0 else None,
        "step_samples_s": [step_s] * 7,
        "step_s_median": step_s,
        "step_s_low": step_s,
        "step_s_high": step_s,
        "samples": 7,
        "outliers": 0,
        "skipped_optimizer_steps": 0,
        "tokens_per_s": 128 / step_s,
    }
    if round_number == 0:
        recomputed = 0 if strategy == "none" else 4
        values |= {
            "peak_allocated_bytes": PEAKS.get(strategy, 70 * MIB),
            "peak_phase": "backward",
            "saved_bytes": PEAKS.get(strategy, 70 * MIB) // 2,
            "activation_peak_bytes": PEAKS.get(strategy, 70 * MIB) // 3,
            "flops_forward": 1000,
            "flops_backward": 2000 if strategy == "none" else 2700,
            "block_calls_forward": 4,
            "block_calls_backward": recomputed,
            "block_calls_backward_planned": recomputed,
            "region_calls_backward": recomputed,
            "n_regions": recomputed,
        }
    for key, value in changes.items():
        section, dot, name = key.partition("__")
        if dot:
            values[section] = {**values[section], name: value}
        else:
            values[key] = value
    return Record(**values).to_json()


def study(n_rounds: int = 3, **changes: Any) -> list[dict[str, Any]]:
    """Give a whole session of three strategies."""
    return [record(name, round_number=i, **changes) for i in range(n_rounds) for name in STEPS]
