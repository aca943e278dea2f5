"""The feed-forward part of a block. Shapes: D d_model, F inner width."""

from torch import Tensor, nn
from torch.nn import functional as F


class Ffn(nn.Module):
    """Two matrices around GELU or ReLU, or three with SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, d_model: int, d_ff: int, activation: str, dropout: float, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.gate = nn.Linear(d_model, d_ff, bias=bias) if activation == "swiglu" else None
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Widen, bend, narrow."""
        up_BSF = self.up(x_BSD)
        if self.gate is not None:
            inner_BSF = F.silu(self.gate(x_BSD)) * up_BSF
        else:
            inner_BSF = F.gelu(up_BSF) if self.activation == "gelu" else F.relu(up_BSF)
        y_BSD: Tensor = self.dropout(self.down(inner_BSF))
        return y_BSD
