"""One layer of our families: attention and FFN with residual sums, over one stream or over two coupled ones.

Shapes: B batch, S sequence, D d_model. Rotary positions, where a family has them, go to every attention.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ckbench.config import ModelConfig
from ckbench.models._attention import SelfAttention
from ckbench.models._ffn import Ffn
from ckbench.models.base import Invertible

BuildNorm = Callable[[int], nn.Module]
Rotation = tuple[Tensor, Tensor]


class _Layer(nn.Module):
    """What both kinds of block are made of."""

    def __init__(self, config: ModelConfig, d_ff: int, build_norm: BuildNorm, *, bias: bool, causal: bool) -> None:
        super().__init__()
        self.pre_norm = config.norms_first()
        self.norm_1 = build_norm(config.d_model)
        self.attention = SelfAttention(config, bias=bias, causal=causal)
        self.norm_2 = build_norm(config.d_model)
        self.ffn = Ffn(config.d_model, d_ff, config.ffn_activation(), config.dropout, bias=bias)


class Block(_Layer):
    """Attention and FFN, each with a norm and a residual sum."""

    def forward(self, x_BSD: Tensor, *rotation: Rotation) -> Tensor:
        """Add what attention and FFN find to the residual stream."""
        if self.pre_norm:
            x_BSD = x_BSD + self.attention(self.norm_1(x_BSD), *rotation)
            return x_BSD + self.ffn(self.norm_2(x_BSD))
        x_BSD = self.norm_1(x_BSD + self.attention(x_BSD, *rotation))
        y_BSD: Tensor = self.norm_2(x_BSD + self.ffn(x_BSD))
        return y_BSD


class CoupledBlock(_Layer, Invertible):
    """The same parts over two streams: f is attention after its norm, g is the FFN after its norm (Reformer)."""

    def __init__(self, config: ModelConfig, d_ff: int, build_norm: BuildNorm, *, bias: bool, causal: bool) -> None:
        super().__init__(config, d_ff, build_norm, bias=bias, causal=causal)
        self.draws = config.dropout > 0

    def couplings(self, *rotation: Rotation) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Give f and g; each maps (B, S, D) to (B, S, D)."""
        return (
            lambda x_BSD: self.attention(self.norm_1(x_BSD), *rotation),
            lambda x_BSD: self.ffn(self.norm_2(x_BSD)),
        )


def build_blocks(config: ModelConfig, build_norm: BuildNorm, *, bias: bool, causal: bool) -> nn.ModuleList:
    """Make the stack that the config's residual asks for, one block for each FFN width."""
    cls = Block if config.residual == "standard" else CoupledBlock
    return nn.ModuleList(cls(config, d_ff, build_norm, bias=bias, causal=causal) for d_ff in config.ffn_widths())


def enter_streams(blocks: nn.ModuleList, x_BSD: Tensor) -> Tensor:
    """Give what the first block takes: x, or x in both streams (B, S, 2·D) where blocks are coupled.

    Both streams start as the embedding (Kitaev et al. 2020, arXiv 2001.04451).
    """
    return torch.cat((x_BSD, x_BSD), dim=-1) if isinstance(blocks[0], CoupledBlock) else x_BSD


def leave_streams(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Give (B, S, D) from what the last block gave: itself, or the mean of two coupled streams.

    Reformer's authors normalise the two side by side, 2·D wide. The mean keeps the last norm, the head and tied
    weights those of the ordinary model, so that a reversible model has as many parameters as its twin.
    """
    if not isinstance(blocks[0], CoupledBlock):
        return x
    x1_BSD, x2_BSD = x.chunk(2, dim=-1)
    return (x1_BSD + x2_BSD) / 2


def parts_of(block: nn.Module) -> dict[str, tuple[nn.Module, ...]]:
    """Map a block's parts as ``BuiltModel`` wants them: a norm after the sum belongs to no part."""
    assert isinstance(block, Block | CoupledBlock)
    core = {"core": (block.attention.core,)}
    if block.pre_norm:
        return {"attention": (block.norm_1, block.attention), "ffn": (block.norm_2, block.ffn), **core}
    return {"attention": (block.attention,), "ffn": (block.ffn,), **core}


def small_normal(module: nn.Module) -> None:
    """Give a layer normal weights of deviation 0.02 and no bias, as GPT-2 has them, without its scale by depth."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
