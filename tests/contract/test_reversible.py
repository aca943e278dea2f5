"""Coupled blocks without their activations: inverses, gradients, memory, hooks, random numbers, and what is let go."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckbench import registry
from ckbench.config import ModelConfig, RunConfig
from ckbench.devices.cpu import Cpu
from ckbench.engine import parity
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.parity import largest_relative_difference, run_steps
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import PlanError
from ckbench.models.base import BuiltModel, Invertible
from ckbench.plan import Plan, Region
from ckbench.strategies.reversible import TOLERANCES

MakeRun = Callable[..., RunConfig]
MakeModel = Callable[..., ModelConfig]
CPU = torch.device("cpu")
FAMILIES = ("gpt", "llama", "bert", "vit")
RNG_STATE_BYTES = 5056
"""One copy of the CPU generator's state."""


def reversible(family: str, **settings: Any) -> dict[str, Any]:
    return {"family": family, "residual": "reversible", "norm_position": "pre", **settings}


TOLERANCE = TOLERANCES["fp32"]


def inverting(n_layers: int) -> Plan:
    return Plan(n_layers=n_layers, regions=(Region(start=0, stop=n_layers, mode="invert"),))


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_come_back_from_outputs(tiny_model: MakeModel, family: str, dtype: torch.dtype, largest: float) -> None:
    """x2 = y2 - g(y1), x1 = y1 - f(x2), with f and g written out from the block's parts."""
    config = tiny_model(**reversible(family, n_layers=24))
    model: BuiltModel = registry.load("models", family)(config, config.own_seq_len() or 16)
    model.module.to(dtype).eval()
    S = config.own_seq_len() or 16
    rotation = ((model.module.cos_SK, model.module.sin_SK),) if family == "llama" else ()
    x = torch.randn(2, S, 64, dtype=dtype)
    with torch.no_grad():
        y = x
        for block in model.blocks:
            y = block(y, *rotation)
        assert float((y - x).norm() / x.norm()) > 0.01, "the stack does something"
        for block in reversed(model.blocks):
            y1, y2 = y.chunk(2, dim=-1)
            x2 = y2 - block.ffn(block.norm_2(y1))
            x1 = y1 - block.attention(block.norm_1(x2), *rotation)
            y = torch.cat((x1, x2), dim=-1)
    assert 0 < float((y - x).norm() / x.norm()) < largest


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_deep_stack(tiny_run: MakeRun, family: str) -> None:
    """24 blocks: the same losses in the first pass, and every gradient within the tolerance that is stated."""
    model = reversible(family, n_layers=24, dropout=0.1)
    train = {"grad_accumulation": 2}
    reference, other = (run_steps(tiny_run(spec, model=model, train=train), CPU, 1) for spec in ("none", "reversible"))
    assert all(map(torch.equal, reference.losses, other.losses)), "forward is the same arithmetic"
    assert all(g is not None for g in other.gradients.values())
    assert 0 < largest_relative_difference(reference, other) < TOLERANCE
    assert all(map(torch.equal, reference.generators, other.generators))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_rounding_tells_them_apart(tiny_run: MakeRun, family: str) -> None:
    """With twice the digits the difference all but vanishes, so it is rounding and no mistake."""

    def gradients(spec: str) -> list[Tensor]:
        trial = Trial(tiny_run(spec, model=reversible(family, n_layers=24, dropout=0.1)), CPU)
        trial.module.double()
        ((inputs, targets),) = trial.batches
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        trial.loss(trial.module(inputs), targets).backward()
        return [p.grad for p in trial.module.parameters() if p.grad is not None]

    for a, b in zip(gradients("none"), gradients("reversible"), strict=True):
        assert float((a - b).norm() / a.norm()) < 1e-11


