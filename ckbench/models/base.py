"""What a model family gives back: the module, where its blocks are, and what each block is made of."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from ckbench.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model and the map of its stack.

    ``parts`` names, per block, the chain of modules of a part in the order they run, each feeding only
    the next: ``{"ffn": (norm, ffn), "attention": (norm, attention)}``. A norm whose output also goes
    elsewhere, or that comes after the residual sum, is left out of the chain.
    """

    module: nn.Module
    blocks: tuple[nn.Module, ...]
    parts: tuple[dict[str, tuple[nn.Module, ...]], ...]
    notes: tuple[str, ...] = field(default=())


class Family(Protocol):
    """One file of this shelf. The module maps tokens (B, S), or vectors (B, S, D) where the config
    has no vocabulary, to logits (B, S, V), or to hidden states (B, S, D) with head none."""

    def build(self, config: ModelConfig, seq_len: int) -> BuiltModel:
        """Make the model with random weights from the global generator, on the default device."""
        ...
