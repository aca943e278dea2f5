"""Estimates against measurements that other people published: every row whose configuration can be expressed.

    python benchmarks/published.py ROWS.csv [--plot FILE.svg]

ROWS.csv has a row per measurement: model, batch, sequence, type, attention, strategy, what was measured and its value.
Printed per row: published, estimated, error; then the median. No constant is fitted to a row. Rows that cannot be
expressed are listed with the reason.
"""

import argparse
import csv
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ckbench import specs
from ckbench.config import HfConfig, RunConfig, RunSettings, TrainConfig
from ckbench.units import MIB_BYTES

UNITS = {"GiB": 2**30, "MiB": 2**20, "MB (1e6 B)": 10**6, "GB": 10**9}
STRATEGIES = {"none": "none", "full per-block (HF gradient_checkpointing)": "hf-native", "full per-block": "hf-native"}
DTYPES = {"fp32": "fp32", "fp16 (whole model)": "fp16-pure", "bf16": "bf16-pure"}
WORKSPACE_BYTES = 8_519_680


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published row as a trial of ours."""

    config: RunConfig
    prepare: Callable[[Any], None] | None
    figure: str


class NoOptimizer:
    """Forward and backward alone."""

    implementation = "none"

    def step(self, scaler: Any) -> bool:
        """Update nothing."""
        return True

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Let gradients go, as the row's loop does before each forward."""
        for parameter in self.parameters:
            parameter.grad = None

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def device_tensors(self) -> list[Any]:
        """Hold no state."""
        return []

    def figures(self) -> dict[str, Any]:
        """Give nothing."""
        return {}


def forward_and_backward_of_summed_logits(trial: Any) -> None:
    """Turn a trial into what the row measured: the loss is the sum of the logits, and there is no optimizer.

    The published loop calls the model without arguments beside the tokens, so it gives a cache of keys and values too,
    and keeps what it gave until the next forward has ended.
    """
    library_model = trial.module.model
    held: list[Any] = []

    def forward(inputs: Any) -> Any:
        given = library_model(input_ids=inputs, use_cache=True)
        held[:] = [given]
        return given.logits

    trial.module.forward = forward
    trial.compute_loss = lambda output, targets: output.sum()
    trial.optimizer = NoOptimizer(trial.module.parameters())


def case_of(row: dict[str, str]) -> Case | str:
    """Express a row, or say why not."""
    arch = {"gpt2": "gpt2", "gpt2-large": "gpt2"}.get(row["model"])
    if arch is None:
        return f"model {row['model'] or '(none)'} is not expressed"
    figure = {
        "peak allocated (memory snapshot)": "peak",
        "peak allocated (max_memory_allocated)": "peak",
        "optimizer state": "optimizer",
        "backward/gradient part of peak": "gradients",
        "activation part of peak": "activations",
    }.get(row["measured_quantity"])
    if figure is None:
        return f"{row['measured_quantity']} is not estimated"
    strategy = STRATEGIES.get(row["strategy"], "none" if row["strategy"].startswith("none") else None)
    if strategy is None or row["dtype"] not in DTYPES:
        return f"strategy {row['strategy']} or type {row['dtype']} is not expressed"
    config = RunConfig(
        study="published",
        model=HfConfig(
            arch=arch,
            n_layers=int(row["layers"]),
            config={
                "n_embd": int(row["d_model"]),
                "n_head": int(row["heads"]),
                "vocab_size": int(row["vocab"]),
                "n_positions": 1024,
            },
            attention="eager" if row["attention"] == "eager" else "sdpa",
        ),
        train=TrainConfig(batch_size=int(row["batch"]), seq_len=int(row["seq"]), precision=DTYPES[row["dtype"]]),
        strategy=specs.parse(strategy),
        run=RunSettings(device="cuda"),
    )
    without_optimizer = row["optimizer"].startswith("none")
    return Case(
        config=config, prepare=forward_and_backward_of_summed_logits if without_optimizer else None, figure=figure
    )


def estimated_bytes(case: Case) -> int:
    """Replay a case and give the figure that was published."""
    from ckbench.estimate.replay import replay
    from ckbench.estimate.worker import figures_of

    replayed = replay(case.config, "cuda", WORKSPACE_BYTES, prepare=case.prepare)
    made = figures_of("", replayed, "cuda")
    assert made.peak_allocated_bytes and made.static_bytes and made.gradient_bytes is not None
    if case.figure == "peak":
        return made.peak_allocated_bytes
    if case.figure == "gradients":
        return made.gradient_bytes
    if case.figure == "optimizer":
        return sum(t.numel() * t.element_size() for t in replayed.trial.optimizer.device_tensors() if t.dim())
    return int(replayed.steady["activation_peak_bytes"])


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", default="", help="ids that begin so")
    parser.add_argument("--json", type=Path, help="also write the figures")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with options.rows.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    errors, kept, reasons = [], [], {}
    print(f"{'row':8}  {'published MiB':>13}  {'estimated MiB':>13}  {'error':>7}  grade")
    for row in rows:
        if not row["id"].startswith(options.only):
            continue
        case = case_of(row)
        if isinstance(case, str):
            reasons[row["id"]] = case
            continue
        published = float(row["value"]) * UNITS[row["unit"]]
        estimated = estimated_bytes(case)
        error = estimated / published - 1
        errors.append(abs(error))
        kept.append({"id": row["id"], "published_bytes": published, "estimated_bytes": estimated, "error": error})
        print(
            f"{row['id']:8}  {published / MIB_BYTES:13.1f}  {estimated / MIB_BYTES:13.1f}"
            f"  {error:+7.1%}  {row['grade']}",
            flush=True,
        )
    if errors:
        within = sum(1 for error in errors if error <= 0.05)
        print(f"{len(errors)} rows: median error {statistics.median(errors):.1%}, {within} within 5 %")
    for reason in sorted(set(reasons.values())):
        print(f"not expressed, {reason}: {', '.join(i for i, r in reasons.items() if r == reason)}")
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
