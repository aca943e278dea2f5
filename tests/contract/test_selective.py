"""Selective checkpointing keeps what its policy names, to the byte, and recomputes the rest, bit by bit."""

import gc
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from ckbench.config import RunConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.parity import differences, run_steps
from ckbench.engine.selective import _Named, _Policy, resolve_op
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import PlanError
from ckbench.models.base import BuiltModel
from ckbench.plan import Plan, Region
from ckbench.strategies.selective import ATTENTION, MATMUL

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
B, S, D, H, L = 2, 16, 32, 4, 4
F_LLAMA = 96
RANDOM_STATE_BYTES = 5056
SINGLE = ("aten.addmm@2+aten.mm@2", "attention+aten.addmm@1+aten.addmm@3+aten.mm@1+aten.mm@3", "aten.add@1")
"""Single calls, for a family with biases and one without."""


def saved_bytes(config: RunConfig) -> int:
    """Weigh the second step, as the harness does."""
    device = Cpu("cpu", 1)
    trial = Trial(config, device.torch_device)
    trial.step(NoObserver())
    saved: int = device.weigh(trial)["saved_bytes"]
    return saved


def products(family: str, itemsize: int = 4) -> list[int]:
    """List the bytes of one block's products of activations and weights, in the order they run."""
    widths = {"gpt": [3 * D, D, 4 * D, D], "llama": [3 * D, D, F_LLAMA, F_LLAMA, D]}[family]
    return [B * S * width * itemsize for width in widths]


def of_family(policy: str, family: str) -> str:
    """Leave the single calls of products out that a family does not run: addmm has a bias, mm has none."""
    other = {"gpt": "aten.mm", "llama": "aten.addmm"}[family]
    return "+".join(w for w in policy.split("+") if not ("@" in w and re.fullmatch(rf"{other}(\.default)?@\d+", w)))


FUSED = B * S * D * 4 + B * H * S * 4
"""What fused attention gives: the weighed values, and the logarithm of each row's sum."""


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("matmul", lambda family: sum(products(family))),
        ("attention", lambda family: FUSED),
        ("matmul+attention", lambda family: sum(products(family)) + FUSED),
        ("every-2nd-matmul", lambda family: sum(products(family)[::2])),
        ("aten.mm+aten.addmm", lambda family: sum(products(family))),
        ("aten.gelu+aten.silu", lambda family: B * S * (4 * D if family == "gpt" else F_LLAMA) * 4),
        ("aten.addmm@2+aten.mm@2", lambda family: products(family)[1]),
        ("aten.addmm@1+aten.addmm.default@3+aten.mm.default@1+aten.mm@3", lambda family: sum(products(family)[:3:2])),
        ("aten.addmm@1+aten.addmm+aten.mm+aten.mm@1", lambda family: sum(products(family))),
        ("attention+aten.addmm@1+aten.mm@1", lambda family: FUSED + products(family)[0]),
    ],
)
def test_kept_bytes_by_hand(tiny_run: MakeRun, family: str, policy: str, kept: Callable[[str], int]) -> None:
    """The difference from per-block is the policy's results, nothing else."""
    model = {"family": family}
    policy = of_family(policy, family)
    extra = saved_bytes(tiny_run(f"selective:{policy}", model=model)) - saved_bytes(tiny_run("per-block", model=model))
    assert extra == L * kept(family)


def test_products_of_plain_attention_are_kept_too(tiny_run: MakeRun) -> None:
    """Where attention is plain operations, its two products are products like any other."""
    model = {"attention": "eager"}
    extra = saved_bytes(tiny_run("selective:matmul", model=model)) - saved_bytes(tiny_run("per-block", model=model))
    assert extra == L * (sum(products("gpt")) + B * H * S * S * 4 + B * S * D * 4)


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_short_types_dispatch_to_the_same_operations(tiny_run: MakeRun, family: str, precision: str) -> None:
    settings: dict[str, Any] = {"model": {"family": family}, "train": {"precision": precision}}
    extra = saved_bytes(tiny_run("selective:matmul", **settings)) - saved_bytes(tiny_run("per-block", **settings))
    assert extra == L * sum(products(family, itemsize=2))


