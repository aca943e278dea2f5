"""Ways to run a span of blocks: which are tried, and that each takes the seconds of what it runs again."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckbench.config import RunConfig
from ckbench.estimate.traced import trace_step
from ckbench.plan import Plan, Region
from ckbench.planner.costs import BlockCosts, StepCosts
from ckbench.planner.letters import FULL, PLAIN, SEGMENTS, Letter, extra_s, letters
from ckbench.planner.operations import StepOperations
from tests.planner.counted import counted

MakeRun = Callable[..., RunConfig]
L = 4


def in_flops(operations: StepOperations) -> StepCosts:
    """Give costs whose seconds are FLOPs, so that they can be counted."""
    made: dict[int, BlockCosts] = {}
    for block in operations.blocks:
        op_s = tuple(float(operation.flops) for operation in block.operations)
        made.setdefault(id(block), BlockCosts(forward_s=sum(op_s), backward_s=0.0, op_s=op_s))
    blocks = tuple(made[id(block)] for block in operations.blocks)
    return StepCosts(blocks=blocks, rest_s=0.0, source="counted")


@pytest.fixture(scope="module")
def traced(tiny_run: MakeRun) -> tuple[RunConfig, StepOperations]:
    """A small trial of unequal blocks and its operations."""
    config = tiny_run(
        "none", model={"n_layers": L, "d_model": 16, "d_ff": (16, 48, 32, 64)}, train={"optimizer": "sgd"}
    )
    return config, trace_step(config, "cuda")


def region(start: int, stop: int, *children: Region) -> Region:
    return Region(start=start, stop=stop, children=children)


@pytest.mark.parametrize(
    "letter",
    [
        PLAIN,
        FULL,
        Letter(n_blocks=1, region=Region(start=0, stop=1, save_ops=("aten.addmm@1", "aten.addmm@4"))),
        Letter(n_blocks=3, region=region(0, 3)),
        Letter(n_blocks=2, region=region(0, 2, region(0, 1), region(1, 2))),
        Letter(n_blocks=3, region=region(0, 3, region(0, 1), region(1, 2), region(2, 3))),
        Letter(n_blocks=3, region=region(0, 3, region(0, 2, region(0, 1)))),
        Letter(n_blocks=3, region=region(0, 3, region(1, 3, region(2, 3)))),
    ],
    ids=lambda letter: str(letter.name),
)
def test_seconds_are_the_counted_work(traced: tuple[RunConfig, StepOperations], letter: Letter) -> None:
    config, operations = traced
    costs = in_flops(operations)
    none = counted(config, "cuda", Plan(n_layers=L), n_steps=1).backward_flops
    for start in {0, L - letter.n_blocks}:
        laid = letter.at(start)
        plan = Plan(n_layers=L, regions=() if laid is None else (laid,))
        assert (
            extra_s(letter, start, operations, costs) == counted(config, "cuda", plan, n_steps=1).backward_flops - none
        )


@pytest.mark.parametrize("seed", range(20))
def test_without_tails_seconds_are_the_calls_that_the_plan_predicts(seed: int) -> None:
    """Blocks of one second each, whose early stop skips nothing: the seconds are the forwards in backward."""
    import random

    from ckbench.planner.operations import BlockOperations, Operation

    operation = Operation(
        name="aten.op", overload="default", flops=1, moved_bytes=0, dtype="float32", call=1, out_bytes=1, kept_bytes=1,
        is_view=False, is_mutated=False, is_rerun=True,
    )  # fmt: skip
    block = BlockOperations(operations=(operation,), backward=(), plain_bytes=1, n_parameters=0)
    n_blocks = 8
    operations = StepOperations(
        blocks=(block,) * n_blocks, rest=(), update=(), update_share=1.0, n_micro_batches=1
    )  # fmt: skip
    costs = StepCosts(
        blocks=(BlockCosts(forward_s=1.0, backward_s=0.0, op_s=(1.0,)),) * n_blocks,
        rest_s=0.0, source="made up",
    )  # fmt: skip
    draw = random.Random(seed)

    def drawn(start: int, stop: int, depth: int) -> Region:
        children, at = [], start
        while depth and at < stop:
            end = draw.randint(at + 1, stop)
            if (at, end) != (start, stop) and draw.random() < 0.7:
                children.append(drawn(at, end, depth - 1))
            at = end
        return Region(start=start, stop=stop, children=tuple(children))

    stop = draw.randint(1, n_blocks)
    letter = Letter(n_blocks=stop, region=drawn(0, stop, 3))
    laid = letter.at(0)
    assert laid is not None
    plan = Plan(n_layers=n_blocks, regions=(laid,))
    assert extra_s(letter, 0, operations, costs) == sum(plan.block_calls_backward())


def test_what_is_tried(traced: tuple[RunConfig, StepOperations]) -> None:
    _, operations = traced
    costs = in_flops(operations)
    found = letters(operations, costs, L, spans=True, all_lengths=True)
    assert found[:2] == [PLAIN, FULL] and len(found) == len(set(found))
    spans = [letter for letter in found if letter.n_blocks > 1]
    assert {letter.n_blocks for letter in spans} == set(SEGMENTS)
    assert {bool(letter.region and letter.region.children) for letter in spans} == {True, False}
    kept = [letter for letter in found if letter.region is not None and letter.region.save_ops]
    assert 3 <= len(kept) and all(letter.n_blocks == 1 for letter in kept)
    seconds = [extra_s(letter, 1, operations, costs) for letter in kept]
    assert all(0 <= s < extra_s(FULL, 1, operations, costs) for s in seconds)
    alone = letters(operations, costs, L, spans=False, all_lengths=True)
    assert alone == [letter for letter in found if letter.n_blocks == 1]
    assert all(letter.n_blocks <= 2 for letter in letters(operations, costs, 2, spans=True, all_lengths=True))


def test_a_deep_stack_also_tries_its_root(traced: tuple[RunConfig, StepOperations]) -> None:
    _, operations = traced
    deep = replace(operations, blocks=operations.blocks[:1] * 100)
    found = letters(deep, in_flops(deep), 100, spans=True, all_lengths=True)
    assert 10 in {letter.n_blocks for letter in found}


def test_names() -> None:
    assert [letter.name for letter in (PLAIN, FULL)] == ["save", "recompute"]
    assert Letter(n_blocks=3, region=region(0, 3)).name == "segment 3"
    assert Letter(n_blocks=2, region=region(0, 2, region(0, 1))).name == "nested 2"
    keeping = Region(start=0, stop=1, save_ops=("aten.mm", "aten.gelu@2"))
    assert Letter(n_blocks=1, region=keeping).name == "keep mm+gelu@2"
