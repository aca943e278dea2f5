"""What autograd keeps inside each block, measured by one forward pass under saved-tensor hooks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckbench.models.base import BuiltModel, call


class _Scale:
    """Adds up the storages that autograd saves while it is in force; parameters and buffers are not counted."""

    def __init__(self, owned: set[int]) -> None:
        self.owned = owned
        self.storages: dict[int, int] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.owned:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def block_saved_bytes(model: BuiltModel, inputs: Any) -> tuple[int, ...]:
    """Give the bytes that autograd keeps for backward inside each block, each storage once per block.

    Runs the module forward once and drops the result. The random state is put back.
    """
    owned = {t.untyped_storage().data_ptr() for t in (*model.module.parameters(), *model.module.buffers())}
    scales = [_Scale(owned) for _ in model.blocks]
    handles = []
    devices = [p.device for p in model.module.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=devices):
        try:
            for i, block in enumerate(model.blocks):
                handles += _weighed(block, i, scales)
            output = call(model.module, inputs)
            del output
        finally:
            for handle in handles:
                handle.remove()
    return tuple(sum(scale.storages.values()) for scale in scales)


def _weighed(block: nn.Module, index: int, scales: Sequence[_Scale]) -> list[Any]:
    """Put hooks around a block's forward."""
    contexts: list[Any] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        context = torch.autograd.graph.saved_tensors_hooks(scales[index], lambda tensor: tensor)
        context.__enter__()
        contexts.append(context)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    return [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
