"""The bare-loop test: the same model and step in a hand-written loop and through ckbench, alternating in one run.

    python benchmarks/fidelity.py [--pairs 15] [--steps 60]

Every measurement of either kind is a fresh process forked from the same warm server. Printed per size: the median over
pairs of (ckbench's median step over the loop's median step), with a 95 % interval of the geometric mean.
"""

import argparse
import json
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ckbench.config import ModelConfig, RunConfig, RunSettings, StrategySpec, TrainConfig
from ckbench.launch import Launcher, enter_child
from ckbench.statistics import paired_ratio

SIZES = {
    "1 ms": (dict(n_layers=1, d_model=16, n_heads=2, vocab_size=32), dict(batch_size=1, seq_len=8, optimizer="sgd")),
    "5 ms": (dict(n_layers=4, d_model=64, n_heads=4, vocab_size=128), dict(batch_size=2, seq_len=64, optimizer="sgd")),
    "20 ms": (dict(n_layers=4, d_model=128, n_heads=4, vocab_size=512), dict(batch_size=4, seq_len=64)),
    "80 ms": (dict(n_layers=6, d_model=256, n_heads=4, vocab_size=1024), dict(batch_size=4, seq_len=64)),
}
LIMITS = {"1 ms": 0.03, "5 ms": 0.01, "20 ms": 0.01, "80 ms": 0.01}
WARM_UP = 10


def bare_loop(connection: Connection, text: str, log: str) -> None:
    """Time the loop that a person would write; only the model class is ckbench's."""
    enter_child(connection, log)
    import torch
    from torch.nn import functional as F

    from ckbench import registry

    request = json.loads(text)
    config = RunConfig.model_validate_json(json.dumps(request["config"]))
    torch.set_num_threads(config.run.threads or 1)
    torch.manual_seed(config.run.seed)
    model = registry.load("models", config.model.family)(config.model, config.train.seq_len).module.train()
    classes = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = classes[config.train.optimizer](model.parameters(), lr=config.train.lr)
    shape = (config.train.batch_size, config.train.seq_len)
    inputs = torch.randint(config.model.vocab_size or 1, shape)
    targets = torch.randint(config.model.vocab_size or 1, shape)
    seconds = []
    for _ in range(WARM_UP + request["steps"]):
        begun = time.perf_counter()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begun)
    connection.send_bytes(json.dumps({"median_s": statistics.median(seconds[WARM_UP:])}).encode())
    connection.close()


def main() -> None:
    """Print one line per size, and whether it is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="draw the ratios as SVG")
    options = parser.parse_args()
    every: dict[str, list[float]] = {}
    launcher = Launcher()
    print(f"threads {options.threads}, {options.pairs} pairs of fresh processes, {options.steps} steps each")
    print(f"{'size':>6}  {'loop ms':>8}  {'median ratio':>12}  {'95 % interval':>15}  limit")
    for name, (model, train) in SIZES.items():
        run = RunSettings(
            device="cpu", threads=options.threads, warmup_steps=WARM_UP, min_steps=options.steps,
            max_steps=options.steps, max_seconds=600.0,
        )  # fmt: skip
        config = RunConfig(
            study="fidelity",
            model=ModelConfig(**model),
            train=TrainConfig(**train),
            strategy=StrategySpec(name="none"),
            run=run,
        )
        text = json.dumps({"config": config.model_dump(mode="json"), "steps": options.steps})
        ours: list[float] = []
        bare: list[float] = []

        def measure_ours(config: RunConfig = config, into: list[float] = ours) -> None:
            record = launcher.run(config, 1, lambda phase: None)
            assert record.status == "ok" and record.step_s_median is not None, record.message
            into.append(record.step_s_median)

        def measure_bare(text: str = text, into: list[float] = bare) -> None:
            answer, _, tail = launcher.converse(bare_loop, text, 600.0, lambda phase: None)
            assert answer is not None, tail
            into.append(answer["median_s"])

        for pair in range(options.pairs):
            for measure in (measure_ours, measure_bare) if pair % 2 else (measure_bare, measure_ours):
                measure()
        ratios = every[name] = [a / b for a, b in zip(ours, bare, strict=True)]
        _, low, high = paired_ratio(ours, bare)
        middle = statistics.median(ratios)
        verdict = "ok" if abs(middle - 1) <= LIMITS[name] else "ABOVE"
        print(
            f"{name:>6}  {statistics.median(bare) * 1e3:8.2f}  {middle:12.4f}  {low:7.4f}..{high:.4f}"
            f"  {LIMITS[name]:.0%} {verdict}",
            flush=True,
        )
    if options.plot:
        import _plot

        _plot.ratios(options.plot, "Step time through ckbench over a hand-written loop", every, LIMITS)


if __name__ == "__main__":
    main()
