"""The weighing pass: bytes by hand, once per storage, and no trace of it left behind."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ckbench.config import RunConfig
from ckbench.engine.saved import block_saved_bytes
from ckbench.engine.trial import Trial
from ckbench.models.base import BuiltModel

MakeRun = Callable[..., RunConfig]
N, D = 3, 8


def stack(*blocks: nn.Module) -> BuiltModel:
    distinct = list(dict.fromkeys(blocks))
    model = BuiltModel(module=nn.ModuleList(distinct), blocks=blocks, parts=({},) * len(blocks))

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    object.__setattr__(model.module, "forward", forward)
    return model


class Squared(nn.Module):
    """Keeps its input twice, in one storage, and its factor of n times as many numbers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        wide = (x * x).repeat(1, self.n).exp()
        return wide[:, : x.shape[1]] * 1.0


def test_by_hand() -> None:
    """The product keeps its input once, the exponential its result."""
    x = torch.randn(N, D, requires_grad=True)
    assert block_saved_bytes(stack(Squared(2), Squared(5)), x) == (N * D * 4 * 3, N * D * 4 * 6)


def test_parameters_and_buffers_are_not_counted() -> None:
    linear = nn.Linear(D, D)
    assert block_saved_bytes(stack(linear), torch.randn(N, D, requires_grad=True)) == (N * D * 4,)
    norm = nn.BatchNorm1d(D).eval()  # keeps its input and its buffers
    assert block_saved_bytes(stack(norm), torch.randn(N, D, requires_grad=True)) == (N * D * 4,)


def test_a_block_at_several_places_is_weighed_at_each() -> None:
    shared = Squared(2)
    x = torch.randn(N, D, requires_grad=True)
    assert block_saved_bytes(stack(shared, Squared(5), shared), x) == (N * D * 12, N * D * 24, N * D * 12)


def test_buffers_and_random_state_are_put_back() -> None:
    norm = nn.BatchNorm1d(D)
    model = stack(nn.Dropout(0.5), norm)
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    state = torch.get_rng_state()
    block_saved_bytes(model, torch.randn(N, D, generator=torch.Generator().manual_seed(1)))
    assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trial_is_left_as_it_was(tiny_run: MakeRun, precision: str) -> None:
    trial = Trial(tiny_run("none", model={"dropout": 0.1}, train={"precision": precision}), torch.device("cpu"))
    trial.applied.remove()
    state, weights = torch.get_rng_state(), [p.clone() for p in trial.module.parameters()]
    with trial._autocast():
        measured = block_saved_bytes(trial.model, trial.batches[0][0])
    assert len(set(measured)) == 1 and measured[0] > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and torch.equal(p, w) for p, w in zip(trial.module.parameters(), weights, strict=True))
    for module in trial.module.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in module.__dict__
    probe: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: probe.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        (weights[0].requires_grad_() * weights[0]).sum()
    assert probe, "no hooks of the pass are in force any more"


def test_a_pass_that_fails_leaves_no_hooks() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    model = stack(Squared(2), Failing())
    with pytest.raises(ValueError, match="^no$"):
        block_saved_bytes(model, torch.ones(N, D, requires_grad=True))
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(torch.autograd.grad((x * x).sum(), x)[0], torch.full((2,), 2.0))
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


def test_nothing_is_held_from_block_to_block() -> None:
    """So a strategy that fits can be chosen where none would not fit."""
    storages: list[StorageWeakRef] = []

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert all(storage.expired() for storage in storages)
            inner = x.exp()
            storages.append(StorageWeakRef(inner.untyped_storage()))
            return inner.sin() * 1.0

    block_saved_bytes(stack(*(Watching() for _ in range(3))), torch.ones(N, D, requires_grad=True))
    assert len(storages) == 3
