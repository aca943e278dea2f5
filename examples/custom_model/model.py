"""A small transformer as you might have written it: nothing in it knows of ckbench."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of (batch, sequence, width)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One block: attention and an MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP."""
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Embed tokens, run the layers, predict the next token."""

    def __init__(self, vocab: int, depth: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, sequence) to logits (batch, sequence, vocab)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(*, vocab: int = 256, depth: int = 4, width: int = 64, heads: int = 4, dropout: float = 0.1) -> nn.Module:
    """Make the model; the study's model.args are these arguments."""
    return Transformer(vocab, depth, width, heads, dropout)
