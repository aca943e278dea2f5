"""Self-attention, causal or not, with grouped key/value heads and a selectable backend.

Shapes: B batch, S sequence, D d_model, H query heads, G key/value heads, K width of a head.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckbench.config import ModelConfig

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class SelfAttention(nn.Module):
    """Project to queries, keys and values, attend, project back."""

    def __init__(self, config: ModelConfig, *, bias: bool, causal: bool = True) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads or config.n_heads
        self.d_head = config.d_model // config.n_heads
        d_kv = self.n_kv_heads * self.d_head
        self.split = (config.d_model, d_kv, d_kv)
        self.qkv = nn.Linear(config.d_model, sum(self.split), bias=bias)
        self.core = CoreAttention(config, causal=causal)
        self.out = nn.Linear(config.d_model, config.d_model, bias=bias)
        self.out_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend. ``rotation`` holds cosines and sines (S, K) for rotary positions."""
        B, S, D = x_BSD.shape
        q, k, v = self.qkv(x_BSD).split(self.split, dim=-1)
        q_BHSK = q.view(B, S, self.n_heads, self.d_head).transpose(1, 2)
        k_BGSK = k.view(B, S, self.n_kv_heads, self.d_head).transpose(1, 2)
        v_BGSK = v.view(B, S, self.n_kv_heads, self.d_head).transpose(1, 2)
        if rotation is not None:
            q_BHSK, k_BGSK = rotate(q_BHSK, *rotation), rotate(k_BGSK, *rotation)
        y_BHSK = self.core(q_BHSK, k_BGSK, v_BGSK)
        y_BSD = y_BHSK.transpose(1, 2).reshape(B, S, D)
        y_BSD = self.out_dropout(self.out(y_BSD))
        return y_BSD


class CoreAttention(nn.Module):
    """softmax(QK^T / sqrt(K))·V, a module without parameters, so that it can be recomputed by itself."""

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads or config.n_heads
        self.d_head = config.d_model // config.n_heads
        self.backend = config.attention
        self.dropout = config.dropout
        self.causal = causal

    def forward(self, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
        """Weigh the values through the configured backend."""
        dropout = self.dropout if self.training else 0.0
        if self.backend == "eager":
            return self._eager(q_BHSK, k_BGSK, v_BGSK, dropout)
        grouped = self.n_kv_heads != self.n_heads
        if self.backend == "auto":
            return F.scaled_dot_product_attention(
                q_BHSK, k_BGSK, v_BGSK, dropout_p=dropout, is_causal=self.causal, enable_gqa=grouped
            )
        try:
            with sdpa_kernel(BACKENDS[self.backend]):
                return F.scaled_dot_product_attention(
                    q_BHSK, k_BGSK, v_BGSK, dropout_p=dropout, is_causal=self.causal, enable_gqa=grouped
                )
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise RuntimeError(self._no_kernel(q_BHSK)) from None
            raise

    def _eager(self, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, dropout: float) -> Tensor:
        repeat = self.n_heads // self.n_kv_heads
        k, v = k_BGSK, v_BGSK
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        scores_BHSS = q_BHSK @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if self.causal:
            S = scores_BHSS.shape[-1]
            future = torch.ones(S, S, dtype=torch.bool, device=scores_BHSS.device).triu(1)
            scores_BHSS = scores_BHSS.masked_fill(future, float("-inf"))
        weights_BHSS = scores_BHSS.softmax(dim=-1)
        return F.dropout(weights_BHSS, dropout, self.training) @ v

    def _no_kernel(self, q_BHSK: Tensor) -> str:
        where, what = q_BHSK.device.type, str(q_BHSK.dtype).removeprefix("torch.")
        return (
            f"PyTorch has no {self.backend} attention kernel on {where} for {what}, dropout {self.dropout:g}, "
            f"heads of width {self.d_head}; use attention: auto, math or eager"
        )


def rotate(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Turn each pair of a head's halves by its position's angle (RoPE, arXiv 2104.09864)."""
    first, second = x_BHSK.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BHSK * cos_SK.to(x_BHSK.dtype) + turned * sin_SK.to(x_BHSK.dtype)
