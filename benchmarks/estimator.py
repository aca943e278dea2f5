"""Estimates against real steps on this processor, and how fast they are beside PyTorch's own tracker.

    python benchmarks/estimator.py [--json FILE] [--plot FILE.svg]
    python benchmarks/estimator.py --speed

First: every family x strategy x precision x size is run for real under the profiler's allocator events (exact) and
replayed without data; printed is how far the replayed peak and kept bytes are off. Larger errors are listed with the
phase of the peak. ``--speed`` times estimates of deep stacks, by replay and by chain model, and PyTorch's
torch.distributed._tools.MemTracker on the same model, then both beside a real step.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ckbench import specs
from ckbench.config import ModelConfig, RunConfig, RunSettings, TrainConfig, model_class
from ckbench.units import MIB_BYTES

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "vocab_size": 512, "dropout": 0.1},
    "llama": {"family": "llama", "vocab_size": 512, "n_kv_heads": 2},
    "bert": {"family": "bert", "vocab_size": 512},
    "vit": {"family": "vit", "image_size": 32, "patch_size": 4, "n_classes": 10},
    "gpt, eager": {"family": "gpt", "vocab_size": 512, "attention": "eager"},
    "llama, reversible": {"family": "llama", "vocab_size": 512, "residual": "reversible"},
}
STRATEGIES = ("none", "per-block", "every-k:2", "nested:2", "ffn-only", "attn-only", "selective:matmul", "full")
PRECISIONS = ("fp32", "bf16")
SIZES = ((4, 64, 64), (6, 96, 32), (3, 128, 128))
"""Blocks, width, sequence."""
BATCH = 4
EXACT_BYTES = 64


def points() -> list[tuple[str, str, str, RunConfig]]:
    """List the grid."""
    found = []
    for name, settings in FAMILIES.items():
        for n_layers, width, seq_len in SIZES:
            cls = model_class(settings["family"])
            assert issubclass(cls, ModelConfig)
            model = cls(**{"n_layers": n_layers, "d_model": width, "n_heads": 4, **settings})
            for precision in PRECISIONS:
                for spec in STRATEGIES:
                    config = RunConfig(
                        study="estimator",
                        model=model,
                        train=TrainConfig(
                            batch_size=BATCH, seq_len=model.own_seq_len() or seq_len, precision=precision
                        ),
                        strategy=specs.parse(spec),
                        run=RunSettings(device="cpu", threads=1),
                    )
                    found.append((name, precision, spec, config))
    return found


def validate(options: argparse.Namespace) -> None:
    """Print how far estimates are off."""
    import torch

    from ckbench.devices.cpu import Cpu
    from ckbench.engine.trial import NoObserver
    from ckbench.estimate.replay import replay

    torch.set_num_threads(1)
    device = Cpu("cpu", 1)
    rows = []
    for name, precision, spec, config in points():
        subject = device.subject(config, 0)
        subject.step(NoObserver())
        real = device.weigh(subject)
        replayed = replay(config, "cpu").steady
        row = {
            "family": name,
            "precision": precision,
            "strategy": spec,
            "n_layers": config.model.n_layers,
            "real_bytes": real["peak_allocated_bytes"],
            "estimated_bytes": replayed["peak_allocated_bytes"],
            "saved_off_bytes": replayed["saved_bytes"] - real["saved_bytes"],
            "phase": real["peak_phase"],
        }
        row["error"] = row["estimated_bytes"] / row["real_bytes"] - 1
        rows.append(row)
    for precision in PRECISIONS:
        chosen = [row for row in rows if row["precision"] == precision]
        errors = [abs(row["error"]) for row in chosen]
        exact = sum(1 for row in chosen if abs(row["estimated_bytes"] - row["real_bytes"]) <= EXACT_BYTES)
        kept = sum(1 for row in chosen if abs(row["saved_off_bytes"]) <= EXACT_BYTES)
        print(
            f"{precision}: {len(chosen)} points; peak within {EXACT_BYTES} bytes at {exact}, within 1 % at "
            f"{sum(1 for error in errors if error <= 0.01)}; largest error {max(errors):.2%}, "
            f"median {statistics.median(errors):.4%}; kept bytes within {EXACT_BYTES} bytes at {kept}"
        )
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[: options.worst]:
        if abs(row["error"]) > 0.01:
            print(
                f"  {row['error']:+6.1%}  {row['family']}, {row['strategy']}, {row['precision']}, "
                f"{row['n_layers']} blocks, {row['real_bytes'] / MIB_BYTES:.2f} MiB, peak in {row['phase']}"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        import _plot

        grouped = {
            f"{name}, {precision}": [
                row["estimated_bytes"] / row["real_bytes"]
                for row in rows
                if row["family"] == name and row["precision"] == precision
            ]
            for name in FAMILIES
            for precision in PRECISIONS
        }
        _plot.ratios(options.plot, "Estimated over real peak, CPU", grouped, dict.fromkeys(grouped, 0.01))


DEEP = {
    "GPT-2 width, 48 blocks": dict(n_layers=48, d_model=768, n_heads=12, vocab_size=50257, tie_embeddings=True),
    "Llama-7B": dict(family="llama", n_layers=32, d_model=4096, n_heads=32, d_ff=11008, vocab_size=32000),
}


SMALL = dict(n_layers=6, d_model=128, n_heads=4, vocab_size=512)
"""Small enough to run for real."""
METHODS = ("replay", "chain")


def speed() -> None:
    """Print seconds and peaks of estimates of deep stacks, then PyTorch's own tracker on the same and on real steps."""
    from ckbench.estimate.worker import estimate

    train = TrainConfig(batch_size=1, seq_len=1024, precision="bf16-pure")
    run = RunSettings(device="cuda")
    for method in METHODS:  # imports
        estimate(_config(SMALL | {"n_layers": 20}, train, "none", run), "cuda", method=method)
    for name, sizes in DEEP.items():
        for spec in ("none", "per-block", "nested:4", "full"):
            for method in METHODS:
                begun = time.perf_counter()
                made = estimate(_config(sizes, train, spec, run), "cuda", method=method)
                seconds = time.perf_counter() - begun
                told = (
                    f"{(made.peak_requested_bytes or 0) / MIB_BYTES:10.1f} MiB" if made.reason is None else made.reason
                )
                print(f"{name:24} {spec:10} {method:7} {seconds:7.2f} s  {told}", flush=True)
    begun = time.perf_counter()
    peak = mem_tracker_peak_bytes(DEEP["GPT-2 width, 48 blocks"], batch_size=1, seq_len=1024, n_steps=1)
    seconds = time.perf_counter() - begun
    print(
        f"{'GPT-2 width, 48 blocks':24} {'none':10} MemTracker, 1 step, fp32 {seconds:7.2f} s"
        f"  {peak / MIB_BYTES:10.1f} MiB"
    )
    _against_real()


