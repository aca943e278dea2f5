"""What a strategy costs beyond its FLOPs, and who takes it: the arithmetic, torch's checkpoint, or ckbench.

    python benchmarks/overhead.py [--rounds 5] [--processes 5] [--plot FILE.svg]

Printed first, per strategy and model: measured slowdown (fresh processes, rounds alternating, 95 % interval) beside the
counted ratio of FLOPs. Then the excess of per-block taken apart, with variants that alternate step by step within each
of several fresh processes, among them a loop that has no code of ckbench's but the model, and a profile. Last, regions
of next to nothing: what one region costs whatever it computes. The taking apart is in processor time of the one thread
that works, so that other programs on the machine disturb it less.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from ckbench import specs
from ckbench.compare import Row, compare
from ckbench.config import ModelConfig, RunConfig, RunSettings, TrainConfig
from ckbench.launch import Launcher, enter_child
from ckbench.plan import StackShape
from ckbench.statistics import t_quantile

SIZES = {
    "small": (dict(n_layers=4, d_model=64, n_heads=4, vocab_size=128), dict(batch_size=2, seq_len=64, optimizer="sgd")),
    "larger": (dict(n_layers=4, d_model=128, n_heads=4, vocab_size=512), dict(batch_size=4, seq_len=64)),
}
STRATEGIES = (
    "none", "per-block", "every-k:2", "segments:3", "sqrt", "full", "one-in-k:2", "first-n:1", "ffn-only",
    "attn-only", "nested:2", "recursive",
)  # fmt: skip
WARM_UP = 5
PROFILED_STEPS = 20
MICRO_BLOCKS, MICRO_CYCLES = 64, 30
"""The stack whose blocks multiply eight numbers, and how often each variant gets its turn."""
GROUPS = {
    "ckbench": (("ckbench/engine/checkpointing.py", ""),),
    "saved tensors: hooks, and the check that they come back alike": (
        ("torch/utils/checkpoint.py", "_hook"), ("torch/utils/checkpoint.py", "check_recomputed"),
        ("torch/utils/checkpoint.py", "meta_extractor"), ("torch/autograd/graph.py", ""), ("/weakref.py", ""),
        ("torch/autograd/grad_mode.py", ""), ("", "_set_grad_enabled"), ("torch/_dynamo/eval_frame.py", ""),
    ),
    "random state: get and set": (("torch/random.py", ""), ("", "get_state"), ("", "set_state")),
    "autocast contexts": (("amp/autocast_mode.py", ""), ("", "autocast")),
    "other frames of torch's checkpoint": (
        ("torch/utils/checkpoint.py", ""), ("/contextlib.py", ""), ("utils/_pytree.py", ""), ("torch/overrides.py", ""),
        ("torch/_compile.py", ""), ("torch/_dynamo", ""), ("torch/compiler", ""),
    ),
}  # fmt: skip
"""Whose a profiled function is: the first group with a part of its file's name and a part of its own name."""


class Difference(NamedTuple):
    """Microseconds per region, with a 95 % interval over processes."""

    middle: float
    half: float

    def __str__(self) -> str:
        return f"{self.middle:9.1f} ± {self.half:5.1f}"


