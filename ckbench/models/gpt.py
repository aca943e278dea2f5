"""gpt: decoder with LayerNorm, learned positions, biases and GELU (Radford et al. 2019).

Shapes: B batch, S sequence, D d_model, V vocab_size.
"""

import torch
from torch import Tensor, nn

from ckbench.config import ModelConfig
from ckbench.models._attention import SelfAttention
from ckbench.models._ffn import Ffn
from ckbench.models.base import BuiltModel


class Block(nn.Module):
    """One layer: attention and FFN, each with a norm and a residual sum."""

    def __init__(self, config: ModelConfig, d_ff: int) -> None:
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.norm_1 = nn.LayerNorm(config.d_model)
        self.attention = SelfAttention(config, bias=True)
        self.norm_2 = nn.LayerNorm(config.d_model)
        self.ffn = Ffn(config.d_model, d_ff, config.ffn_activation(), config.dropout, bias=True)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Add what attention and FFN find to the residual stream."""
        if self.pre_norm:
            x_BSD = x_BSD + self.attention(self.norm_1(x_BSD))
            return x_BSD + self.ffn(self.norm_2(x_BSD))
        x_BSD = self.norm_1(x_BSD + self.attention(x_BSD))
        y_BSD: Tensor = self.norm_2(x_BSD + self.ffn(x_BSD))
        return y_BSD


class Gpt(nn.Module):
    """Embed, run the stack, read out."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        vocab_size, D = config.vocab_size, config.d_model
        self.tokens = nn.Embedding(vocab_size, D) if vocab_size else None
        self.positions = nn.Embedding(seq_len, D) if vocab_size else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config, d_ff) for d_ff in config.ffn_widths()])
        self.norm = nn.LayerNorm(D) if config.norm_position == "pre" else nn.Identity()
        self.head = nn.Linear(D, vocab_size, bias=False) if config.head == "lm" and vocab_size else None
        self.apply(_init)
        if config.tie_embeddings and self.head is not None and self.tokens is not None:
            self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens (B, S) or vectors (B, S, D) to logits (B, S, V) or hidden states (B, S, D)."""
        x_BSD = inputs
        if self.tokens is not None and self.positions is not None:
            at = torch.arange(inputs.shape[1], device=inputs.device)
            x_BSD = self.tokens(inputs) + self.positions(at)
        x_BSD = self.dropout(x_BSD)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        x_BSD = self.norm(x_BSD)
        return x_BSD if self.head is None else self.head(x_BSD)


def _init(module: nn.Module) -> None:
    """GPT-2's initialisation, without its depth-dependent scale."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build(config: ModelConfig, seq_len: int) -> BuiltModel:
    """Make a model with random weights from the global generator, on the default device."""
    model = Gpt(config, seq_len)
    if config.freeze_embedding and model.tokens is not None and model.positions is not None:
        model.tokens.weight.requires_grad_(False)
        model.positions.weight.requires_grad_(False)
    blocks = tuple(model.blocks)
    return BuiltModel(module=model, blocks=blocks, parts=tuple(_parts(block) for block in blocks), head=model.head)


def _parts(block: nn.Module) -> dict[str, tuple[nn.Module, ...]]:
    assert isinstance(block, Block)
    core = {"core": (block.attention.core,)}
    if block.pre_norm:
        return {"attention": (block.norm_1, block.attention), "ffn": (block.norm_2, block.ffn), **core}
    return {"attention": (block.attention,), "ffn": (block.ffn,), **core}


PLUGIN = build
