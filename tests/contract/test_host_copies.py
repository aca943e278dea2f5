"""How tensors travel to the host and back: views, uses after each other, changes in place, and the order of copies."""

import copy
import pickle
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckbench.config import RunConfig
from ckbench.engine.checkpointing import AppliedPlan
from ckbench.engine.copies import AtOnce, Mark
from ckbench.engine.host_store import HostStore
from ckbench.engine.offload import Offloader
from ckbench.engine.trial import NoObserver, Trial, baseline_config
from ckbench.errors import PlanError
from ckbench.models.base import BuiltModel
from ckbench.plan import Plan, Region
from tests.contract.everything import FAMILY_SETTINGS, L

MakeRun = Callable[..., RunConfig]
CPU = torch.device("cpu")


def offloader(trial: Trial) -> Offloader:
    found = trial.applied._offloader
    assert found is not None
    return found


class Block(nn.Module):
    """Takes a mask by keyword, and a bias that is shared by all blocks; saves several views of one storage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.register_buffer("scale", torch.full((64, width), 0.5))

    def forward(self, x: Tensor, *, mask: Tensor, more: tuple[Tensor, ...] = ()) -> Tensor:
        first, second, third = self.up(x).chunk(3, dim=-1)
        x = x + first * second * torch.sigmoid(third) * self.scale * mask
        for each in more:
            x = x * each
        return x


class Stack(nn.Module):
    def __init__(self, n_blocks: int, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask=mask)
        return x


def built(n_blocks: int) -> BuiltModel:
    stack = Stack(n_blocks)
    return BuiltModel(module=stack, blocks=tuple(stack.blocks), parts=tuple({} for _ in stack.blocks))


def stack_inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 32, requires_grad=True), torch.rand(64, 32)


def applied_to(model: BuiltModel, *, per_block: bool, cap_bytes: int | None = None) -> Offloader:
    n = len(model.blocks)
    regions = tuple(Region(start=i, stop=i + 1) for i in range(n)) if per_block else ()
    applied = AppliedPlan(model, Plan(n_layers=n, regions=regions, offload=True), offload_cap_bytes=cap_bytes)
    assert applied._offloader is not None
    return applied._offloader


@pytest.mark.parametrize("per_block", [False, True])
def test_keywords_that_a_region_keeps_are_moved_once(per_block: bool) -> None:
    torch.manual_seed(0)
    model = built(4)
    x, mask = stack_inputs()
    model.module(x, mask).sum().backward()
    reference = [p.grad.clone() for p in model.module.parameters()] + [x.grad.clone()]
    model.module.zero_grad()
    x.grad = None
    own = applied_to(model, per_block=per_block)
    output = model.module(x, mask)
    one = x.nbytes
    if per_block:
        assert own.store.live_bytes == 4 * one + one, "four hidden states, and the mask of all four blocks once"
    else:
        # x, up's output of three, the product of the first two, the sigmoid
        assert own.store.live_bytes == (4 * (1 + 3 + 1 + 1) + 1) * one
    output.sum().backward()
    assert own.store.live_bytes == 0
    found = [p.grad for p in model.module.parameters()] + [x.grad]
    assert all(torch.equal(a, b) for a, b in zip(reference, found, strict=True))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64]
)
def test_views_come_back_as_they_lay(dtype: torch.dtype) -> None:
    model = built(1)
    own = Offloader(model, [(0, len(model.blocks))])
    base = (torch.randn(40, 50) * 9).to(dtype)
    views = [base, base.t(), base[3:17, ::2], base.view(-1)[7:], base[:, :1].expand(40, 8), base.unflatten(1, (5, 10))]
    own._enter(0)
    packed = [own._pack(view) for view in views]
    own._leave(0)
    assert own.store.live_bytes == base.nbytes, "one storage, one copy"
    restored = [each.restore() for each in packed]
    for view, other in zip(views, restored, strict=True):
        assert torch.equal(view, other) and view.dtype == other.dtype
        assert (view.stride(), view.storage_offset()) == (other.stride(), other.storage_offset())
        assert other.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert len({other.untyped_storage().data_ptr() for other in restored}) == 1
    del packed
    assert own.store.live_bytes == 0


def test_a_graph_can_be_used_twice() -> None:
    torch.manual_seed(0)
    model = built(4)
    x, mask = stack_inputs()
    own = applied_to(model, per_block=False)
    loss = model.module(x, mask).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    held = own.store.live_bytes
    there = {id(stored.groups[0]) for stored in own._on_device if len(stored.groups) == 1}
    assert held == own.store.peak_bytes > 0
    assert len(there) == 1, "what was used comes off the device though its graph lives; only the last block is left"
    second = torch.autograd.grad(loss, x)[0]
    assert torch.equal(first, second)
    del loss
    assert own.store.live_bytes == 0


def test_two_forwards_before_their_backwards() -> None:
    torch.manual_seed(0)
    model = built(3)
    pairs = [stack_inputs() for _ in range(2)]
    expected = [torch.autograd.grad(model.module(x, mask).square().sum(), x)[0] for x, mask in pairs]
    own = applied_to(model, per_block=False)
    losses = [model.module(x, mask).square().sum() for x, mask in pairs]
    found = [torch.autograd.grad(loss, x)[0] for loss, (x, _) in zip(losses, pairs, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert own.store.live_bytes == 0


def test_backward_of_a_step_that_was_given_up_says_so() -> None:
    model = built(2)
    own = applied_to(model, per_block=False)
    loss = model.module(*stack_inputs()).sum()
    own.start_step()
    assert own.store.live_bytes == 0
    with pytest.raises(RuntimeError, match="given up"):
        loss.backward()


def test_a_tensor_modified_after_it_was_saved_counts_as_it_was() -> None:
    model = built(1)
    own = Offloader(model, [(0, len(model.blocks))])
    x = torch.arange(512.0)
    own._enter(0)
    before = own._pack(x)
    x.add_(1)
    after = own._pack(x)
    again = own._pack(x)
    own._leave(0)
    assert own.store.live_bytes == 2 * x.nbytes
    x.zero_()
    assert torch.equal(before.restore(), torch.arange(512.0))
    assert torch.equal(after.restore(), torch.arange(512.0) + 1)
    assert torch.equal(again.restore(), torch.arange(512.0) + 1)


def test_what_stays_is_checked_in_autograds_place() -> None:
    """A parameter, a small tensor, and one over the cap, each modified between forward and backward."""
    for size, cap_bytes in ((8, None), (512, 100)):
        own = Offloader(built(1), [(0, 1)], cap_bytes)
        x = torch.ones(size)
        own._enter(0)
        packed = own._pack(x)
        own._leave(0)
        assert packed.restore().data_ptr() == x.data_ptr()
        x.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified in place after it was saved \(version 1, saved 0\)"):
            packed.restore()
    model = built(2)
    applied_to(model, per_block=False)
    loss = model.module(*stack_inputs()).sum()
    with torch.no_grad():
        model.blocks[0].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


def test_a_store_counts_and_caps() -> None:
    store = HostStore(CPU, cap_bytes=100)
    first = store.take(60)
    assert first is not None and first.nbytes == 60 and store.take(60) is None
    second = store.take(40)
    assert second is not None and (store.live_bytes, store.peak_bytes) == (100, 100)
    store.give_back(first)
    assert (store.live_bytes, store.peak_bytes) == (40, 100)
    assert store.take(60) is first


class Later(AtOnce):
    """Copies that are done as late as a side stream may do them: when a mark behind them is waited for.

    It holds no memory of the device, so whoever frees some before its copy is done is found out.
    """

    holds_sources = True

    def __init__(self) -> None:
        self.asked: deque[tuple[weakref.ref[Any], Tensor, bool]] = deque()
        self.n_asked = self.n_done = 0

    def _ask(self, on_device: Tensor, buffer: Tensor, *, to_host: bool) -> None:
        self.asked.append((weakref.ref(on_device.untyped_storage()), buffer, to_host))
        self.n_asked += 1

    def to_host(self, source: Tensor, buffer: Tensor) -> None:
        buffer.fill_(255)
        self._ask(source, buffer, to_host=True)

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Mark]:
        target = torch.full_like(buffer, 255)
        self._ask(target, buffer, to_host=False)
        return target, self.mark()

    def mark(self) -> Mark:
        return self.n_asked

    def wait(self, mark: Mark) -> None:
        while self.n_done < mark:
            reference, buffer, to_host = self.asked.popleft()
            storage = reference()
            assert storage is not None, "memory was freed before the copy that needs it"
            on_device = torch.empty(0, dtype=torch.uint8).set_(storage)
            (buffer if to_host else on_device).copy_(on_device if to_host else buffer)
            self.n_done += 1


def late(trial: Trial) -> Later:
    """Put late copies in place of those of the processor."""
    copies = Later()
    offloader(trial)._copies = copies
    return copies


def copies_of_equal_steps(plain: Trial, other: Trial) -> int:
    """Run two steps of both, the other's copies late; weights are equal and nothing stays. Give the number of copies."""
    copies = late(other)
    for trial in (plain, other):
        torch.manual_seed(5)
        for _ in range(2):
            trial.step(NoObserver())
    for a, b in zip(plain.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert offloader(other).store.live_bytes == 0
    return copies.n_asked


@pytest.mark.parametrize("spec", ["offload", "per-block+offload", "every-k:2+offload"])
def test_copies_on_a_side_stream_are_waited_for(tiny_run: MakeRun, spec: str) -> None:
    """The order that a CUDA stream keeps, played by copies that wait: sources live until then, targets are filled."""
    config = tiny_run(spec, model=FAMILY_SETTINGS["gpt"], train={"grad_accumulation": 2})
    assert copies_of_equal_steps(Trial(baseline_config(config), CPU), Trial(config, CPU)) > 2 * L


def test_sources_of_one_block_wait_beside_the_next(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("offload", model={"n_layers": 4}), CPU)
    copies = late(trial)
    outstanding: list[int] = []
    own = offloader(trial)
    leave = own._leave
    own._leave = lambda i: (leave(i), outstanding.append(len(own._copying)))[0]  # type: ignore[method-assign,func-returns-value]
    loss = trial.loss(trial.module(trial.batches[0][0]), trial.batches[0][1])
    assert outstanding == [1, 1, 1, 0], "behind the last block all copies are done"
    assert not copies.asked
    loss.backward()


def test_memory_that_is_not_needed_any_more_waits_for_its_copy(tiny_run: MakeRun) -> None:
    """Fetched ahead, then given up: freed before the copy is done, the memory would be written to under its next owner."""
    trial = Trial(tiny_run("offload", model={"n_layers": 3}), CPU)
    copies = late(trial)
    loss = trial.loss(trial.module(trial.batches[0][0]), trial.batches[0][1])
    own = offloader(trial)
    assert own._newest is not None
    own.turn_to(own._newest)
    assert copies.asked
    del loss
    assert not copies.asked and own.store.live_bytes == 0


def test_a_source_modified_before_its_copy_is_refused() -> None:
    own = Offloader(built(1), [(0, 1)], None, Later())
    x = torch.ones(512)
    own._enter(0)
    packed = own._pack(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        own._leave(0)
    assert packed is not None


SPANS = [
    Plan(n_layers=L, offload_spans=((0, 1),)),
    Plan(n_layers=L, offload_spans=((0, 2), (2, 3), (L - 1, L))),
    Plan(n_layers=L, offload_spans=((1, 3),), regions=(Region(start=1, stop=2), Region(start=3, stop=4))),
    Plan(n_layers=L, offload_spans=((0, 2),), regions=(Region(start=0, stop=2, children=(Region(start=0, stop=1),)),)),
]


@pytest.mark.parametrize("plan", SPANS, ids=lambda plan: str(plan.offload_spans))
@pytest.mark.parametrize("family", ["gpt", "llama", "custom"])
def test_spans_are_bit_identical(tiny_run: MakeRun, family: str, plan: Plan) -> None:
    config = tiny_run("none", model=FAMILY_SETTINGS[family], train={"grad_accumulation": 2})
    assert copies_of_equal_steps(Trial(config, CPU), Trial(config, CPU, plan)) > 0


def test_a_span_waits_behind_its_last_block_and_is_not_fetched_from_another(tiny_run: MakeRun) -> None:
    trial = Trial(tiny_run("none", model={"n_layers": 5}), CPU, Plan(n_layers=5, offload_spans=((0, 2), (2, 4))))
    late(trial)
    own = offloader(trial)
    outstanding: dict[int, int] = {}
    earlier: dict[int, bool] = {}
    leave = own._leave

    def left(index: int) -> None:
        earlier[index] = own._group.earlier is not None
        leave(index)
        outstanding[index] = len(own._copying)

    own._leave = left  # type: ignore[method-assign]
    loss = trial.loss(trial.module(trial.batches[0][0]), trial.batches[0][1])
    assert outstanding == {0: 1, 1: 0, 2: 1, 3: 0}, "block 4 stays on the device"
    assert earlier == {0: False, 1: True, 2: False, 3: True}
    loss.backward()
    assert own.store.live_bytes == 0


def test_what_a_span_moves_is_what_its_blocks_keep(tiny_run: MakeRun) -> None:
    moved = {}
    for spans in (((0, 2),), ((2, 4),), ((0, 2), (2, 4))):
        trial = Trial(tiny_run("none", model={"n_layers": 4}), CPU, Plan(n_layers=4, offload_spans=spans))
        moved[spans] = trial.count()["host_store_peak_bytes"]
    whole = Trial(tiny_run("offload", model={"n_layers": 4}), CPU).count()["host_store_peak_bytes"]
    assert moved[((0, 2),)] + moved[((2, 4),)] == moved[((0, 2), (2, 4))] == whole > 0


def test_a_model_that_moves_after_its_plan_was_applied_is_followed() -> None:
    model = built(2)
    model.module.to("meta")
    own = applied_to(model, per_block=False)
    model.module.to_empty(device="cpu")
    model.module(*stack_inputs()).sum().backward()
    assert own.store.peak_bytes > 0


def test_a_model_under_a_plan_is_not_copied_and_not_pickled() -> None:
    """A copy's blocks would run the original's weights."""
    model = built(2)
    applied = AppliedPlan(model, Plan(n_layers=2, regions=(Region(start=0, stop=1),)))
    with pytest.raises(PlanError, match="remove"):
        copy.deepcopy(model.module)
    with pytest.raises(PlanError, match="state_dict"):
        pickle.dumps(model.module)
    assert set(model.module.state_dict()) == set(built(2).module.state_dict())
    applied.remove()
    assert torch.equal(copy.deepcopy(model.module).blocks[0].up.weight, model.blocks[0].up.weight)
