"""Where seconds come from: a card's roofline, a device's clock, stored records."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ckbench.card_speeds import SPEEDS, card_speed
from ckbench.cards import CARDS_MIB
from ckbench.config import RunConfig
from ckbench.engine.trial import Trial
from ckbench.errors import CkbenchError, ConfigError
from ckbench.estimate import timed as timed_module
from ckbench.estimate.follow import Follower
from ckbench.estimate.timed import CpuStamps, _OperationClock, _Pieces, _stack_to_time, measured, time_step
from ckbench.plan import Plan, Region
from ckbench.planner.costs import StepCosts, recorded, rerun_s, roofline, tail_s, work_s
from ckbench.planner.operations import SelectiveSet, StepOperations, Work, step_operations
from ckbench.records import Record

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
L = 4


@pytest.fixture(scope="module")
def traced(tiny_run: MakeRun) -> StepOperations:
    return step_operations(tiny_run("none", train={"precision": "bf16-pure"}), "cuda")


def test_every_card_has_its_speeds() -> None:
    assert list(SPEEDS) == list(CARDS_MIB)
    for name, speed in SPEEDS.items():
        assert speed.fp32_flops_per_s <= speed.tf32_flops_per_s <= speed.short_flops_per_s, name
        assert 0 < speed.host_bytes_per_s < speed.memory_bytes_per_s < 1e13, name
        assert speed.source, name


def test_an_operation_takes_what_its_slower_half_takes() -> None:
    _, a100 = card_speed("A100 80GB")
    product = Work(name="aten.mm", overload="default", flops=312 * 10**9, moved_bytes=2039, dtype="bfloat16")
    assert work_s(product, a100, "bf16") == pytest.approx(1e-3)
    assert work_s(replace(product, dtype="float32"), a100, "fp32") == pytest.approx(16e-3)
    assert work_s(replace(product, dtype="float32"), a100, "tf32") == pytest.approx(2e-3)
    assert work_s(replace(product, moved_bytes=2039 * 10**7), a100, "bf16") == pytest.approx(10e-3)
    assert work_s(Work(name="aten.view", overload="default", flops=0, moved_bytes=0, dtype=""), a100, "bf16") == 0


@pytest.mark.parametrize("card", ["A101", "24GiB", ""])
def test_times_need_a_card(traced: StepOperations, card: str) -> None:
    with pytest.raises(ConfigError, match=f"^times need a card by its name, not '{card}'; have: T4, V100 16GB, "):
        roofline(traced, card, "bf16")


def test_a_roofline_adds_up(traced: StepOperations) -> None:
    costs = roofline(traced, "h100-80gb", "bf16-pure")
    assert costs.source == (
        "roofline of H100 80GB (989.4 TFLOP/s bf16-pure, 3.4 TB/s; H100 data sheet, halved where it counts sparsity), "
        "ratios only: the share of peak is not modelled"
    )
    block, operations = costs.blocks[1], traced.blocks[1]
    assert block.forward_s == pytest.approx(sum(block.op_s)) and len(block.op_s) == len(operations.operations)
    assert block.backward_s > block.forward_s > 0 and costs.rest_s > 0
    assert costs.plain_s == pytest.approx(costs.rest_s + L * (block.forward_s + block.backward_s))


def test_rerun_and_tail(traced: StepOperations) -> None:
    block, operations = roofline(traced, "T4", "bf16-pure").blocks[1], traced.blocks[1]
    seconds = {o.save_op: s for o, s in zip(operations.operations, block.op_s, strict=True)}
    assert tail_s(block, operations) == pytest.approx(seconds["aten.addmm@4"] + seconds["aten.add@2"])
    assert rerun_s(block, operations) == pytest.approx(block.forward_s - tail_s(block, operations))
    kept = ("aten.addmm@1", "aten.gelu")
    spared = seconds["aten.addmm@1"] + seconds["aten.gelu@1"]
    assert rerun_s(block, operations, kept) == pytest.approx(rerun_s(block, operations) - spared)
    assert rerun_s(block, operations, ("aten.addmm@4",)) == rerun_s(block, operations), "it never runs again"
    dear = replace(block, region_s=3.0, selective_s=4.0)
    assert rerun_s(dear, operations) == pytest.approx(rerun_s(block, operations) + 3)
    assert rerun_s(dear, operations, kept) == pytest.approx(rerun_s(block, operations, kept) + 7)


def test_micro_batches_count_and_the_update_does_not(tiny_run: MakeRun, traced: StepOperations) -> None:
    step = step_operations(tiny_run("none", train={"precision": "bf16-pure", "grad_accumulation": 3}), "cuda")
    assert step.blocks == traced.blocks and step.n_micro_batches == 3
    one, three = roofline(traced, "L4", "bf16-pure"), roofline(step, "L4", "bf16-pure")
    assert three.blocks[0].op_s == pytest.approx([3 * s for s in one.blocks[0].op_s])
    assert three.blocks[0].backward_s == pytest.approx(3 * one.blocks[0].backward_s)
    update_s = step.update_share * sum(work_s(work, SPEEDS["L4"], "bf16-pure") for work in step.update)
    assert three.rest_s - update_s == pytest.approx(3 * (one.rest_s - update_s))


def test_the_update_grows_with_the_depth(tiny_run: MakeRun) -> None:
    """The optimizer of twelve blocks costs what it costs, though two were traced."""
    train = {"precision": "bf16-pure"}
    shallow, deep = (step_operations(tiny_run("none", model={"n_layers": n}, train=train), "cuda") for n in (2, 12))
    moved = [step.update_share * sum(work.moved_bytes for work in step.update) for step in (shallow, deep)]
    assert shallow.update_share == 1 and shallow.update == deep.update
    parameters = [shallow.blocks[1].n_parameters * n for n in (2, 12)]
    outside = 2 * 64 * 32 + 16 * 32 + 2 * 32
    assert moved[1] / moved[0] == pytest.approx((parameters[1] + outside) / (parameters[0] + outside))


def test_pieces_are_noted_in_the_order_they_run(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("none", model={"n_layers": 2}), CPU)
    pieces = _Pieces(CpuStamps())
    ticks = itertools.count()
    pieces.stamps.stamp = lambda: next(ticks)  # type: ignore[method-assign]
    follower = Follower(trial, Plan(n_layers=2), pieces)
    follower.on = True
    trial.step(follower)
    assert [what for what, _ in pieces.noted] == [
        "rest", "forward 0", "rest", "forward 1", "rest", "rest", "backward 1", "backward 0", "rest", "optimizer", "end",
    ]  # fmt: skip
    assert pieces.seconds() == {
        "rest": 5,
        **dict.fromkeys(["forward 0", "forward 1", "backward 1", "backward 0", "optimizer"], 1),
    }
    follower.remove()
    assert all("forward" not in vars(block) for block in trial.model.blocks)
    pieces.noted.clear()
    follower = Follower(trial, Plan(n_layers=2, regions=(Region(start=0, stop=1), Region(start=1, stop=2))), pieces)
    follower.on = True
    trial.step(follower)
    assert [what for what, _ in pieces.noted[6:]] == [
        "backward 1", "replay 1", "backward 1", "backward 0", "replay 0", "backward 0", "rest", "optimizer", "end",
    ]  # fmt: skip


@torch.library.custom_op("ckbench_tests::slow_copy", mutates_args=())
def slow_copy(x: Tensor) -> Tensor:
    """Take a while."""
    time.sleep(0.02)
    return x.clone()


def test_a_slow_operation_is_found() -> None:
    clock = _OperationClock(CpuStamps())
    x = torch.ones(8)
    with clock:
        slow_copy(x)
        clock.entered(0, False, ())
        y = slow_copy(x + 1)
        clock.left(0, False, y)
        slow_copy(x)
    assert [name for name, _, _ in clock.noted[0]] == ["aten.add", "ckbench_tests.slow_copy"]
    add, slow = (end - begin for _, begin, end in clock.noted[0])
    assert slow >= 0.02 > add


def test_measured_costs_fit_the_trace(tiny_run: MakeRun) -> None:
    config = tiny_run("per-block", model={"d_ff": (64, 256, 64, 256)}, train={"grad_accumulation": 2})
    step = step_operations(config, "cpu")
    costs = measured(config, step, n_repeats=3)
    assert costs.source == "measured on cpu, best of 3"
    assert costs.blocks[1] is costs.blocks[3] and costs.blocks[0] is costs.blocks[2] is not costs.blocks[1]
    for block, operations in zip(costs.blocks, step.blocks, strict=True):
        assert len(block.op_s) == len(operations.operations) and min(block.op_s) > 0
        assert sum(block.op_s) == pytest.approx(block.forward_s)
        assert block.backward_s > 0 and block.selective_s >= 0
    assert costs.rest_s > 0


KEEPING = [
    SelectiveSet(save_ops=save_ops, kept_bytes=0, avoided_s=0)
    for save_ops in (("aten.addmm@1",), ("aten.addmm@1", "aten.gelu"))
]


@pytest.mark.parametrize("d_ff", [None, (64, 256, 64, 256)])
def test_what_regions_take_holds_their_backward(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, d_ff: tuple[int, ...] | None
) -> None:
    """By a clock that ticks once a stamp: a replay takes one, and cuts its block's backward into two of one each."""
    ticks = itertools.count()
    monkeypatch.setattr(CpuStamps, "stamp", lambda _: next(ticks))
    monkeypatch.setattr(timed_module, "selective_sets", lambda _operations, _op_s: KEEPING)
    config = tiny_run("none", model={"d_ff": d_ff} if d_ff else {}, train={"grad_accumulation": 2})
    step = step_operations(config, "cpu")
    costs = time_step(config, step, CPU, "ticks", n_repeats=2)
    blocks = list(zip(costs.blocks, step.blocks, strict=True))
    assert {(block.forward_s, block.backward_s) for block, _ in blocks} == {(2, 2)}, "micro-batches count"
    assert [rerun_s(block, operations) for block, operations in blocks] == pytest.approx([4] * L)
    # Both sets take as long here, so what they spare has to come back as what regions that keep results cost.
    for block, operations in blocks:
        took = [rerun_s(block, operations, saved.save_ops) for saved in KEEPING]
        assert sum(took) / len(took) == pytest.approx(4) and took[0] > took[1]


