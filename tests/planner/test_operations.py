"""What a block does, operation by operation: predictions from the trace against real replays of the plans."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ckbench.config import RunConfig
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.flops import FlopCounter
from ckbench.engine.trial import Trial
from ckbench.estimate.replay import replay
from ckbench.estimate.traced import trace_on
from ckbench.plan import Plan, Region
from ckbench.planner.operations import (
    BlockOperations,
    Operation,
    hull,
    kept_calls,
    rerun,
    selective_sets,
    spell,
    step_operations,
)
from tests.planner.counted import counted

MakeRun = Callable[..., RunConfig]
L = 3
GENERATOR_STATE_BYTES = 5056
WRAPPED_NUMBERS_BYTES = 64

CASES = {
    "gpt dropout": {"model": {"family": "gpt", "dropout": 0.1}},
    "gpt bf16": {"model": {"family": "gpt"}, "train": {"precision": "bf16"}},
    "llama": {"model": {"family": "llama", "n_kv_heads": 2}},
    "llama bf16": {"model": {"family": "llama", "n_kv_heads": 2}, "train": {"precision": "bf16"}},
    "bert post-norm": {"model": {"family": "bert", "attention": "eager"}},
}


def run_of(tiny_run: MakeRun, case: str) -> RunConfig:
    settings: dict[str, Any] = CASES[case]
    return tiny_run("none", **{**settings, "model": {**settings["model"], "n_layers": L}})


def block_operations(config: RunConfig, kind: str) -> BlockOperations:
    """Give the operations of one interior block of the stack."""
    blocks = step_operations(config, kind).blocks
    return blocks[len(blocks) // 2]


def kept_bytes(operations: BlockOperations, save_ops: Sequence[str]) -> int:
    return sum(operations.operations[i].kept_bytes for i in kept_calls(operations, save_ops))


def replayed(config: RunConfig, kind: str, plan: Plan) -> tuple[int, int]:
    """Give the bytes that a plan keeps after forward, and the FLOPs of its backward."""
    made = counted(config, kind, plan)
    return made.saved_bytes, made.backward_flops


def plan_keeping(save_ops: Sequence[str]) -> Plan:
    return Plan(n_layers=L, regions=tuple(Region(start=i, stop=i + 1, save_ops=tuple(save_ops)) for i in range(L)))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_kept_bytes_and_flops_add_up(tiny_run: MakeRun, case: str, kind: str) -> None:
    """What regions keep and recompute is the sum that the trace predicts: nothing, random sets, everything possible.

    And what keeping everything takes, and what early stop skips, against a replay of none.
    """
    config = run_of(tiny_run, case)
    operations = block_operations(config, kind)
    all_recomputed, most_flops = replayed(config, kind, plan_keeping(()))
    none, none_flops = replayed(config, kind, Plan(n_layers=L))
    assert most_flops - none_flops == L * sum(operations.operations[i].flops for i in rerun(operations))
    states = L * GENERATOR_STATE_BYTES if kind == "cpu" else 0
    assert abs(none - (all_recomputed - states) - L * operations.plain_bytes) <= WRAPPED_NUMBERS_BYTES * L
    draw = random.Random(f"{case} {kind}")
    candidates = operations.candidates
    assert len(candidates) >= 6
    for chosen in [*([i for i in candidates if draw.random() < share] for share in (0.3, 0.6)), list(candidates)]:
        save_ops = spell(operations, chosen)
        assert kept_calls(operations, save_ops) == set(chosen)
        kept, flops = replayed(config, kind, plan_keeping(save_ops))
        assert kept - all_recomputed == L * kept_bytes(operations, save_ops), save_ops
        assert most_flops - flops == L * sum(operations.operations[i].flops for i in chosen), save_ops


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("case", ["gpt bf16", "llama"])
def test_flops_of_the_whole_step(tiny_run: MakeRun, case: str, kind: str) -> None:
    """Blocks and rest, forward and backward, are all that the harness's own counter counts."""
    config = run_of(tiny_run, case)
    step = step_operations(config, kind)
    seen: list[FlopCounter] = []

    def prepare(trial: Trial) -> None:
        run = trial.step

        def counted(observer: Any) -> None:
            with FlopCounter() as flops:
                run(observer)
            flops.at("end")
            seen.append(flops)

        trial.step = counted  # type: ignore[method-assign]

    replay(config, kind, prepare=prepare)
    blocks = sum(work.flops for block in step.blocks for work in (*block.operations, *block.backward))
    assert blocks + sum(work.flops for work in step.rest) == seen[-1].forward + seen[-1].backward
    assert len(step.blocks) == L
    assert step.blocks[1] is step.blocks[2], "equal blocks are one object"
    assert step.update and step.update_share > 1, "the trace has fewer blocks than the model"


