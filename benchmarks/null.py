"""The null test: none against none must come out as no difference.

    python benchmarks/null.py --simulate 2000     scripted noise, through the replay device
    python benchmarks/null.py --simulate 2000 --max-rounds 15    the same, adding rounds until precise enough
    python benchmarks/null.py --real 20           real trials of a tiny model on this machine
    python benchmarks/null.py --methods 20000     interval methods at few rounds, on plain random numbers

Printed: in how many studies the 95 % interval of the ratio holds 1.00. Each simulated study goes the way of a real one
(trials, records, comparison), at the default rounds and steps, with noise between processes, between steps (heavy
tails), drift within a trial, slow bursts, and drift of the machine from round to round that both arms share.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ckbench.compare import compare
from ckbench.config import ModelConfig, RunConfig, RunSettings, StrategySpec, TrainConfig
from ckbench.engine.worker import run_trial
from ckbench.launch import Launcher
from ckbench.records import Record
from ckbench.session import is_vague
from ckbench.statistics import paired_ratio

NOISE = {
    "process": 0.01,
    "round": 0.03,
    "step": 0.02,
    "drift": 0.02,
    "burst_probability": 0.02,
    "burst_factor": 3.0,
    "tail": 3.0,
}
ARMS = (StrategySpec(name="none"), StrategySpec(name="none", repeat=2))


def simulated_device(folder: Path) -> str:
    """Write the script of a noisy device; give its name."""
    script = folder / "script.json"
    strategies = {"*": {"step_s": 0.01, "noise": NOISE}}
    script.write_text(json.dumps({"device_name": "simulated", "strategies": strategies}))
    return f"replay:{script}"


def study(
    device: str, seed: int, rounds: int, max_rounds: int, launcher: Launcher | None
) -> tuple[float, float, float]:
    """Measure none twice and give the second arm's ratio with its interval."""
    records: list[Record] = []
    number = 0
    while True:
        for spec in ARMS if number % 2 == 0 else ARMS[::-1]:
            config = RunConfig(
                study="null",
                model=ModelConfig(n_layers=4, d_model=64, n_heads=4, vocab_size=128),
                train=TrainConfig(batch_size=2, seq_len=64, optimizer="sgd"),
                strategy=spec,
                run=RunSettings(
                    device=device,
                    seed=seed,
                    threads=1,
                    parity=False,
                    rounds=rounds,
                    max_rounds=max_rounds or None,
                    max_seconds=2.0,
                ),  # fmt: skip
            )
            if launcher is None:
                record = run_trial(config, number, 0.0, lambda phase: None)
            else:
                record = launcher.run(config, max(1, number), lambda phase: None)
                record.round = number
            assert record.status == "ok", record.message
            record.started_at = f"{number:06d}"
            records.append(record)
        number += 1
        if number >= rounds:
            row = compare(r.to_json() for r in records).rows[1]
            if number >= max_rounds or not is_vague(row):
                values = row.values
                return values["slowdown_ratio"], values["slowdown_low"], values["slowdown_high"]


def main() -> None:
    """Print the coverage of one kind of study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", type=int, default=0, metavar="N")
    parser.add_argument("--real", type=int, default=0, metavar="N")
    parser.add_argument("--rounds", type=int, default=RunSettings().rounds)
    parser.add_argument("--max-rounds", type=int, default=0, help="go on until precise enough, up to this many")
    parser.add_argument("--plot", type=Path, help="draw the intervals of the last kind of study as SVG")
    parser.add_argument("--methods", type=int, default=0, metavar="N")
    options = parser.parse_args()
    if options.methods:
        print(methods(options.methods), flush=True)
    for n_studies, is_real in ((options.simulate, False), (options.real, True)):
        if n_studies:
            print(coverage(n_studies, is_real, options.rounds, options.max_rounds, options.plot), flush=True)


def methods(n_studies: int) -> str:
    """Compare how often each method's 95 % interval holds the truth, for log ratios of 3 to 10 rounds."""
    import numpy as np

    generator = np.random.default_rng(0)
    lines = ["rounds  Student's t  percentile bootstrap"]
    for rounds in (3, 4, 5, 7, 10):
        logs = generator.normal(0.0, 0.01, size=(n_studies, rounds))
        ours = 0
        for row in np.exp(logs[: min(n_studies, 20_000)]):
            _, low, high = paired_ratio(list(row), [1.0] * rounds)
            ours += low is not None and high is not None and low <= 1.0 <= high
        picks = generator.integers(0, rounds, size=(500, rounds))
        means = logs[:2000][:, picks].mean(axis=2)
        low_high = np.quantile(means, [0.025, 0.975], axis=1)
        bootstrap = float(((low_high[0] <= 0) & (low_high[1] >= 0)).mean())
        lines.append(f"{rounds:6}  {ours / min(n_studies, 20_000):11.1%}  {bootstrap:20.1%}")
    return "\n".join(lines)


def coverage(n_studies: int, is_real: bool, rounds: int, max_rounds: int, plot: Path | None) -> str:
    """Give the line to print."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher() if is_real else None
        device = "cpu" if is_real else simulated_device(Path(folder))
        results = [study(device, seed, rounds, max_rounds, launcher) for seed in range(n_studies)]
    if plot:
        import _plot

        _plot.intervals(plot, "none against none: 95 % intervals of the ratio", results[:200])
    held = sum(1 for _, low, high in results if low <= 1.0 <= high)
    ratio = statistics.fmean(ratio for ratio, _, _ in results)
    width = statistics.median(high / low - 1 for _, low, high in results)
    kind = "real" if is_real else "simulated"
    stop = f"{rounds} rounds" if max_rounds <= rounds else f"{rounds} to {max_rounds} rounds, adaptive"
    return (
        f"{kind}, {stop}: interval holds 1.00 in {held} of {n_studies} studies ({held / n_studies:.1%}), "
        f"mean ratio {ratio:.4f}, median width of the interval {width:.1%}"
    )


if __name__ == "__main__":
    main()