def test_the_stack_that_is_timed_fills_a_cache(tiny_run: MakeRun) -> None:
    def timed(**model: Any) -> tuple[Any, list[int]]:
        config = tiny_run("none", model={"n_layers": 9, **model})
        asked, stands_for = _stack_to_time(config, step_operations(config, "cpu"))
        assert len(stands_for) == asked.model.n_layers
        return asked.model.d_ff, stands_for

    unequal = (32, *(64, 128) * 4)
    assert timed() == (None, [0, *[1] * 8]), "no more than there are"
    assert timed(d_ff=unequal) == (unequal, [0, *(1, 2) * 4])
    block_bytes = step_operations(tiny_run("none"), "cpu").blocks[1].plain_bytes
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timed_module, "CACHE_BYTES", 3 * block_bytes - 1)
        assert timed() == (None, [0, 1, 1, 1])
        patched.setattr(timed_module, "CACHE_BYTES", 1)
        assert timed() == (None, [0, 1])
        assert timed(d_ff=unequal) == ((32, 64, 128), [0, 1, 2])


def test_a_block_that_runs_something_else_is_refused(tiny_run: MakeRun, tmp_path: Path) -> None:
    """As a device would for which the estimate assumed another kernel."""
    config = tiny_run("none")
    step = step_operations(config, "cuda")
    with pytest.raises(
        CkbenchError, match=r"^block 0 ran aten\._scaled_dot_product_\w+ as operation \d+ on the device"
    ):
        time_step(config, step, CPU, "cpu", n_repeats=1)
    with pytest.raises(CkbenchError, match="^nothing can be timed on replay"):
        script = tmp_path / "script.json"
        script.write_text('{"device_name": "scripted", "strategies": {}}')
        scripted = config.run.model_copy(update={"device": f"replay:{script}"})
        measured(config.model_copy(update={"run": scripted}), step)


