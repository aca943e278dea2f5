"""What autograd keeps inside each block, measured by one forward pass under saved-tensor hooks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from ckbench.models.base import BuiltModel, call


class _Scale:
    """Weighs what autograd saves in one block, each storage once; parameters and buffers are not counted."""

    def __init__(self, owned: set[int]) -> None:
        self.owned = owned
        self.total_bytes = 0
        self._held: dict[int, Tensor] = {}
        self._hooks: saved_tensors_hooks | None = None

    def open(self) -> None:
        """Start weighing what is saved from here on."""
        self._hooks = saved_tensors_hooks(self._weigh, _never_asked)
        self._hooks.__enter__()

    def close(self) -> None:
        """Stop, and let go of what was held so that no two of its storages could have the same address."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None
        self.total_bytes += sum(tensor.untyped_storage().nbytes() for tensor in self._held.values())
        self._held.clear()

    def _weigh(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata  # of the storage's own object: tensors without data have no other address
        if key not in self.owned:
            self._held.setdefault(key, tensor.detach())


def block_saved_bytes(model: BuiltModel, inputs: Any) -> tuple[int, ...]:
    """Give the bytes that autograd keeps for backward inside each block, each storage once per block.

    Runs the module forward once and drops the result. Nothing is kept from block to block, so it needs the memory of
    one block only. Random state and buffers are put back, and no gradient is touched.
    """
    state = [*model.module.parameters(), *model.module.buffers()]
    owned = {tensor.untyped_storage()._cdata for tensor in state}
    scales = [_Scale(owned) for _ in model.blocks]
    places: dict[nn.Module, list[_Scale]] = {}
    for block, scale in zip(model.blocks, scales, strict=True):
        places.setdefault(block, []).append(scale)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.module.buffers() if _has_data(buffer)]
    devices = list({tensor.device for tensor in state if tensor.device.type == "cuda"})
    handles: list[Any] = []
    with torch.random.fork_rng(devices=devices):
        try:
            for block, in_turn in places.items():
                handles += _weighed(block, in_turn)
            with saved_tensors_hooks(lambda tensor: None, _never_asked):
                call(model.module, inputs)
        finally:
            for handle in handles:
                handle.remove()
            for scale in reversed(scales):
                scale.close()  # a block that failed left its hooks behind
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
    return tuple(scale.total_bytes for scale in scales)


def _weighed(block: nn.Module, in_turn: list[_Scale]) -> list[Any]:
    """Put hooks around a block's forward; a block that stands at several places is weighed at each in turn."""
    n_calls = 0

    def enter(_module: nn.Module, _args: Any) -> None:
        in_turn[n_calls % len(in_turn)].open()

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal n_calls
        in_turn[n_calls % len(in_turn)].close()
        n_calls += 1

    return [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]


def _has_data(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _never_asked(_packed: Any) -> Tensor:
    raise AssertionError("the weighing pass has no backward")