def test_a_gpt_block_by_hand(tiny_run: MakeRun) -> None:
    B, S, D, H = 2, 16, 32, 4
    operations = block_operations(tiny_run("none"), "cpu")
    named = {operation.save_op: operation for operation in operations.operations}
    assert [name for name, operation in named.items() if not operation.is_view] == [
        "aten.native_layer_norm@1", "aten.addmm@1", "aten._scaled_dot_product_flash_attention_for_cpu@1", "aten.addmm@2",
        "aten.add@1", "aten.native_layer_norm@2", "aten.addmm@3", "aten.gelu@1", "aten.addmm@4", "aten.add@2",
    ]  # fmt: skip
    qkv = named["aten.addmm@1"]
    assert (qkv.overload, qkv.flops, qkv.dtype) == ("default", 2 * B * S * D * 3 * D, "float32")
    assert qkv.out_bytes == qkv.kept_bytes == B * S * 3 * D * 4
    assert qkv.moved_bytes == 4 * (B * S * D + 3 * D * D + 3 * D + B * S * 3 * D), "factors, bias, result"
    norm = named["aten.native_layer_norm@1"]
    assert norm.out_bytes == 4 * (B * S * D + 2 * B * S), "with means and roots"
    assert named["aten.add@2"].out_bytes == B * S * D * 4 and named["aten.add@2"].kept_bytes == 0, "the block's output"
    assert [name for name, operation in named.items() if not operation.is_rerun] == [
        "aten.addmm@4", "aten.view@12", "aten.add@2",
    ]  # fmt: skip
    assert named["aten.view@3"].moved_bytes == 0
    assert operations.n_parameters == 12 * D * D + 13 * D
    # norms' inputs and statistics, projections' inputs, q, k and v, what attention gives and its rows' sums, gelu's
    # input, less the block's own input
    values = (1 + 1 + 3 + 1 + 1 + 1 + 4 + 4) * D + 4 + H - D
    assert operations.plain_bytes == 4 * B * S * values


def test_what_is_written_into_is_no_candidate(tiny_run: MakeRun) -> None:
    """Dropout on a CPU draws into a mask; to keep it would be refused by PyTorch in backward."""
    operations = block_operations(run_of(tiny_run, "gpt dropout"), "cpu")
    masks = [o for o in operations.operations if o.name == "aten.empty_like"]
    assert masks and all(mask.is_mutated and not mask.is_candidate and mask.moved_bytes == 0 for mask in masks)
    config = run_of(tiny_run, "gpt dropout")
    trial = Trial(config, torch.device("cpu"))
    trial.applied.remove()
    trial.applied = AppliedPlan(trial.model, plan_keeping((masks[0].save_op,)))
    with pytest.raises(RuntimeError, match="mutated"):
        trial.count()