def times(config: RunConfig, strategy: str, seconds: Sequence[float], **fields: Any) -> list[Record]:
    sections = {"model": config.model.model_dump(mode="json"), "train": config.train.model_dump(mode="json")}
    made = {"device_name": "a machine", **sections, **fields}
    return [Record(strategy=strategy, step_s_median=s, **made) for s in seconds]


def check_recorded(costs: StepCosts, step: StepOperations, plain_s: float) -> float:
    assert costs.plain_s == pytest.approx(plain_s)
    return sum(rerun_s(block, operations) for block, operations in zip(costs.blocks, step.blocks, strict=True))


@pytest.mark.parametrize("card", [None, "A100 40GB"])
def test_recorded_steps_scale_the_shares(tiny_run: MakeRun, traced: StepOperations, card: str | None) -> None:
    config = tiny_run("none", train={"precision": "bf16-pure"})
    records = [
        *times(config, "none", [0.9, 1.0, 1.4]),
        *times(config, "per-block", [1.3, 1.2, 1.1]),
        *times(config, "none", [50.0], status="oom"),
        *times(config, "per-block", [50.0], device_name="another"),
        *times(config, "per-block,early_stop=false", [50.0]),
        *times(config, "none", [50.0], train={}),
    ]
    costs = recorded(traced, records, config, card)
    assert check_recorded(costs, traced, 1.0) == pytest.approx(0.2), "what per-block adds"
    by = "10 FLOP per byte" if card is None else "roofline of A100 40GB"
    assert costs.source == f"recorded on a machine (none 1000 ms, per-block 1200 ms), shares by {by}"
    assert costs.blocks[1] is costs.blocks[3]
    only_none = recorded(traced, records[:3], config, card)
    assert check_recorded(only_none, traced, 1.0) > 0 and "per-block" not in only_none.source
    with pytest.raises(ConfigError, match="^there is no record of none for this model and training section; measure"):
        recorded(traced, records[3:], config, card)
