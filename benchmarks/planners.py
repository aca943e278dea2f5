"""Plans for ten budgets by ckbench's planner and its rivals, all measured in one run: exact peaks, paired step times.

    python benchmarks/planners.py --quick                      three small models, three budgets, under two minutes
    python benchmarks/planners.py --out FOLDER --plot FOLDER   the real run: JSON and Markdown, and one SVG per model;
                                                               twenty minutes on a quiet machine

Three models on the processor, in fp32, one thread: a GPT-2, a Llama with grouped queries, and a vision transformer
whose blocks differ in width. Budgets lie evenly between the least peak of any plan and the peak of keeping everything.
The rivals are in ``_planners_rivals.py``. Every distinct plan is one trial; all are built at once, and every round
visits each of them in a new order, so that a plan's step time is compared with that of ``none`` a moment before. What
comes out are medians of those ratios with 95 % intervals; peaks are the exact sum of the allocator's events in a warm
step. With ``--clock cpu`` seconds are those that this process, which has one thread, spent on the processor: on an idle
machine the same, on a busy one without the time that others had it.

Two rules are checked and printed. The measured peak of ours is within its budget, in the first step too. And ours is
never slower, by more than 2 %, than the fastest rival whose measured peak is no higher. Where the rounds leave that
open, the two are timed again by themselves, and those fresh pairs decide: the fastest of forty noisy medians looks
faster than it is.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import _planners_report as report
import _planners_rivals as rivals
import torch

from ckbench.config import RunConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine.trial import NoObserver, Trial
from ckbench.launch import Launcher
from ckbench.plan import Plan
from ckbench.planner.chain import Chain, Item, extra_s
from ckbench.planner.solve import floor
from ckbench.planning import Planned, Planner, plan_of
from ckbench.statistics import median_interval

N_BUDGETS, N_ROUNDS, N_STEPS = 10, 10, 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
RECHECK_ABOVE = 0.98
"""Ours over the best rival, by the rounds; above it the pair is timed again."""
RECHECK_PAIRS = 40
CHUNK = 4
"""Trials between two visits to the one that ratios are taken to."""
WIDTHS = (256, 1024, 512, 128)
"""Of the unequal stack's FFNs, in turn."""

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "title": "GPT-2 like: 8 equal blocks of width 128, batch 4 x 128, vocabulary 1024",
        "model": {"family": "gpt", "n_layers": 8, "d_model": 128, "n_heads": 4, "vocab_size": 1024},
        "train": {"batch_size": 4, "seq_len": 128},
    },
    "llama": {
        "title": "Llama like: 8 equal blocks of width 128, 8 heads on 2 for keys and values, batch 4 x 128",
        "model": {
            "family": "llama", "n_layers": 8, "d_model": 128, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 1024,
        },
        "train": {"batch_size": 4, "seq_len": 128},
    },
    "vit": {
        "title": "ViT, unequal: 8 blocks of width 128 with FFNs of 256, 1024, 512 and 128 in turn, batch 8 x 65",
        "model": {
            "family": "vit", "n_layers": 8, "d_model": 128, "n_heads": 4, "d_ff": WIDTHS * 2,
            "image_size": 32, "patch_size": 4, "n_classes": 10,
        },
        "train": {"batch_size": 8, "seq_len": 65},
    },
}  # fmt: skip
QUICK_LAYERS = 4


@dataclass(kw_only=True)
class Arm:
    """One distinct plan, every method that asked for it, and what was measured."""

    plan: Plan
    compiled: bool
    names: list[tuple[str, str]] = field(default_factory=list)
    """Method and spec."""
    predicted_peak_bytes: int | None = None
    """By the chain; None where the plan is not made of its items."""
    predicted_ratio: float | None = None
    peak_bytes: int = 0
    first_peak_bytes: int = 0
    ratios: list[float] = field(default_factory=list)
    """Step time over that of none (for compiled blocks: of none, compiled), by round."""
    step: Callable[[], float] = field(default=lambda: math.nan, repr=False)

    @property
    def ratio(self) -> float:
        """Give the median ratio."""
        return statistics.median(self.ratios)

    @property
    def name(self) -> str:
        """Name the arm by the first that asked for it."""
        return self.names[0][1]

    def is_of(self, method: str) -> bool:
        """Tell whether a method has this plan."""
        return any(name == method for name, _ in self.names)


