"""Compiled blocks: every strategy computes what compiled none computes, compiles once, and is counted where it can be.

Compiling takes seconds, so all but the least is marked prove.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckbench import specs
from ckbench.config import RunConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.compiling import BlockCompiler, check_toolchain
from ckbench.engine.measure import measure
from ckbench.engine.parity import check_parity
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import DeviceUnavailable, PlanError
from ckbench.models.base import BuiltModel
from ckbench.plan import Plan, Region, StackShape

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
B, S, D, H, L = 2, 8, 16, 2, 2
TINY = {"n_layers": L, "d_model": D, "n_heads": H, "vocab_size": 32}
TRAIN = {"batch_size": B, "seq_len": S, "compile": True}
prove = pytest.mark.prove


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code, and see that no setting of PyTorch's outlives a plan."""
    import torch._functorch.config as autograd_config

    torch._dynamo.reset()
    settings = torch._dynamo.config
    before = settings.recompile_limit, settings.fail_on_recompile_limit_hit, autograd_config.activation_memory_budget
    yield
    after = settings.recompile_limit, settings.fail_on_recompile_limit_hit, autograd_config.activation_memory_budget
    assert after == before
    torch._dynamo.reset()


def compiled_run(tiny_run: MakeRun, spec: str, *, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return tiny_run(spec, model={**TINY, **(model or {})}, train={**TRAIN, **train})


def counted(config: RunConfig) -> dict[str, Any]:
    """Warm up, see that nothing is compiled any more, count one step."""
    trial = Trial(config, CPU)
    trial.step(NoObserver())
    compiler = trial.applied._compiler
    assert compiler is not None
    n_compilations, seconds = compiler.n_compilations, compiler.seconds()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            trial.step(NoObserver())
        fields = trial.count()
        trial.step(NoObserver())
    assert (compiler.n_compilations, compiler.seconds()) == (n_compilations, seconds)
    assert fields["compile_s"] == seconds > 0
    trial.applied.remove()
    return {**fields, "n_graphs": compiler._tally.n_graphs}


def flops_of_eager(config: RunConfig) -> tuple[int, int]:
    eager = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
    fields = Trial(eager, CPU).count()
    return fields["flops_forward"], fields["flops_backward"]


def verdict(config: RunConfig) -> dict[str, Any]:
    plan = specs.resolve(config.strategy, StackShape(n_layers=config.model.n_layers or L))
    return check_parity(config, CPU, lambda: None, plan)


def test_a_block_is_compiled_once_for_all_and_counted_from_outside(tiny_run: MakeRun) -> None:
    config = compiled_run(tiny_run, "per-block,early_stop=false", model={"dropout": 0.1})
    fields = counted(config)
    assert fields["n_graphs"] == 1, "two equal blocks share one compilation"
    assert (fields["block_calls_forward"], fields["block_calls_backward"], fields["region_calls_backward"]) == (L, L, L)
    assert (fields["flops_forward"], fields["flops_backward"]) == flops_of_eager(config), "counted in compiled code"
    assert fields["notes"] == []
    assert verdict(config)["parity"] == "exact", "masks are those of compiled none, and drawn again in the replay"


class Breaking(nn.Module):
    """A block that the compiler cannot take in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return torch.tanh(y)


def test_a_graph_break_is_noted() -> None:
    blocks = (Breaking(),)
    model = BuiltModel(module=nn.ModuleList(blocks), blocks=blocks, parts=({},))
    applied = AppliedPlan(model, Plan(n_layers=1, regions=(Region(start=0, stop=1),)), compiled=True)
    blocks[0](torch.ones(2, 8, requires_grad=True)).sum().backward()
    notes = applied.figures()["notes"]
    applied.remove()
    assert len(notes) == 1
    assert notes[0].startswith("torch.compile broke the blocks' graph for 1 reasons; first: ")
    assert "graph_break" in notes[0]


def test_what_was_never_compiled_is_noted(tiny_run: MakeRun) -> None:
    trial = Trial(compiled_run(tiny_run, "none"), CPU)
    assert trial.applied.figures()["notes"] == ["torch.compile compiled nothing of the blocks"]
    trial.applied.remove()


def test_a_machine_without_a_compiler_is_told() -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(DeviceUnavailable) as told:
        check_toolchain("cpu")
    assert str(told.value) == (
        "torch.compile on a CPU needs a C++ compiler and found none; install g++, or name one in the environment "
        "variable CXX"
    )
    check_toolchain("cpu")


def test_what_cannot_be_compiled_is_refused(tiny_run: MakeRun) -> None:
    model = Trial(compiled_run(tiny_run, "none", compile=False), CPU).model
    inverted = Plan(n_layers=L, regions=(Region(start=0, stop=L, mode="invert"),))
    with pytest.raises(PlanError, match="^a reversible stack runs its blocks in pieces"):
        AppliedPlan(model, inverted, compiled=True)
    spanning = Plan(n_layers=L, regions=(Region(start=0, stop=L, save_ops=("aten.mm",)),))
    with pytest.raises(PlanError, match="^a compiled region that keeps results lies inside one block"):
        AppliedPlan(model, spanning, compiled=True)


def test_recompiling_too_often_is_an_error_not_uncompiled_code() -> None:
    """PyTorch would go on uncompiled after eight; the limit follows the depth, and reaching it is told."""
    compiler = BlockCompiler(Plan(n_layers=40), "cpu")
    assert torch._dynamo.config.recompile_limit == 320
    assert torch._dynamo.config.fail_on_recompile_limit_hit
    compiler.remove()
    compiler.remove()


STRATEGIES = (
    "offload", "per-block+offload", "per-block", "per-block,reentrant", "every-k:2", "nested:2", "ffn-only", "attn-only", "core-attn", "one-in-k:2",
    "selective:matmul", "selective:every-2nd-matmul", "selective:matmul+attention",
)  # fmt: skip
COUNTED = ("offload", "per-block+offload", "per-block", "per-block,reentrant", "every-k:2", "nested:2", "one-in-k:2")


@prove
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("spec", STRATEGIES)
def test_parity_and_counts(tiny_run: MakeRun, family: str, spec: str) -> None:
    """With dropout: recomputation inside compiled code and outside of it draws the masks of compiled none again."""
    model = {"family": family, "dropout": 0.1}
    found = verdict(compiled_run(tiny_run, spec, model=model))
    assert found["parity"] in ("exact", "within_tolerance"), found
    assert found["parity"] == "exact" or spec not in COUNTED, "outside, the very same code runs again"
    torch._dynamo.reset()
    fields = counted(compiled_run(tiny_run, spec, model=model))
    assert fields["notes"] == []
    plan = specs.resolve(specs.parse(spec), StackShape(n_layers=L))
    if spec in COUNTED:
        assert fields["block_calls_backward"] == sum(plan.block_calls_backward())
        assert fields["region_calls_backward"] == plan.region_calls_backward()
        assert fields["n_graphs"] <= 2, "one for all blocks; reentrant runs them without gradients too"
    else:
        assert fields["region_calls_backward"] is None, "it cannot be seen from outside"
        assert fields["block_calls_backward"] == (None if spec.startswith("selective") else 0)
        assert fields["n_graphs"] == 1


@prove
def test_recomputed_flops_of_compiled_code(tiny_run: MakeRun) -> None:
    """What a policy keeps is not computed again: the counter sees the products that compiled code calls."""
    none = counted(compiled_run(tiny_run, "none"))["flops_backward"]
    attention = 2 * B * H * S * S * 2 * (D // H)
    for spec, extra in {
        "selective:matmul+attention": 0,
        "selective:matmul": L * attention,
        "core-attn": L * attention,
        "compile-budget:1": 0,
    }.items():
        torch._dynamo.reset()
        assert counted(compiled_run(tiny_run, spec))["flops_backward"] == none + extra, spec


@prove
@pytest.mark.parametrize("spec", ["per-block", "selective:matmul", "attn-only"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_short_types(tiny_run: MakeRun, spec: str, precision: str) -> None:
    found = verdict(compiled_run(tiny_run, spec, model={"dropout": 0.1}, precision=precision))
    assert found["parity"] in ("exact", "within_tolerance"), found


@prove
def test_unequal_blocks_beyond_pytorchs_own_limit(tiny_run: MakeRun) -> None:
    """Ten widths are ten compilations, where PyTorch by itself would give up after eight."""
    widths = tuple(16 + 8 * i for i in range(10))
    config = compiled_run(tiny_run, "per-block", model={"n_layers": 10, "d_ff": widths})
    fields = counted(config)
    assert fields["n_graphs"] == 10
    assert fields["block_calls_backward"] == 10


def saved_bytes(config: RunConfig) -> int:
    device = Cpu("cpu", 1)
    trial = Trial(config, CPU)
    trial.step(NoObserver())
    saved: int = device.weigh(trial)["saved_bytes"]
    trial.applied.remove()
    torch._dynamo.reset()
    return saved


@prove
def test_a_budget_keeps_less_the_smaller_it_is(tiny_run: MakeRun) -> None:
    """Compiled even where the study does not say so. All of it is what compiled none keeps, nothing of it is the
    block's input, as per-block keeps it."""
    train = {"batch_size": 4, "seq_len": 32}

    def kept(spec: str, **more: Any) -> int:
        return saved_bytes(tiny_run(spec, model={**TINY, "d_model": 32}, train={**train, **more}))

    none, per_block = kept("none", compile=True), kept("per-block,preserve_rng=false", compile=True)
    all_of_it, half, nothing = (kept(f"compile-budget:{x}") for x in (1, 0.5, 0))
    assert all_of_it == none
    assert nothing == per_block
    assert nothing < half < all_of_it


@prove
@pytest.mark.parametrize("budget", [0, 0.5, 1])
def test_a_budget_computes_what_compiled_none_computes(tiny_run: MakeRun, budget: float) -> None:
    config = tiny_run(f"compile-budget:{budget}", model=TINY, train={"batch_size": B, "seq_len": S})
    found = verdict(config)
    assert found["parity"] in ("exact", "within_tolerance"), found
    fields = counted(config)
    assert fields["block_calls_backward"] is None, "what the compiler runs again is no start of a block"
    assert fields["notes"] == []


@prove
def test_a_budget_with_dropout_is_found_out(tiny_run: MakeRun) -> None:
    """PyTorch 2.13 draws other masks in the recomputation (pytorch issue 190758); parity must not let it pass.

    Once PyTorch draws them again, the verdict is that it is the same.
    """
    config = tiny_run("compile-budget:0", model={**TINY, "dropout": 0.1}, train={"batch_size": B, "seq_len": S})
    found = verdict(config)
    assert found["parity"] == "failed" if "differ" in found["parity_detail"] else found["parity"] == "exact"
    if torch.__version__.startswith("2.13"):
        assert found["parity"] == "failed"


@prove
def test_compiling_is_in_no_step_time(tiny_run: MakeRun) -> None:
    """The whole measurement, with no warm-up asked for: the compilation is over before the first timed step."""
    config = compiled_run(tiny_run, "per-block")
    run = config.run.model_copy(update={"warmup_steps": 0, "min_steps": 3, "max_steps": 3, "parity": False})
    config = config.model_copy(update={"run": run})
    device = Cpu("cpu", 1)
    for round_number in (0, 1):
        torch._dynamo.reset()
        trial = Trial(config, CPU)
        fields = measure(trial, device, config, round_number, lambda phase: None)
        compiler = trial.applied._compiler
        assert compiler is not None
        assert max(fields["step_samples_s"]) < compiler.seconds() / 2
        assert ("compile_s" in fields) == (round_number == 0)
        trial.applied.remove()
