"""Build the optimizer and say which of PyTorch's implementations it will run."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ckbench.config import TrainConfig
from ckbench.errors import ConfigError

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}

_SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


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
    """The ordinary case: PyTorch's optimizer, after backward, where the parameters are."""

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
        return [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]

    def figures(self) -> dict[str, Any]:
        """Nothing more to say."""
        return {}


def build_optimizer(module: nn.Module, train: TrainConfig, device: torch.device) -> Updater:
    """Give the updater over all trainable parameters.

    Left to itself PyTorch takes foreach on CUDA and the for-loop on CPU
    (torch/optim/optimizer.py, ``_default_to_fused_or_foreach``).
    Raises ConfigError where no parameter is trainable.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("no parameter of this model needs a gradient")
    switches = _SWITCHES[train.optimizer_implementation]
    optimizer = CLASSES[train.optimizer](parameters, lr=train.lr, **switches)  # type: ignore[call-arg]
    implementation = train.optimizer_implementation
    if implementation == "default":
        implementation = "foreach" if device.type == "cuda" else "for-loop"
    return AfterBackward(optimizer, implementation)
