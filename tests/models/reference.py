"""PyTorch's own encoder layer with the weights of a block of ours, as an independent answer."""

import torch
from torch import nn


def encoder_twin(block: nn.Module, *, norm_first: bool, eps: float) -> nn.Module:
    """Build a TransformerEncoderLayer that should compute what an encoder block with GELU computes."""
    D, F = block.ffn.up.in_features, block.ffn.up.out_features
    twin = nn.TransformerEncoderLayer(
        D, block.attention.n_heads, F, 0.0, "gelu", eps, batch_first=True, norm_first=norm_first
    )
    weights = {
        twin.self_attn.in_proj_weight: block.attention.qkv.weight,
        twin.self_attn.in_proj_bias: block.attention.qkv.bias,
        twin.self_attn.out_proj.weight: block.attention.out.weight,
        twin.self_attn.out_proj.bias: block.attention.out.bias,
        twin.linear1.weight: block.ffn.up.weight,
        twin.linear1.bias: block.ffn.up.bias,
        twin.linear2.weight: block.ffn.down.weight,
        twin.linear2.bias: block.ffn.down.bias,
    }
    with torch.no_grad():
        for theirs, ours in weights.items():
            nn.init.normal_(ours, std=0.2)
            theirs.copy_(ours)
        for theirs, ours in ((twin.norm1, block.norm_1), (twin.norm2, block.norm_2)):
            nn.init.normal_(ours.weight)
            nn.init.normal_(ours.bias)
            theirs.load_state_dict(ours.state_dict())
    return twin