def test_unequal_blocks_are_traced_each(tiny_run: MakeRun) -> None:
    widths = (64, 32, 64, 32, 96)
    config = tiny_run("per-block", model={"n_layers": 5, "d_ff": widths})
    blocks = step_operations(config, "cuda").blocks
    up = [next(o.flops for o in block.operations if o.save_op == "aten.addmm@3") for block in blocks]
    assert [flops // up[1] for flops in up] == [2, 1, 2, 1, 3]
    assert blocks[0] is blocks[2] and blocks[1] is blocks[3] and len(set(map(id, blocks))) == 3
    full = step_operations(config.model_copy(update={"model": config.model.model_copy(update={"d_ff": 64})}), "cuda")
    assert full.blocks[0] == blocks[0]


def test_a_first_block_without_gradient_at_its_input_stands_for_itself(tiny_run: MakeRun) -> None:
    blocks = step_operations(tiny_run("none", model={"freeze_embedding": True}), "cpu").blocks
    assert blocks[0] != blocks[1] and blocks[1] is blocks[3]
    assert len(blocks[0].backward) < len(blocks[1].backward), "no gradient of its input, none to add to the residual's"


@pytest.mark.parametrize("case", ["gpt dropout", "llama bf16"])
def test_a_trace_without_data_is_the_trace_on_the_device(tiny_run: MakeRun, case: str) -> None:
    config = run_of(tiny_run, case)
    assert step_operations(config, "cpu") == trace_on(config, torch.device("cpu"))


def made_up(sizes: Sequence[int], flops: Sequence[int], plain_bytes: int = 10**9) -> BlockOperations:
    operations = tuple(
        Operation(
            name="aten.op", overload="default", flops=cost, moved_bytes=0, dtype="float32", call=i + 1, out_bytes=size,
            kept_bytes=size, is_view=False, is_mutated=False, is_rerun=True,
        )
        for i, (size, cost) in enumerate(zip(sizes, flops, strict=True))
    )  # fmt: skip
    return BlockOperations(operations=operations, backward=(), plain_bytes=plain_bytes, n_parameters=0)


@pytest.mark.parametrize("seed", range(20))
def test_the_hull_is_that_of_every_set(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(1, 9)
    operations = made_up([draw.randint(1, 12) for _ in range(n)], [draw.randint(0, 9) for _ in range(n)])
    op_s = [float(o.flops) for o in operations.operations]
    sums = {
        (sum(operations.operations[i].kept_bytes for i in some), sum(op_s[i] for i in some))
        for k in range(n + 1)
        for some in itertools.combinations(range(n), k)
    }
    best = sorted(p for p in sums if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in sums))
    found = hull(operations, op_s)
    for corner in found:
        assert kept_bytes(operations, corner.save_ops) == corner.kept_bytes
        assert sum(op_s) - sum(op_s[i] for i in rerun(operations, corner.save_ops)) == corner.avoided_s
    corners = [(corner.kept_bytes, corner.avoided_s) for corner in found]
    assert set(corners) <= set(best), "no choice beats a corner"
    for x, y in best:
        left = max(corner for corner in corners if corner[0] <= x)
        right = min(corner for corner in corners if corner[0] >= x)
        share = 0.0 if left == right else (x - left[0]) / (right[0] - left[0])
        assert y <= left[1] + share * (right[1] - left[1]) + 1e-9, "nothing lies above the hull"


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_thinning_loses_the_least_area(n: int) -> None:
    draw = random.Random(n)
    operations = made_up([draw.randint(1, 20) for _ in range(9)], [draw.randint(1, 20) for _ in range(9)], 10**6)
    op_s = [float(o.flops) for o in operations.operations]
    corners = [(corner.kept_bytes, corner.avoided_s) for corner in hull(operations, op_s)]
    end = (operations.plain_bytes, sum(op_s))
    inner = [corner for corner in corners[1:] if corner[1] < end[1]]

    def area(points: Sequence[tuple[float, float]]) -> float:
        line = [corners[0], *points, end]
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(line))

    got = [(chosen.kept_bytes, chosen.avoided_s) for chosen in selective_sets(operations, op_s, n)]
    whole = [corner for corner in corners[1:]]
    assert len(got) == n and set(got) <= set(whole)
    assert area(got) == pytest.approx(max(area(some) for some in itertools.combinations(whole, n)))
    assert inner


def test_what_keeping_everything_beats_is_left_out() -> None:
    operations = made_up([1, 10, 30], [8, 8, 3], plain_bytes=12)
    op_s = [8.0, 8.0, 3.0]
    kept = [chosen.kept_bytes for chosen in selective_sets(operations, op_s)]
    assert kept == [1], "ten bytes more avoid 8 of the 11 that eleven bytes avoid altogether"
    assert [chosen.kept_bytes for chosen in selective_sets(made_up([1, 10, 30], [8, 8, 3]), op_s)] == [1, 11, 41]


def test_a_set_with_every_call_is_spelled_by_the_operation() -> None:
    operations = made_up([1, 2, 3], [1, 1, 1])
    assert spell(operations, [0, 1, 2]) == ("aten.op",)
    assert spell(operations, [2, 0]) == ("aten.op@1", "aten.op@3")
    assert kept_calls(operations, ("aten.op.default@2",)) == {1}
    assert kept_calls(operations, ("aten.op", "aten.op@2", "aten.other")) == {0, 1, 2}
