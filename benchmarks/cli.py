"""Speed of the tool itself: ``ckbench --help``, and ``ckbench report`` over growing folders.

    python benchmarks/cli.py [--repeats 7]

Printed: the median and smallest wall time of fresh interpreters, and how the time of ``report`` grows per record.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ckbench.records import Record

ROOT = Path(__file__).parents[1]
SIZES = (1000, 2000, 5000, 10_000)
STRATEGIES = ("none", "per-block", "every-k:2", "ffn-only", "full")
ROUNDS = 5
SAMPLES = 60


def write_records(folder: Path, n_records: int) -> None:
    """Write records like those of a depth sweep: five strategies, five rounds, sixty samples each."""
    plain: dict[str, Any] = {"device": "cpu", "device_name": "a processor", "study": "growth", "session_id": "s"}
    environment = {"torch": "2.13.0", "code": "c", "threads": 2, "allocator": {}, "load_1min": 0.1}
    with (folder / "growth.jsonl").open("w") as file:
        for i in range(n_records):
            depth, rest = divmod(i, len(STRATEGIES) * ROUNDS)
            round_number, which = divmod(rest, len(STRATEGIES))
            step_s = 0.01 * (1 + which * 0.1) * (1 + 0.001 * round_number)
            record = Record(
                **plain,
                record_id=f"r{i}",
                strategy=STRATEGIES[which],
                configuration_id=f"{depth}-{which}",
                round=round_number,
                order=rest,
                started_at=f"2026-01-01T00:00:{round_number:02d}.000+00:00",
                model={"family": "gpt", "n_layers": depth + 1, "d_model": 64, "n_heads": 4, "vocab_size": 128},
                train={"batch_size": 2, "seq_len": 64, "precision": "fp32"},
                run={"precision_target": 0.01, "warmup_steps": 3, "seed": 0},
                environment=environment,
                parity="exact" if round_number == 0 else None,
                peak_allocated_bytes=10**8 + which if round_number == 0 else None,
                saved_bytes=10**7 if round_number == 0 else None,
                step_samples_s=[step_s * (1 + 0.001 * (k % 7)) for k in range(SAMPLES)],
                step_s_median=step_s,
                step_s_low=step_s,
                step_s_high=step_s,
                samples=SAMPLES,
                outliers=0,
            )
            file.write(json.dumps(record.to_json()) + "\n")


def wall_s(arguments: list[str], repeats: int) -> list[float]:
    """Time fresh interpreters."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "ckbench", *arguments], cwd=ROOT, capture_output=True, text=True)
        times.append(time.perf_counter() - begun)
        assert done.returncode == 0, done.stderr
    return times


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plot", type=Path, help="draw the growth of report as SVG")
    options = parser.parse_args()
    grown = []
    for command in (["--help"], ["list"], ["run", "--help"]):
        times = wall_s(command, options.repeats)
        print(f"ckbench {' '.join(command):12} median {statistics.median(times):.2f} s, smallest {min(times):.2f} s")
    for size in SIZES:
        with tempfile.TemporaryDirectory() as name:
            write_records(Path(name), size)
            times = wall_s(["report", name], max(3, options.repeats // 2))
        middle = statistics.median(times)
        grown.append(middle)
        print(
            f"ckbench report, {size:6} records: median {middle:.2f} s, {middle / size * 1e6:.0f} us per record",
            flush=True,
        )
    if options.plot:
        import _plot

        _plot.line(options.plot, "Wall time of ckbench report", SIZES, grown, ("records", "seconds"))


if __name__ == "__main__":
    main()
