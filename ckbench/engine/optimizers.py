"""Build the optimizer and say which of PyTorch's implementations it will run."""

from typing import Any

import torch
from torch import nn

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


def build_optimizer(module: nn.Module, train: TrainConfig, device_type: str) -> tuple[torch.optim.Optimizer, str]:
    """Give the optimizer over all trainable parameters, and its implementation's name.

    Left to itself PyTorch takes foreach on CUDA and the for-loop on CPU
    (torch/optim/optimizer.py, ``_default_to_fused_or_foreach``).
    Raises ConfigError where no parameter is trainable.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("no parameter of this model needs a gradient")
    switches = _SWITCHES[train.optimizer_implementation]
    optimizer = CLASSES[train.optimizer](parameters, lr=train.lr, **switches)  # type: ignore[call-arg]
    if train.optimizer_implementation != "default":
        return optimizer, train.optimizer_implementation
    return optimizer, "foreach" if device_type == "cuda" else "for-loop"
