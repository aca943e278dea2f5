"""The bare-loop test: the same model and step in a hand-written loop and through ckbench, alternating in one run.

    python benchmarks/fidelity.py [--processes 10] [--windows 40]
    python benchmarks/fidelity.py --apart [--processes 15]

In each of several fresh processes both build the same model and then take turns, a window of steps each: ckbench's
through the very function that times trials. Per process the ratio is that of the two median steps. Printed per size:
the median of the processes' ratios, with a 95 % interval of their geometric mean. ``--apart`` gives each measurement a
process of its own instead, as trials have them; then what the machine does between two processes is in the ratio too.
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
WINDOW = 5
"""Steps between two turns."""


class BareLoop:
    """The loop that a person would write; only the model class is ckbench's."""

    def __init__(self, config: RunConfig) -> None:
        import torch

        from ckbench import registry

        torch.manual_seed(config.run.seed)
        self.model = registry.load("models", config.model.family)(config.model, config.train.seq_len).module.train()
        classes = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        self.optimizer = classes[config.train.optimizer](self.model.parameters(), lr=config.train.lr)
        shape = (config.train.batch_size, config.train.seq_len)
        self.inputs = torch.randint(config.model.vocab_size or 1, shape)
        self.targets = torch.randint(config.model.vocab_size or 1, shape)

    def run(self, n_steps: int) -> list[float]:
        """Give the seconds of each of ``n_steps``."""
        from torch.nn import functional as F

        model, optimizer, inputs, targets = self.model, self.optimizer, self.inputs, self.targets
        seconds = []
        for _ in range(n_steps):
            begun = time.perf_counter()
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - begun)
        return seconds


def take_turns(connection: Connection, text: str, log: str) -> None:
    """In one process: windows of both, alternating, and the medians of all their steps."""
    enter_child(connection, log)
    from ckbench.devices.cpu import Cpu
    from ckbench.engine.measure import time_steps

    request = json.loads(text)
    config = RunConfig.model_validate_json(json.dumps(request["config"]))
    device = Cpu("cpu", config.run.threads)
    made = {}
    for name in ("bare", "ours") if request["bare_first"] else ("ours", "bare"):
        made[name] = BareLoop(config) if name == "bare" else device.subject(config, 1)
    bare, subject = made["bare"], made["ours"]
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    for window in range(-2, request["windows"]):
        for name in ("bare", "ours") if window % 2 else ("ours", "bare"):
            if name == "bare":
                fresh = bare.run(WINDOW)
            else:
                fresh = [times.step_s for times in time_steps(subject, device, config)[0]]
            if window >= 0:
                seconds[name] += fresh
    connection.send_bytes(json.dumps({name: statistics.median(values) for name, values in seconds.items()}).encode())
    connection.close()


def bare_alone(connection: Connection, text: str, log: str) -> None:
    """Time the hand-written loop in a process of its own."""
    enter_child(connection, log)
    import torch

    request = json.loads(text)
    config = RunConfig.model_validate_json(json.dumps(request["config"]))
    torch.set_num_threads(config.run.threads or 1)
    seconds = BareLoop(config).run(WARM_UP + config.run.min_steps)
    connection.send_bytes(json.dumps({"bare": statistics.median(seconds[WARM_UP:])}).encode())
    connection.close()


def pair_in_one(launcher: Launcher, config: RunConfig, number: int, windows: int) -> tuple[float, float]:
    """Give the median step of ckbench and of the loop, taking turns in one fresh process."""
    run = config.run.model_copy(update={"min_steps": WINDOW, "max_steps": WINDOW})
    config = config.model_copy(update={"run": run})
    request = {"config": config.model_dump(mode="json"), "windows": windows, "bare_first": bool(number % 2)}
    answer, _, tail = launcher.converse(take_turns, json.dumps(request), 600.0, lambda phase: None)
    assert answer is not None, tail
    return answer["ours"], answer["bare"]


def pair_apart(launcher: Launcher, config: RunConfig, number: int, windows: int) -> tuple[float, float]:
    """Give the median step of ckbench and of the loop, each in a fresh process, in alternating order."""
    text = json.dumps({"config": config.model_dump(mode="json")})
    found: dict[str, float] = {}
    for name in ("ours", "bare") if number % 2 else ("bare", "ours"):
        if name == "bare":
            answer, _, tail = launcher.converse(bare_alone, text, 600.0, lambda phase: None)
            assert answer is not None, tail
            found[name] = answer["bare"]
        else:
            record = launcher.run(config, 1, lambda phase: None)
            assert record.status == "ok" and record.step_s_median is not None, record.message
            found[name] = record.step_s_median
    return found["ours"], found["bare"]


def main() -> None:
    """Print one line per size, and whether it is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=10, help="fresh processes (or pairs of them) per size")
    parser.add_argument("--windows", type=int, default=40, help=f"turns of {WINDOW} steps in each process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=SIZES, help="one size alone")
    parser.add_argument("--apart", action="store_true", help="give each measurement a process of its own")
    parser.add_argument("--plot", type=Path, help="draw the ratios as SVG")
    options = parser.parse_args()
    steps = WINDOW * options.windows
    every: dict[str, list[float]] = {}
    launcher = Launcher()
    how = "each in a process of its own" if options.apart else "taking turns in one process"
    print(f"threads {options.threads}, {options.processes} times, {how}, {steps} steps of each")
    print(f"{'size':>6}  {'loop ms':>8}  {'median ratio':>12}  {'95 % interval':>15}  limit")
    for name, (model, train) in SIZES.items():
        if options.only not in (None, name):
            continue
        run = RunSettings(
            device="cpu", threads=options.threads, warmup_steps=WARM_UP, min_steps=steps, max_steps=steps,
            max_seconds=600.0,
        )  # fmt: skip
        config = RunConfig(
            study="fidelity",
            model=ModelConfig(**model),
            train=TrainConfig(**train),
            strategy=StrategySpec(name="none"),
            run=run,
        )
        measure = pair_apart if options.apart else pair_in_one
        pairs = [measure(launcher, config, number, options.windows) for number in range(options.processes)]
        ours, bare = zip(*pairs, strict=True)
        ratios = every[name] = [a / b for a, b in pairs]
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