@pytest.mark.parametrize("options", ["", ",early_stop=false", ",skip_last", ",preserve_rng=false"])
@pytest.mark.parametrize(
    "policy",
    ["matmul", "attention", "matmul+attention", "every-2nd-matmul", "aten.gelu+aten.silu", *SINGLE],
)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_bit_identical_without_dropout(tiny_run: MakeRun, family: str, policy: str, options: str) -> None:
    """With dropout the contract of all strategies proves it; fused attention on a CPU is only without."""
    model = {"family": family}
    reference = run_steps(tiny_run("none", model=model), CPU)
    policy = of_family(policy, family)
    assert differences(reference, run_steps(tiny_run(f"selective:{policy}{options}", model=model), CPU)) == []


@pytest.mark.parametrize("policy", ["matmul+attention", "attention", "every-2nd-matmul", "aten.addmm@2+aten.addmm@3"])
def test_accumulation_and_autocast(tiny_run: MakeRun, policy: str) -> None:
    train = {"grad_accumulation": 3, "precision": "bf16"}
    reference = run_steps(tiny_run("none", train=train), CPU)
    assert differences(reference, run_steps(tiny_run(f"selective:{policy}", train=train), CPU)) == []


def flops(config: RunConfig) -> tuple[int, int]:
    counted = Trial(config, CPU).count()
    return counted["flops_forward"], counted["flops_backward"]


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("early_stop", ["", ",early_stop=false"])
def test_recomputed_flops(tiny_run: MakeRun, family: str, early_stop: str) -> None:
    """The counter sees what is run again, not what is answered from the store."""
    model = {"family": family}
    none = flops(tiny_run("none", model=model))
    per_block = flops(tiny_run("per-block,early_stop=false", model=model))

    def extra(policy: str) -> int:
        forward, backward = flops(tiny_run(f"selective:{policy}{early_stop}", model=model))
        assert forward == none[0]
        return backward - none[1]

    attention = 2 * B * H * S * S * 2 * (D // H)
    assert extra("matmul+attention") == 0
    assert extra("matmul") == L * attention
    assert extra("aten._scaled_dot_product_flash_attention_for_cpu") in (
        per_block[1] - none[1] - L * attention,
        per_block[1] - none[1] - L * attention - L * 2 * B * S * D * (4 * D if family == "gpt" else F_LLAMA),
    ), "all products, but for the last one where early stop spares it"


@pytest.mark.parametrize("kept", [(1,), (2,), (3,), (1, 3), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_recomputed_flops_drop_by_the_named_calls(tiny_run: MakeRun, family: str, kept: tuple[int, ...]) -> None:
    model = {"family": family}
    name = {"gpt": "aten.addmm", "llama": "aten.mm"}[family]
    policy = "+".join(f"{name}@{call}" for call in kept)
    spared = flops(tiny_run("per-block", model=model))[1] - flops(tiny_run(f"selective:{policy}", model=model))[1]
    factors = {"gpt": [D * 3 * D, D * D, D * 4 * D], "llama": [D * 3 * D, D * D, D * F_LLAMA]}[family]
    assert spared == L * sum(2 * B * S * factors[call - 1] for call in kept)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("aten.addmm@5", "block 0 ran aten.addmm 4 times, so there is no aten.addmm@5 to keep"),
        ("aten.addmm@1+aten.addmm@7", "block 0 ran aten.addmm 4 times, so there is no aten.addmm@7 to keep"),
        ("aten.gelu@2+aten.addmm", "block 0 ran aten.gelu 1 time, so there is no aten.gelu@2 to keep"),
        ("aten.mm@1+aten.addmm@1", "block 0 ran aten.mm 0 times, so there is no aten.mm@1 to keep"),
        ("aten.mm@1", "block 0 ran no aten.mm@1, so nothing would be kept; it ran aten.native_layer_norm, "),
    ],
)
def test_a_call_that_was_not_there_is_an_error(tiny_run: MakeRun, policy: str, said: str) -> None:
    trial = Trial(tiny_run(f"selective:{policy}"), CPU)
    with pytest.raises(PlanError) as told:
        trial.step(NoObserver())
    assert str(told.value).startswith(said)


@pytest.mark.parametrize("save_ops", [("aten.mm@2",), ("aten.mm@2", "aten.mm.default@3", "aten.addmm")])
def test_forward_and_replay_decide_alike_where_both_are_asked(save_ops: tuple[str, ...]) -> None:
    """PyTorch before 2.13 asks the policy again in the replay."""
    policy = _Policy(_Named(save_ops), 1, notes_ops=False)
    ran = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default] * 2
    decided = {
        is_recompute: [policy(SimpleNamespace(is_recompute=is_recompute), op) for op in ran]
        for is_recompute in (False, True)
    }
    kept = [i for i, decision in enumerate(decided[False]) if decision is CheckpointPolicy.MUST_SAVE]
    assert kept == ([2] if len(save_ops) == 1 else [1, 2, 3, 4])
    assert decided[True] == decided[False]