def main() -> None:
    """Measure the models that were asked for, print tables and rules, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, three budgets, little of everything")
    parser.add_argument("--only", action="append", choices=MODELS, help="a model; repeat for more (default: all)")
    parser.add_argument("--rounds", type=int, help=f"rounds of step times (default {N_ROUNDS})")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: seconds of this process, for a busy machine"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile's budgets out")
    parser.add_argument("--ckptplan", metavar="FOLDER", help="site-packages that hold ckptplan, if not installed here")
    parser.add_argument("--pulp", metavar="FOLDER", help="site-packages that hold pulp and pwlf (PyTorch's SAC MILP)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write planners.json and planners.md there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw planners_MODEL.svg there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put tables and plots between that page's marks")
    parser.add_argument("--again", type=Path, metavar="FILE", help="measure nothing: show a planners.json again")
    options = parser.parse_args()
    if options.again:
        stored = json.loads(options.again.read_text())
        print(*(report.text(data) for data in stored["models"]), report.summary(stored["models"]), sep="\n")
        write(options, stored["about"], stored["models"])
        return
    sys.path += [place for place in (options.ckptplan, options.pulp) if place]
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler that weighs steps tells of every start
    begun = time.perf_counter()
    device = Cpu("cpu", 1)
    about = {
        "machine": device.name(), "threads": 1, "torch": torch.__version__, "python": platform.python_version(),
        "date": str(date.today()), "quick": options.quick,
        "rounds": options.rounds or (2 if options.quick else N_ROUNDS), "clock": options.clock,
        "load_before": _load(), "left_out": rivals.left_out(),
    }  # fmt: skip
    print(", ".join(f"{key} {value}" for key, value in about.items() if key != "left_out"))
    for line in about["left_out"]:
        print(line)
    launcher = Launcher()
    found = []
    for name in options.only or MODELS:
        budgets: Sequence[float] = rivals.COMPILE_BUDGETS[1:2] if options.quick else rivals.COMPILE_BUDGETS
        if options.no_compile or (options.quick and name != "gpt"):
            budgets = ()
        data = compare(name, device, launcher, about, budgets)
        found.append(data)
        print(report.text(data), flush=True)
        about |= {"load_after": _load(), "seconds": round(time.perf_counter() - begun)}
        write(options, about, found)
    print(report.summary(found))
    print(f"{about['seconds']} s, load {about['load_before']} before and {about['load_after']} after")


def write(options: argparse.Namespace, about: dict[str, Any], found: Sequence[dict[str, Any]]) -> None:
    """Write data, tables and plots where they were asked for."""
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "planners.json").write_text(json.dumps({"about": about, "models": found}) + "\n")
        (options.out / "planners.md").write_text(report.markdown(about, found), encoding="utf-8")
    for data in found if options.plot else ():
        report.draw(data, options.plot / f"planners_{data['name']}.svg")
    if options.page:
        report.write_page(options.page, report.markdown(about, found), [data["name"] for data in found])


def _tell(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _load() -> list[float]:
    try:
        return [float(word) for word in Path("/proc/loadavg").read_text().split()[:3]]
    except OSError:
        return []


def config_of(name: str, quick: bool) -> RunConfig:
    """Make a model's trial."""
    model = dict(MODELS[name]["model"])
    if quick:
        model["n_layers"] = QUICK_LAYERS
        if "d_ff" in model:
            model["d_ff"] = model["d_ff"][:QUICK_LAYERS]
    return RunConfig.model_validate(
        {
            "study": "planners",
            "model": model,
            "train": {"optimizer": "adamw", "precision": "fp32", **MODELS[name]["train"]},
            "strategy": {"name": "none"},
            "run": {"device": "cpu", "threads": 1},
        }
    )


