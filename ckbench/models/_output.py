"""The logits of a foreign model, whatever its forward wraps them in."""

from typing import Any

from torch import Tensor, nn

from ckbench.errors import ConfigError
from ckbench.models.base import call


class Logits(nn.Module):
    """A model that answers with its logits and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Hand all arguments on and take the logits out of the answer."""
        return logits_of(self.model(*args, **kwargs))


class LogitsByKeyword(nn.Module):
    """A model that takes its one input by keyword and answers with its logits."""

    def __init__(self, model: nn.Module, input_name: str) -> None:
        super().__init__()
        self.model = model
        self.input_name = input_name

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens (B, S) to logits (B, S, V), or images (B, C, H, W) to logits (B, V)."""
        return logits_of(call(self.model, {self.input_name: inputs}))


def logits_of(output: Any) -> Tensor:
    """Give the logits of an output: a tensor itself, a tuple's first item, or what has ``.logits``.

    Raises ConfigError where there are none.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    kind = type(output).__name__
    raise ConfigError(
        f"the model gives a {kind}: no tensor, no tuple with one in front, nothing with .logits; write model.loss"
    )
