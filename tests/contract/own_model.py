"""Models as users write them, for family custom: found and named blocks, and outputs and inputs of every kind."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal attention of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Layer(nn.Module):
    """A pre-norm block; ``parallel`` feeds one norm to both parts, ``late`` puts the dropout after the norm."""

    def __init__(self, width: int, dropout: float, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Any:
        """Add attention and MLP."""
        if self.kind == "parallel":
            y = self.norm1(x)
            return x + self.dropout(self.attn(y)) + self.mlp(y)
        if self.kind == "late":
            x = x + self.attn(self.dropout(self.norm1(x)))
            return x + self.mlp(self.dropout(self.norm2(x)))
        if self.kind == "from norm":
            y = self.norm1(x)
            x = y + self.dropout(self.attn(y))
            return x + self.mlp(self.norm2(x))
        x = x + self.dropout(self.attn(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x))) * (1.0 if gain is None else gain)
        return (x, None) if self.kind == "tuple" else x


class TorchLayer(nn.Module):
    """Attention by nn.MultiheadAttention, to which the norm's output is given three times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and FFN."""
        y = self.norm1(x)
        x = x + self.self_attn(y, y, y, need_weights=False)[0]
        return x + self.ff(self.norm2(x))


class Model(nn.Module):
    """Embedding, encoder with layers, head; what its forward gives depends on ``output``."""

    def __init__(self, layers: list[nn.Module], width: int, vocab: int, output: str, between: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(layers)
        self.probes = nn.ModuleList(nn.Linear(width, width) for _ in range(9))  # a longer list, of plain layers
        self.head = nn.Linear(width, vocab)
        self.output, self.between = output, between

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Any:
        """Map tokens (B, S) to logits (B, S, V), wrapped."""
        x = self.tokens(tokens)
        x = x if scale is None else x * scale
        for layer in self.encoder.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
            x = x * 0.5 if self.between == "scaled" else x
        for probe in self.probes:
            x = x + torch.tanh(probe(x))
        logits = self.head(x)
        if self.output == "text":
            return "logits"
        return {"tensor": logits, "tuple": (logits, x), "object": SimpleNamespace(logits=logits)}[self.output]


def build(
    *,
    depth: int,
    width: int = 16,
    vocab: int = 64,
    dropout: float = 0.1,
    kind: str = "plain",
    output: str = "tensor",
    between: str = "nothing",
) -> nn.Module:
    """Make a model of ``depth`` layers."""
    layers = [TorchLayer(width) if kind == "torch" else Layer(width, dropout, kind) for _ in range(depth)]
    return Model(layers, width, vocab, output, between)


def batch(batch_size: int, seq_len: int, generator: Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Draw tokens and a scale by keyword, and one class per sequence."""
    tokens = torch.randint(64, (batch_size, seq_len), generator=generator)
    scale = torch.rand(batch_size, seq_len, 1, generator=generator)
    return {"tokens": tokens, "scale": scale}, torch.randint(64, (batch_size,), generator=generator)


def loss(output: Any, targets: Tensor) -> Tensor:
    """Compare the last position with the class, and keep the logits small."""
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits[:, -1], targets) + 1e-3 * logits.square().mean()


def one_thing(batch_size: int, seq_len: int, generator: Generator) -> Tensor:
    """Forget the targets."""
    return torch.randint(64, (batch_size, seq_len), generator=generator)


def no_module(*, depth: int) -> list[int]:
    """Give something else than a module."""
    return [depth]


def no_blocks() -> nn.Module:
    """Give a module without a list of blocks."""
    return nn.Linear(4, 4)


def raises() -> nn.Module:
    """Fail inside the function."""
    raise ValueError("width must be even")


NOT_A_FUNCTION = 3
