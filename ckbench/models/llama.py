"""llama: decoder with RMSNorm, SwiGLU, rotary positions and grouped-query attention (arXiv 2302.13971).

Shapes: B batch, S sequence, D d_model, K width of a head, V vocab_size.
"""

from functools import partial

import torch
from torch import Tensor, nn

from ckbench.config import ModelConfig
from ckbench.models._block import build_blocks, enter_streams, leave_streams, parts_of, small_normal
from ckbench.models.base import BuiltModel

ROPE_BASE = 10_000.0
build_norm = partial(nn.RMSNorm, eps=1e-5)


class Llama(nn.Module):
    """Embed, run the stack, read out."""

    cos_SK: Tensor
    sin_SK: Tensor

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        vocab_size, D = config.vocab_size, config.d_model
        self.tokens = nn.Embedding(vocab_size, D) if vocab_size else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = build_blocks(config, build_norm, bias=False, causal=True)
        self.norm = build_norm(D) if config.norms_first() else nn.Identity()
        self.head = nn.Linear(D, vocab_size, bias=False) if config.head == "lm" and vocab_size else None
        cos_SK, sin_SK = rotation_table(seq_len, D // config.n_heads)
        self.register_buffer("cos_SK", cos_SK, persistent=False)
        self.register_buffer("sin_SK", sin_SK, persistent=False)
        self.apply(small_normal)
        if config.tie_embeddings and self.head is not None and self.tokens is not None:
            self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens (B, S) or vectors (B, S, D) to logits (B, S, V) or hidden states (B, S, D)."""
        x_BSD = self.dropout(inputs if self.tokens is None else self.tokens(inputs))
        S = x_BSD.shape[1]
        rotation = (self.cos_SK[:S], self.sin_SK[:S])
        x_BSD = enter_streams(self.blocks, x_BSD)
        for block in self.blocks:
            x_BSD = block(x_BSD, rotation)
        x_BSD = self.norm(leave_streams(self.blocks, x_BSD))
        return x_BSD if self.head is None else self.head(x_BSD)


def rotation_table(seq_len: int, d_head: int) -> tuple[Tensor, Tensor]:
    """Give cosines and sines (S, K) of every position's angles; both halves of a head share them."""
    frequencies = ROPE_BASE ** (-torch.arange(0, d_head, 2).float() / d_head)
    angles = torch.outer(torch.arange(seq_len).float(), frequencies)
    angles_SK = torch.cat((angles, angles), dim=-1)
    return angles_SK.cos(), angles_SK.sin()


def build(config: ModelConfig, seq_len: int) -> BuiltModel:
    """Make a model with random weights from the global generator, on the default device."""
    model = Llama(config, seq_len)
    if config.freeze_embedding and model.tokens is not None:
        model.tokens.weight.requires_grad_(False)
    blocks = tuple(model.blocks)
    return BuiltModel(module=model, blocks=blocks, parts=tuple(map(parts_of, blocks)), head=model.head)


PLUGIN = build
