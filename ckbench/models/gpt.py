"""gpt: decoder with LayerNorm, learned positions, biases and GELU (Radford et al. 2019).

Shapes: B batch, S sequence, D d_model, V vocab_size.
"""

import torch
from torch import Tensor, nn

from ckbench.config import ModelConfig
from ckbench.models._block import build_blocks, enter_streams, leave_streams, parts_of, small_normal
from ckbench.models.base import BuiltModel


class Gpt(nn.Module):
    """Embed, run the stack, read out."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        vocab_size, D = config.vocab_size, config.d_model
        self.tokens = nn.Embedding(vocab_size, D) if vocab_size else None
        self.positions = nn.Embedding(seq_len, D) if vocab_size else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = build_blocks(config, nn.LayerNorm, bias=True, causal=True)
        self.norm = nn.LayerNorm(D) if config.norms_first() else nn.Identity()
        self.head = nn.Linear(D, vocab_size, bias=False) if config.head == "lm" and vocab_size else None
        self.apply(small_normal)
        if config.tie_embeddings and self.head is not None and self.tokens is not None:
            self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens (B, S) or vectors (B, S, D) to logits (B, S, V) or hidden states (B, S, D)."""
        x_BSD = inputs
        if self.tokens is not None and self.positions is not None:
            at = torch.arange(inputs.shape[1], device=inputs.device)
            x_BSD = self.tokens(inputs) + self.positions(at)
        x_BSD = enter_streams(self.blocks, self.dropout(x_BSD))
        for block in self.blocks:
            x_BSD = block(x_BSD)
        x_BSD = self.norm(leave_streams(self.blocks, x_BSD))
        return x_BSD if self.head is None else self.head(x_BSD)


def build(config: ModelConfig, seq_len: int) -> BuiltModel:
    """Make a model with random weights from the global generator, on the default device."""
    model = Gpt(config, seq_len)
    if config.freeze_embedding and model.tokens is not None and model.positions is not None:
        model.tokens.weight.requires_grad_(False)
        model.positions.weight.requires_grad_(False)
    blocks = tuple(model.blocks)
    return BuiltModel(module=model, blocks=blocks, parts=tuple(map(parts_of, blocks)), head=model.head)


PLUGIN = build