def _against_real() -> None:
    """Print peaks of a steady fp32 step on this processor: real, replayed, and by MemTracker."""
    import torch

    from ckbench.devices.cpu import Cpu
    from ckbench.engine.trial import NoObserver
    from ckbench.estimate.worker import estimate

    torch.set_num_threads(1)
    train = TrainConfig(batch_size=BATCH, seq_len=128, optimizer_implementation="foreach")
    config = _config(SMALL, train, "none", RunSettings(device="cpu", threads=1))
    device = Cpu("cpu", 1)
    subject = device.subject(config, 0)
    subject.step(NoObserver())
    real = device.weigh(subject)["peak_allocated_bytes"]
    found = {}
    begun = time.perf_counter()
    found["replay"] = estimate(config, "cpu", method="replay").peak_allocated_bytes or 0, time.perf_counter() - begun
    begun = time.perf_counter()
    peak = mem_tracker_peak_bytes(SMALL, batch_size=BATCH, seq_len=128, n_steps=2)
    found["MemTracker"] = peak, time.perf_counter() - begun
    for name, (n_bytes, seconds) in found.items():
        print(
            f"6 blocks, 2 steps in fp32, {name}: {n_bytes / MIB_BYTES:.3f} MiB, real {real / MIB_BYTES:.3f} MiB "
            f"({n_bytes / real - 1:+.2%}), {seconds:.2f} s"
        )


def mem_tracker_peak_bytes(sizes: dict[str, Any], *, batch_size: int, seq_len: int, n_steps: int) -> int:
    """Give the peak of the last of some plain fp32 steps on fake tensors by torch.distributed's MemTracker."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.nn import functional as F

    from ckbench import registry

    with FakeTensorMode(), torch.device("cpu"):
        model = registry.load("models", "gpt")(ModelConfig(**sizes), seq_len).module
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        inputs = torch.zeros(batch_size, seq_len, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, inputs)
        with tracker:
            for step in range(n_steps):
                loss = F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
                if step == 0 and n_steps > 1:
                    tracker.reset_mod_stats()
        peaks = tracker.get_tracker_snapshot("peak")
    return int(peaks[torch.device("cpu")]["Total"])


def _config(sizes: dict[str, Any], train: TrainConfig, spec: str, run: RunSettings) -> RunConfig:
    return RunConfig(study="speed", model=ModelConfig(**sizes), train=train, strategy=specs.parse(spec), run=run)


def main() -> None:
    """Print one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--worst", type=int, default=12, help="how many of the largest errors to list")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.speed:
        speed()
    else:
        validate(options)


if __name__ == "__main__":
    main()
