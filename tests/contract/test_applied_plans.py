"""Plans in force on any module: hand-made trees, foreign blocks, shared layers, evaluation, and removal."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckbench import specs
from ckbench.config import RunConfig
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.trial import NoObserver, Trial
from ckbench.errors import PlanError
from ckbench.models.base import BuiltModel
from ckbench.plan import Plan, Region, StackShape

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")
L = 5
SPECS = ("none", "per-block", "every-k:2", "full", "nested:2", "recursive", "attn-only", "ffn-only")


def plan_of(spec: str, n_layers: int = L) -> Plan:
    return specs.resolve(specs.parse(spec), StackShape(n_layers=n_layers))


def test_remove_keeps_a_forward_of_the_users_own(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("none"), CPU)
    trial.applied.remove()
    block = trial.model.blocks[0]

    def own(*args: Any) -> Any:
        return type(block).forward(block, *args)

    object.__setattr__(block, "forward", own)
    AppliedPlan(trial.model, plan_of("sqrt", 4)).remove()
    assert block.__dict__["forward"] is own


def test_a_plan_of_another_depth_is_refused(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("none"), CPU)
    with pytest.raises(PlanError) as told:
        AppliedPlan(trial.model, Plan(n_layers=7))
    assert str(told.value) == "plan for 7 blocks, model has 4"


def random_region(rng: torch.Generator, start: int, stop: int) -> Region:
    """Draw a tree: some blocks of the span lie in child regions, some run plainly."""
    children, at = [], start
    while at < stop and stop - start > 1:
        length = min(int(torch.randint(1, stop - start, (), generator=rng)), stop - at)
        if torch.rand((), generator=rng) < 0.6:
            children.append(random_region(rng, at, at + length))
        at += length
    return Region(start=start, stop=stop, children=tuple(children))


@pytest.mark.parametrize("case", range(24))
def test_any_tree_of_regions_is_exact_and_counted(tiny_run: MakeRun, case: int) -> None:
    """Not only the named strategies: a plan may be any tree, and predictions must hold for it too."""
    rng = torch.Generator().manual_seed(case)
    plan = Plan(n_layers=6, regions=(random_region(rng, 0, 6),), early_stop=case % 3 > 0)
    config = tiny_run("none", model={"n_layers": 6, "dropout": 0.1})
    trial = Trial(config, CPU)
    reference = _one_step_gradients(trial)
    assert trial.applied.plan == Plan(n_layers=6)
    trial = Trial(config, CPU)
    trial.applied.remove()
    trial.applied = AppliedPlan(trial.model, plan)
    gradients = _one_step_gradients(trial)
    assert all(torch.equal(a, b) for a, b in zip(reference, gradients, strict=True))
    counts = trial.applied.counts
    assert tuple(counts.block_calls_backward) == plan.block_calls_backward(), plan
    assert counts.region_calls_backward == plan.region_calls_backward(), plan


def _one_step_gradients(trial: Trial) -> list[Tensor]:
    kept: list[Tensor] = []

    class Keeper:
        def at(self, event: str) -> None:
            if event == "optimizer":
                kept.extend(p.grad.clone() for p in trial.module.parameters() if p.grad is not None)

    trial.step(Keeper())
    return kept


class KeywordBlock(nn.Module):
    """A block as other libraries write them: the hidden state and a mask by keyword, a scale per block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *, hidden: Tensor, scales: tuple[Tensor, list[Tensor]]) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden)) * scales[0] * scales[1][0]


@pytest.mark.parametrize("spec", SPECS)
def test_keyword_arguments_of_each_block_survive(spec: str) -> None:
    blocks = tuple(KeywordBlock() for _ in range(L))
    parts = tuple({"ffn": (block.linear,), "attention": (block.linear,)} for block in blocks)
    model = BuiltModel(module=nn.ModuleList(blocks), blocks=blocks, parts=parts)
    x = torch.randn(3, 8, requires_grad=True)
    weights = [torch.randn(8, requires_grad=True) for _ in range(L)]

    def gradients() -> list[Tensor]:
        hidden = x
        for i, block in enumerate(blocks):
            hidden = block(hidden=hidden, scales=(weights[i], [torch.full((), i + 1.0)]))
        inputs = [x, *weights, *model.module.parameters()]
        return list(torch.autograd.grad(hidden.square().sum(), inputs))

    wanted = gradients()
    applied = AppliedPlan(model, plan_of(spec))
    got = gradients()
    applied.remove()
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert (applied.notes != []) == spec.endswith("-only"), "a part without its norm says so"


def test_a_block_called_without_a_tensor_is_refused() -> None:
    block = KeywordBlock()
    model = BuiltModel(module=block, blocks=(block,), parts=({},))
    AppliedPlan(model, plan_of("per-block", 1))
    with pytest.raises(PlanError) as told:
        block(hidden=None, scales=None)
    assert str(told.value) == "a checkpointed module was called without a tensor"


def test_a_missing_part_is_named() -> None:
    block = KeywordBlock()
    model = BuiltModel(module=block, blocks=(block, block), parts=({"ffn": (block.linear,)}, {}))
    with pytest.raises(PlanError) as told:
        AppliedPlan(model, plan_of("ffn-only", 2))
    assert str(told.value) == "block 1 has no ffn part"