@pytest.mark.prove
@pytest.mark.parametrize("kept", [(1,), (2,), (1, 3)])
def test_calls_are_counted_alike_inside_compiled_code(tiny_run: MakeRun, kept: tuple[int, ...]) -> None:
    """The compiler drops the last product, whose result no gradient needs, as early stop does."""
    policy = "+".join(f"aten.addmm@{call}" for call in kept)
    found = []
    for spec in ("none", f"selective:{policy}"):
        torch._dynamo.reset()
        trial = Trial(tiny_run(spec, model={"n_layers": 2}, train={"compile": True}), CPU)
        found.append(trial.count()["flops_backward"])
        trial.applied.remove()
    torch._dynamo.reset()
    addmm = [2 * B * S * n for n in (D * 3 * D, D * D, D * 4 * D)]
    again = 2 * B * H * S * S * 2 * (D // H) + sum(n for call, n in enumerate(addmm, 1) if call not in kept)
    assert found[1] - found[0] == 2 * again


def test_calls_are_counted_anew_in_each_step_and_block(tiny_run: MakeRun) -> None:
    """Accumulation runs each block's forward several times before the optimizer does."""
    train = {"grad_accumulation": 2}
    per_block = saved_bytes(tiny_run("per-block", train=train))
    assert saved_bytes(tiny_run("selective:aten.addmm@2", train=train)) - per_block == L * products("gpt")[1]


@pytest.mark.parametrize(
    ("policy", "model", "ran"),
    [
        ("attention", {"attention": "eager"}, "aten.native_layer_norm, aten.addmm, "),
        ("attention", {"attention": "math"}, "aten.native_layer_norm, aten.addmm, "),
        ("aten.conv2d", {}, "aten.native_layer_norm, aten.addmm, "),
        ("aten.mm", {}, "aten.native_layer_norm, aten.addmm, "),
    ],
)
def test_a_policy_that_finds_nothing_is_an_error(
    tiny_run: MakeRun, policy: str, model: dict[str, Any], ran: str
) -> None:
    trial = Trial(tiny_run(f"selective:{policy}", model=model), CPU)
    with pytest.raises(PlanError) as told:
        trial.step(NoObserver())
    text = str(told.value)
    assert text.startswith("block 0 ran no ") and "so nothing would be kept; it ran " in text
    assert ran in text and text.count(",") < 12


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aten.mmm", "this PyTorch has no operation 'aten.mmm'; did you mean 'aten.mm'?"),
        ("nowhere.xyzzy_plugh", "this PyTorch has no operation 'nowhere.xyzzy_plugh'"),
        ("aten.gelu.sideways", "operation aten.gelu has no overload 'sideways'; have: default, out"),
    ],
)
def test_unknown_operations_are_errors(tiny_run: MakeRun, name: str, said: str) -> None:
    with pytest.raises(PlanError) as told:
        Trial(tiny_run(f"selective:{name}"), CPU)
    assert str(told.value).startswith(said)