def main() -> None:
    """Print the three parts, and draw the first where a file for it is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes per strategy and model")
    parser.add_argument("--steps", type=int, default=30, help="timed steps in each")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes for the taking apart")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw the first part (matplotlib comes with the extra bench)"
    )
    options = parser.parse_args()
    launcher = Launcher()
    measured = {name: slowdowns(name, launcher, options.rounds, options.steps) for name in SIZES}
    if options.plot is not None:
        print(draw(measured, options.plot))
    for name, rows in measured.items():
        take_apart(name, rows, launcher, options.processes, options.steps)
    regions_of_nothing(launcher, options.processes)


def config_of(size: str, strategy: str, steps: int) -> RunConfig:
    """Ask for a fixed number of steps on one thread."""
    model, train = SIZES[size]
    run = RunSettings(
        device="cpu", threads=1, warmup_steps=WARM_UP, min_steps=steps, max_steps=steps, max_seconds=600.0, parity=False
    )
    return RunConfig(
        study="overhead",
        model=ModelConfig(**model),
        train=TrainConfig(**train),
        strategy=specs.parse(strategy),
        run=run,
    )


def slowdowns(size: str, launcher: Launcher, rounds: int, steps: int) -> list[Row]:
    """Measure every strategy in alternating rounds and print slowdown, FLOPs and the excess."""
    records = []
    for number in range(rounds):
        for strategy in STRATEGIES if number % 2 == 0 else STRATEGIES[::-1]:
            record = launcher.run(config_of(size, strategy, steps), number, lambda phase: None)
            assert record.status == "ok", record.message
            record.round, record.started_at = number, f"{number:06d}"
            records.append(record.to_json())
    rows = sorted(compare(records).rows, key=lambda row: STRATEGIES.index(row.label))
    step_ms = rows[0].values["step_s_median"] * 1e3
    print(f"{size} model: {describe(size)}; none takes {step_ms:.2f} ms per step, {rounds} rounds")
    print(f"{'strategy':>20}  {'FLOPs':>6}  {'slowdown':>8}  {'95 % interval':>14}  excess")
    for row in rows[1:]:
        ratio, low, high, flops = (
            row.values[k] for k in ("slowdown_ratio", "slowdown_low", "slowdown_high", "flops_ratio")
        )
        interval = f"{low:6.3f}..{high:.3f}" if low is not None else "n/a"
        print(f"{row.label:>20}  {flops:6.3f}  {ratio:8.3f}  {interval:>14}  {ratio / flops - 1:+.1%}", flush=True)
    print()
    return rows


def describe(size: str) -> str:
    """Write a size in a few words."""
    model, train = SIZES[size]
    return (
        f"{model['n_layers']} blocks of width {model['d_model']}, batch {train['batch_size']} x {train['seq_len']}, "
        f"{train.get('optimizer', 'adamw')}"
    )


def take_apart(size: str, rows: list[Row], launcher: Launcher, processes: int, steps: int) -> None:
    """Print what the excess of per-block consists of."""
    text = json.dumps({"config": config_of(size, "per-block", steps).model_dump(mode="json"), "cycles": steps})
    answers = [ask(launcher, alternate, text) for _ in range(processes)]
    n_regions = SIZES[size][0]["n_layers"]

    def between(variant: str, other: str) -> Difference:
        return spread([(a[variant] - a[other]) / n_regions * 1e6 for a in answers])

    none_us = statistics.fmean(a["none, by hand"] for a in answers) / n_regions * 1e6
    flops = next(row.values["flops_ratio"] for row in rows if row.label == "per-block")
    owed = (flops - 1) * none_us
    total = between("per-block, ckbench", "none, by hand")
    excess = total.middle - owed
    again = between("none, blocks forward twice", "none, by hand")
    machinery = between("per-block, by hand, early_stop off", "none, blocks forward twice")
    saved = between("per-block, by hand", "per-block, by hand, early_stop off")
    ours = between("per-block, ckbench", "per-block, by hand")
    print(
        f"{size} model, per-block, microseconds per region and step (mean and 95 % interval of {processes} processes)"
    )
    print(f"{total}  per-block in ckbench, over none by hand")
    print(f"{owed:9.1f}          of that is what the FLOPs ratio {flops:.3f} says; the excess is {excess:.1f}:")
    floor = Difference(again.middle + saved.middle - owed, again.half + saved.half)
    print(f"{floor}  {floor.middle / excess:7.1%}  the forward once more takes longer than its FLOPs say")
    print(f"{machinery}  {machinery.middle / excess:7.1%}  torch's checkpoint, over running the forward twice")
    print(f"{ours}  {ours.middle / excess:7.1%}  ckbench, over torch's checkpoint called in a hand-written loop")
    print("among them:")
    for label, difference in (
        ("saved by early_stop, by hand", saved),
        ("preserve_rng, by hand", between("per-block, by hand", "per-block, by hand, preserve_rng off")),
        ("preserve_rng, ckbench", between("per-block, ckbench", "per-block, ckbench, preserve_rng off")),
        ("early_stop, ckbench", between("per-block, ckbench", "per-block, ckbench, early_stop off")),
        ("counting wrappers, none in ckbench over none by hand", between("none, ckbench", "none, by hand")),
    ):
        print(f"{difference}           {label}")
    print("what the interpreter spends on checkpointing, by cProfile (which slows short functions the most):")
    for group in GROUPS:
        print(f"{statistics.fmean(a['profile'].get(group, 0.0) for a in answers):18.1%}  {group}")
    print(flush=True)


def ask(launcher: Launcher, entry: Callable[..., None], text: str) -> dict[str, Any]:
    """Run ``entry`` in a fresh process and give its answer."""
    answer, _, tail = launcher.converse(entry, text, 600.0, lambda phase: None)
    assert answer is not None, tail
    return answer


def spread(values: list[float]) -> Difference:
    """Give mean and half the 95 % interval (Student's t)."""
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Difference(statistics.fmean(values), half)


def alternate(connection: Connection, text: str, log: str) -> None:
    """Run one step of each variant in turn, over and over, on one model; send the median seconds of each."""
    enter_child(connection, log)
    import torch
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    from ckbench import registry
    from ckbench.engine.checkpointing import AppliedPlan
    from ckbench.engine.optimizers import build_optimizer

    request = json.loads(text)
    config = RunConfig.model_validate_json(json.dumps(request["config"]))
    torch.set_num_threads(1)
    torch.manual_seed(config.run.seed)
    built = registry.load("models", config.model.family)(config.model, config.train.seq_len)
    model = built.module.train()
    optimizer, _ = build_optimizer(model, config.train, "cpu")
    shape = (config.train.batch_size, config.train.seq_len)
    inputs = torch.randint(config.model.vocab_size or 1, shape)
    targets = torch.randint(config.model.vocab_size or 1, shape)
    positions = torch.arange(config.train.seq_len)

    def by_hand(run_block: Callable[..., Any]) -> Callable[[], Any]:
        """Write the model's forward out, with every block run by ``run_block``."""

        def forward() -> Any:
            hidden = model.tokens(inputs) + model.positions(positions)
            for block in model.blocks:
                hidden = run_block(block, hidden)
            return model.head(model.norm(hidden))

        return forward

    def checkpointed(**options: bool) -> Callable[[], Any]:
        return by_hand(lambda block, hidden: checkpoint(block, hidden, use_reentrant=False, **options))

    def twice(block: Any, hidden: Any) -> Any:
        block(hidden)
        return block(hidden)

    def step(forward: Callable[[], Any]) -> None:
        loss = F.cross_entropy(forward().flatten(0, 1), targets.flatten())
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    variants: dict[str, tuple[Callable[[], Any], str | None]] = {
        "none, by hand": (by_hand(lambda block, hidden: block(hidden)), None),
        "none, blocks forward twice": (by_hand(twice), None),
        "none, ckbench": (lambda: model(inputs), "none"),
        "per-block, by hand": (checkpointed(), None),
        "per-block, by hand, preserve_rng off": (checkpointed(preserve_rng_state=False), None),
        "per-block, by hand, early_stop off": (checkpointed(early_stop=False), None),
        "per-block, ckbench": (lambda: model(inputs), "per-block"),
        "per-block, ckbench, preserve_rng off": (lambda: model(inputs), "per-block,preserve_rng=false"),
        "per-block, ckbench, early_stop off": (lambda: model(inputs), "per-block,early_stop=false"),
    }
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for cycle in range(WARM_UP + request["cycles"]):
        turn = cycle % len(names)
        for name in [*names[turn:], *names[:turn]] if cycle % 2 else [*names[:turn][::-1], *names[turn:][::-1]]:
            forward, spec = variants[name]
            applied = None
            if spec is not None:
                plan = specs.resolve(specs.parse(spec), StackShape(n_layers=len(built.blocks)))
                applied = AppliedPlan(built, plan)
            begun = time.thread_time()
            step(forward)
            seconds[name].append(time.thread_time() - begun)
            if applied is not None:
                applied.remove()
    answer: dict[str, Any] = {name: statistics.median(samples[WARM_UP:]) for name, samples in seconds.items()}
    AppliedPlan(built, specs.resolve(specs.parse("per-block"), StackShape(n_layers=len(built.blocks))))
    profiler = cProfile.Profile()
    for _ in range(PROFILED_STEPS):
        profiler.runcall(step, lambda: model(inputs))
    answer["profile"] = shares(pstats.Stats(profiler))
    connection.send_bytes(json.dumps(answer).encode())
    connection.close()


def regions_of_nothing(launcher: Launcher, processes: int) -> None:
    """Print what a region costs whose block multiplies eight numbers."""
    answers = [ask(launcher, next_to_nothing, "") for _ in range(processes)]
    print(f"regions of next to nothing: microseconds per block and step, {processes} processes")
    for name in answers[0]:
        over = name.replace("ckbench", "by hand")
        value, difference = spread([a[name] for a in answers]), spread([a[name] - a[over] for a in answers])
        print(f"{value}  {name:44}" + (f"{difference} over by hand" if "ckbench" in name else ""))


def next_to_nothing(connection: Connection, text: str, log: str) -> None:
    """Time a stack of tiny blocks under none and per-block, by hand and in ckbench."""
    enter_child(connection, log)
    import gc

    import torch
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    from ckbench.engine.checkpointing import AppliedPlan
    from ckbench.models.base import BuiltModel

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor, scale: tuple[Tensor, ...] = ()) -> Tensor:
            return x * self.weight

    torch.set_num_threads(1)
    blocks = tuple(Tiny() for _ in range(MICRO_BLOCKS))
    built = BuiltModel(module=nn.ModuleList(blocks), blocks=blocks, parts=({},) * MICRO_BLOCKS)
    x, scale = torch.ones(8, requires_grad=True), (torch.ones(8),)

    def stack(run_block: Callable[..., Any]) -> Callable[[], None]:
        def step() -> None:
            hidden = x
            for block in blocks:
                hidden = run_block(block, hidden)
            hidden.sum().backward()

        return step

    def by_hand(**options: bool) -> Callable[[], None]:
        return stack(lambda block, hidden: checkpoint(block, hidden, use_reentrant=False, **options))

    plain = stack(lambda block, hidden: block(hidden))
    variants: dict[str, tuple[Callable[[], None], str | None]] = {
        "none, by hand": (plain, None),
        "none, ckbench": (plain, "none"),
        "per-block, by hand": (by_hand(), None),
        "per-block, by hand again": (by_hand(), None),
        "per-block, by hand, preserve_rng off": (by_hand(preserve_rng_state=False), None),
        "per-block, ckbench": (plain, "per-block"),
        "per-block, ckbench, preserve_rng off": (plain, "per-block,preserve_rng=false"),
        "per-block, by hand, blocks take a tuple too": (
            stack(lambda block, hidden: checkpoint(block, hidden, scale, use_reentrant=False)),
            None,
        ),
        "per-block, ckbench, blocks take a tuple too": (stack(lambda block, hidden: block(hidden, scale)), "per-block"),
    }

    def seconds(step: Callable[[], None]) -> float:
        begun = time.thread_time()
        step()
        return time.thread_time() - begun

    smallest: dict[str, list[float]] = {name: [] for name in variants}
    gc.collect()
    gc.freeze()  # what is there already need not be looked through again
    for cycle in range(MICRO_CYCLES):
        for name in list(variants) if cycle % 2 else list(variants)[::-1]:
            step, spec = variants[name]
            applied = None
            if spec is not None:
                applied = AppliedPlan(built, specs.resolve(specs.parse(spec), StackShape(n_layers=len(blocks))))
            step()
            gc.collect()
            smallest[name].append(min(seconds(step) for _ in range(3)))
            if applied is not None:
                applied.remove()
    answer = {name: statistics.median(values) / MICRO_BLOCKS * 1e6 for name, values in smallest.items()}
    connection.send_bytes(json.dumps(answer).encode())
    connection.close()