def compare(
    name: str, device: Cpu, launcher: Launcher, about: dict[str, Any], compile_budgets: Sequence[float]
) -> dict[str, Any]:
    """Plan, build, weigh and time everything for one model; give the figures as plain data."""
    quick = about["quick"]
    config = config_of(name, quick)
    _tell(f"{name}: probing")
    planner = Planner("cpu", launcher, costs="measured")
    chain = planner.probed(config).chain
    none_bytes = planner.budget_of(config, "100%")
    least_bytes = floor(chain).peak_bytes
    _tell(f"{name}: planning")
    n_budgets = 3 if quick else N_BUDGETS
    budgets = [least_bytes + (none_bytes - least_bytes) * k // n_budgets for k in range(n_budgets)]
    arms: dict[str, Arm] = {}
    none = _arm(arms, chain, "none", "none", Plan(n_layers=chain.n_blocks))
    ours: list[tuple[int, Planned, Arm]] = []
    for budget in budgets:
        planned = planner.plan(config, budget)
        share = f"budget:{budget}"
        ours.append((budget, planned, _arm(arms, chain, "ours", share, planned.plan)))
    aimed = []
    for method, spec, plan, target in rivals.plans(chain, budgets, none_bytes, quick):
        arm = _arm(arms, chain, method, spec, plan)
        if target is not None:
            aimed.append((method, target, arm))
    _tell(f"{name}: building")
    compiled = None
    if compile_budgets:
        compiled = _arm(arms, chain, "none", "none, compiled", Plan(n_layers=chain.n_blocks), compiled=True)
        for budget_share in compile_budgets:
            plan = Plan(n_layers=chain.n_blocks, compile_budget=budget_share)
            _arm(arms, chain, "compile-budget", f"compile-budget:{budget_share:g}", plan, compiled=True)
    for arm in arms.values():
        _build(arm, config, device, CLOCKS[about["clock"]])
    _tell(f"{name}: {len(arms)} trials built, timing")
    time_all(list(arms.values()), none, compiled, about["rounds"], 1 if quick else N_STEPS)
    _tell(f"{name}: timing single pairs")
    return {
        "name": name,
        "title": MODELS[name]["title"] + (f", cut to {QUICK_LAYERS} blocks" if quick else ""),
        "seconds_from": planner.probed(config).source,
        "none_peak_bytes": none.peak_bytes,
        "least_peak_bytes": least_bytes,
        "compiled_over_none": None if compiled is None else _interval(compiled.ratios),
        "arms": [_arm_data(arm) for arm in arms.values()],
        "aimed": [
            {"method": method, "budget_bytes": target, "spec": arm.name, "peak_bytes": arm.peak_bytes}
            for method, target, arm in aimed
        ],
        "budgets": [_row(budget, planned, arm, arms, 5 if quick else RECHECK_PAIRS) for budget, planned, arm in ours],
    }


def _arm(arms: dict[str, Arm], chain: Chain, method: str, spec: str, plan: Plan, *, compiled: bool = False) -> Arm:
    """Give the arm of a plan, a new one where it is the first to ask for it."""
    key = json.dumps([plan.to_json(), compiled], sort_keys=True)
    if key not in arms:
        arms[key] = arm = Arm(plan=plan, compiled=compiled)
        items = None if compiled else items_of(chain, plan)
        if items is not None:
            arm.predicted_peak_bytes = chain.peak_bytes(items)
            arm.predicted_ratio = 1 + extra_s(items) / chain.plain_s
    arms[key].names.append((method, spec))
    return arms[key]


def items_of(chain: Chain, plan: Plan) -> list[Item] | None:
    """Write a plan as the chain's items; None where it has a region that the chain does not know."""
    regions = {region.start: region for region in plan.regions}
    items: list[Item] = []
    at = 0
    while at < chain.n_blocks:
        item = next((i for i in chain.items[at] if i.region == regions.get(at)), None)
        if item is None:
            return None
        items.append(item)
        at = item.stop
    assert plan_of(chain, items).regions == plan.regions
    return items


def _build(arm: Arm, config: RunConfig, device: Cpu, clock: Callable[[], float]) -> None:
    """Build an arm's trial, weigh its first step and a warm one, and give it a timed step."""
    train = config.train.model_copy(update={"compile": arm.compiled})
    trial = Trial(config.model_copy(update={"train": train}), device.torch_device, arm.plan)
    if arm.compiled:
        trial.step(NoObserver())  # the compiler's own memory is no part of a step
    arm.first_peak_bytes = device.weigh(trial)["peak_allocated_bytes"]
    trial.step(NoObserver())
    arm.peak_bytes = device.weigh(trial)["peak_allocated_bytes"]

    def step() -> float:
        begun = clock()
        trial.step(NoObserver())
        return clock() - begun

    arm.step = step


def time_all(arms: list[Arm], none: Arm, compiled: Arm | None, n_rounds: int, n_steps: int) -> None:
    """Visit every arm in every round, in a new order, next to the one that its ratio is taken to."""
    order = random.Random(0)
    for _ in range(n_rounds):
        for base, is_compiled in ((none, False), (compiled, True)):
            if base is None:
                continue
            others = [arm for arm in arms if arm is not base and arm.compiled == is_compiled]
            order.shuffle(others)
            before = _visit(none, n_steps)
            if is_compiled:
                base.ratios.append(_visit(base, n_steps) / before)
            else:
                base.ratios.append(_visit(none, n_steps) / before)
            for start in range(0, len(others), CHUNK):
                base_s = _visit(base, n_steps)
                for arm in others[start : start + CHUNK]:
                    arm.ratios.append(_visit(arm, n_steps) / base_s)


def _visit(arm: Arm, n_steps: int) -> float:
    """Time some steps after one that brings the arm's weights back; the shortest counts."""
    arm.step()
    return min(arm.step() for _ in range(n_steps))


def paired(first: Arm, second: Arm, n_pairs: int) -> list[float]:
    """Time two arms alternately, each of them first as often; give the ratios of pairs."""
    ratios = []
    for k in range(n_pairs):
        seconds = {id(arm): _visit(arm, 1) for arm in ((first, second) if k % 2 else (second, first))}
        ratios.append(seconds[id(first)] / seconds[id(second)])
    return ratios


def _row(budget: int, planned: Planned, ours: Arm, arms: dict[str, Arm], n_pairs: int) -> dict[str, Any]:
    """Judge one budget: the rule of the peak, the best rival, the rule of time."""
    fitting: dict[str, Arm] = {}
    for arm in arms.values():
        for method, _ in arm.names:
            if method in rivals.METHODS and arm.peak_bytes <= budget:
                fitting[method] = min(fitting.get(method, arm), arm, key=lambda a: a.ratio)
    row: dict[str, Any] = {
        "budget_bytes": budget,
        "predicted_peak_bytes": planned.peak_bytes,
        "predicted_ratio": planned.slowdown_ratio,
        "peak_bytes": ours.peak_bytes,
        "first_peak_bytes": ours.first_peak_bytes,
        "is_within": max(ours.peak_bytes, ours.first_peak_bytes) <= budget,
        "ratio": _interval(ours.ratios),
        "proven_optimal": planned.proven_optimal,
        "plan": ours.plan.to_json(),
        "rivals": {
            method: {"spec": arm.name, "peak_bytes": arm.peak_bytes, "ratio": arm.ratio}
            for method, arm in fitting.items()
        },
    }
    lower = [a for a in arms.values() if not a.compiled and a.peak_bytes <= ours.peak_bytes and _is_rival(a)]
    best = min(lower, key=lambda a: a.ratio, default=None)
    if best is None:
        return row | {"best": None}
    row["best"] = {
        "spec": next(spec for method, spec in best.names if method in rivals.METHODS),
        "is_ours": best is ours,
        "peak_bytes": best.peak_bytes,
        "predicted_ratio": best.predicted_ratio,
        "over": [1.0, 1.0, 1.0] if best is ours else [ours.ratio / best.ratio, None, None],
        "pairs": [],
    }
    if best is not ours and ours.ratio / best.ratio > RECHECK_ABOVE:
        pairs = paired(ours, best, n_pairs)
        row["best"] |= {"over": _interval(pairs), "pairs": [round(ratio, 4) for ratio in pairs]}
    return row


def _is_rival(arm: Arm) -> bool:
    return any(method in rivals.METHODS for method, _ in arm.names)


def _interval(ratios: Sequence[float]) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in median_interval(ratios)]


def _arm_data(arm: Arm) -> dict[str, Any]:
    return {
        "names": arm.names,
        "compiled": arm.compiled,
        "peak_bytes": arm.peak_bytes,
        "first_peak_bytes": arm.first_peak_bytes,
        "predicted_peak_bytes": arm.predicted_peak_bytes,
        "predicted_ratio": arm.predicted_ratio and round(arm.predicted_ratio, 4),
        "ratio": _interval(arm.ratios),
        "ratios": [round(ratio, 4) for ratio in arm.ratios],
    }


if __name__ == "__main__":
    main()
