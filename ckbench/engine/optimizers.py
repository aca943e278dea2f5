"""Build the optimizer and say which implementation will run, when, and where."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckbench.config import TrainConfig
from ckbench.engine.host_optimizer import HostOptimizer
from ckbench.engine.in_backward import InBackward
from ckbench.errors import ConfigError

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}

_SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class Updater(Protocol):
    """What a step needs of an optimizer, however and wherever it updates."""

    implementation: str
    """What the record calls it."""

    def step(self, scaler: "torch.amp.GradScaler | None") -> bool:
        """Update the parameters; say whether an update was executed (gradient scaling may skip it)."""
        ...

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Let go of gradients, or zero them."""
        ...

    def device_tensors(self) -> list[Tensor]:
        """List state tensors that lie on the model's device."""
        ...

    def figures(self) -> dict[str, Any]:
        """Give record fields of its own."""
        ...


class AfterBackward:
    """The ordinary case: an optimizer over all parameters, after backward."""

    def __init__(self, optimizer: torch.optim.Optimizer, implementation: str) -> None:
        self.optimizer = optimizer
        self.implementation = implementation

    def step(self, scaler: "torch.amp.GradScaler | None") -> bool:
        """Update, through the scaler where there is one; it lowers its scale when it skips."""
        if scaler is None:
            self.optimizer.step()
            return True
        scale = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        return scaler.get_scale() >= scale

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Let go of gradients, or zero them."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def device_tensors(self) -> list[Tensor]:
        """List all state."""
        return state_tensors(self.optimizer)

    def figures(self) -> dict[str, Any]:
        """Say what lies on the host, where the optimizer is one that keeps its state there."""
        if isinstance(self.optimizer, HostOptimizer):
            return {"host_store_peak_bytes": self.optimizer.store.peak_bytes}
        return {}


class WhileBackward:
    """Each parameter is updated, and its gradient freed, as soon as the gradient is whole."""

    def __init__(self, in_backward: InBackward, implementation: str) -> None:
        self.in_backward = in_backward
        self.implementation = implementation

    def step(self, scaler: "torch.amp.GradScaler | None") -> bool:
        """Nothing is left to do; say whether backward updated anything."""
        assert scaler is None, "the config refuses gradient scaling with updates in backward"
        return self.in_backward.end_step() > 0

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Gradients are gone."""

    def device_tensors(self) -> list[Tensor]:
        """List all state."""
        return [tensor for optimizer in self.in_backward.optimizers for tensor in state_tensors(optimizer)]

    def figures(self) -> dict[str, Any]:
        """Nothing more to say."""
        return {}


def build_optimizer(module: nn.Module, train: TrainConfig, device: torch.device) -> Updater:
    """Give the updater over all trainable parameters.

    Left to itself PyTorch takes foreach on CUDA and the for-loop on CPU (torch/optim/optimizer.py,
    ``_default_to_fused_or_foreach``); Adafactor takes the for-loop everywhere (torch/optim/_adafactor.py).
    Raises ConfigError where no parameter is trainable, or the optimizer needs a library that is not installed.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("no parameter of this model needs a gradient")
    make, implementation = _maker(train, torch.device("cpu") if train.optimizer_on_host else device)
    if train.optimizer_in_backward:
        return WhileBackward(InBackward(parameters, make), f"{implementation}, in backward")
    if train.optimizer_on_host:
        return AfterBackward(HostOptimizer(parameters, make, device), f"{implementation}, on host")
    return AfterBackward(make(parameters), implementation)


def _maker(train: TrainConfig, device: torch.device) -> tuple[Make, str]:
    """Give what makes the optimizer over any parameters, and the name of what will run on ``device``."""
    if train.optimizer == "adamw-8bit":
        return partial(_eight_bit(), lr=train.lr), "torchao 8-bit"
    implementation = train.optimizer_implementation
    switches = dict(_SWITCHES[implementation])
    if train.optimizer == "adafactor":
        switches.pop("fused", None)
    if implementation == "default":
        is_foreach = device.type == "cuda" and train.optimizer != "adafactor"
        implementation = "foreach" if is_foreach else "for-loop"
    return partial(CLASSES[train.optimizer], lr=train.lr, **switches), implementation  # type: ignore[call-arg]


def _eight_bit() -> Callable[..., torch.optim.Optimizer]:
    """Find AdamW with block-wise 8-bit state (Dettmers et al. 2021, arXiv 2110.02861)."""
    try:
        made: Callable[..., torch.optim.Optimizer] = importlib.import_module("torchao.optim").AdamW8bit
    except ImportError:
        raise ConfigError("optimizer adamw-8bit needs torchao; pip install 'ckbench[eight-bit]'") from None
    return made


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the tensors of an optimizer's state; of a packed one, those that hold its memory."""
    found: list[Tensor] = []
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                found += _plain(value)
    return found


def _plain(tensor: Any) -> list[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in _plain(getattr(tensor, name))]