def test_the_words_of_policies_are_operations_of_this_pytorch() -> None:
    for name in (*MATMUL, *ATTENTION):
        assert torch.ops.aten is not None and any(str(op).startswith(name) for op in resolve_op(name))


class Drawing(nn.Module):
    """A block that draws random numbers in operations which a policy may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            y = torch.tanh(self.linear(x))
            x = x + torch.native_dropout(y, 0.3, True)[0] * torch.rand_like(y)
        return x


def gradients(plan: Plan, blocks: tuple[nn.Module, ...]) -> list[Tensor]:
    model = BuiltModel(module=nn.ModuleList(blocks), blocks=blocks, parts=({},) * len(blocks))
    applied = AppliedPlan(model, plan)
    torch.manual_seed(3)
    hidden = x = torch.ones(3, 8, requires_grad=True)
    for block in blocks:
        hidden = block(hidden)
    found = torch.autograd.grad(hidden.square().sum(), [x, *model.module.parameters()])
    applied.remove()
    return [hidden.detach(), *found, torch.rand(2)]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 2)])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(
    "ops", [("aten.native_dropout",), ("aten.rand_like",), ("aten.native_dropout", "aten.rand_like")]
)
def test_kept_random_operations_leave_the_others_their_numbers(
    ops: tuple[str, ...], every: int, start: int, stop: int, early_stop: bool
) -> None:
    """What is kept is not drawn again, and what follows must still draw what it drew."""
    blocks = tuple(Drawing() for _ in range(2))
    region = Region(start=start, stop=stop, save_ops=ops, save_every=every)
    reference = gradients(Plan(n_layers=2), blocks)
    got = gradients(Plan(n_layers=2, regions=(region,), early_stop=early_stop), blocks)
    assert all(torch.equal(a, b) for a, b in zip(reference, got, strict=True))


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "ops",
    [
        ("aten.native_dropout@1",),
        ("aten.native_dropout@4",),
        ("aten.rand_like@2",),
        ("aten.native_dropout@2", "aten.rand_like@3", "aten.rand_like.default@1"),
        ("aten.native_dropout", "aten.rand_like@1"),
    ],
)
def test_single_kept_random_operations_leave_the_others_their_numbers(ops: tuple[str, ...], early_stop: bool) -> None:
    blocks = tuple(Drawing() for _ in range(2))
    regions = tuple(Region(start=i, stop=i + 1, save_ops=ops) for i in range(2))
    reference = gradients(Plan(n_layers=2), blocks)
    got = gradients(Plan(n_layers=2, regions=regions, early_stop=early_stop), blocks)
    assert all(torch.equal(a, b) for a, b in zip(reference, got, strict=True))


def test_what_is_kept_is_let_go_after_backward() -> None:
    blocks = tuple(Drawing() for _ in range(2))
    plan = Plan(n_layers=2, regions=(Region(start=0, stop=2, save_ops=("aten.addmm", "aten.native_dropout")),))
    model = BuiltModel(module=nn.ModuleList(blocks), blocks=blocks, parts=({}, {}))
    AppliedPlan(model, plan)
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(3, 8)
        alive = weakref.ref(x)
        hidden = x
        for block in blocks:
            hidden = block(hidden)
        hidden.sum().backward()
        del x, hidden
        assert alive() is None
    finally:
        gc.enable()


def test_an_evaluation_pass_keeps_nothing(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("selective:matmul"), CPU)
    tokens = trial.batches[0][0]
    with torch.no_grad():
        output = trial.module(tokens)
    trial.applied.remove()
    with torch.no_grad():
        assert torch.equal(output, trial.module(tokens))