class Residual(nn.Module):
    """A small block with dropout, whose part has a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))) * scale)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("pattern", [(0, 0, 0, 0, 0), (0, 1, 0, 1, 1), (0, 1, 2, 0, 1)], ids=str)
def test_layers_shared_between_places(spec: str, pattern: tuple[int, ...]) -> None:
    """One module at several places of the stack, each place with its own arguments and its own region."""
    modules = [Residual() for _ in range(3)]
    blocks = tuple(modules[i] for i in pattern)
    chain = tuple({"ffn": (block.norm, block.linear), "attention": (block.norm, block.linear)} for block in blocks)
    model = BuiltModel(module=nn.ModuleList(modules[: max(pattern) + 1]), blocks=blocks, parts=chain)
    x = torch.randn(3, 8, requires_grad=True)
    counts = None

    def passes() -> list[Tensor]:
        torch.manual_seed(5)
        found: list[Tensor] = []
        for _ in range(2):
            hidden = x
            for i, block in enumerate(blocks):
                hidden = block(hidden, 0.5 + i)
            loss = hidden.square().sum()
            if counts is not None:
                counts.clear()
                counts.in_backward = True
            found += torch.autograd.grad(loss, [x, *model.module.parameters()])
            if counts is not None:
                counts.in_backward = False
        return found

    wanted = passes()
    applied = AppliedPlan(model, plan_of(spec))
    counts = applied.counts
    got = passes()
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert tuple(counts.block_calls_backward) == applied.plan.block_calls_backward()
    assert counts.region_calls_backward == applied.plan.region_calls_backward()
    applied.remove()
    assert not [m for m in model.module.modules() if "forward" in m.__dict__]


@pytest.mark.parametrize(("spec", "records_at_once"), [("per-block", True), ("per-block,reentrant", False)])
def test_reentrant_is_the_older_variant(tiny_run: MakeRun, spec: str, records_at_once: bool) -> None:
    """The older variant runs the forward without a graph and builds one in the replay only."""
    trial = Trial(tiny_run(spec), CPU)
    with_graph: list[bool] = []
    trial.model.blocks[1].ffn.register_forward_pre_hook(lambda *_: with_graph.append(torch.is_grad_enabled()))
    trial.step(NoObserver())
    assert with_graph == [records_at_once, True]


@pytest.mark.parametrize("spec", ["per-block", "every-k:2", "nested:2", "attn-only", "per-block,reentrant"])
def test_an_evaluation_pass_runs_plainly(tiny_run: MakeRun, spec: str) -> None:
    """Without gradients nothing is kept, so nothing is recomputed, and training goes on as before."""
    trial = Trial(tiny_run(spec), CPU)
    tokens = trial.batches[0][0]
    trial.applied.remove()
    with torch.no_grad():
        wanted = trial.module(tokens)
    trial.applied = AppliedPlan(trial.model, plan_of(spec, 4))
    with torch.no_grad():
        assert torch.equal(trial.module(tokens), wanted)
    trial.applied.counts.clear()
    trial.step(NoObserver())
    assert tuple(trial.applied.counts.block_calls_backward) == trial.applied.plan.block_calls_backward()


class Masked(nn.Module):
    """A block that takes one more tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden) * mask)


@pytest.mark.parametrize("spec", ["per-block", "every-k:2", "full"])
def test_extra_arguments_are_let_go_without_the_collector(spec: str) -> None:
    blocks = tuple(Masked() for _ in range(4))
    model = BuiltModel(module=nn.ModuleList(blocks), blocks=blocks, parts=({},) * 4)
    AppliedPlan(model, specs.resolve(specs.parse(spec), StackShape(n_layers=4)))
    gc.collect()
    gc.disable()
    try:
        mask = torch.ones(2, 8)
        alive = weakref.ref(mask)
        hidden = torch.randn(2, 8)
        for block in blocks:
            hidden = block(hidden, mask)
        hidden.sum().backward()
        del mask, hidden
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("spec", ["every-k:2", "full", "nested:2"])
def test_a_forward_hook_inside_a_region_over_several_blocks_is_refused(tiny_run: MakeRun, spec: str) -> None:
    model = Trial(tiny_run("none", model={"n_layers": L}), CPU).model
    model.blocks[0].register_forward_hook(lambda _module, _args, output: output * 1.5)
    with pytest.raises(PlanError, match="^block 0 has a forward hook, which a region over several modules"):
        AppliedPlan(model, plan_of(spec))


def test_a_forward_hook_on_a_block_with_a_region_of_its_own_is_kept(tiny_run: MakeRun) -> None:
    found = []
    for spec in ("none", "per-block"):
        trial = Trial(tiny_run("none", model={"n_layers": L}), CPU)
        trial.applied.remove()
        trial.model.blocks[1].register_forward_hook(lambda _module, _args, output: output * 1.5)
        trial.applied = AppliedPlan(trial.model, plan_of(spec))
        loss = trial.loss(trial.module(trial.batches[0][0]), trial.batches[0][1])
        loss.backward()
        found.append([p.grad for p in trial.module.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


class MappingBlock(nn.Module):
    """Gives a mapping, as blocks of some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Any) -> dict[str, Tensor]:
        hidden = hidden if isinstance(hidden, Tensor) else hidden["hidden"]
        return {"hidden": hidden + torch.tanh(self.linear(hidden))}


def test_a_last_block_that_gives_a_mapping_is_observed(tiny_run: MakeRun) -> None:
    class Events:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def at(self, event: str) -> None:
            self.seen.append(event)

    trial = Trial(tiny_run("none"), CPU)
    blocks = (MappingBlock(), MappingBlock())

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Any = x
            for block in self.blocks:
                hidden = block(hidden)
            return hidden["hidden"]

    trial.model = BuiltModel(module=Stack(), blocks=blocks, parts=({}, {}))
    trial.module = trial.model.module
    trial.batches = [(torch.randn(2, 8), torch.zeros(2, dtype=torch.long))]
    events = Events()
    trial.observed_step(events)
    assert events.seen == ["forward", "head", "turn", "blocks", "optimizer", "end"]