def shares(stats: pstats.Stats) -> dict[str, float]:
    """Give each group's share of the time that the functions of all groups spent themselves."""
    found = dict.fromkeys(GROUPS, 0.0)
    for (file, _, name), (_, _, own_s, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        where = file.replace("\\", "/")
        for group, patterns in GROUPS.items():
            if any(part in where and word in name for part, word in patterns):
                found[group] += own_s
                break
    total = sum(found.values())
    return {group: own_s / total for group, own_s in found.items()}


def draw(measured: dict[str, list[Row]], path: Path) -> str:
    """Draw, per model and strategy, the counted ratio and the measured one with its interval."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (it comes with the extra bench)\n"
    rcParams.update({"svg.hashsalt": "ckbench", "svg.fonttype": "none"})
    figure = Figure(figsize=(5.2 * len(measured), 4.6), layout="constrained")
    for axes, (size, rows) in zip(figure.subplots(1, len(measured), squeeze=False)[0], measured.items(), strict=True):
        rows = sorted(rows[1:], key=lambda row: (row.values["flops_ratio"], row.label))
        flops = [row.values["flops_ratio"] for row in rows]
        ratio = [row.values["slowdown_ratio"] for row in rows]
        ends = [(row.values["slowdown_low"], row.values["slowdown_high"]) for row in rows]
        below = [r - (low if low is not None else r) for r, (low, _) in zip(ratio, ends, strict=True)]
        above = [(high if high is not None else r) - r for r, (_, high) in zip(ratio, ends, strict=True)]
        places = range(len(rows))
        axes.hlines(places, flops, ratio, color="0.8", linewidth=3, zorder=1)
        axes.errorbar(
            ratio, places, xerr=[below, above], fmt="o", color="#0072b2", capsize=3, label="step time, measured (95 %)"
        )
        axes.plot(flops, places, "D", color="#d55e00", markersize=5, label="FLOPs, counted")
        axes.axvline(1.0, color="0.6", linewidth=1, linestyle=":")
        axes.set_yticks(places, [row.label for row in rows])
        axes.set_xlabel("ratio to none")
        axes.set_title(f"{size}: {describe(size)}", fontsize=9)
        axes.grid(axis="x", color="0.92")
        axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return f"plot: {path}\n"


if __name__ == "__main__":
    main()