@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"freeze_embedding": True}},
        {"model": {"head": "none", "vocab_size": None}, "train": {"loss": "mse"}},
        {"model": {"tie_embeddings": True}},
        {"model": {"attention": "eager", "dropout": 0.1}},
        {"train": {"set_to_none": False, "grad_accumulation": 3}},
        {"train": {"loss": "chunked_cross_entropy"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_other_models(tiny_run: MakeRun, family: str, settings: dict[str, Any]) -> None:
    model = reversible(family, **settings.get("model", {}))
    reference, other = (
        run_steps(tiny_run(spec, model=model, train=settings.get("train")), CPU) for spec in ("none", "reversible")
    )
    assert largest_relative_difference(reference, other) < TOLERANCE
    assert {n for n, g in reference.gradients.items() if g is None} == {
        n for n, g in other.gradients.items() if g is None
    }


class Weighed:
    """Bytes of a step above parameters, buffers, gradients and the batch."""

    def __init__(self, config: RunConfig) -> None:
        device = Cpu("cpu", 1)
        trial = Trial(config, device.torch_device)
        for parameter in trial.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        fields = device.weigh(trial)
        self.saved: int = fields["saved_bytes"]
        base = trial.holdings().total_bytes()
        self.peak: int = fields["peak_allocated_bytes"] - base
        self.loss: int = fields["peak_loss_bytes"] - base
        self.backward: int = fields["peak_backward_bytes"] - base


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_memory_does_not_grow_with_depth(tiny_run: MakeRun, family: str, precision: str) -> None:
    train = {"batch_size": 4, "seq_len": 64, "optimizer": "sgd", "set_to_none": False, "precision": precision}

    def at(spec: str, n_layers: int, **settings: Any) -> Weighed:
        model = reversible(family, n_layers=n_layers, d_model=64, attention="math", **settings)
        return Weighed(tiny_run(spec, model=model, train=train))

    shallow, deep = at("reversible", 4), at("reversible", 16)
    assert deep.saved == shallow.saved
    assert (deep.peak, deep.loss, deep.backward) == (shallow.peak, shallow.loss, shallow.backward)
    none, per_block = at("none", 16), at("per-block,preserve_rng=false", 16)
    b = 4 * 64 * 64 * 4
    assert per_block.saved - deep.saved == 15 * 2 * b, "one boundary of two streams instead of one per block"
    assert deep.saved < per_block.saved < none.saved
    assert deep.peak < per_block.peak < none.peak
    dropping = at("reversible", 16, dropout=0.1).saved - at("reversible", 4, dropout=0.1).saved
    assert dropping == 12 * 2 * RNG_STATE_BYTES, "with dropout one state for f and one for g of each block"


class Coupled(Invertible):
    """A small block with dropout in f, a scale that g takes from the call, and a shift and a gain in both."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.g = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)
        self.gain = nn.Parameter(torch.full((8,), 0.5))

    def couplings(
        self, scale: Tensor | float, *, shift: Tensor | None = None
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        shift = torch.zeros(()) if shift is None else shift
        return (
            lambda x: self.dropout(torch.tanh(self.f(x))) * self.gain + shift,
            lambda x: torch.tanh(self.g(x) * scale) * self.gain + shift.sin(),
        )


def stack_of(*blocks: nn.Module) -> BuiltModel:
    return BuiltModel(module=nn.ModuleList(dict.fromkeys(blocks)), blocks=blocks, parts=({},) * len(blocks))


def passed(blocks: Iterable[nn.Module], x: Tensor, scale: Any, **kwargs: Any) -> Tensor:
    torch.manual_seed(5)
    for block in blocks:
        x = block(x, scale, **kwargs)
    return x


def close(a: Tensor | None, b: Tensor | None) -> bool:
    assert a is not None and b is not None
    return torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("pattern", [(0, 1, 2), (0, 0, 0), (0, 1, 0)], ids=str)
def test_tensors_of_the_call_and_shared_blocks(pattern: tuple[int, ...]) -> None:
    """Further tensors get their gradient, a block at several places the sum; also where .grad is not written."""
    modules = [Coupled() for _ in range(3)]
    blocks = [modules[i] for i in pattern]
    model = stack_of(*blocks)
    x, scale, shift = (torch.randn(*shape, requires_grad=True) for shape in ((3, 16), (8,), (8,)))
    inputs = [x, scale, shift, *model.module.parameters()]

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(passed(blocks, x, scale, shift=shift).square().sum(), inputs))

    wanted = gradients()
    applied = AppliedPlan(model, inverting(len(blocks)))
    got = gradients()
    applied.remove()
    assert all(map(close, wanted, got))
    assert not [m for m in model.module.modules() if "forward" in m.__dict__]


def test_frozen_parameters_and_frozen_blocks() -> None:
    blocks = [Coupled() for _ in range(4)]
    model = stack_of(*blocks)
    blocks[0].requires_grad_(False)
    blocks[2].f.weight.requires_grad_(False)
    x = torch.randn(3, 16)
    passed(blocks, x, 0.5).square().sum().backward()
    wanted = [p.grad for p in model.module.parameters()]
    model.module.zero_grad()
    AppliedPlan(model, inverting(4))
    passed(blocks, x, 0.5).square().sum().backward()
    got = [p.grad for p in model.module.parameters()]
    assert [g is None for g in wanted] == [g is None for g in got]
    assert sum(g is None for g in got) == 6
    assert all(close(a, b) for a, b in zip(wanted, got, strict=True) if a is not None)
    model.module.requires_grad_(False)
    assert not passed(blocks, x, 0.5).requires_grad


def test_hooks_fire_once_and_from_the_last_block_on() -> None:
    """An optimizer that works in backward sees each gradient whole, and may free it before the block before runs."""
    first, second = Coupled(), Coupled()
    blocks = [first, second, first]
    model = stack_of(*blocks)
    AppliedPlan(model, inverting(3))
    arrived: list[Tensor] = []
    doubled: list[Tensor] = []
    for parameter in model.module.parameters():
        parameter.register_post_accumulate_grad_hook(arrived.append)
        parameter.register_hook(lambda gradient: doubled.append(gradient) or 2 * gradient)
    passed(blocks, torch.randn(3, 16), 0.5).square().sum().backward()
    own, shared = list(second.parameters()), list(first.parameters())
    assert len(arrived) == len(doubled) == 10
    assert {id(p) for p in arrived[:5]} == {id(p) for p in own} and {id(p) for p in arrived[5:]} == set(map(id, shared))
    assert all(p.grad is not None and torch.equal(p.grad, 2 * g) for p, g in zip(arrived, doubled, strict=True))


def test_a_kept_graph_gives_the_same_gradients_again() -> None:
    blocks = [Coupled() for _ in range(3)]
    model = stack_of(*blocks)
    AppliedPlan(model, inverting(3))
    loss = passed(blocks, torch.randn(3, 16), 0.5).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.module.parameters() if p.grad is not None]
    loss.backward()
    assert all(torch.equal(2 * a, p.grad) for a, p in zip(once, model.module.parameters(), strict=True))  # type: ignore[arg-type]


def test_an_output_changed_in_place_is_found_out() -> None:
    blocks = [Coupled() for _ in range(2)]
    AppliedPlan(stack_of(*blocks), inverting(2))
    output = passed(blocks, torch.randn(3, 16), 0.5)
    output.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_all_is_let_go_without_the_collector() -> None:
    blocks = [Coupled() for _ in range(3)]
    AppliedPlan(stack_of(*blocks), inverting(3))
    gc.collect()
    gc.disable()
    try:
        scale = torch.ones(8)
        hidden = passed(blocks, torch.randn(3, 16), scale)
        alive = [weakref.ref(t) for t in (scale, hidden)]
        node = weakref.ref(hidden.grad_fn)
        hidden.sum().backward()
        del scale, hidden
        assert [ref() for ref in alive] == [None, None] and node() is None
        unused = passed(blocks, torch.randn(3, 16), torch.ones(8))
        dropped = weakref.ref(unused.grad_fn)
        del unused
        assert dropped() is None, "a pass without backward"
    finally:
        gc.enable()


def test_an_evaluation_pass_runs_plainly(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("reversible", model=reversible("llama")), CPU)
    tokens = trial.batches[0][0]
    with torch.no_grad():
        got = trial.module(tokens)
    assert trial.applied.counts.block_calls_forward == [1] * 4
    plain = trial.applied
    plain.remove()
    with torch.no_grad():
        assert torch.equal(trial.module(tokens), got)
    trial.applied = AppliedPlan(trial.model, plain.plan)
    trial.step(NoObserver())
    assert tuple(trial.applied.counts.block_calls_backward) == plain.plan.block_calls_backward()


def test_autocast_is_that_of_forward(tiny_run: MakeRun) -> None:
    """The rebuilt pass computes in the short type too, outside of the context that forward ran in."""
    trial = Trial(tiny_run("reversible", model=reversible("gpt"), train={"precision": "bf16"}), CPU)
    types: list[tuple[torch.dtype, bool]] = []
    linear = trial.model.blocks[1].ffn.up
    linear.register_forward_hook(lambda _m, _a, output: types.append((output.dtype, torch.is_grad_enabled())))
    trial.step(NoObserver())
    assert types == [(torch.bfloat16, False), (torch.bfloat16, True)]


def test_a_weight_used_again_under_the_same_autocast_gets_its_gradient() -> None:
    """A cast made without a graph must not be served to whoever comes next, as PyTorch 2.9 would from its cache."""
    block = Coupled()
    AppliedPlan(stack_of(block), inverting(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = passed([block], torch.randn(3, 16), 0.5)
        again = block.f(hidden.detach()[:, :8])
    assert again.requires_grad and again.grad_fn is not None
    again.sum().backward()
    assert block.f.weight.grad is not None


def test_dropout_without_its_random_state_is_found_out(tiny_run: MakeRun) -> None:
    model = reversible("gpt", dropout=0.1)
    verdict = parity.check_parity(
        tiny_run("reversible,preserve_rng=false", model=model), CPU, lambda: None, inverting(4)
    )
    assert verdict["parity"] == "failed"
    trial = Trial(tiny_run("reversible", model=model), CPU)
    verdict = parity.check_parity(trial.config, CPU, trial.release, trial.applied.plan)
    assert verdict["parity"] == "within_tolerance", verdict
    assert f"stated tolerance {TOLERANCE:.2g}" in verdict["parity_detail"]


def test_blocks_that_cannot_are_refused(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("none"), CPU)
    trial.applied.remove()
    with pytest.raises(PlanError) as told:
        AppliedPlan(trial.model, inverting(4))
    assert str(told.value) == "block 0 cannot rebuild its input; only coupled blocks can, see model.residual"
    with pytest.raises(PlanError) as told:
        Trial(tiny_run("reversible"), CPU)
    assert str(told.value).startswith("reversible needs model.residual: reversible")
