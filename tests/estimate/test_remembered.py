"""Remembered results: the same as the operation's own, however arguments lie, and no memory shared that was not."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from ckbench.config import RunConfig
from ckbench.estimate import tracker
from ckbench.estimate.remembered import Remembered
from ckbench.estimate.replay import replay
from tests.contract.everything import FAMILY_SETTINGS

HF = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra hf is not installed")
MakeRun = Callable[..., RunConfig]
aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def lies(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.storage_offset(), value.untyped_storage().nbytes())
    return [lies(item) for item in value] if isinstance(value, list | tuple) else value


class Counted:
    """An operation that counts how often it is run."""

    def __init__(self, func: Any) -> None:
        self.func, self.n_runs = func, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.n_runs += 1
        return self.func(*args, **kwargs)


@pytest.mark.parametrize(
    ("func", "arguments", "n_runs"),
    [
        (aten.mm.default, lambda: (meta(3, 4), meta(4, 5)), 1),
        (aten.add.Tensor, lambda: (meta(3, 4).t(), meta(4, 3)), 1),
        (aten._log_softmax.default, lambda: (meta(3, 4), 1, False), 1),
        (aten.native_layer_norm.default, lambda: (meta(2, 3, 4), [4], meta(4), None, 1e-5), 1),
        (aten._to_copy.default, lambda: (meta(3, 4),), 1),
        (aten.split_with_sizes_copy.default, lambda: (meta(6, 4), [2, 4]), 1),
        (aten._foreach_add.Scalar, lambda: ([meta(3), meta(4, 2)], 1.0), 1),
        (aten.t.default, lambda: (meta(3, 4),), 2),  # a view
        (aten._unsafe_view.default, lambda: (meta(3, 4), [12]), 2),  # shares memory and is not called a view
        (aten.expand.default, lambda: (meta(1, 4), [3, 4]), 2),
    ],
)
def test_a_second_result_lies_as_the_first(func: Any, arguments: Callable[[], tuple[Any, ...]], n_runs: int) -> None:
    remembered, counted = Remembered(), Counted(func)
    first = remembered.run(counted, arguments(), {})
    second = remembered.run(counted, arguments(), {})
    assert lies(second) == lies(first) == lies(func(*arguments()))
    assert counted.n_runs == n_runs


def test_results_are_new_memory_each_time() -> None:
    remembered, x = Remembered(), meta(3, 4)
    made = [remembered.run(aten.mul.Tensor, (x, x), {}) for _ in range(3)]
    assert len({tensor.untyped_storage()._cdata for tensor in (*made, x)}) == 4


def test_what_is_written_to_is_given_back() -> None:
    remembered, add, many = Remembered(), Counted(aten.add_.Tensor), Counted(aten._foreach_mul_.Scalar)
    for _ in range(2):
        x, y = meta(3), meta(3)
        assert remembered.run(add, (x, y), {}) is x
        assert remembered.run(many, ([x, y], 2.0), {}) is None
        out = meta(3)
        assert remembered.run(aten.add.out, (x, y), {"out": out}) is out
    assert add.n_runs == many.n_runs == 1


def test_a_tensor_that_comes_to_lie_otherwise_is_changed_each_time() -> None:
    remembered = Remembered()
    for _ in range(2):
        x = meta(3)
        remembered.run(aten.resize_.default, (x, [5]), {})
        assert x.shape == (5,) and x.untyped_storage().nbytes() == 20


def test_what_decides_tells_results_apart() -> None:
    remembered, x, numbers = Remembered(), meta(3, 4), meta(3, dtype=torch.int64)
    assert remembered.run(aten.sum.dim_IntList, (x, [0]), {}).shape == (4,)
    assert remembered.run(aten.sum.dim_IntList, (x, [1]), {}).shape == (3,)
    assert remembered.run(aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64}).dtype == torch.float64
    assert remembered.run(aten.mul.Tensor, (numbers, 2), {}).dtype == torch.int64
    assert remembered.run(aten.mul.Tensor, (numbers, 2.0), {}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert remembered.run(aten.mul.Tensor, (numbers, 2.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    plain, conjugate = meta(3, dtype=torch.complex64), meta(3, dtype=torch.complex64).conj()
    assert remembered.run(aten.resolve_conj.default, (plain,), {}) is plain
    assert not remembered.run(aten.resolve_conj.default, (conjugate,), {}).is_conj()


def test_tensors_with_data_are_never_answered_from_memory() -> None:
    remembered, add = Remembered(), Counted(aten.add_.Tensor)
    for _ in range(2):
        x = torch.ones(3)
        remembered.run(add, (x, x), {})
        assert x.tolist() == [2.0, 2.0, 2.0]
    assert add.n_runs == 2


class Forgetful:
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("spec", ["none", "selective:matmul"])
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=HF if name.startswith("hf") else ()) for name in sorted(FAMILY_SETTINGS)],
)
def test_a_replay_is_the_same_event_for_event(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, family: str, spec: str, precision: str
) -> None:
    config = tiny_run(spec, model=FAMILY_SETTINGS[family], train={"precision": precision})
    made = replay(config, "cuda").tracker.timeline
    monkeypatch.setattr(tracker, "REMEMBERED", Forgetful())
    plain = replay(config, "cuda").tracker.timeline
    assert made.events == plain.events and made.marks == plain.marks
